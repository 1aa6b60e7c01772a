#include "cuda/cublaslt.h"

#include <cublasLt.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cuda/plugin.h"

namespace surogate::cuda {

namespace {

// The functions that we call, from the library that the options name.
struct Api {
    explicit Api(const std::string& path) {
        void* library = open_library(path);
        auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(find_symbol(library, name));
        };
        find(create, "cublasLtCreate");
        find(destroy, "cublasLtDestroy");
        find(version, "cublasLtGetVersion");
        find(status_string, "cublasLtGetStatusString");
        find(desc_init, "cublasLtMatmulDescInit_internal");
        find(desc_set, "cublasLtMatmulDescSetAttribute");
        find(layout_init, "cublasLtMatrixLayoutInit_internal");
        find(preference_init, "cublasLtMatmulPreferenceInit_internal");
        find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
        find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
        find(algo_check, "cublasLtMatmulAlgoCheck");
        find(matmul, "cublasLtMatmul");
    }
    decltype(&cublasLtCreate) create;
    decltype(&cublasLtDestroy) destroy;
    decltype(&cublasLtGetVersion) version;
    decltype(&cublasLtGetStatusString) status_string;
    decltype(&cublasLtMatmulDescInit_internal) desc_init;
    decltype(&cublasLtMatmulDescSetAttribute) desc_set;
    decltype(&cublasLtMatrixLayoutInit_internal) layout_init;
    decltype(&cublasLtMatmulPreferenceInit_internal) preference_init;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
    decltype(&cublasLtMatmulAlgoCheck) algo_check;
    decltype(&cublasLtMatmul) matmul;

    void check(cublasStatus_t status, const char* what) const {
        if (status == CUBLAS_STATUS_SUCCESS) return;
        throw std::runtime_error(std::string("cuBLASLt: ") + what + ": " + status_string(status));
    }
};

std::string hex_of(const cublasLtMatmulAlgo_t& algo) {
    std::string text;
    char digits[20];
    for (uint64_t word : algo.data) {
        std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(word));
        text += digits;
    }
    return text;
}

