// Committing guesses: see pdkernels/ops/unmask.py.
#pragma once

#include "device.h"
#include "ops/unmask.h"

#include <cmath>

namespace pdkernels::PDK_DEVICE::bindings {

using Unmasked = std::tuple<Tensor, Tensor, Tensor>;

inline Unmasked unmask(Tensor& tokens, const Tensor& ids, const OptionalTensor& confidence, int64_t mask_token,
                       const OptionalTensor& positions, const OptionalTensor& windows, int64_t quota,
                       const OptionalTensor& quotas, std::optional<double> threshold, int64_t min_count,
                       const OptionalTensor& min_counts, std::optional<double> factor, bool strict, int64_t seed,
                       const OptionalTensor& seeds, int64_t step, const OptionalTensor& steps) {
  const Launch launch(tokens);
  const SameDevice device(tokens);
  PDK_CHECK(tokens.dim() == 2 && ids.dim() == 2);
  UnmaskArgs args;
  args.batch = tokens.size(0), args.length = tokens.size(1), args.candidates = ids.size(1);
  args.tokens = index_view(device, tokens, 2, args.batch);
  args.ids = index_view(device, ids, 2, args.batch);
  PDK_CHECK(args.ids.wide == args.tokens.wide);
  args.positions = index_view(device, positions, 2, args.batch);
  // Not nullptr even if it has no bytes, so that it counts as given.
  static float nothing = 0;
  if (positions.has_value() && !args.positions.given()) args.positions.data = &nothing;
  PDK_CHECK((positions.has_value() ? positions->size(1) : args.length) == args.candidates);
  if (confidence.has_value()) {
    device.require(*confidence, ScalarType::Float, {args.batch, args.candidates});
    args.confidence = data<float>(*confidence);
    if (args.confidence == nullptr) args.confidence = &nothing;
    args.confidence_stride0 = confidence->stride(0), args.confidence_stride1 = confidence->stride(1);
  }
  std::vector<int64_t> shape{args.batch};
  if (windows.has_value()) {
    const Tensor& t = *windows;
    device.require(t);
    const int64_t last = t.dim() - 1;
    PDK_CHECK((last == 1 || last == 2) && t.size(0) == args.batch && t.size(last) == 2);
    if (last == 2) shape.push_back(args.segments = t.size(1));
    args.starts = {t.data_ptr(), t.stride(0), last == 2 ? t.stride(1) : 0, is_wide(t)};
    args.ends = args.starts;
    if (t.numel() > 0) args.ends.data = bytes(t) + t.stride(last) * static_cast<int64_t>(t.element_size());
  }
  const int64_t dim = static_cast<int64_t>(shape.size());
  const auto per_segment = [&](const OptionalTensor& t, int64_t number) {
    PDK_CHECK(t.has_value() ? dim == 1 || has_shape(*t, {-1, args.segments}) : number >= 0);
    return PerSegment{index_view(device, t, dim, args.batch), number};
  };
  args.quota = per_segment(quotas, quota);
  args.min_count = per_segment(min_counts, min_count);
  args.steps = index_view(device, steps, 1, args.batch);
  PDK_CHECK(steps.has_value() || (step >= 0 && step <= 0xFFFFFFFF));
  PDK_CHECK(mask_token >= 0 && !(threshold.has_value() && factor.has_value()) && (threshold.has_value() || !strict));
  args.step = step;
  args.mask_token = mask_token;
  args.seeds = {index_view(device, seeds, 1, args.batch), seed};
  if (threshold.has_value()) {
    PDK_CHECK(!std::isnan(*threshold));
    args.rule = UnmaskRule::kThreshold;
    args.lowest_passing = lowest_passing_key(args, *threshold, strict);
  } else if (factor.has_value()) {
    PDK_CHECK(std::isfinite(*factor) && *factor >= 0);
    args.rule = UnmaskRule::kFactor;
    args.factor = *factor;
  }
  Tensor committed = torch::stable::new_empty(tokens, shape, ScalarType::Long);
  Tensor remaining = torch::stable::new_empty(tokens, shape, ScalarType::Long);
  Tensor done = torch::stable::new_empty(tokens, shape, ScalarType::Bool);
  args.committed = data<int64_t>(committed), args.remaining = data<int64_t>(remaining), args.done = data<bool>(done);
  if (args.batch * args.segments > 0) launch(PDK_DEVICE::unmask, args);
  return {committed, remaining, done};
}

PDK_IMPL("unmask_", unmask)

}  // namespace pdkernels::PDK_DEVICE::bindings
