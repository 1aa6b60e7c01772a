#include "core/plugin.h"

#include <dlfcn.h>

#include <stdexcept>

namespace surogate {

std::unique_ptr<Backend> open_plugin_backend(const std::string& path, int device, const std::string& config) {
    // Local: the plugin has its own kernel registry, which must not meet ours. Never closed: kernels and library
    // handles live as long as the process.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("the plugin does not load: ") + dlerror());
    auto ask = reinterpret_cast<PluginBuild>(dlsym(library, kPluginBuildSymbol));
    const std::string build = ask == nullptr ? "unknown" : ask();
    if (build != plugin_build()) {
        throw std::runtime_error(path + " belongs to another build (" + build + ", not " + plugin_build() +
                                 "): install Surogate again");
    }
    auto make = reinterpret_cast<MakeBackend>(dlsym(library, kMakeBackendSymbol));
    if (make == nullptr) throw std::runtime_error(path + " has no " + kMakeBackendSymbol);
    char error[2048] = "";
    std::unique_ptr<Backend> backend(make(device, config.c_str(), error, sizeof error));
    if (!backend) throw std::runtime_error(error);
    return backend;
}

}  // namespace surogate
