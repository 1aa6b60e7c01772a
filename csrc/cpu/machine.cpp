#include "cpu/machine.h"

#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace surogate {

bool cpu_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

void initialise_blas() { scipy_openblas_set_num_threads(1); }

std::string blas_name() { return scipy_openblas_get_config(); }

double sgemm_rate(int threads, int64_t m, int64_t n, int64_t k) {
    std::vector<float> a(static_cast<size_t>(m * k), 0.5f), b(static_cast<size_t>(n * k), 0.25f),
        c(static_cast<size_t>(m * n));
    const int64_t tile = (m + threads - 1) / threads;
    double best = 1e30;
    for (int repeat = 0; repeat < 4; ++repeat) {
        auto begin = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int t = 0; t < threads; ++t) {
            const int64_t first = t * tile, rows = std::min(tile, m - first);
            if (rows <= 0) continue;
            scipy_cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows), static_cast<int>(n),
                              static_cast<int>(k), 1.0f, a.data() + first * k, static_cast<int>(k), b.data(),
                              static_cast<int>(k), 0.0f, c.data() + first * n, static_cast<int>(n));
        }
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / best;
}

}  // namespace surogate
