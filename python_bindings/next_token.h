// The end of a decoding step with one known token a sequence: see pdkernels/decoding/steps/next_token.py.
#pragma once

#include "device.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/next_token.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline void next_token(Tensor& table, Tensor& remaining, const Tensor& logits, const Tensor& tokens,
                       const OptionalTensor& ends, int64_t draft) {
  const Launch launch(table);
  const SameDevice device(table);
  NextTokenArgs args;
  args.batch = table.size(0), args.columns = table.size(1), args.draft = draft;
  device.require(table, ScalarType::Long, {args.batch, args.columns});
  device.require(remaining, ScalarType::Long, {args.batch});
  device.require(tokens, ScalarType::Long, {args.batch, 1});
  device.require(logits);
  PDK_CHECK(has_shape(logits, {args.batch, 1, -1}) && logits.stride(2) == 1);
  PDK_CHECK(table.is_contiguous() && remaining.is_contiguous() && tokens.is_contiguous());
  PDK_CHECK(draft >= 2 && draft < args.columns);
  args.element = row_element(logits), args.logits = {logits.data_ptr(), logits.stride(0)};
  args.vocabulary = logits.size(2), args.tokens = data<int64_t>(tokens);
  args.entries = data<int64_t>(table), args.remaining = data<int64_t>(remaining);
  args.ends = nullptr, args.end_count = 0;
  if (ends.has_value()) {
    device.require(*ends, ScalarType::Long, {-1});
    PDK_CHECK(ends->is_contiguous());
    args.ends = data<int64_t>(*ends), args.end_count = ends->size(0);
  }
  launch(PDK_DEVICE::next_token, args);
}

PDK_IMPL("next_token_", next_token)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
