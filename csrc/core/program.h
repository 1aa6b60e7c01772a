// Program: what the compiler hands over, parsed once. See docs/architecture.md, "Program".
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/tensor.h"

namespace surogate {

enum class Stream : uint8_t { compute, h2d, d2h, comm };
constexpr int kStreams = 4;

Stream parse_stream(std::string_view name);
Space parse_space(std::string_view name);
const char* name_of(Space space);

// A tensor by its place in an arena; becomes a Tensor when the arenas exist.
struct TensorRef {
    bool present = false;
    Space space = Space::device;
    int64_t offset = 0;  // bytes
    Tensor form;         // dtype, shape and strides; data stays null

    // First byte after the tensor. Throws std::invalid_argument for negative or huge sizes and a last stride that
    // is not 1.
    int64_t end() const;
};

struct Instruction {
    std::string op;
    std::vector<TensorRef> input_refs, output_refs;
    TensorRef workspace_ref;
    Attrs attrs;
    Stream stream = Stream::compute;
    std::vector<int> waits;
    int signal = -1;

    // Filled by Engine::load.
    Kernel kernel = nullptr;
    std::vector<Tensor> in, out;
    Tensor workspace;
};

struct Program {
    std::string name;
    std::vector<Instruction> instructions;
    std::map<std::string, TensorRef, std::less<>> symbols;
    int events = 0;

    std::map<std::string, Tensor, std::less<>> resolved;  // symbols, filled by Engine::load
};

}  // namespace surogate
