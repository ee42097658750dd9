// Checks that a written tensor overlaps no other argument and that its entries do not share memory. Bindings take
// outputs as `Tensor&` or `Tensors&` and inputs as const, so that all ops are checked in the same way.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "host/overlap.h"

namespace pdkernels::bindings {

// Kernels iterate over all entries of an expanded dimension, whose size is not limited by memory.
inline void require_real_size(const torch::stable::Tensor& t) {
  constexpr int64_t kMostExpanded = 0x7FFFFFFF;
  const auto sizes = t.sizes();
  for (size_t d = 0; d < sizes.size(); ++d) {
    STD_TORCH_CHECK(sizes[d] <= kMostExpanded || t.stride(static_cast<int64_t>(d)) != 0,
                    "pdkernels: an expanded dimension must not be so large");
  }
}
inline void require_real_size(const std::vector<torch::stable::Tensor>& tensors) {
  for (const auto& t : tensors) require_real_size(t);
}
inline void require_real_size(const std::optional<torch::stable::Tensor>& t) {
  if (t.has_value()) require_real_size(*t);
}
template <class Other>
void require_real_size(const Other&) {}

class Extents {
 public:
  explicit Extents(size_t tensors) { extents_.reserve(tensors); }

  template <bool kWritten>
  void add(const torch::stable::Tensor& t) {
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    const int64_t item = static_cast<int64_t>(t.element_size());
    Extent extent{reinterpret_cast<intptr_t>(t.data_ptr()), item, item, &t, kWritten};
    bool dense = true;  // as in a contiguous tensor: nothing overlaps in it
    for (size_t d = sizes.size(); d-- > 0;) {
      if (sizes[d] == 0) return;
      if (sizes[d] == 1) continue;
      dense = dense && strides[d] * item == extent.bytes;
      extent.bytes += (sizes[d] - 1) * strides[d] * item;
    }
    STD_TORCH_CHECK(!kWritten || dense || !overlaps_itself(dims_of(extent)),
                    "pdkernels: a written tensor overlaps itself");
    extents_.push_back(extent);
  }
  template <bool kWritten>
  void add(const std::vector<torch::stable::Tensor>& tensors) {
    extents_.reserve(extents_.capacity() + tensors.size());
    for (const auto& t : tensors) add<kWritten>(t);
  }
  template <bool kWritten>
  void add(const std::optional<torch::stable::Tensor>& t) {
    if (t.has_value()) add<kWritten>(*t);
  }
  template <bool kWritten, class Other>
  void add(const Other&) {}

  void require_apart() {
    std::sort(extents_.begin(), extents_.end(), [](const Extent& a, const Extent& b) { return a.start < b.start; });
    for (auto a = extents_.begin(); a != extents_.end(); ++a) {
      for (auto b = a + 1; b != extents_.end() && b->start < a->start + a->bytes; ++b) {
        STD_TORCH_CHECK(!(a->written || b->written) || !overlap(dims_of(*a), dims_of(*b), b->start - a->start),
                        "pdkernels: what is written overlaps another tensor");
      }
    }
  }

 private:
  struct Extent {
    intptr_t start;
    int64_t bytes, item;
    const torch::stable::Tensor* tensor;
    bool written;
  };

  static Strided dims_of(const Extent& extent) {
    Strided strided{extent.item, {}};
    for (int64_t d = 0; d < extent.tensor->dim(); ++d)
      strided.dims.push_back({extent.tensor->size(d), extent.tensor->stride(d) * extent.item});
    return strided;
  }

  std::vector<Extent> extents_;
};

template <class Argument>
constexpr bool kIsWritten = std::is_lvalue_reference_v<Argument> && !std::is_const_v<std::remove_reference_t<Argument>>;

// All arguments of an op as one value: see structure.h.
template <class T>
concept Structure = requires(const T& value) { value.fields(); };

// A string argument. torch's own conversion (2.13) leaks a copy of the string at every call; see ToImpl below.
struct Word : std::string {
  using std::string::string;
};

// The type that torch passes to an op for an argument of its function.
template <class Argument>
using Taken = std::conditional_t<std::is_same_v<Argument, const std::string&>, const Word&, Argument>;

template <auto function>
struct Checked;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
  requires(!(Structure<std::remove_cvref_t<Arguments>> || ...))
struct Checked<function> {
  static Result run(Taken<Arguments>... arguments) {
    (require_real_size(arguments), ...);
    if constexpr ((kIsWritten<Arguments> || ...)) {
      Extents extents(sizeof...(Arguments));
      (extents.add<kIsWritten<Arguments>>(arguments), ...);
      extents.require_apart();
    }
    return function(std::forward<Taken<Arguments>>(arguments)...);
  }

  static void boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
    TORCH_BOX (&run)(stack, num_args, num_outputs);
  }
};

}  // namespace pdkernels::bindings

template <>
struct torch::stable::detail::ToImpl<pdkernels::bindings::Word> {
  static pdkernels::bindings::Word call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    const pdkernels::bindings::Word word(text, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return word;
  }
};
