// Tensors -> the argument struct of the unmask kernels. As in unpack.h: geometry is checked here, in short words.
#pragma once

#include "pdkernels/unmask.h"
#include "unpack.h"

#include <cmath>

namespace pdkernels::bindings {

using Unmasked = std::tuple<Tensor, Tensor, Tensor>;

template <class Run>
Unmasked run_unmask(const Tensor& tokens, const Tensor& ids, const OptionalTensor& confidence, int64_t mask_token,
                    const OptionalTensor& positions, const OptionalTensor& windows, int64_t quota,
                    const OptionalTensor& quotas, std::optional<double> threshold, int64_t need,
                    const OptionalTensor& needs, std::optional<double> factor, bool strict, int64_t seed, int64_t step,
                    const OptionalTensor& steps, const Run& run) {
  const SameDevice device(tokens);
  STD_TORCH_CHECK(tokens.dim() == 2 && ids.dim() == 2, "pdkernels: tokens and ids must have 2 dimensions");
  UnmaskArgs args;
  args.batch = tokens.size(0), args.length = tokens.size(1), args.candidates = ids.size(1);
  args.tokens = written_view(device, tokens, 2, args.batch);
  args.ids = index_view(device, ids, 2, args.batch);
  STD_TORCH_CHECK(args.ids.wide == args.tokens.wide, "pdkernels: ids must have the dtype of tokens");
  args.positions = index_view(device, positions, 2, args.batch);
  // Given, even if it has no bytes to point to.
  static float nothing = 0;
  if (positions.has_value() && !args.positions.given()) args.positions.data = &nothing;
  STD_TORCH_CHECK((positions.has_value() ? positions->size(1) : args.length) == args.candidates,
                  "pdkernels: every candidate must have a position");
  if (confidence.has_value()) {
    device.require(*confidence);
    STD_TORCH_CHECK(confidence->scalar_type() == ScalarType::Float && confidence->dim() == 2 &&
                        confidence->size(0) == args.batch && confidence->size(1) == args.candidates,
                    "pdkernels: confidence must be a float32 tensor of the shape of ids");
    args.confidence = static_cast<const float*>(confidence->data_ptr());
    if (args.confidence == nullptr) args.confidence = &nothing;
    args.confidence_stride0 = confidence->stride(0), args.confidence_stride1 = confidence->stride(1);
  }
  std::vector<int64_t> shape{args.batch};
  if (windows.has_value()) {
    const Tensor& t = *windows;
    device.require(t);
    const int64_t last = t.dim() - 1;
    STD_TORCH_CHECK((last == 1 || last == 2) && t.size(0) == args.batch && t.size(last) == 2,
                    "pdkernels: windows must be pairs");
    if (last == 2) shape.push_back(args.segments = t.size(1));
    args.starts = {t.data_ptr(), t.stride(0), last == 2 ? t.stride(1) : 0, is_wide(t)};
    args.ends = args.starts;
    if (t.numel() > 0) args.ends.data = bytes(t) + t.stride(last) * static_cast<int64_t>(t.element_size());
  }
  const int64_t dim = static_cast<int64_t>(shape.size());
  const auto per_segment = [&](const OptionalTensor& t, int64_t number) {
    STD_TORCH_CHECK(t.has_value() || number >= 0, "pdkernels: quota and need must not be negative");
    STD_TORCH_CHECK(!t.has_value() || dim == 1 || (t->dim() == 2 && t->size(1) == args.segments),
                    "pdkernels: quota and need must fit windows");
    return PerSegment{index_view(device, t, dim, args.batch), number};
  };
  args.quota = per_segment(quotas, quota);
  args.need = per_segment(needs, need);
  args.steps = index_view(device, steps, 1, args.batch);
  STD_TORCH_CHECK(steps.has_value() || (step >= 0 && step <= 0xFFFFFFFF), "pdkernels: step must be in [0, 2**32)");
  STD_TORCH_CHECK(
      mask_token >= 0 && !(threshold.has_value() && factor.has_value()) && (threshold.has_value() || !strict),
      "pdkernels: options that do not go together");
  args.step = step;
  args.mask_token = mask_token;
  args.seed[0] = static_cast<uint32_t>(seed);
  args.seed[1] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  if (threshold.has_value()) {
    STD_TORCH_CHECK(!std::isnan(*threshold), "pdkernels: threshold must be a number");
    args.rule = UnmaskRule::kThreshold;
    args.bar = unmask_bar(args, *threshold, strict);
  } else if (factor.has_value()) {
    STD_TORCH_CHECK(std::isfinite(*factor) && *factor >= 0, "pdkernels: factor must be finite and not negative");
    args.rule = UnmaskRule::kFactor;
    args.factor = *factor;
  }
  Tensor committed = torch::stable::new_empty(tokens, shape, ScalarType::Long);
  Tensor remaining = torch::stable::new_empty(tokens, shape, ScalarType::Long);
  Tensor done = torch::stable::new_empty(tokens, shape, ScalarType::Bool);
  args.committed = static_cast<int64_t*>(committed.data_ptr());
  args.remaining = static_cast<int64_t*>(remaining.data_ptr());
  args.done = static_cast<bool*>(done.data_ptr());
  if (args.batch * args.segments > 0) run(args);
  return {committed, remaining, done};
}

}  // namespace pdkernels::bindings
