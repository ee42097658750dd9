// Drafts from earlier occurrences of the last tokens: see pdkernels/ops/lookup_draft.py.
#pragma once

#include "device.h"
#include "ops/lookup_draft.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline void lookup_draft(Tensor& draft, Tensor& draft_lengths, Tensor& tokens, const Tensor& ends, int64_t start,
                         int64_t reach, int64_t least, int64_t growth) {
  const Launch launch(draft);
  const SameDevice device(draft);
  device.require(draft, ScalarType::Long, {-1, -1});
  device.require(tokens, ScalarType::Long, {draft.size(0), -1});
  PDK_CHECK(draft.size(1) > 0 && (tokens.stride(1) == 1 || tokens.size(1) <= 1));
  PDK_CHECK(start >= 0 && reach > 0 && least > 0 && growth > 0);
  LookupDraftArgs args;
  args.draft = data<int64_t>(draft);
  args.draft_strides[0] = draft.stride(0), args.draft_strides[1] = draft.stride(1);
  args.batch = draft.size(0), args.slots = draft.size(1);
  args.tokens = data<int64_t>(tokens), args.tokens_stride = tokens.stride(0), args.width = tokens.size(1);
  args.draft_lengths = index_view(device, draft_lengths, 1, args.batch);
  args.ends = index_view(device, ends, 1, args.batch);
  args.start = start, args.reach = reach, args.least = least, args.growth = growth;
  launch(PDK_DEVICE::lookup_draft, args);
}

PDK_IMPL("lookup_draft_", lookup_draft)

}  // namespace pdkernels::PDK_DEVICE::bindings
