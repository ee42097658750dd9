// The end of a decoding step with one known token a sequence: see pdkernels/generation/next_token.py.
#pragma once

#include "device.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/next_token.h"

namespace pdkernels::PDK_DEVICE::bindings {

// NextTokenArguments of pdkernels/generation/next_token.py.
struct NextTokenInputs {
  Written table, remaining;
  OptionalWritten lengths;
  Tensor logits;
  OptionalTensor tokens, ends;
  std::vector<int64_t> suppress;
  int64_t capacity, draft;
  auto fields() const { return std::tie(table, remaining, lengths, logits, tokens, ends, suppress, capacity, draft); }
};

// The arguments of the kernel, which point to `memory` and to `in`.
inline NextTokenArgs unpack_next_token(NextTokenInputs&& in, Tensor& memory) = delete;
inline NextTokenArgs unpack_next_token(const NextTokenInputs& in, Tensor& memory) {
  const SameDevice device(in.table);
  const auto longs = [&](const Tensor& t, std::initializer_list<int64_t> sizes) {
    device.require(t, ScalarType::Long, sizes);
    PDK_CHECK(t.is_contiguous());
    return data<int64_t>(t);
  };
  NextTokenArgs args = {};
  PDK_CHECK(in.table.dim() == 2 && in.logits.dim() == 3 && in.logits.stride(2) == 1);
  const int64_t batch = args.batch = in.table.size(0);
  args.columns = in.table.size(1), args.draft = in.draft;
  PDK_CHECK(in.draft >= 2 && in.draft < args.columns && in.suppress.size() <= kMaxSuppressed);
  args.entries = longs(in.table, {batch, args.columns}), args.remaining = longs(in.remaining, {batch});
  device.require(in.logits, in.logits.scalar_type(), {batch, 1, -1});
  args.element = row_element(in.logits), args.logits = {in.logits.data_ptr(), in.logits.stride(0)};
  args.vocabulary = in.logits.size(2);
  if (in.tokens.has_value()) args.tokens = longs(*in.tokens, {batch, 1});
  if (in.ends.has_value()) args.ends = longs(*in.ends, {-1}), args.end_count = in.ends->size(0);
  if (in.lengths.has_value()) args.lengths = longs(*in.lengths, {batch}), args.capacity = in.capacity;
  args.suppress = in.suppress.data(), args.suppress_count = static_cast<int64_t>(in.suppress.size());
  for (const int64_t token : in.suppress) PDK_CHECK(token >= 0 && token < args.vocabulary);
  memory = torch::stable::new_empty(in.table, {args.memory_bytes()}, ScalarType::Byte);
  args.memory = bytes(memory);
  return args;
}

inline std::tuple<> next_token(const NextTokenInputs& in) {
  const Launch launch(in.table);
  Tensor memory;
  launch(PDK_DEVICE::next_token, unpack_next_token(in, memory));
  return {};
}

PDK_IMPL("next_token_", next_token)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
