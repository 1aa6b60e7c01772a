// A backend in whose place the CUDA backend is on a GPU: the same kernels on the emulator, instruction after
// instruction, with plain loops where cuBLASLt and cuDNN compute.
#include "core/backend.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <vector>

#include "core/plugin.h"
#include "cuda/cublaslt.h"
#include "cuda/cudnn.h"
#include "cuda/plugin.h"
#include "cuda_bf16.h"

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    std::memset(p, 0, sizeof *p);
    std::strcpy(p->name, "emulator");
    p->major = 9;
    p->multiProcessorCount = 4;
    p->sharedMemPerBlockOptin = 227 << 10;
    return cudaSuccess;
}

namespace surogate::cuda {

namespace {

double value(const void* data, DType dtype, int64_t at) {
    if (dtype == DType::bf16) return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[at]);
    return static_cast<const float*>(data)[at];
}
void put(void* data, DType dtype, int64_t at, double x) {
    if (dtype == DType::bf16) {
        static_cast<__nv_bfloat16*>(data)[at] = static_cast<float>(x);
    } else {
        static_cast<float*>(data)[at] = static_cast<float>(x);
    }
}

struct Product final : GemmPlan {
    Gemm g;
    explicit Product(const Gemm& gemm) : g(gemm) {}

    void run(float alpha, const GemmOperands& o, cudaStream_t) override {
        std::vector<double> b(static_cast<size_t>(g.k * g.n));  // [n,k]
        for (int64_t j = 0; j < g.n; ++j) {
            for (int64_t k = 0; k < g.k; ++k) {
                b[static_cast<size_t>(j * g.k + k)] = value(o.b, g.in, g.tb ? j * g.ldb + k : k * g.ldb + j);
            }
        }
        std::vector<double> a(static_cast<size_t>(g.k));
        for (int64_t i = 0; i < g.m; ++i) {
            for (int64_t k = 0; k < g.k; ++k) {
                a[static_cast<size_t>(k)] = value(o.a, g.in, g.ta ? k * g.lda + i : i * g.lda + k);
            }
            for (int64_t j = 0; j < g.n; ++j) {
                const double* column = b.data() + j * g.k;
                double sum = 0.0;
                for (int64_t k = 0; k < g.k; ++k) sum += a[static_cast<size_t>(k)] * column[k];
                sum *= alpha;
                if (o.bias != nullptr) sum += value(o.bias, g.out, j);
                if (g.accumulate) sum += value(o.y, g.out, i * g.ldy + j);
                put(o.y, g.out, i * g.ldy + j, sum);
            }
        }
    }
};

// Packed attention as cuDNN is asked for it: statistics are [tokens, heads].
struct Attention final : Sdpa {
    SdpaProblem p;
    explicit Attention(const SdpaProblem& problem) : p(problem) {}
    int64_t workspace() const override { return 0; }

    void run(const SdpaOperands& o, cudaStream_t) override {
        if (p.padded_statistics) throw std::runtime_error("padded statistics are not emulated");
        const auto* lengths = static_cast<const int32_t*>(o.lengths);
        const auto* first = static_cast<const int64_t*>(o.offsets(o.context, p.q.token));
        auto* lse = static_cast<float*>(o.statistics);
        const auto tokens = static_cast<size_t>(p.tokens), group = static_cast<size_t>(p.heads / p.kv_heads);
        const auto dim = static_cast<size_t>(p.dim);
        std::vector<double> dk(tokens * static_cast<size_t>(p.kv_heads) * dim), dv = dk;
        for (int64_t d = 0; d < p.documents; ++d) {
            const int64_t begin = first[d] / p.q.token;
            for (int64_t h = 0; h < p.heads; ++h) {
                const int64_t kv = h / static_cast<int64_t>(group);
                for (int64_t i = begin; i < begin + lengths[d]; ++i) row(o, lse, begin, i, h, kv, dk, dv);
            }
        }
        if (!p.backward) return;
        for (int64_t i = 0; i < p.tokens; ++i) {
            for (int64_t h = 0; h < p.kv_heads; ++h) {
                for (int64_t e = 0; e < p.dim; ++e) {
                    const auto at = static_cast<size_t>((i * p.kv_heads + h) * p.dim + e);
                    put(o.dk, DType::bf16, i * p.dk.token + h * p.dk.head + e, dk[at]);
                    put(o.dv, DType::bf16, i * p.dv.token + h * p.dv.head + e, dv[at]);
                }
            }
        }
    }

