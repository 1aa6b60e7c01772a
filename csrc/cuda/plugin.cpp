#include "cuda/plugin.h"

#include <dlfcn.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace surogate::cuda {

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // so that an error that can be lived with is not reported again by the next call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                             ")");
}

Options Options::parse(const char* text) {
    Options options;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        size_t cut = line.find('=');
        if (cut == std::string::npos) throw std::invalid_argument("configuration: '" + line + "' is not key=value");
        std::string key = line.substr(0, cut), value = line.substr(cut + 1);
        if (key == "cublaslt") {
            options.cublaslt = value;
        } else if (key == "cudnn") {
            options.cudnn = value;
        } else if (key == "cudart") {
            options.cudart = value;
        } else if (key == "cache") {
            options.cache = value;
        } else if (key == "tune") {
            options.tune = value == "1";
        } else if (key == "eager") {
            options.eager = value == "1";
        } else if (key == "check_nan") {
            options.check_nan = value == "1";
        } else {
            throw std::invalid_argument("configuration: unknown key '" + key + "'");
        }
    }
    return options;
}

Device::Device(int number, Options given) : ordinal(number), options(std::move(given)) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, ordinal), "reading the device's properties");
    sm = 10 * properties.major + properties.minor;
    multiprocessors = properties.multiProcessorCount;
    name = properties.name;
}

namespace {

thread_local Device* current = nullptr;

}  // namespace

Device& device() {
    if (current == nullptr) throw std::logic_error("no device is set on this thread");
    return *current;
}

void set_device(Device* device) {
    current = device;
    check(cudaSetDevice(device->ordinal), "choosing the device");
}

void* open_library(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("a CUDA library does not load: ") + dlerror());
    return library;
}

void* find_symbol(void* library, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("a CUDA library is too old: ") + dlerror());
    return symbol;
}

namespace {

constexpr uintptr_t kAlign = 256;

char* aligned_up(void* p) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kAlign - 1) / kAlign * kAlign);
}

}  // namespace

Scratch::Scratch(const Tensor& workspace) : next_(nullptr), end_(nullptr) {
    if (!workspace) return;
    next_ = aligned_up(workspace.data);
    end_ = workspace.as<char>() + workspace.numel();
}

void* Scratch::take(int64_t bytes, const char* what) {
    int64_t left = end_ - next_;
    if (bytes > left) {
        throw std::runtime_error(std::string(what) + " needs " + std::to_string(bytes) + " bytes of workspace, " +
                                 std::to_string(left < 0 ? 0 : left) + " are left of the plan's");
    }
    char* part = next_;
    next_ = aligned_up(part + bytes);
    return part;
}

void* Scratch::rest(int64_t* bytes) {
    *bytes = end_ > next_ ? end_ - next_ : 0;
    return next_;
}

}  // namespace surogate::cuda
