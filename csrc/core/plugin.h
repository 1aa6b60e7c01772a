// What a plugin library exports. Both sides are compiled from one source tree by one compiler: `surogate_plugin_build`
// of the plugin must equal kPluginBuild here, else the library is refused.
#pragma once

#include <cstddef>

#define SUROGATE_TEXT_(x) #x
#define SUROGATE_TEXT(x) SUROGATE_TEXT_(x)

namespace surogate {

class Backend;

// Goes up when anything that crosses the border changes: Backend, Program, Instruction, Tensor, Attrs, Call.
constexpr char kPluginBuild[] = "surogate plugin 1, C++ ABI " SUROGATE_TEXT(__GXX_ABI_VERSION) ", std::string ABI "
#ifdef _GLIBCXX_USE_CXX11_ABI
    SUROGATE_TEXT(_GLIBCXX_USE_CXX11_ABI)
#endif
    ;

// Null on failure, with the reason in `error` (cut to `size`, zero-terminated).
using MakeBackend = Backend* (*)(int device, const char* config, char* error, size_t size);
constexpr char kMakeBackendSymbol[] = "surogate_make_cuda_backend";
using PluginBuild = const char* (*)();
constexpr char kPluginBuildSymbol[] = "surogate_plugin_build";

}  // namespace surogate
