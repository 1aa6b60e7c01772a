// What the CPU backend needs to know of the machine.
#pragma once

#include <cstdint>
#include <string>

namespace surogate {

bool cpu_supported();
// One BLAS thread: our tiles are the parallelism, and a second pool of threads would fight for the cores.
void initialise_blas();
std::string blas_name();
// Best of several products of this shape, split over threads by rows; flop/s.
double sgemm_rate(int threads, int64_t m, int64_t n, int64_t k);

}  // namespace surogate
