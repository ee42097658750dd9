// Statistics of logits: see pdkernels/ops/token_statistics.py.
#pragma once

#include "device.h"
#include "ops/token_statistics.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

using Statistics = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline Statistics token_statistics(const Tensor& logits, double temperature, int64_t seed, const OptionalTensor& seeds,
                                   int64_t step, const OptionalTensor& steps, const OptionalTensor& positions,
                                   const OptionalTensor& row_index, const std::vector<int64_t>& suppress, int64_t top_k,
                                   double top_p, double min_p, const std::string& distribution, int64_t first_id) {
  const Launch launch(logits);
  const SameDevice device(logits);
  const FlatRows rows(logits);
  constexpr int64_t kWords = int64_t{1} << 32;
  PDK_CHECK(rows.width > 0 && rows.width < kWords && step >= 0 && step < kWords);
  PDK_CHECK((temperature == 0 || temperature >= 1e-30) && temperature <= 1e30 && top_p >= 0 && top_p <= 1 &&
            min_p >= 0 && min_p <= 1);
  PDK_CHECK(top_k >= 1 && top_k <= kMaxTopK && top_k <= rows.width && suppress.size() <= kMaxSuppressed);
  PDK_CHECK(first_id >= 0 && first_id % 4 == 0 && first_id <= kWords - rows.width);
  TokenStatisticsArgs args = {};
  args.element = row_element(logits);
  args.logits = rows.view();
  args.source_rows = rows.count, args.width = rows.width, args.first_id = first_id;
  const std::vector<int64_t> shape = row_index.has_value() ? sizes_of(*row_index) : shape_of(logits, -1);
  args.rows = 1;
  for (const int64_t size : shape) args.rows *= size;
  // One entry per row, in the order of the results.
  const auto numbers = [&](const OptionalTensor& given, OptionalTensor& held) {
    if (!given.has_value()) return IndexView{};
    device.require(*given);
    PDK_CHECK(sizes_of(*given) == shape);
    held = packed(*given);
    static char nothing;  // marks it as given, even if it has no bytes to point to
    return IndexView{args.rows > 0 ? held->data_ptr() : &nothing, 1, 0, is_wide(*held)};
  };
  OptionalTensor held[4];
  args.row_index = numbers(row_index, held[0]);
  args.positions = numbers(positions, held[1]);
  args.steps = numbers(steps, held[2]);
  args.step = static_cast<uint32_t>(step);
  args.seeds = {numbers(seeds, held[3]), seed};
  args.temperature = temperature;
  args.top_p = top_p, args.min_p = min_p;
  args.sampling = is_second(distribution, "model", "sampling");
  args.top_k = static_cast<int>(top_k);
  for (const int64_t token : suppress) {
    PDK_CHECK(token >= 0 && token < rows.width);
    args.suppress[args.num_suppressed++] = token;
  }

  std::vector<int64_t> wide = shape;
  wide.push_back(top_k);
  const auto numbers_out = [&](const std::vector<int64_t>& size, ScalarType dtype) {
    return torch::stable::new_empty(logits, size, dtype);
  };
  Tensor ids = numbers_out(shape, ScalarType::Long), top_ids = numbers_out(wide, ScalarType::Long);
  Tensor probs = numbers_out(shape, ScalarType::Float), top_probs = numbers_out(wide, ScalarType::Float);
  Tensor margin = numbers_out(shape, ScalarType::Float), entropy = numbers_out(shape, ScalarType::Float);
  Tensor logsumexp = numbers_out(shape, ScalarType::Float);
  args.ids = data<int64_t>(ids), args.top_ids = data<int64_t>(top_ids);
  args.probs = data<float>(probs), args.top_probs = data<float>(top_probs), args.margin = data<float>(margin);
  args.entropy = data<float>(entropy), args.logsumexp = data<float>(logsumexp);
  // Results of the parts of the vocabulary: sized by the shapes alone.
  const int64_t doubles = static_cast<int64_t>(sizeof(TokenPart) / sizeof(double));
  Tensor parts = numbers_out({args.rows * args.num_parts() * doubles}, ScalarType::Double);
  args.parts = data<TokenPart>(parts);
  OptionalTensor cuts;
  if (args.filtered()) {
    cuts = numbers_out({args.rows}, ScalarType::Float);
    args.cuts = data<float>(*cuts);
  }
  if (args.rows > 0) launch(PDK_DEVICE::token_statistics, args);
  return {ids, probs, top_ids, top_probs, margin, entropy, logsumexp};
}

PDK_IMPL("token_statistics", token_statistics)

}  // namespace pdkernels::PDK_DEVICE::bindings
