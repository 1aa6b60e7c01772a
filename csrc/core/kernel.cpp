#include "core/kernel.h"

#include <map>

namespace surogate {

namespace {

using Registry = std::map<std::pair<std::string, std::string>, Kernel, std::less<>>;

// A function-local static: kernels register from static initialisers in any order.
Registry& registry() {
    static Registry kernels;
    return kernels;
}

[[noreturn]] void wrong(std::string_view name, const char* problem) {
    throw std::invalid_argument("attribute '" + std::string(name) + "' " + problem);
}

}  // namespace

const AttrValue* Attrs::find(std::string_view name) const {
    for (const auto& [key, value] : items_) {
        if (key == name) return &value;
    }
    return nullptr;
}

bool Attrs::has(std::string_view name) const { return find(name) != nullptr; }

bool Attrs::flag(std::string_view name, bool otherwise) const {
    const AttrValue* value = find(name);
    if (value == nullptr) return otherwise;
    if (const bool* held = std::get_if<bool>(value)) return *held;
    wrong(name, "is not a truth value");
}

int64_t Attrs::integer(std::string_view name, int64_t otherwise) const {
    const AttrValue* value = find(name);
    if (value == nullptr) return otherwise;
    if (const int64_t* held = std::get_if<int64_t>(value)) return *held;
    wrong(name, "is not an integer");
}

double Attrs::real(std::string_view name, double otherwise) const {
    const AttrValue* value = find(name);
    if (value == nullptr) return otherwise;
    if (const double* held = std::get_if<double>(value)) return *held;
    if (const int64_t* held = std::get_if<int64_t>(value)) return static_cast<double>(*held);
    wrong(name, "is not a number");
}

void register_kernel(const char* backend, const char* op, Kernel kernel) {
    if (!registry().emplace(std::pair(backend, op), kernel).second) {
        throw std::logic_error(std::string("two ") + backend + " kernels named " + op);
    }
}

Kernel find_kernel(std::string_view backend, std::string_view op) {
    auto found = registry().find(std::pair<std::string, std::string>(backend, op));
    return found == registry().end() ? nullptr : found->second;
}

std::vector<std::string> kernel_names(std::string_view backend) {
    std::vector<std::string> names;
    for (const auto& [key, kernel] : registry()) {
        if (key.first == backend) names.push_back(key.second);
    }
    return names;
}

}  // namespace surogate
