// What the files of the CUDA plugin share: checked calls, and the device that the current thread works on.
//
// The plugin has a static CUDA runtime and no other CUDA library among its needs: cuBLASLt and cuDNN are opened by
// path, when first used.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>

#include "core/kernel.h"

namespace surogate::cuda {

// Throws std::runtime_error "<what>: <the runtime's message>" unless the status is success.
void check(cudaError_t status, const char* what);

// The plugin's configuration: lines of "key=value".
struct Options {
    // Paths of libraries. Empty: found by the loader under their usual names.
    std::string cublaslt = "libcublasLt.so.13";
    std::string cudnn = "libcudnn.so.9";
    std::string cudart;  // for cuDNN's frontend, which does not see ours
    // Folder that keeps what was measured once; empty: nothing is kept.
    std::string cache;
    // Choose matrix-product algorithms by timing. Without it the library's first proposal is taken, which depends on
    // nothing but shapes, device and version.
    bool tune = true;
    // Never capture graphs.
    bool eager = false;
    // Never capture, and stop at the first instruction that writes a NaN.
    bool check_nan = false;

    static Options parse(const char* text);
};

// A device as the kernels see it. Handles and plans that several instructions share live in `made`, by a key that says
// all that they depend on.
class Device {
   public:
    Device(int ordinal, Options options);

    // Calls of cudaGetDeviceProperties are slow: read once.
    int ordinal, sm, multiprocessors;
    std::string name;
    Options options;

    template <typename T, typename Make>
    std::shared_ptr<T> once(const std::string& key, const Make& make) {
        std::shared_ptr<void>& found = made_[key];
        if (!found) found = std::shared_ptr<T>(make());
        return std::static_pointer_cast<T>(found);
    }

   private:
    std::map<std::string, std::shared_ptr<void>> made_;
};

// Of the program that runs on this thread; set by the backend.
Device& device();
void set_device(Device* device);

// Opens a library and keeps it open; throws std::runtime_error that names the path.
void* open_library(const std::string& path);
// Address of a function; throws std::runtime_error that names it.
void* find_symbol(void* library, const char* name);

inline cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream); }

// Cuts a workspace into parts, each aligned to 256 bytes. Throws std::runtime_error where the plan gave too little.
class Scratch {
   public:
    explicit Scratch(const Tensor& workspace);
    void* take(int64_t bytes, const char* what);
    // All that is left.
    void* rest(int64_t* bytes);

   private:
    char *next_, *end_;
};

}  // namespace surogate::cuda
