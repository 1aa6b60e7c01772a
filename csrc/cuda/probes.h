// Small kernels of the backend itself: waiting, and looking for NaN.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensor.h"

namespace surogate::cuda {

// Keeps the stream busy for a time, by the device's clock.
void launch_delay(int64_t nanoseconds, cudaStream_t stream);
// Sets *found (memory that the host sees) to 1 if a float of the tensor is NaN.
void launch_nan_check(const Tensor& tensor, int* found, cudaStream_t stream);

}  // namespace surogate::cuda
