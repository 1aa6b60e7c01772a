// clip_scale (surogate/ops/clip_scale.py).
#include <cmath>

#include "core/kernel.h"

namespace surogate {
namespace {

void clip_scale(const Call& call) {
    const double norm = std::sqrt(*call.in[0].as<double>());
    const double max_norm = call.attrs.real("max_norm");
    const double ratio = max_norm / (norm + 1e-6);
    *call.out[0].as<float>() = static_cast<float>(norm);
    // Written so that a ratio that is not a number stays one.
    *call.out[1].as<float>() = max_norm == 0.0 || ratio > 1.0 ? 1.f : static_cast<float>(ratio);
}

SUROGATE_CPU_KERNEL("clip_scale", clip_scale);

}  // namespace
}  // namespace surogate
