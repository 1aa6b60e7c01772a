// all_reduce, reduce_scatter, all_gather, broadcast (surogate/ops/collectives.py).
#include "core/collectives.h"

namespace surogate {
namespace {

SUROGATE_CUDA_KERNEL("all_reduce", collectives::all_reduce);
SUROGATE_CUDA_KERNEL("reduce_scatter", collectives::reduce_scatter);
SUROGATE_CUDA_KERNEL("all_gather", collectives::all_gather);
SUROGATE_CUDA_KERNEL("broadcast", collectives::broadcast);

}  // namespace
}  // namespace surogate
