// Hands out the pieces of a call's workspace, one after the other. The sizes are those that Op.workspace planned; a
// kernel that asks for more than that is a fault of this program and says so.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "core/kernel.h"

namespace surogate {

class Workspace {
   public:
    explicit Workspace(const Call& call)
        : at_(call.workspace.as<char>()), left_(call.workspace ? call.workspace.numel() : 0) {}

    // The piece is aligned as T is, if pieces are taken in the order of falling alignment.
    template <typename T>
    T* take(int64_t count) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        if (bytes > left_) throw std::logic_error("the workspace is smaller than its kernel needs");
        T* piece = reinterpret_cast<T*>(at_);
        at_ += bytes;
        left_ -= bytes;
        return piece;
    }

   private:
    char* at_;
    int64_t left_;
};

}  // namespace surogate
