// all_reduce, reduce_scatter, all_gather, broadcast (surogate/ops/collectives.py).
#include "core/collectives.h"

namespace surogate {
namespace {

SUROGATE_CPU_KERNEL("all_reduce", collectives::all_reduce);
SUROGATE_CPU_KERNEL("reduce_scatter", collectives::reduce_scatter);
SUROGATE_CPU_KERNEL("all_gather", collectives::all_gather);
SUROGATE_CPU_KERNEL("broadcast", collectives::broadcast);

}  // namespace
}  // namespace surogate