bool parse_hex(const std::string& text, cublasLtMatmulAlgo_t* algo) {
    constexpr size_t kDigits = 16;
    if (text.size() != kDigits * std::size(algo->data)) return false;
    if (text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
    for (size_t i = 0; i < std::size(algo->data); ++i) {
        algo->data[i] = std::stoull(text.substr(i * kDigits, kDigits), nullptr, 16);
    }
    return true;
}

// Algorithms chosen earlier, by problem: a text file of lines "problem <tab> algorithm <tab> microseconds", named by
// device and library version, because an algorithm's 64 bytes mean something to one version alone. A line is appended
// in one write, so that several processes may share the file; lines that are cut or wrong are passed over.
class AlgorithmFile {
   public:
    AlgorithmFile(const std::string& folder, const std::string& device_name, size_t version) {
        if (folder.empty()) return;
        std::string device;
        for (char c : device_name) device += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
        path_ = folder + "/cublaslt-" + device + "-" + std::to_string(version) + ".tsv";
        std::ifstream file(path_);
        for (std::string line; std::getline(file, line);) {
            std::istringstream fields(line);
            std::string problem, hex;
            cublasLtMatmulAlgo_t algo;
            if (std::getline(fields, problem, '\t') && std::getline(fields, hex, '\t') && parse_hex(hex, &algo)) {
                known_[problem] = algo;
            }
        }
    }
    const cublasLtMatmulAlgo_t* find(const std::string& problem) const {
        auto found = known_.find(problem);
        return found == known_.end() ? nullptr : &found->second;
    }
    void add(const std::string& problem, const cublasLtMatmulAlgo_t& algo, double seconds) {
        known_[problem] = algo;
        if (path_.empty()) return;
        std::ostringstream line;
        line << problem << '\t' << hex_of(algo) << '\t' << seconds * 1e6 << '\n';
        int file = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (file < 0) return;  // a folder that cannot be written costs the timing next time, nothing else
        const std::string text = line.str();
        [[maybe_unused]] ssize_t written = ::write(file, text.data(), text.size());
        close(file);
    }

   private:
    std::string path_;
    std::map<std::string, cublasLtMatmulAlgo_t> known_;
};

struct Library {
    explicit Library(Device& device) : api(device.options.cublaslt) {
        api.check(api.create(&handle), "making a handle");
        algorithms = std::make_unique<AlgorithmFile>(device.options.cache, device.name, api.version());
    }
    ~Library() { api.destroy(handle); }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    Api api;
    cublasLtHandle_t handle = nullptr;
    std::unique_ptr<AlgorithmFile> algorithms;
};

std::shared_ptr<Library> library() {
    return device().once<Library>("cublaslt", [] { return new Library(device()); });
}

cudaDataType_t type_of(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// What a pointer is known to be aligned to, in bytes, up to 256.
uint32_t alignment(const void* p) {
    auto bits = reinterpret_cast<uintptr_t>(p);
    uint32_t found = 256;
    while (bits % found != 0) found /= 2;
    return found;
}

std::string key_of(const Gemm& g, const GemmOperands& o) {
    std::ostringstream key;
    key << name_of(g.in) << '>' << name_of(g.out) << ' ' << (g.ta ? 't' : 'n') << (g.tb ? 't' : 'n') << ' ' << g.m
        << 'x' << g.n << 'x' << g.k << " ld " << g.lda << ',' << g.ldb << ',' << g.ldy << (g.accumulate ? " acc" : "")
        << (o.bias != nullptr ? " bias" : "") << " align " << alignment(o.a) << ',' << alignment(o.b) << ','
        << alignment(o.y);
    if (o.bias != nullptr) key << ',' << alignment(o.bias);
    key << " workspace " << o.workspace_bytes;
    return key.str();
}

// cuBLASLt is column-major, where a row-major matrix appears transposed: y^T = op(b)^T op(a)^T. So its A is our b, its
// B our a, its rows our columns.
class Plan final : public GemmPlan {
   public:
    Plan(const Gemm& g, const GemmOperands& o, const std::string& key, cudaStream_t stream)
        : library_(library()), accumulate_(g.accumulate) {
        const Api& api = library_->api;
        api.check(api.desc_init(&desc_, sizeof desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
        set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(g.tb ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(g.ta ? CUBLAS_OP_T : CUBLAS_OP_N));
        if (o.bias != nullptr) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
            set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(g.out)));
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
        }
        layout(&b_, g.in, g.tb ? g.k : g.n, g.tb ? g.n : g.k, g.ldb);
        layout(&a_, g.in, g.ta ? g.m : g.k, g.ta ? g.k : g.m, g.lda);
        layout(&y_, g.out, g.n, g.m, g.ldy);
        choose(g, o, key, stream);
    }

    void run(float alpha, const GemmOperands& o, cudaStream_t stream) override {
        if (o.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
        library_->api.check(launch(algo_, alpha, o, o.y, stream), "a product");
    }

   private:
    template <typename T>
    void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
        library_->api.check(library_->api.desc_set(&desc_, attribute, &value, sizeof value), "describing a product");
    }
    void layout(cublasLtMatrixLayoutOpaque_t* layout, DType t, int64_t rows, int64_t columns, int64_t ld) {
        library_->api.check(library_->api.layout_init(layout, sizeof *layout, type_of(t), static_cast<uint64_t>(rows),
                                                      static_cast<uint64_t>(columns), ld),
                            "describing a matrix");
    }
    cublasStatus_t launch(const cublasLtMatmulAlgo_t& algo, float alpha, const GemmOperands& o, void* y,
                          cudaStream_t stream) {
        const float beta = accumulate_ ? 1.0F : 0.0F;
        return library_->api.matmul(library_->handle, &desc_, &alpha, o.b, &b_, o.a, &a_, &beta, y, &y_, y, &y_, &algo,
                                    o.workspace, static_cast<size_t>(o.workspace_bytes), stream);
    }

    void choose(const Gemm& g, const GemmOperands& o, const std::string& key, cudaStream_t stream) {
        const bool tune = device().options.tune;
        if (tune) {
            if (const cublasLtMatmulAlgo_t* known = library_->algorithms->find(key)) {
                cublasLtMatmulHeuristicResult_t result;
                if (library_->api.algo_check(library_->handle, &desc_, &b_, &a_, &y_, &y_, known, &result) ==
                        CUBLAS_STATUS_SUCCESS &&
                    result.workspaceSize <= static_cast<size_t>(o.workspace_bytes)) {
                    algo_ = *known;
                    return;
                }
            }
        }
        std::vector<cublasLtMatmulHeuristicResult_t> proposals = propose(o, tune ? 16 : 1);
        if (proposals.empty()) throw std::runtime_error("cuBLASLt has no algorithm for " + key);
        algo_ = proposals[0].algo;
        if (!tune || proposals.size() == 1) return;

        // A product that accumulates must not be timed on its own y, which would change: on memory borrowed for the
        // while. Where there is none, the first proposal has to do.
        void* borrowed = nullptr;
        if (accumulate_) {
            const size_t bytes = static_cast<size_t>((g.m - 1) * g.ldy + g.n) * size_of(g.out);
            if (cudaMalloc(&borrowed, bytes) != cudaSuccess) {
                cudaGetLastError();
                return;
            }
        }
        double best = 0.0;
        for (size_t i = 0; i < proposals.size(); ++i) {
            double seconds = time(proposals[i].algo, o, accumulate_ ? borrowed : o.y, stream);
            // One that is hardly faster is not worth an order that changes from run to run.
            if (seconds > 0.0 && (best == 0.0 || seconds < 0.99 * best)) {
                best = seconds;
                algo_ = proposals[i].algo;
            }
        }
        if (borrowed != nullptr) cudaFree(borrowed);
        if (best == 0.0) throw std::runtime_error("cuBLASLt: no algorithm runs for " + key);
        library_->algorithms->add(key, algo_, best);
    }

    std::vector<cublasLtMatmulHeuristicResult_t> propose(const GemmOperands& o, int most) {
        const Api& api = library_->api;
        cublasLtMatmulPreferenceOpaque_t preference;
        api.check(api.preference_init(&preference, sizeof preference), "stating preferences");
        auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            api.check(api.preference_set(&preference, attribute, &value, sizeof value), "stating preferences");
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(o.workspace_bytes));
        // Parts of a split sum are kept in f32, never rounded to bf16.
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(o.b));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(o.a));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(o.y));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(o.y));
        std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
        int count = 0;
        cublasStatus_t status =
            api.heuristic(library_->handle, &desc_, &b_, &a_, &y_, &y_, &preference, most, found.data(), &count);
        if (status == CUBLAS_STATUS_NOT_SUPPORTED) count = 0;
        if (status != CUBLAS_STATUS_NOT_SUPPORTED) api.check(status, "asking for algorithms");
        found.resize(static_cast<size_t>(count));
        std::erase_if(found, [](const auto& r) { return r.state != CUBLAS_STATUS_SUCCESS; });
        return found;
    }

    // Seconds of one product, 0 where the algorithm does not run.
    double time(const cublasLtMatmulAlgo_t& algo, const GemmOperands& o, void* y, cudaStream_t stream) {
        constexpr double kEnough = 2e-3;  // seconds to measure
        cudaEvent_t begin = nullptr, end = nullptr;
        check(cudaEventCreate(&begin), "timing");
        check(cudaEventCreate(&end), "timing");
        double mean = 0.0;
        // The first time warms up and says how often to repeat.
        for (int repeats = 1, round = 0; round < 2; ++round) {
            cudaEventRecord(begin, stream);
            bool ran = true;
            for (int i = 0; i < repeats && ran; ++i) ran = launch(algo, 1.0F, o, y, stream) == CUBLAS_STATUS_SUCCESS;
            cudaEventRecord(end, stream);
            check(cudaEventSynchronize(end), "timing");
            float milliseconds = 0.0F;
            cudaEventElapsedTime(&milliseconds, begin, end);
            mean = ran ? std::max(milliseconds, 1e-4F) * 1e-3 / repeats : 0.0;
            if (!ran) break;
            repeats = static_cast<int>(std::clamp(kEnough / mean, 3.0, 100.0));
        }
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
        return mean;
    }

    std::shared_ptr<Library> library_;
    bool accumulate_;
    cublasLtMatmulDescOpaque_t desc_;
    cublasLtMatrixLayoutOpaque_t a_, b_, y_;
    cublasLtMatmulAlgo_t algo_;
};

}  // namespace

std::shared_ptr<GemmPlan> plan_gemm(const Gemm& gemm, const GemmOperands& operands, cudaStream_t stream) {
    const std::string key = key_of(gemm, operands);
    return device().once<GemmPlan>("gemm " + key, [&] { return new Plan(gemm, operands, key, stream); });
}

}  // namespace surogate::cuda
