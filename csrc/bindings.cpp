// Python bindings: conversion of arguments and release of the GIL, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "core/engine.h"
#include "cpu/machine.h"
#include "cpu/quantize_weights.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

// The elements of a tuple; nanobind itself checks neither kind nor length.
template <size_t N>
std::array<nb::object, N> elements(nb::handle object, const char* what) {
    if (!nb::isinstance<nb::tuple>(object) || nb::len(object) != N) {
        throw std::invalid_argument(std::string(what) + " must be a tuple of " + std::to_string(N));
    }
    std::array<nb::object, N> items;
    for (size_t i = 0; i < N; ++i) items[i] = nb::borrow(PyTuple_GET_ITEM(object.ptr(), static_cast<Py_ssize_t>(i)));
    return items;
}

template <typename T>
T as(nb::handle object, const char* what) {
    T value;
    if (!nb::try_cast(object, value)) throw std::invalid_argument(std::string(what) + " is of another type");
    return value;
}

TensorRef parse_ref(nb::handle object) {
    TensorRef ref;
    if (object.is_none()) return ref;
    const auto items = elements<5>(object, "a tensor");
    ref.present = true;
    ref.space = parse_space(as<std::string>(items[0], "a tensor's space"));
    ref.offset = as<int64_t>(items[1], "a tensor's offset");
    ref.form.dtype = parse_dtype(as<std::string>(items[2], "a tensor's dtype"));
    auto shape = as<std::vector<int64_t>>(items[3], "a tensor's shape");
    auto strides = as<std::vector<int64_t>>(items[4], "a tensor's strides");
    if (shape.size() > kMaxRank || shape.size() != strides.size()) {
        throw std::invalid_argument("a tensor has at most 4 dimensions and as many strides");
    }
    ref.form.rank = static_cast<int>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
        ref.form.shape[i] = shape[i];
        ref.form.stride[i] = strides[i];
    }
    return ref;
}

std::vector<TensorRef> parse_refs(nb::handle object, const char* what) {
    std::vector<TensorRef> refs;
    for (nb::handle item : as<nb::list>(object, what)) refs.push_back(parse_ref(item));
    return refs;
}

AttrValue parse_attr(nb::handle value) {
    if (nb::isinstance<nb::bool_>(value)) return nb::cast<bool>(value);
    if (nb::isinstance<nb::int_>(value)) return nb::cast<int64_t>(value);
    if (nb::isinstance<nb::float_>(value)) return nb::cast<double>(value);
    return as<std::string>(value, "an attribute");
}

Instruction parse_instruction(nb::handle object) {
    const auto fields = elements<8>(object, "an instruction");
    Instruction instruction;
    instruction.op = as<std::string>(fields[0], "op");
    instruction.input_refs = parse_refs(fields[1], "inputs");
    instruction.output_refs = parse_refs(fields[2], "outputs");
    instruction.workspace_ref = parse_ref(fields[3]);
    for (auto [key, value] : as<nb::dict>(fields[4], "attrs")) {
        if (nb::isinstance<nb::tuple>(value)) continue;  // shapes and sizes: the tensors say them already
        instruction.attrs.set(as<std::string>(key, "an attribute's name"), parse_attr(value));
    }
    instruction.stream = parse_stream(as<std::string>(fields[5], "stream"));
    instruction.waits = as<std::vector<int>>(fields[6], "waits");
    instruction.signal = as<int>(fields[7], "signal");
    return instruction;
}

Program parse_program(const std::string& name, const nb::list& instructions, const nb::dict& symbols, int events) {
    Program program;
    program.name = name;
    program.events = events;
    for (nb::handle item : instructions) {
        try {
            program.instructions.push_back(parse_instruction(item));
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(name + ", instruction " + std::to_string(program.instructions.size()) + ": " +
                                        error.what());
        }
    }
    for (auto [key, value] : symbols) {
        const auto symbol = as<std::string>(key, "a symbol's name");
        try {
            program.symbols.emplace(symbol, parse_ref(value));
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(name + ", symbol " + symbol + ": " + error.what());
        }
    }
    return program;
}

nb::dict describe(const StepResult& r) {
    nb::dict d;
    d["loss_sum"] = r.loss_sum;
    d["targets"] = r.targets;
    d["tokens"] = r.tokens;
    d["loss"] = r.targets > 0 ? r.loss_sum / static_cast<double>(r.targets) : 0.0;
    d["grad_norm"] = r.grad_norm;
    d["applied"] = r.applied;
    d["seconds"] = r.seconds;
    d["data_wait_seconds"] = r.data_wait_seconds;
    return d;
}

using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64Array = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

