// Statistics of logits: see pdkernels/ops/token_statistics.py.
#pragma once

#include "device.h"
#include "filter_logits.h"
#include "ops/token_statistics.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

using Statistics = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct StatisticsInputs {
  Tensor logits;
  double temperature;
  int64_t seed;
  OptionalTensor seeds;
  int64_t step;
  OptionalTensor steps, positions, row_index;
  std::vector<int64_t> suppress;
  int64_t top_k;
  double top_p, min_p;
  std::string distribution;
  int64_t keep_top_k;
  double typical_p;
  FilterInputs filters;
  int64_t first_id;

  auto fields() const {
    return std::tie(logits, temperature, seed, seeds, step, steps, positions, row_index, suppress, top_k, top_p, min_p,
                    distribution, keep_top_k, typical_p, filters, first_id);
  }
};

inline Statistics token_statistics(const StatisticsInputs& in) {
  const Tensor& logits = in.logits;
  const Launch launch(logits);
  const SameDevice device(logits);
  const FlatRows rows(logits);
  constexpr int64_t kWords = int64_t{1} << 32;
  PDK_CHECK(rows.width > 0 && rows.width < kWords && in.step >= 0 && in.step < kWords);
  PDK_CHECK((in.temperature == 0 || in.temperature >= 1e-30) && in.temperature <= 1e30);
  PDK_CHECK(in.top_p >= 0 && in.top_p <= 1 && in.min_p >= 0 && in.min_p <= 1);
  PDK_CHECK(in.keep_top_k >= 0 && in.typical_p > 0 && in.typical_p <= 1);
  PDK_CHECK(in.top_k >= 1 && in.top_k <= kMaxTopK && in.top_k <= rows.width && in.suppress.size() <= kMaxSuppressed);
  PDK_CHECK(in.first_id >= 0 && in.first_id % 4 == 0 && in.first_id <= kWords - rows.width);
  TokenStatisticsArgs args = {};
  args.element = row_element(logits);
  args.logits = rows.view();
  args.source_rows = rows.count, args.width = rows.width, args.first_id = in.first_id;
  const std::vector<int64_t> shape = in.row_index.has_value() ? sizes_of(*in.row_index) : shape_of(logits, -1);
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
  args.row_index = numbers(in.row_index, held[0]);
  args.positions = numbers(in.positions, held[1]);
  args.steps = numbers(in.steps, held[2]);
  args.step = static_cast<uint32_t>(in.step);
  args.seeds = {numbers(in.seeds, held[3]), in.seed};
  std::vector<Tensor> copies;
  args.filters = filters_of(device, in.filters, args.rows, rows.width, copies);
  args.temperature = in.temperature;
  args.keep_top_k = in.keep_top_k;
  args.top_p = in.top_p, args.min_p = in.min_p, args.typical_p = in.typical_p;
  args.sampling = is_second(in.distribution, "model", "sampling");
  args.top_k = static_cast<int>(in.top_k);
  for (const int64_t token : in.suppress) {
    PDK_CHECK(token >= 0 && token < rows.width);
    args.suppress[args.num_suppressed++] = token;
  }

  std::vector<int64_t> wide = shape;
  wide.push_back(in.top_k);
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
#ifdef PDKERNELS_DEVICE_CUDA
  const int64_t workspace_width = args.workspace_width(true);
#else
  const int64_t workspace_width = args.workspace_width(false);
#endif
  // Two numbers for the logits that pass, and the workspace, whose rows are aligned.
  const int64_t head = args.filtered() ? (2 * args.rows + 15) / 16 * 16 : 0;
  Tensor workspace = numbers_out({head + args.rows * workspace_width}, ScalarType::Float);
  args.passing = data<Passing>(workspace);
  args.workspace = data<float>(workspace) + head;
  if (args.rows > 0) launch(PDK_DEVICE::token_statistics, args);
  return {ids, probs, top_ids, top_probs, margin, entropy, logsumexp};
}

PDK_IMPL("token_statistics", token_statistics)

}  // namespace pdkernels::PDK_DEVICE::bindings
