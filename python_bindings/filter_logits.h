// Filters of logits: see pdkernels/ops/filter_logits.py.
#pragma once

#include <cfloat>
#include <cmath>

#include "device.h"
#include "ops/filter_logits.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

// The arguments of an op that filters logits, in the order of its schema.
struct FilterInputs {
  OptionalTensor bias, counts, recent, banned, allowed;
  double repetition_penalty, presence_penalty, frequency_penalty;

  auto fields() const {
    return std::tie(bias, counts, recent, banned, allowed, repetition_penalty, presence_penalty, frequency_penalty);
  }
};

// The filters of `rows` rows of logits; `held` keeps copies alive.
inline LogitFilters filters_of(const SameDevice& device, const FilterInputs& inputs, int64_t rows, int64_t width,
                               std::vector<Tensor>& held) {
  static char nothing;  // marks a tensor as given, even if it has no bytes to point to
  const auto span_of = [&](const Tensor& t) {
    PDK_CHECK(t.dim() == 2 && (t.size(0) > 0 ? rows % t.size(0) == 0 : rows == 0));
    return t.size(0) > 0 && rows > 0 ? rows / t.size(0) : 1;
  };
  const auto rows_of = [&](const OptionalTensor& t, ScalarType dtype, int64_t size) -> SharedRows {
    if (!t.has_value()) return {};
    device.require(*t, dtype);
    const int64_t span = span_of(*t);
    PDK_CHECK(t->size(1) == size);
    held.push_back(size <= 1 || t->stride(1) == 1 ? *t : torch::stable::contiguous(*t));
    const Tensor& kept = held.back();
    return {kept.data_ptr() != nullptr ? kept.data_ptr() : &nothing, kept.stride(0), span};
  };
  const auto ids_of = [&](const OptionalTensor& t) -> SharedIds {
    if (!t.has_value()) return {};
    device.require(*t);
    const int64_t span = span_of(*t);
    return {{t->data_ptr(), t->stride(0), t->stride(1), is_wide(*t)}, span, t->size(1)};
  };
  PDK_CHECK(inputs.repetition_penalty > 0 && inputs.repetition_penalty <= FLT_MAX);
  PDK_CHECK(std::abs(inputs.presence_penalty) <= FLT_MAX && std::abs(inputs.frequency_penalty) <= FLT_MAX);
  LogitFilters filters;
  filters.bias = rows_of(inputs.bias, ScalarType::Float, width);
  filters.counts = rows_of(inputs.counts, ScalarType::Int, width);
  filters.allowed = rows_of(inputs.allowed, ScalarType::Int, (width + 31) / 32);
  filters.recent = ids_of(inputs.recent);
  filters.banned = ids_of(inputs.banned);
  filters.repetition = static_cast<float>(inputs.repetition_penalty);
  filters.presence = static_cast<float>(inputs.presence_penalty);
  filters.frequency = static_cast<float>(inputs.frequency_penalty);
  return filters;
}

struct FilterLogitsInputs {
  Tensor logits;
  FilterInputs filters;

  auto fields() const { return std::tie(logits, filters); }
};

inline std::tuple<Tensor> filter_logits(const FilterLogitsInputs& inputs) {
  const Launch launch(inputs.logits);
  const SameDevice device(inputs.logits);
  const FlatRows rows(inputs.logits);
  PDK_CHECK(rows.width > 0 && rows.width < int64_t{1} << 32);
  std::vector<Tensor> held;
  FilterLogitsArgs args = {};
  args.element = row_element(inputs.logits);
  args.logits = rows.view();
  args.rows = rows.count, args.width = rows.width;
  args.filters = filters_of(device, inputs.filters, rows.count, rows.width, held);
  Tensor out = torch::stable::new_empty(inputs.logits, sizes_of(inputs.logits), ScalarType::Float);
  args.out = data<float>(out);
  if (args.rows > 0) launch(PDK_DEVICE::filter_logits, args);
  return {out};
}

PDK_IMPL("filter_logits", filter_logits)

}  // namespace pdkernels::PDK_DEVICE::bindings
