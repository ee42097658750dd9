// Tensors -> the argument structs of the attention kernels. As in unpack.h: geometry is checked here, in short words.
#pragma once

#include "pdkernels/block_sparse_attention.h"
#include "unpack.h"

namespace pdkernels::bindings {

// The tensors of a TilePlan, in its order.
struct PlanTensors {
  Tensor kv_offsets, kv_tiles, kv_bitmaps, q_offsets, q_tiles, q_bitmaps, q_order, k_order, bitmaps;
};

inline Element element_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBfloat16;
    default: STD_TORCH_CHECK(false, "pdkernels: q, k and v must be float32, float16 or bfloat16");
  }
}

inline HeadsView heads_view(const Place& place, const Tensor& t, ScalarType dtype, int64_t batch, int64_t tokens, int64_t heads,
                            int64_t head_dim) {
  place.require(t);
  STD_TORCH_CHECK(t.scalar_type() == dtype, "pdkernels: q, k and v must have one dtype");
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch && t.size(1) == tokens && t.size(2) == heads && t.size(3) == head_dim,
                  "pdkernels: an attention tensor has the wrong shape");
  STD_TORCH_CHECK(t.stride(3) == 1, "pdkernels: the last dimension must be contiguous");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline float* row_numbers(const Place& place, const Tensor& t, const AttentionArgs& args) {
  place.require(t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == args.batch * args.q_heads * args.q_len,
                  "pdkernels: lse must be a contiguous float32 tensor (batch, q_heads, q_len)");
  return static_cast<float*>(t.data_ptr());
}

// A contiguous int32 tensor of `dim` dimensions, or with a batch in front of them.
inline int64_t batch_stride(const Place& place, const Tensor& t, int64_t dim, int64_t batch) {
  place.require(t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && (t.dim() == dim || (t.dim() == dim + 1 && t.size(0) == batch)),
                  "pdkernels: a plan's tensors must be contiguous, of int32, with at most a batch dimension in front");
  return t.dim() == dim ? 0 : t.stride(0);
}

inline TileLists tile_lists(const Place& place, const Tensor& offsets, const Tensor& tiles, const Tensor& bitmap_ids, const Tensor& order,
                            int64_t batch) {
  const auto words = [](const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); };
  TileLists lists{words(offsets), words(tiles), words(bitmap_ids), words(order), batch_stride(place, offsets, 1, batch),
                  batch_stride(place, tiles, 1, batch), batch_stride(place, bitmap_ids, 1, batch), batch_stride(place, order, 1, batch),
                  order.size(order.dim() - 1), tiles.size(tiles.dim() - 1)};
  STD_TORCH_CHECK(offsets.size(offsets.dim() - 1) == lists.num_tiles + 1 && bitmap_ids.size(bitmap_ids.dim() - 1) == lists.visits,
                  "pdkernels: a plan's lists must fit together");
  return lists;
}

inline void unpack_plan(const Place& place, const PlanTensors& plan, AttentionArgs& args) {
  args.of_q = tile_lists(place, plan.kv_offsets, plan.kv_tiles, plan.kv_bitmaps, plan.q_order, args.batch);
  args.of_k = tile_lists(place, plan.q_offsets, plan.q_tiles, plan.q_bitmaps, plan.k_order, args.batch);
  const int64_t words = (args.block_k + 31) / 32, dim = plan.bitmaps.dim();
  args.bitmaps = {static_cast<const uint32_t*>(plan.bitmaps.data_ptr()), batch_stride(place, plan.bitmaps, 3, args.batch),
                  plan.bitmaps.size(dim - 3), args.block_q, words};
  STD_TORCH_CHECK(args.block_q > 0 && args.block_q % 16 == 0 && args.block_k > 0 && args.block_k % 16 == 0,
                  "pdkernels: block_q and block_k must be multiples of 16");
  STD_TORCH_CHECK(plan.bitmaps.size(dim - 2) == args.block_q && plan.bitmaps.size(dim - 1) == words,
                  "pdkernels: a plan's bitmaps must have its tile size");
  STD_TORCH_CHECK(args.of_q.num_tiles == (args.q_len + args.block_q - 1) / args.block_q &&
                      args.of_k.num_tiles == (args.kv_len + args.block_k - 1) / args.block_k,
                  "pdkernels: the plan must be for as many rows and columns as q and k have");
}

inline void unpack_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const PlanTensors& plan, int64_t block_q, int64_t block_k, double scale, AttentionArgs& args) {
  const Place place(q);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "pdkernels: q, k and v must have 4 dimensions");
  args.element = element_of(q);
  args.batch = q.size(0), args.q_len = q.size(1), args.q_heads = q.size(2), args.head_dim = q.size(3);
  args.kv_len = k.size(1), args.kv_heads = k.size(2);
  args.block_q = block_q, args.block_k = block_k, args.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(args.kv_heads > 0 && args.q_heads > 0 && args.q_heads % args.kv_heads == 0, "pdkernels: q heads must be a multiple of kv heads");
  STD_TORCH_CHECK(args.head_dim % 8 == 0 && args.head_dim >= 16 && args.head_dim <= 256,
                  "pdkernels: head_dim must be a multiple of 8 in [16, 256]");
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(place, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.q = view(q, args.q_len, args.q_heads);
  args.k = view(k, args.kv_len, args.kv_heads);
  args.v = view(v, args.kv_len, args.kv_heads);
  args.out = view(out, args.q_len, args.q_heads);
  args.lse = row_numbers(place, lse, args);
  unpack_plan(place, plan, args);
}

inline Tensor new_like(const Tensor& t) {
  return torch::stable::new_empty(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type());
}

}  // namespace pdkernels::bindings
