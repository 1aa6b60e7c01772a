// What a plugin library exports. Both sides are compiled from one source tree by one compiler: what the plugin's
// `surogate_plugin_build` says must equal plugin_build() here, else the library is refused.
#pragma once

#include <cstddef>
#include <string>

#include "core/backend.h"

namespace surogate {

// Which interface the two sides share. The number goes up when anything changes that crosses the border: Backend,
// Program, Instruction, Tensor, Attrs, Call.
inline std::string plugin_build() {
    return "plugin 2 of " + std::to_string(sizeof(Program)) + "/" + std::to_string(sizeof(Instruction)) + "/" +
           std::to_string(sizeof(Call)) + "/" + std::to_string(sizeof(ProfileEntry)) + " bytes, C++ ABI " +
           std::to_string(__GXX_ABI_VERSION);
}
using PluginBuild = const char* (*)();
constexpr char kPluginBuildSymbol[] = "surogate_plugin_build";

// Null on failure, with the reason in `error` (cut to `size`, zero-terminated).
using MakeBackend = Backend* (*)(int device, const char* config, char* error, size_t size);
constexpr char kMakeBackendSymbol[] = "surogate_make_cuda_backend";

}  // namespace surogate
