// Attention of new tokens to a cached prefix: see pdkernels/ops/speculative_attention.py. On CUDA it is Triton's.
#pragma once

#include "attention.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// Memory for the results of the splits of the prefix: sized by the capacity, so the same at every step.
struct SplitResults {
  OptionalTensor out, lse;

  SplitResults(const Tensor& like, SpeculativeArgs& args) {
    args.parts = args.parts_lse = nullptr;
    if (args.splits <= 1) return;
    const int64_t rows = args.splits * args.rows() * args.q_heads;
    out = torch::stable::new_empty(like, {rows, args.head_dim}, ScalarType::Float);
    lse = torch::stable::new_empty(like, {rows}, ScalarType::Float);
    args.parts = data<float>(*out), args.parts_lse = data<float>(*lse);
  }
};

// `choose_rows(args)` says which of the new tokens are stored.
template <class Cache, class ChooseRows>
std::tuple<Tensor, Tensor> attend_to_prefix(const SpeculativeInputs<Cache>& in, const ChooseRows& choose_rows) {
  const Tensor rows = as_entry(in.q, in.packed());
  const int64_t batch = rows.size(0), tokens = rows.size(1), heads = rows.size(2);
  Tensor out = torch::stable::new_empty(in.q, sizes_of(in.q), in.q.scalar_type());
  std::vector<int64_t> of_lse{heads, tokens};
  if (!in.packed()) of_lse.insert(of_lse.begin(), batch);
  Tensor lse = torch::stable::new_empty(in.q, of_lse, ScalarType::Float);
  SpeculativeArgs args;
  unpack_speculative(in, out, lse, args);
  choose_rows(args);
  const SplitResults parts(in.q, args);
  const Launch launch(in.q);
  launch(PDK_DEVICE::speculative_attention, args);
  return {out, lse};
}

inline std::tuple<Tensor, Tensor> speculative_attention(const SpeculativeInputs<Tensor>& in) {
  return attend_to_prefix(in, [](SpeculativeArgs&) {});
}

inline std::tuple<Tensor, Tensor> speculative_attention_append(const AppendInputs& in) {
  return attend_to_prefix(in.attention, [&](SpeculativeArgs& args) {
    const SameDevice device(in.attention.q);
    args.op = "speculative_attention_append_";
    args.counts = index_view(device, in.counts, 1, args.batch);
    args.source_index = index_view(device, in.source_index, 2, args.batch);
    args.append_rows = in.source_index.has_value() ? in.source_index->size(1) : args.q_len;
  });
}

PDK_IMPL("speculative_attention", speculative_attention)
PDK_IMPL("speculative_attention_append_", speculative_attention_append)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