   private:
    std::vector<double> vector(const void* data, const Steps& s, int64_t token, int64_t head) const {
        std::vector<double> x(static_cast<size_t>(p.dim));
        for (int64_t e = 0; e < p.dim; ++e)
            x[static_cast<size_t>(e)] = value(data, DType::bf16, token * s.token + head * s.head + e);
        return x;
    }
    static double dot(const std::vector<double>& a, const std::vector<double>& b) {
        double sum = 0.0;
        for (size_t e = 0; e < a.size(); ++e) sum += a[e] * b[e];
        return sum;
    }
    void row(const SdpaOperands& o, float* lse, int64_t begin, int64_t i, int64_t h, int64_t kv,
             std::vector<double>& dk, std::vector<double>& dv) const {
        const int64_t from = p.window > 0 ? std::max(begin, i - p.window + 1) : begin;
        const std::vector<double> q = vector(o.q, p.q, i, h);
        std::vector<double> scores;
        double top = -INFINITY, sum = 0.0;
        for (int64_t j = from; j <= i; ++j) {
            scores.push_back(p.scale * dot(q, vector(o.k, p.k, j, kv)));
            top = std::max(top, scores.back());
        }
        for (double s : scores) sum += std::exp(s - top);
        float& held = lse[i * p.heads + h];
        if (!p.backward) held = static_cast<float>(top + std::log(sum));
        std::vector<double> out(static_cast<size_t>(p.dim));
        std::vector<double> dout, given;
        double delta = 0.0;
        if (p.backward) {
            dout = vector(o.dout, p.dout, i, h), given = vector(o.o, p.o, i, h);
            delta = dot(dout, given);
        }
        for (int64_t j = from; j <= i; ++j) {
            const double weight = std::exp(scores[static_cast<size_t>(j - from)] - held);
            const std::vector<double> v = vector(o.v, p.v, j, kv);
            if (!p.backward) {
                for (size_t e = 0; e < out.size(); ++e) out[e] += weight * v[e];
                continue;
            }
            const std::vector<double> k = vector(o.k, p.k, j, kv);
            const double ds = p.scale * weight * (dot(dout, v) - delta);
            const auto at = static_cast<size_t>((j * p.kv_heads + kv) * p.dim);
            for (size_t e = 0; e < out.size(); ++e) {
                out[e] += ds * k[e];
                dk[at + e] += ds * q[e];
                dv[at + e] += weight * dout[e];
            }
        }
        const Steps& s = p.backward ? p.dq : p.o;
        for (int64_t e = 0; e < p.dim; ++e)
            put(p.backward ? o.dq : o.o, DType::bf16, i * s.token + h * s.head + e, out[static_cast<size_t>(e)]);
    }
};

class Emulator final : public Backend {
   public:
    explicit Emulator(const char* config) : device_(0, Options::parse(config)) { set_device(&device_); }

    const char* name() const override { return "cuda"; }
    Kernel find(std::string_view op) const override { return find_kernel("cuda", op); }
    std::vector<std::string> kernels() const override { return kernel_names("cuda"); }

    void* allocate(Space, int64_t bytes) override {
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
        return std::memset(memory, 0, static_cast<size_t>(bytes));
    }
    void release(Space, void* memory, int64_t) override { std::free(memory); }
    bool host_visible(Space space) const override { return space != Space::device; }
    void write(Space, void* target, const void* source, int64_t bytes) override {
        std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    void read(Space, void* target, const void* source, int64_t bytes) override {
        std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    void prepare(Program& program) override { states_[&program].resize(program.instructions.size()); }
    void run(Program& program) override {
        set_device(&device_);
        for (size_t i = 0; i < program.instructions.size(); ++i) {
            const Instruction& one = program.instructions[i];
            try {
                one.kernel(
                    {one.in, one.out, one.workspace, one.attrs, 1, nullptr, &states_[&program][i], group_.get()});
            } catch (const std::exception& error) {
                throw std::runtime_error(program.name + ", instruction " + std::to_string(i) + " (" + one.op +
                                         "): " + error.what());
            }
        }
    }
    void wait() override {}
    void join(std::shared_ptr<Communicator> group) override { group_ = std::move(group); }
    Communicator* communicator() const override { return group_.get(); }
    void inject_delays(uint64_t, int) override {}
    void profile(bool) override {}
    std::vector<ProfileEntry> profile_report() const override { return {}; }

   private:
    Device device_;
    std::shared_ptr<Communicator> group_;
    std::map<Program*, std::vector<std::shared_ptr<void>>> states_;
};

}  // namespace

std::shared_ptr<GemmPlan> plan_gemm(const Gemm& gemm, const GemmOperands&, cudaStream_t) {
    return std::make_shared<Product>(gemm);
}
std::shared_ptr<Sdpa> plan_sdpa(const SdpaProblem& problem) { return std::make_shared<Attention>(problem); }

}  // namespace surogate::cuda

extern "C" const char* surogate_plugin_build() {
    static const std::string build = surogate::plugin_build();
    return build.c_str();
}

extern "C" surogate::Backend* surogate_make_cuda_backend(int, const char* config, char* error, size_t size) {
    try {
        return new surogate::cuda::Emulator(config);
    } catch (const std::exception& e) {
        std::strncpy(error, e.what(), size - 1);
        error[size - 1] = 0;
        return nullptr;
    }
}
