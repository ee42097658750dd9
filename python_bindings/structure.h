// An op whose binding takes its arguments as one structure. `fields()` ties them in the order of the schema; a field
// may be a structure itself:
//
//   struct PlanInputs {
//     Tensor plan_rows, plan_lists;
//     int64_t block_q;
//     auto fields() const { return std::tie(plan_rows, plan_lists, block_q); }
//   };
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "aliasing.h"

namespace pdkernels::bindings {

// A tensor that its op writes, one that may be absent, and several.
struct Written : torch::stable::Tensor {};
struct OptionalWritten : std::optional<torch::stable::Tensor> {};
struct WrittenList : std::vector<torch::stable::Tensor> {};

template <class T>
struct Fields;

template <class... Field>
struct Fields<std::tuple<const Field&...>> {
  static constexpr uint64_t kCount = (Fields<Field>::kCount + ...);
  static constexpr bool kWrites = (Fields<Field>::kWrites || ...);

  template <class T>
  static T read(StableIValue*& stack) {
    return T{Fields<Field>::template read<Field>(stack)...};  // braces: in this order
  }
};

template <Structure T>
struct Fields<T> : Fields<decltype(std::declval<const T&>().fields())> {};

template <class T>
  requires(!Structure<T>)
struct Fields<T> {
  static constexpr uint64_t kCount = 1;
  static constexpr bool kWrites =
      std::is_same_v<T, Written> || std::is_same_v<T, OptionalWritten> || std::is_same_v<T, WrittenList>;

  template <class>
  static T read(StableIValue*& stack) {
    if constexpr (std::is_same_v<T, Written>) {
      return {torch::stable::detail::to<torch::stable::Tensor>(*stack++)};
    } else if constexpr (std::is_same_v<T, WrittenList>) {
      return {torch::stable::detail::to<std::vector<torch::stable::Tensor>>(*stack++)};
    } else if constexpr (kWrites) {
      return {torch::stable::detail::to<std::optional<torch::stable::Tensor>>(*stack++)};
    } else if constexpr (std::is_same_v<T, std::string>) {
      return torch::stable::detail::to<Word>(*stack++);
    } else {
      return torch::stable::detail::to<T>(*stack++);
    }
  }
};

// Calls visit.operator()<is it written>(argument) for every argument of the schema.
template <class T, class Visit>
void for_arguments(const T& value, const Visit& visit) {
  if constexpr (Structure<T>) {
    std::apply([&](const auto&... field) { (for_arguments(field, visit), ...); }, value.fields());
  } else if constexpr (std::is_same_v<T, Written>) {
    visit.template operator()<true>(static_cast<const torch::stable::Tensor&>(value));
  } else if constexpr (std::is_same_v<T, WrittenList>) {
    visit.template operator()<true>(static_cast<const std::vector<torch::stable::Tensor>&>(value));
  } else if constexpr (Fields<T>::kWrites) {
    visit.template operator()<true>(static_cast<const std::optional<torch::stable::Tensor>&>(value));
  } else {
    visit.template operator()<false>(value);
  }
}

template <Structure Inputs, class... Results, std::tuple<Results...> (*function)(const Inputs&)>
struct Checked<function> {
  static void boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
    STD_TORCH_CHECK(num_args == Fields<Inputs>::kCount && num_outputs == sizeof...(Results),
                    "pdkernels: the schema of an op and its binding differ");
    StableIValue* next = stack;
    const Inputs inputs = Fields<Inputs>::template read<Inputs>(next);
    constexpr bool kWrites = Fields<Inputs>::kWrites;
    Extents extents(kWrites ? num_args : 0);
    for_arguments(inputs, [&]<bool kWritten>(const auto& argument) {
      require_real_size(argument);
      if constexpr (kWrites) extents.add<kWritten>(argument);
    });
    extents.require_apart();
    torch::stable::detail::box_from_tuple<Results...>(stack, function(inputs));
  }
};

}  // namespace pdkernels::bindings
