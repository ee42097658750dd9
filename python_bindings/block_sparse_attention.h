// Attention under a tile plan: see pdkernels/ops/block_sparse_attention.py. On CUDA it is Triton's.
#pragma once

#include "attention.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

inline Tensor new_like(const Tensor& t) { return torch::stable::new_empty(t, sizes_of(t), t.scalar_type()); }

inline std::tuple<Tensor, Tensor> block_sparse_attention(const AttentionInputs& in) {
  STD_TORCH_CHECK(in.q.dim() == 4, "pdkernels: q must have 4 dimensions");
  Tensor out = new_like(in.q);
  Tensor lse = torch::stable::new_empty(in.q, {in.q.size(0), in.q.size(2), in.q.size(1)}, ScalarType::Float);
  AttentionArgs args;
  unpack_attention(in, out, lse, args);
  unpack_plan(SameDevice(in.q), in.plan, args);
  const Launch launch(in.q);
  launch(PDK_DEVICE::block_sparse_attention, args);
  return {out, lse};
}

inline std::tuple<Tensor, Tensor, Tensor> block_sparse_attention_backward(const GradientInputs& in) {
  const Tensor& q = in.forward.q;
  AttentionGradArgs args;
  PDK_CHECK(in.forward.softcap == 0);
  unpack_attention(in.forward, in.out, in.lse, args);
  const SameDevice device(q);
  unpack_plan(device, in.forward.plan, args);
  Tensor dq = new_like(q), dk = new_like(in.forward.k), dv = new_like(in.forward.v);
  // Two values per row that the first pass leaves for the second.
  Tensor delta = torch::stable::new_empty(in.lse, {2, args.batch * args.q_heads * args.q_len}, ScalarType::Float);
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.grad_out = view(in.grad_out, args.q_len, args.q_heads);
  args.dq = view(dq, args.q_len, args.q_heads);
  args.dk = view(dk, args.kv_len, args.kv_heads);
  args.dv = view(dv, args.kv_len, args.kv_heads);
  args.grad_lse = in.grad_lse.has_value() ? row_sums(device, *in.grad_lse, args) : nullptr;
  args.delta = static_cast<float*>(delta.data_ptr());
  const Launch launch(q);
  launch(PDK_DEVICE::block_sparse_attention_backward, args);
  return {dq, dk, dv};
}

PDK_IMPL("block_sparse_attention", block_sparse_attention)
PDK_IMPL("block_sparse_attention_backward", block_sparse_attention_backward)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
