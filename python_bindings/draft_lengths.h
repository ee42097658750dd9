// Lengths of drafts: see pdkernels/ops/draft_lengths.py.
#pragma once

#include "device.h"
#include "ops/draft_lengths.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline void draft_lengths(Tensor& lengths, const Tensor& accepted, const Tensor& remaining, Tensor& seen,
                          Tensor& balance, const Tensor& ready, const Tensor& costs, double wake, double of_sequence,
                          double of_guess, double kept, double hope, double slack, bool padded) {
  const Launch launch(lengths);
  const SameDevice device(lengths);
  PDK_CHECK(lengths.dim() == 1 && seen.dim() == 3 && costs.dim() == 2);
  DraftLengthsArgs args;
  args.batch = lengths.size(0), args.slots = seen.size(2);
  PDK_CHECK(args.slots > 0 && args.slots <= DraftLengthsArgs::kMostSlots);
  PDK_CHECK(args.batch <= DraftLengthsArgs::kMostSequences && costs.size(1) >= args.batch * args.slots);
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.accepted = index_view(device, accepted, 1, args.batch);
  args.remaining = index_view(device, remaining, 1, args.batch);
  device.require(seen, ScalarType::Double, {args.batch, 2, args.slots});
  device.require(balance, ScalarType::Double, {args.batch});
  device.require(ready, ScalarType::Bool, {args.batch});
  device.require(costs, ScalarType::Double, {2, costs.size(1)});
  args.seen = {data<double>(seen), {seen.stride(0), seen.stride(1), seen.stride(2)}};
  args.balance = {data<double>(balance), {balance.stride(0)}};
  args.ready = {data<const bool>(ready), {ready.stride(0)}};
  args.costs = {data<const double>(costs), {costs.stride(0), costs.stride(1)}};
  PDK_CHECK(wake >= 0 && kept >= 0 && kept <= 1 && hope >= 0 && hope <= 1 && slack >= 0);
  PDK_CHECK(of_sequence >= 0 && of_guess >= 0);
  args.wake = wake, args.of_sequence = of_sequence, args.of_guess = of_guess, args.padded = padded;
  args.kept = kept, args.hope = hope, args.slack = slack;
  launch(PDK_DEVICE::draft_lengths, args);
}

PDK_IMPL("draft_lengths_", draft_lengths)

}  // namespace pdkernels::PDK_DEVICE::bindings
