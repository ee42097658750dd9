// Attention under a tile plan: see pdkernels/ops/block_sparse_attention.py. On CUDA it is Triton's.
#pragma once

#include "device.h"
#include "ops/block_sparse_attention.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// The parts of a TilePlan that an op takes, in the order of its schema.
struct PlanArguments {
  Tensor rows, lists, bitmaps;
  int64_t block_q, block_k;
};

inline HeadsView heads_view(const SameDevice& device, const Tensor& t, ScalarType dtype, int64_t batch, int64_t tokens,
                            int64_t heads, int64_t head_dim) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == dtype, "pdkernels: q, k and v must have one dtype");
  STD_TORCH_CHECK(
      t.dim() == 4 && t.size(0) == batch && t.size(1) == tokens && t.size(2) == heads && t.size(3) == head_dim,
      "pdkernels: an attention tensor has the wrong shape");
  STD_TORCH_CHECK(t.stride(3) == 1 || t.numel() == 0, "pdkernels: the last dimension must be contiguous");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline float* row_numbers(const SameDevice& device, const Tensor& t, const AttentionArgs& args) {
  device.require(t);
  STD_TORCH_CHECK(
      t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == args.batch * args.q_heads * args.q_len,
      "pdkernels: lse must be a contiguous float32 tensor (batch, q_heads, q_len)");
  return static_cast<float*>(t.data_ptr());
}

inline const int32_t* plan_words(const SameDevice& device, const Tensor& t) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous(),
                  "pdkernels: a plan's tensors must be contiguous, of int32");
  return static_cast<const int32_t*>(t.data_ptr());
}

// The only code that knows the layout of a plan's tensors: see tile_plan.h.
inline void unpack_plan(const SameDevice& device, const PlanArguments& plan, AttentionArgs& args) {
  const auto& [rows, lists, bitmaps, block_q, block_k] = plan;
  const int64_t q_tiles = (args.q_len + block_q - 1) / block_q, k_tiles = (args.kv_len + block_k - 1) / block_k;
  const int64_t dim = rows.dim(), words_per_row = (block_k + 31) / 32;
  STD_TORCH_CHECK((dim == 2 || (dim == 3 && rows.size(0) == args.batch)) && rows.size(dim - 1) == 4 &&
                      rows.size(dim - 2) == q_tiles + k_tiles && lists.dim() == 2 && lists.size(1) == 2,
                  "pdkernels: the plan must be for as many samples and tokens as there are");
  STD_TORCH_CHECK(bitmaps.dim() == 3 && bitmaps.size(1) == block_q && bitmaps.size(2) == words_per_row,
                  "pdkernels: a plan's bitmaps must have its tile size");
  TileLists& of_q = args.of_q;
  of_q.rows = plan_words(device, rows), of_q.rows_stride = dim == 2 ? 0 : rows.stride(0), of_q.num_tiles = q_tiles;
  of_q.pairs = reinterpret_cast<const TilePair*>(plan_words(device, lists)), of_q.num_pairs = lists.size(0);
  args.of_k = of_q;
  args.of_k.rows += 4 * q_tiles, args.of_k.num_tiles = k_tiles;
  args.bitmaps = {reinterpret_cast<const uint32_t*>(plan_words(device, bitmaps)), bitmaps.size(0), block_q,
                  words_per_row};
}

inline void unpack_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const PlanArguments& plan, double scale, bool packed, AttentionArgs& args) {
  const SameDevice device(q);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "pdkernels: q, k and v must have 4 dimensions");
  args.element = row_element(q);
  args.batch = q.size(0), args.q_len = q.size(1), args.q_heads = q.size(2), args.head_dim = q.size(3);
  args.kv_len = k.size(1), args.kv_heads = k.size(2);
  args.block_q = plan.block_q, args.block_k = plan.block_k, args.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(args.kv_heads > 0 && args.q_heads > 0 && args.q_heads % args.kv_heads == 0,
                  "pdkernels: q heads must be a multiple of kv heads");
  STD_TORCH_CHECK(args.head_dim % 8 == 0 && args.head_dim >= 16 && args.head_dim <= 256,
                  "pdkernels: head_dim must be a multiple of 8 in [16, 256]");
  STD_TORCH_CHECK(args.block_q > 0 && args.block_q % 16 == 0 && args.block_k > 0 && args.block_k % 16 == 0,
                  "pdkernels: block_q and block_k must be multiples of 16");
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.q = view(q, args.q_len, args.q_heads);
  args.k = view(k, args.kv_len, args.kv_heads);
  args.v = view(v, args.kv_len, args.kv_heads);
  args.out = view(out, args.q_len, args.q_heads);
  args.lse = row_numbers(device, lse, args);
  args.lse_stride = args.q_len;
  if (!packed) unpack_plan(device, plan, args);  // of each sequence otherwise
}

inline Tensor new_like(const Tensor& t) {
  return torch::stable::new_empty(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type());
}

inline std::tuple<Tensor, Tensor> block_sparse_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& plan_rows, const Tensor& plan_lists,
                                                         const Tensor& bitmaps, int64_t block_q, int64_t block_k,
                                                         double scale) {
  STD_TORCH_CHECK(q.dim() == 4, "pdkernels: q must have 4 dimensions");
  Tensor out = new_like(q);
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  AttentionArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, false, args);
  const Launch launch(q);
  launch(PDK_DEVICE::block_sparse_attention, args);
  return {out, lse};
}

inline std::tuple<Tensor, Tensor, Tensor> block_sparse_attention_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor& plan_rows, const Tensor& plan_lists, const Tensor& bitmaps, int64_t block_q, int64_t block_k,
    double scale, const OptionalTensor& grad_lse) {
  AttentionGradArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, false, args);
  const SameDevice device(q);
  Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  // Two numbers per row that the first pass leaves for the second.
  Tensor delta = torch::stable::new_empty(lse, {2, args.batch * args.q_heads * args.q_len}, ScalarType::Float);
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.grad_out = view(grad_out, args.q_len, args.q_heads);
  args.dq = view(dq, args.q_len, args.q_heads);
  args.dk = view(dk, args.kv_len, args.kv_heads);
  args.dv = view(dv, args.kv_len, args.kv_heads);
  args.grad_lse = grad_lse.has_value() ? row_numbers(device, *grad_lse, args) : nullptr;
  args.delta = static_cast<float*>(delta.data_ptr());
  const Launch launch(q);
  launch(PDK_DEVICE::block_sparse_attention_backward, args);
  return {dq, dk, dv};
}

PDK_IMPL("block_sparse_attention", block_sparse_attention)
PDK_IMPL("block_sparse_attention_backward", block_sparse_attention_backward)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
