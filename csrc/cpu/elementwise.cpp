// add, mul and scale (surogate/ops/elementwise.py).
#include "cpu/elementwise.h"

namespace surogate {
namespace {

void add(const Call& call) {
    map_binary(call, [](float a, float b) { return a + b; });
}

void mul(const Call& call) {
    map_binary(call, [](float a, float b) { return a * b; });
}

void scale(const Call& call) {
    const float alpha = static_cast<float>(call.attrs.real("alpha"));
    map_unary(call, [alpha](float x) { return alpha * x; });
}

SUROGATE_CPU_KERNEL("add", add);
SUROGATE_CPU_KERNEL("mul", mul);
SUROGATE_CPU_KERNEL("scale", scale);

}  // namespace
}  // namespace surogate
