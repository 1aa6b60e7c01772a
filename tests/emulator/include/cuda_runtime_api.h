// The part of CUDA that our kernels use, on the CPU: a block's threads are fibers that take turns at barriers and
// exchanges between lanes. It shows wrong indexing, wrong values, missing barriers (blocks run their threads in
// alternating order) and barriers that part of a warp does not reach. It shows nothing of speed, of memory ordering
// between blocks, and of instructions that only the device has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: as CUDA's
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using cudaStream_t = struct EmulatedStream*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t sharedMemPerBlockOptin;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memmove(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t i = 0; i < height; ++i) {
        std::memmove(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
    }
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
    for (size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(to) + i * pitch, value, width);
    return cudaSuccess;
}

namespace emulate {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

struct Config {
    dim3 grid, block;
    Config(dim3 grid_, dim3 block_, size_t = 0, cudaStream_t = nullptr) : grid(grid_), block(block_) {}
};

// Calls body once for every thread of every block.
void run(const Config& config, void (*body)(void*), void* context);

// Waits for the block, or for the lanes of the warp that `mask` names.
void wait_block();
void wait_warp(unsigned mask);
int lane();
// Sixteen bytes that a lane of this warp shows the others.
void* slot(int lane);

template <typename Fn, typename... Args>
void launch(const Config& config, Fn fn, const Args&... args) {
    auto body = [&] { fn(args...); };
    run(config, [](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body);
}

template <typename T>
T exchange(unsigned mask, T x, int from) {
    static_assert(sizeof(T) <= 16);
    std::memcpy(slot(lane()), &x, sizeof x);
    wait_warp(mask);
    if (from >= 0 && from < 32) std::memcpy(&x, slot(from), sizeof x);
    wait_warp(mask);
    return x;
}

}  // namespace emulate

extern emulate::Index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

inline void __syncthreads() { emulate::wait_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffU) { emulate::wait_warp(mask); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int = 32) {
    return emulate::exchange(mask, x, emulate::lane() ^ lanes);
}
template <typename T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
    return emulate::exchange(mask, x, emulate::lane() / width * width + from % width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, int lanes, int width = 32) {
    const int lane = emulate::lane(), from = lane + lanes;
    return emulate::exchange(mask, x, from / width == lane / width ? from : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int lanes, int width = 32) {
    const int lane = emulate::lane(), from = lane - lanes;
    return emulate::exchange(mask, x, from >= 0 && from / width == lane / width ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool yes) {
    const bool mine = yes;
    std::memcpy(emulate::slot(emulate::lane()), &mine, sizeof mine);
    emulate::wait_warp(mask);
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) {
        if ((mask >> i & 1U) != 0 && *static_cast<bool*>(emulate::slot(i))) found |= 1U << i;
    }
    emulate::wait_warp(mask);
    return found;
}
inline bool __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
inline bool __all_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) == mask; }

template <typename T>
T atomicAdd(T* at, T x) {
    return std::exchange(*at, *at + x);
}
template <typename T>
T atomicMin(T* at, T x) {
    return std::exchange(*at, std::min(*at, x));
}
template <typename T>
T atomicMax(T* at, T x) {
    return std::exchange(*at, std::max(*at, x));
}
inline void __threadfence() {}

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0F / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline float normcdff(float x) { return 0.5F * std::erfc(-x * 0.70710678F); }
inline float __saturatef(float x) { return x > 0.0F ? std::min(x, 1.0F) : 0.0F; }
template <typename T>
T __ldg(const T* p) {
    return *p;
}
using std::isinf;
using std::isnan;
using std::max;
using std::min;
