#include "core/engine.h"

#include <chrono>
#include <cmath>
#include <limits>

namespace surogate {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

int64_t micro_seed(int64_t seed, int64_t step, int64_t micro) {
    uint64_t mixed = splitmix64(static_cast<uint64_t>(seed));
    mixed = splitmix64(mixed ^ static_cast<uint64_t>(step));
    mixed = splitmix64(mixed ^ static_cast<uint64_t>(micro));
    return static_cast<int64_t>(mixed >> 1);
}

Engine::Engine(const std::string& backend, int threads, int device, const std::string& plugin,
               const std::string& config) {
    if (backend == "cuda") {
        backend_ = open_plugin_backend(plugin, device, config);
        return;
    }
    if (backend != "cpu") throw std::invalid_argument("there is no backend '" + backend + "'");
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    const bool check_nan = config == "check_nan=1";
    if (!check_nan && !config.empty() && config != "check_nan=0") {
        throw std::invalid_argument("the CPU's configuration is check_nan=0 or check_nan=1, not '" + config + "'");
    }
    backend_ = make_cpu_backend(threads, check_nan);
}

Engine::~Engine() {
    for (int s = 0; s < kSpaces; ++s) {
        if (arenas_[s].base != nullptr) backend_->release(static_cast<Space>(s), arenas_[s].base, arenas_[s].bytes);
    }
}

void Engine::join(std::shared_ptr<Communicator> communicator) {
    std::lock_guard lock(mutex_);
    if (!programs_.empty()) throw std::logic_error("an engine joins its group before programs are loaded");
    backend_->join(std::move(communicator));
}

void Engine::abort(const std::string& reason) {
    if (Communicator* communicator = backend_->communicator()) communicator->abort(reason);
}

template <typename F>
auto Engine::together(const F& work) -> decltype(work()) {
    try {
        return work();
    } catch (const RankStopped&) {
        throw;
    } catch (const std::exception& error) {
        abort(error.what());
        throw;
    }
}

int64_t Engine::allocated(Space space) const {
    std::lock_guard lock(mutex_);
    return arenas_[static_cast<int>(space)].bytes;
}

void Engine::allocate(Space space, int64_t bytes) {
    std::lock_guard lock(mutex_);
    Arena& arena = arenas_[static_cast<int>(space)];
    if (arena.base != nullptr) throw std::invalid_argument(std::string(name_of(space)) + " is allocated already");
    if (bytes <= 0) throw std::invalid_argument("an arena needs at least one byte");
    arena.base = backend_->allocate(space, bytes);
    arena.bytes = bytes;
}

void* Engine::memory(Space space, int64_t offset, int64_t bytes) const {
    if (!backend_->host_visible(space)) {
        throw std::invalid_argument(std::string("the host cannot see ") + name_of(space) + " memory of the " +
                                    backend_->name() + " backend: use read and write");
    }
    std::lock_guard lock(mutex_);
    return place(space, offset, bytes);
}

void Engine::write(Space space, int64_t offset, const void* source, int64_t bytes) {
    std::lock_guard lock(mutex_);
    backend_->write(space, place(space, offset, bytes), source, bytes);
}

void Engine::read(Space space, int64_t offset, void* target, int64_t bytes) {
    std::lock_guard lock(mutex_);
    backend_->read(space, target, place(space, offset, bytes), bytes);
}

void* Engine::place(Space space, int64_t offset, int64_t bytes) const {
    const Arena& arena = arenas_[static_cast<int>(space)];
    if (offset < 0 || bytes < 0 || offset > arena.bytes - bytes) {
        throw std::invalid_argument("bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                                    " are outside the " + name_of(space) + " arena of " + std::to_string(arena.bytes));
    }
    return static_cast<char*>(arena.base) + offset;
}

Tensor Engine::resolve(const TensorRef& ref, const std::string& what) const {
    if (!ref.present) return {};
    Tensor tensor = ref.form;
    try {
        tensor.data = place(ref.space, ref.offset, ref.end() - ref.offset);
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(what + ": " + error.what());
    }
    if (ref.offset % static_cast<int64_t>(size_of(tensor.dtype)) != 0) {
        throw std::invalid_argument(what + ": offset " + std::to_string(ref.offset) + " is not aligned to " +
                                    name_of(tensor.dtype));
    }
    return tensor;
}

void Engine::load(Program loaded) {
    std::lock_guard lock(mutex_);
    if (loaded.events < 0) throw std::invalid_argument(loaded.name + ": a negative number of events");
    auto owned = std::make_unique<Program>(std::move(loaded));
    Program& p = *owned;
    std::vector<char> signalled(static_cast<size_t>(p.events), 0);
    for (size_t i = 0; i < p.instructions.size(); ++i) {
        Instruction& instruction = p.instructions[i];
        std::string what = p.name + ", instruction " + std::to_string(i) + " (" + instruction.op + ")";
        instruction.kernel = backend_->find(instruction.op);
        if (instruction.kernel == nullptr) {
            throw std::invalid_argument(what + ": the " + backend_->name() + " backend has no such kernel");
        }
        auto event_ok = [&](int event) { return event >= 0 && event < p.events; };
        for (int event : instruction.waits) {
            // Signalled earlier in the list: so every order in which streams advance can finish.
            if (!event_ok(event) || !signalled[static_cast<size_t>(event)]) {
                throw std::invalid_argument(what + ": waits for event " + std::to_string(event) +
                                            ", which nothing before it signals");
            }
        }
        if (instruction.signal >= 0) {
            if (!event_ok(instruction.signal) || signalled[static_cast<size_t>(instruction.signal)]) {
                throw std::invalid_argument(what + ": event " + std::to_string(instruction.signal) +
                                            " is out of range or signalled twice");
            }
            signalled[static_cast<size_t>(instruction.signal)] = 1;
        }
        for (const TensorRef& ref : instruction.input_refs) instruction.in.push_back(resolve(ref, what));
        for (const TensorRef& ref : instruction.output_refs) instruction.out.push_back(resolve(ref, what));
        instruction.workspace = resolve(instruction.workspace_ref, what);
    }
    for (const auto& [name, ref] : p.symbols) p.resolved.emplace(name, resolve(ref, p.name + ", symbol " + name));
    // A program that replaces another takes its address: what the backend keeps goes by that.
    std::unique_ptr<Program>& place = programs_[p.name];
    if (place) {
        *place = std::move(*owned);
    } else {
        place = std::move(owned);
    }
    backend_->prepare(*place);
}

Program* Engine::find(std::string_view name) {
    auto found = programs_.find(name);
    return found == programs_.end() ? nullptr : found->second.get();
}

Program& Engine::program(std::string_view name) {
    if (Program* found = find(name)) return *found;
    throw std::invalid_argument("no program '" + std::string(name) + "' is loaded");
}

void Engine::run(std::string_view name) {
    std::lock_guard lock(mutex_);
    together([&] {
        backend_->run(program(name));
        backend_->wait();
    });
}

void Engine::feed(Program& p, const Batch& batch) {
    auto copy = [&](std::string_view symbol, const std::vector<int32_t>& values) {
        auto found = p.resolved.find(symbol);
        if (found == p.resolved.end()) return;
        const Tensor& target = found->second;
        if (target.dtype != DType::i32 || !target.contiguous() ||
            target.numel() != static_cast<int64_t>(values.size())) {
            throw std::invalid_argument("the feeder's " + std::string(symbol) + " has " +
                                        std::to_string(values.size()) + " values; the program takes " +
                                        std::to_string(target.numel()) + " of " + name_of(target.dtype) + ", dense");
        }
        backend_->write(p.symbols.find(symbol)->second.space, target.data, values.data(),
                        static_cast<int64_t>(values.size() * sizeof(int32_t)));
    };
    copy("ids", batch.ids);
    copy("targets", batch.targets);
    copy("positions", batch.positions);
    copy("cu_seqlens", batch.cu_seqlens);
}

void* Engine::scalar(const Program& p, std::string_view symbol, DType dtype) {
    auto found = p.resolved.find(symbol);
    if (found == p.resolved.end()) return nullptr;
    if (found->second.dtype != dtype || found->second.numel() != 1) {
        throw std::invalid_argument(p.name + ", symbol " + std::string(symbol) + ": must be one " + name_of(dtype));
    }
    return found->second.data;
}

void Engine::set(Program& p, std::string_view symbol, double value) {
    auto found = p.resolved.find(symbol);
    if (found == p.resolved.end()) return;
    const Space space = p.symbols.find(symbol)->second.space;
    if (found->second.dtype == DType::f64) {
        backend_->write(space, scalar(p, symbol, DType::f64), &value, sizeof value);
    } else {
        const auto narrow = static_cast<float>(value);
        backend_->write(space, scalar(p, symbol, DType::f32), &narrow, sizeof narrow);
    }
}

// Not through set(): a double would lose the seed's low bits.
void Engine::set_seed(Program& p, int64_t seed) {
    if (void* target = scalar(p, "seed", DType::i64)) {
        backend_->write(p.symbols.find("seed")->second.space, target, &seed, sizeof seed);
    }
}

double Engine::get(Program& p, std::string_view symbol) {
    auto found = p.resolved.find(symbol);
    if (found == p.resolved.end()) throw std::invalid_argument(p.name + " has no symbol " + std::string(symbol));
    const Space space = p.symbols.find(symbol)->second.space;
    if (found->second.dtype == DType::f64) {
        double value = 0.0;
        backend_->read(space, &value, scalar(p, symbol, DType::f64), sizeof value);
        return value;
    }
    float value = 0.0F;
    backend_->read(space, &value, scalar(p, symbol, DType::f32), sizeof value);
    return value;
}

StepResult Engine::train_step(Feeder& feeder, int accumulation, const std::map<std::string, double>& scalars,
                              int64_t seed, int64_t number) {
    std::lock_guard lock(mutex_);
    return together([&] { return step(feeder, accumulation, scalars, seed, number); });
}

StepResult Engine::step(Feeder& feeder, int accumulation, const std::map<std::string, double>& scalars, int64_t seed,
                        int64_t step) {
    if (accumulation < 1) throw std::invalid_argument("accumulation must be at least 1");
    StepResult result;
    const Communicator* group = backend_->communicator();
    const int rank = group == nullptr ? 0 : group->rank(), ranks = group == nullptr ? 1 : group->ranks();
    const double begin = now();
    Program& micro = program("micro_step");
    Program* last = find("last_micro_step");
    Program* norm = find("norm_step");
    Program& update = program("optimizer_step");

    // The whole global batch is at hand before its first micro-batch runs, so that its targets can be counted.
    std::vector<Batch> batches = feeder.take(accumulation);
    result.data_wait_seconds = now() - begin;
    for (const Batch& batch : batches) {
        result.targets += batch.all_targets;
        result.tokens += batch.all_tokens;
    }
    for (Program* p : {&micro, norm, &update}) {
        if (p == nullptr) continue;
        for (const auto& [name, value] : scalars) set(*p, name, value);
    }
    set(micro, "loss", 0.0);
    set(micro, "loss_scale", result.targets > 0 ? 1.0 / static_cast<double>(result.targets) : 0.0);
    for (int m = 0; m < accumulation; ++m) {
        // By its place in the global batch, so that the numbers drawn do not depend on how many ranks share it.
        set_seed(micro, micro_seed(seed, step, int64_t{m} * ranks + rank));
        feed(micro, batches[static_cast<size_t>(m)]);
        backend_->run(last != nullptr && m == accumulation - 1 ? *last : micro);
    }
    if (norm != nullptr) backend_->run(*norm);
    result.loss_sum = get(micro, "loss");
    if (norm != nullptr) result.grad_norm = get(*norm, "grad_norm");
    if (std::isfinite(result.loss_sum) && std::isfinite(result.grad_norm)) {
        set_seed(update, micro_seed(seed, step, int64_t{accumulation} * ranks));
        backend_->run(update);
        backend_->wait();
        result.applied = true;
    }
    if (norm == nullptr) {
        const bool told = update.resolved.find("grad_norm") != update.resolved.end();
        result.grad_norm = told ? get(update, "grad_norm") : std::numeric_limits<double>::quiet_NaN();
    }
    result.seconds = now() - begin;
    return result;
}

StepResult Engine::evaluate(Feeder& feeder, int batches) {
    std::lock_guard lock(mutex_);
    return together([&] { return pass(feeder, batches); });
}

StepResult Engine::pass(Feeder& feeder, int batches) {
    StepResult result;
    const double begin = now();
    Program& p = program("eval_step");
    set(p, "loss", 0.0);
    for (int i = 0; i < batches; ++i) {
        Batch batch = std::move(feeder.take(1)[0]);
        result.targets += batch.all_targets;
        result.tokens += batch.all_tokens;
        feed(p, batch);
        backend_->run(p);
    }
    if (Program* end = find("eval_end")) backend_->run(*end);
    result.loss_sum = get(p, "loss");
    result.seconds = now() - begin;
    return result;
}

void Engine::inject_delays(uint64_t seed, int max_microseconds) {
    std::lock_guard lock(mutex_);
    backend_->inject_delays(seed, max_microseconds);
}

void Engine::profile(bool on) {
    std::lock_guard lock(mutex_);
    backend_->profile(on);
}

std::vector<ProfileEntry> Engine::profile_report() const {
    std::lock_guard lock(mutex_);
    return backend_->profile_report();
}

}  // namespace surogate