std::vector<int64_t> to_vector(const Int64Array& array) { return {array.data(), array.data() + array.size()}; }

nb::object to_numpy(const std::vector<int32_t>& values) {
    auto* copy = new std::vector<int32_t>(values);
    nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(copy->data(), {copy->size()}, owner));
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native engine: programs over arenas, and the feeder of token shards.";
    if (!cpu_supported()) {
        throw nb::import_error("Surogate needs a processor with AVX2 and FMA (Intel since 2013, AMD since 2015)");
    }
    initialise_blas();
    m.def("sgemm_rate", &sgemm_rate, nb::arg("threads"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
          nb::call_guard<nb::gil_scoped_release>(),
          "Measured rate of float32 matrix products of this shape on this machine, in flop/s.");
    m.def(
        "quantize_4bit",
        [](const Bytes& values, const std::string& dtype, const Numbers& numbers, int64_t block, const Codes& codes,
           const Floats& absmax, int threads) {
            const DType stored = parse_dtype(dtype);
            const auto n = static_cast<int64_t>(values.nbytes() / size_of(stored));
            if ((stored != DType::f32 && stored != DType::bf16) || numbers.size() != 16 || block < 1 ||
                codes.size() != static_cast<size_t>((n + 1) / 2) ||
                absmax.size() != static_cast<size_t>((n + block - 1) / block)) {
                throw std::invalid_argument("quantize_4bit: sizes or dtypes do not fit");
            }
            nb::gil_scoped_release release;
            quantize_4bit(values.data(), stored, n, numbers.data(), block, codes.data(), absmax.data(), threads);
        },
        nb::arg("values"), nb::arg("dtype"), nb::arg("numbers"), nb::arg("block"), nb::arg("codes"), nb::arg("absmax"),
        nb::arg("threads"));
    m.def(
        "quantize_8bit",
        [](const Numbers& values, const Numbers& table, const Codes& index, const Floats& absmax, int threads) {
            const size_t n = values.size();
            if (table.size() != 512 || index.size() != n || absmax.size() != (n + 255) / 256) {
                throw std::invalid_argument("quantize_8bit: sizes do not fit");
            }
            nb::gil_scoped_release release;
            quantize_8bit(values.data(), static_cast<int64_t>(n), table.data(), index.data(), absmax.data(), threads);
        },
        nb::arg("values"), nb::arg("table"), nb::arg("index"), nb::arg("absmax"), nb::arg("threads"));
    m.def("blas_name", &blas_name, "Name and configuration of the BLAS library.");
    m.def("micro_seed", &micro_seed, nb::arg("seed"), nb::arg("step"), nb::arg("micro"),
          "The seed that a micro-batch of a step draws its randomness from.");

    nb::class_<Feeder>(m, "Feeder")
        .def(
            "__init__",
            [](Feeder* self, const std::string& tokens, const std::string& mask, const Int64Array& pieces,
               const Int64Array& sequences, int64_t batch, int64_t sequence_len, int64_t max_documents, int32_t pad_id,
               int64_t cursor, int64_t vocab_size, int rank, int ranks) {
                if (pieces.ndim() != 2 || pieces.shape(1) != 3) {
                    throw std::invalid_argument("feeder: pieces must have the shape [n, 3]");
                }
                new (self) Feeder(tokens, mask, to_vector(pieces), to_vector(sequences), batch, sequence_len,
                                  max_documents, pad_id, cursor, vocab_size, rank, ranks);
            },
            nb::arg("tokens"), nb::arg("mask"), nb::arg("pieces"), nb::arg("sequences"), nb::arg("batch"),
            nb::arg("sequence_len"), nb::arg("max_documents"), nb::arg("pad_id"), nb::arg("cursor") = 0,
            nb::arg("vocab_size") = 0, nb::arg("rank") = 0, nb::arg("ranks") = 1)
        .def_prop_ro("cursor", &Feeder::cursor, "Sequences taken so far.")
        .def("next", [](Feeder& self) {
            std::vector<Batch> batches;
            {
                nb::gil_scoped_release release;
                batches = self.take(1);
            }
            nb::dict d;
            d["ids"] = to_numpy(batches[0].ids);
            d["targets"] = to_numpy(batches[0].targets);
            d["positions"] = to_numpy(batches[0].positions);
            d["cu_seqlens"] = to_numpy(batches[0].cu_seqlens);
            return d;
        });

    nb::class_<Communicator>(m, "Communicator")
        .def_prop_ro("rank", &Communicator::rank)
        .def_prop_ro("ranks", &Communicator::ranks)
        .def("barrier", &Communicator::barrier, nb::call_guard<nb::gil_scoped_release>(), "Until all ranks are here.")
        .def("abort", &Communicator::abort, nb::arg("reason"), "This rank has failed: all others stop.");
    m.def("thread_group", &make_thread_group, nb::arg("ranks"),
          "The communicators of a group whose ranks are engines on threads of this process.");
    nb::exception<RankStopped>(m, "RankStopped", PyExc_RuntimeError);

    nb::class_<Engine>(m, "Engine")
        .def(nb::init<const std::string&, int, int, const std::string&, const std::string&>(), nb::arg("backend"),
             nb::arg("threads") = 1, nb::arg("device") = 0, nb::arg("plugin") = "", nb::arg("config") = "")
        .def("join", &Engine::join, nb::arg("communicator"), "Become one rank of a group.")
        .def("abort", &Engine::abort, nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>(),
             "This rank has failed: the others stop.")
        .def("kernels", &Engine::kernels, "Names of the ops that this backend has.")
        .def(
            "allocate", [](Engine& self, const std::string& space, int64_t n) { self.allocate(parse_space(space), n); },
            nb::arg("space"), nb::arg("nbytes"))
        .def("allocated",
             [](const Engine& self) {
                 std::map<std::string, int64_t> sizes;
                 for (int s = 0; s < kSpaces; ++s) {
                     auto space = static_cast<Space>(s);
                     if (self.allocated(space) > 0) sizes[name_of(space)] = self.allocated(space);
                 }
                 return sizes;
             })
        .def(
            "memory",
            [](nb::handle self, const std::string& space, int64_t offset, int64_t nbytes) {
                Engine& engine = nb::cast<Engine&>(self);
                void* data;
                {
                    nb::gil_scoped_release release;
                    data = engine.memory(parse_space(space), offset, nbytes);
                }
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {static_cast<size_t>(nbytes)}, self);
            },
            nb::arg("space"), nb::arg("offset"), nb::arg("nbytes"), nb::rv_policy::reference)
        .def(
            "write",
            [](Engine& self, const std::string& space, int64_t offset, const Bytes& data) {
                nb::gil_scoped_release release;
                self.write(parse_space(space), offset, data.data(), static_cast<int64_t>(data.nbytes()));
            },
            nb::arg("space"), nb::arg("offset"), nb::arg("data"), "Copy a contiguous array's bytes into an arena.")
        .def(
            "read",
            [](Engine& self, const std::string& space, int64_t offset, int64_t nbytes) {
                auto* copy = new uint8_t[static_cast<size_t>(std::max<int64_t>(nbytes, 0))];
                nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
                {
                    nb::gil_scoped_release release;
                    self.read(parse_space(space), offset, copy, nbytes);
                }
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(copy, {static_cast<size_t>(nbytes)}, owner);
            },
            nb::arg("space"), nb::arg("offset"), nb::arg("nbytes"), "A copy of an arena's bytes.")
        .def(
            "load",
            [](Engine& self, const std::string& name, const nb::list& instructions, const nb::dict& symbols,
               int events) {
                Program program = parse_program(name, instructions, symbols, events);
                nb::gil_scoped_release release;
                self.load(std::move(program));
            },
            nb::arg("name"), nb::arg("instructions"), nb::arg("symbols"), nb::arg("events"))
        .def(
            "run", [](Engine& self, const std::string& name) { self.run(name); }, nb::arg("name"),
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "train_step",
            [](Engine& self, Feeder& feeder, int accumulation, const std::map<std::string, double>& scalars,
               int64_t seed, int64_t step) {
                StepResult result;
                {
                    nb::gil_scoped_release release;
                    result = self.train_step(feeder, accumulation, scalars, seed, step);
                }
                return describe(result);
            },
            nb::arg("feeder"), nb::arg("accumulation"), nb::arg("scalars"), nb::arg("seed"), nb::arg("step"))
        .def(
            "evaluate",
            [](Engine& self, Feeder& feeder, int batches) {
                StepResult result;
                {
                    nb::gil_scoped_release release;
                    result = self.evaluate(feeder, batches);
                }
                return describe(result);
            },
            nb::arg("feeder"), nb::arg("batches"))
        .def("inject_delays", &Engine::inject_delays, nb::arg("seed"), nb::arg("max_microseconds"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("profile", &Engine::profile, nb::arg("on"), nb::call_guard<nb::gil_scoped_release>())
        .def("profile_report", [](const Engine& self) {
            std::vector<ProfileEntry> entries;
            {
                nb::gil_scoped_release release;
                entries = self.profile_report();
            }
            nb::list rows;
            for (const ProfileEntry& e : entries) {
                rows.append(nb::make_tuple(e.program, e.index, e.op, e.calls, e.seconds));
            }
            return rows;
        });
}
