// Verification of drafts: see pdkernels/ops/verify_draft.py.
#pragma once

#include "device.h"
#include "ops/verify_draft.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_draft(const Tensor& draft, const Tensor& predictions,
                                                                       const OptionalTensor& draft_lengths,
                                                                       const OptionalTensor& end_tokens,
                                                                       const OptionalTensor& refill) {
  const Launch launch(draft);
  const SameDevice device(draft);
  const bool rows = draft.dim() == 3;
  PDK_CHECK((rows || draft.dim() == 2) && sizes_of(predictions) == sizes_of(draft));
  const auto tokens = [&](const Tensor& t) {
    device.require(t);
    return TokenView{t.data_ptr(), {t.stride(0), rows ? t.stride(1) : 0, t.stride(t.dim() - 1)}, is_wide(t)};
  };
  VerifyArgs args;
  args.draft = tokens(draft);
  args.predictions = tokens(predictions);
  args.batch = draft.size(0);
  args.candidates = rows ? draft.size(1) : 1;
  PDK_CHECK(args.candidates > 0 && args.candidates <= 65536);
  args.width = draft.size(draft.dim() - 1);
  args.draft_lengths = index_view(device, draft_lengths, 1, args.batch);
  args.num_end_tokens = end_tokens.has_value() ? end_tokens->size(0) : 0;
  args.end_tokens = index_view(device, end_tokens, 1, args.num_end_tokens);
  args.refill = index_table(device, refill, args.batch, args.width);
  const auto numbers = [&] { return torch::stable::new_empty(draft, {args.batch}, ScalarType::Long); };
  Tensor accepted = numbers(), next_token = numbers(), candidate = numbers();
  Tensor ended = torch::stable::new_empty(draft, {args.batch}, ScalarType::Bool);
  Tensor new_draft = torch::stable::new_empty(draft, {args.batch, args.width}, ScalarType::Long);
  args.accepted = data<int64_t>(accepted), args.next_token = data<int64_t>(next_token);
  args.ended = data<bool>(ended), args.new_draft = data<int64_t>(new_draft), args.candidate = data<int64_t>(candidate);
  launch(PDK_DEVICE::verify_draft, args);
  return {accepted, next_token, ended, new_draft, candidate};
}

PDK_IMPL("verify_draft", verify_draft)

}  // namespace pdkernels::PDK_DEVICE::bindings
