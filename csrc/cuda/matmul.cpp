// y = alpha * op(a) op(b) + bias + c, where y takes c's storage.
#include "core/kernel.h"
#include "cuda/cublaslt.h"
#include "cuda/plugin.h"

namespace surogate::cuda {

namespace {

// Elements between rows; where there is one row, the stride says nothing.
int64_t leading(const Tensor& t) { return t.dim(0) == 1 ? t.dim(1) : t.stride[0]; }

void expect(bool condition, const char* what, const Tensor& a, const Tensor& b) {
    if (condition) return;
    throw std::invalid_argument(std::string(what) + " (" + name_of(a.dtype) + " and " + name_of(b.dtype) + ")");
}

void matmul(const Call& call) {
    const Tensor &a = call.in[0], &b = call.in[1], &bias = call.in[2], &c = call.in[3], &y = call.out[0];
    expect(a.dtype == b.dtype, "a product of two dtypes has no kernel here: cast one operand", a, b);
    expect(y.dtype == DType::f32 || y.dtype == a.dtype, "a product's result is f32 or as its operands", y, a);
    if (bias) expect(bias.dtype == y.dtype, "a bias must have the result's dtype", bias, y);
    if (c) expect(c.data == y.data, "the result must take c's storage", c, y);

    Gemm gemm;
    gemm.ta = call.attrs.flag("ta");
    gemm.tb = call.attrs.flag("tb");
    gemm.m = y.dim(0);
    gemm.n = y.dim(1);
    gemm.k = gemm.ta ? a.dim(0) : a.dim(1);
    gemm.in = a.dtype;
    gemm.out = y.dtype;
    gemm.lda = leading(a);
    gemm.ldb = leading(b);
    gemm.ldy = leading(y);
    gemm.accumulate = static_cast<bool>(c);

    GemmOperands operands{a.data, b.data, bias.data, y.data};
    operands.workspace = Scratch(call.workspace).rest(&operands.workspace_bytes);
    if (!*call.state) *call.state = plan_gemm(gemm, operands, stream_of(call));
    std::static_pointer_cast<GemmPlan>(*call.state)
        ->run(static_cast<float>(call.attrs.real("alpha", 1.0)), operands, stream_of(call));
}

SUROGATE_CUDA_KERNEL("matmul", matmul);

}  // namespace

}  // namespace surogate::cuda
