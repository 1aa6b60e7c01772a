#include "core/program.h"

#include <algorithm>

namespace surogate {

namespace {

template <typename T, size_t N>
T parse(std::string_view name, const std::pair<const char*, T> (&table)[N], const char* what) {
    for (const auto& [text, value] : table) {
        if (name == text) return value;
    }
    throw std::invalid_argument("unknown " + std::string(what) + " '" + std::string(name) + "'");
}

constexpr std::pair<const char*, DType> kDTypes[] = {{"f32", DType::f32}, {"f64", DType::f64}, {"bf16", DType::bf16},
                                                     {"i32", DType::i32}, {"i64", DType::i64}, {"u8", DType::u8}};
constexpr std::pair<const char*, Stream> kStreamNames[] = {
    {"compute", Stream::compute}, {"h2d", Stream::h2d}, {"d2h", Stream::d2h}, {"comm", Stream::comm}};
constexpr std::pair<const char*, Space> kSpaceNames[] = {
    {"device", Space::device}, {"pinned", Space::pinned}, {"host", Space::host}};

}  // namespace

DType parse_dtype(std::string_view name) { return parse(name, kDTypes, "dtype"); }
Stream parse_stream(std::string_view name) { return parse(name, kStreamNames, "stream"); }
Space parse_space(std::string_view name) { return parse(name, kSpaceNames, "space"); }

const char* name_of(DType t) {
    for (const auto& [text, value] : kDTypes) {
        if (value == t) return text;
    }
    return "?";
}

const char* name_of(Space space) { return kSpaceNames[static_cast<int>(space)].first; }

int64_t TensorRef::end() const {
    if (offset < 0) throw std::invalid_argument("negative offset");
    int64_t last = 0, reach = 0, bytes = 0, numel = 1;
    bool empty = false, huge = false;
    for (int i = 0; i < form.rank; ++i) {
        if (form.shape[i] < 0 || form.stride[i] < 0) throw std::invalid_argument("negative size or stride");
        empty |= form.shape[i] == 0;
        huge |= __builtin_mul_overflow(std::max<int64_t>(form.shape[i] - 1, 0), form.stride[i], &reach);
        huge |= __builtin_add_overflow(last, reach, &last);
        huge |= __builtin_mul_overflow(numel, form.shape[i], &numel);
    }
    if (empty) return offset;
    huge |= __builtin_add_overflow(last, 1, &last);
    huge |= __builtin_mul_overflow(last, static_cast<int64_t>(size_of(form.dtype)), &bytes);
    huge |= __builtin_add_overflow(offset, bytes, &bytes);
    if (huge) throw std::invalid_argument("sizes beyond 64 bits");
    if (form.rank > 0 && form.shape[form.rank - 1] > 1 && form.stride[form.rank - 1] != 1) {
        throw std::invalid_argument("the last dimension is not contiguous");
    }
    return bytes;
}

}  // namespace surogate
