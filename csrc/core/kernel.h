// Kernels: functions over tensors, found by (backend, op name). Each kernel file registers itself, so a new op
// edits no central list.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/tensor.h"

namespace surogate {

class Communicator;

using AttrValue = std::variant<bool, int64_t, double, std::string>;

// A few (name, value) pairs; linear search beats a map at this size.
class Attrs {
   public:
    void set(std::string name, AttrValue value) { items_.emplace_back(std::move(name), std::move(value)); }
    bool has(std::string_view name) const;
    // Missing names or other types throw std::invalid_argument that names the attribute.
    bool flag(std::string_view name, bool otherwise = false) const;
    int64_t integer(std::string_view name, int64_t otherwise = 0) const;
    double real(std::string_view name, double otherwise = 0.0) const;  // an integer is accepted too

   private:
    const AttrValue* find(std::string_view name) const;
    std::vector<std::pair<std::string, AttrValue>> items_;
};

// What a kernel sees. `stream` is the backend's own handle (null on the CPU). `state` belongs to the instruction: what
// a kernel makes once, on the first run, and needs again (null on the CPU). `communicator`: null where this engine is
// the only rank.
struct Call {
    const std::vector<Tensor>& in;
    const std::vector<Tensor>& out;
    Tensor workspace;
    const Attrs& attrs;
    int threads;
    void* stream;
    std::shared_ptr<void>* state = nullptr;
    Communicator* communicator = nullptr;
};

using Kernel = void (*)(const Call&);

void register_kernel(const char* backend, const char* op, Kernel kernel);
Kernel find_kernel(std::string_view backend, std::string_view op);  // null: there is none
std::vector<std::string> kernel_names(std::string_view backend);

struct KernelRegistration {
    KernelRegistration(const char* backend, const char* op, Kernel k) { register_kernel(backend, op, k); }
};

}  // namespace surogate

#define SUROGATE_CONCAT_(a, b) a##b
#define SUROGATE_CONCAT(a, b) SUROGATE_CONCAT_(a, b)
#define SUROGATE_CPU_KERNEL(op, fn) \
    static const ::surogate::KernelRegistration SUROGATE_CONCAT(registration_, __LINE__) { "cpu", op, fn }
#define SUROGATE_CUDA_KERNEL(op, fn) \
    static const ::surogate::KernelRegistration SUROGATE_CONCAT(registration_, __LINE__) { "cuda", op, fn }
