// matmul (surogate/ops/matmul.py).
#include "core/kernel.h"
#include "cpu/gemm.h"
#include "cpu/workspace.h"

namespace surogate {
namespace {

void matmul(const Call& call) {
    const Tensor &a = call.in[0], &b = call.in[1], &bias = call.in[2], &c = call.in[3], &y = call.out[0];
    const bool ta = call.attrs.flag("ta");
    const int64_t m = y.dim(0), n = y.dim(1), k = a.dim(ta ? 0 : 1);
    const Gemm product{
        .m = m,
        .n = n,
        .k = k,
        .alpha = static_cast<float>(call.attrs.real("alpha")),
        .a = a.as<float>(),
        .lda = leading(a),
        .ta = ta,
        .b = b,
        .tb = call.attrs.flag("tb"),
        .c = y.as<float>(),
        .ldc = leading(y),
        .add = c.as<float>(),
        .ld_add = c ? leading(c) : 0,
        .bias = bias,
    };
    gemm(product, Workspace(call).take<float>(gemm_scratch(n, k, b.dtype)), call.threads);
}

SUROGATE_CPU_KERNEL("matmul", matmul);

}  // namespace
}  // namespace surogate
