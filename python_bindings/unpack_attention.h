// Tensors -> the argument structs of the attention kernels. As in unpack.h: geometry is checked here, in short words.
#pragma once

#include "pdkernels/speculative_attention.h"
#include "unpack.h"

#include <array>

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

inline HeadsView heads_view(const SameDevice& device, const Tensor& t, ScalarType dtype, int64_t batch, int64_t tokens,
                            int64_t heads, int64_t head_dim) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == dtype, "pdkernels: q, k and v must have one dtype");
  STD_TORCH_CHECK(
      t.dim() == 4 && t.size(0) == batch && t.size(1) == tokens && t.size(2) == heads && t.size(3) == head_dim,
      "pdkernels: an attention tensor has the wrong shape");
  STD_TORCH_CHECK(t.stride(3) == 1, "pdkernels: the last dimension must be contiguous");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline float* row_numbers(const SameDevice& device, const Tensor& t, const AttentionArgs& args) {
  device.require(t);
  STD_TORCH_CHECK(
      t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == args.batch * args.q_heads * args.q_len,
      "pdkernels: lse must be a contiguous float32 tensor (batch, q_heads, q_len)");
  return static_cast<float*>(t.data_ptr());
}

// A contiguous int32 tensor of `dim` dimensions, or with a batch in front of them.
inline int64_t batch_stride(const SameDevice& device, const Tensor& t, int64_t dim, int64_t batch) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() &&
                      (t.dim() == dim || (t.dim() == dim + 1 && t.size(0) == batch)),
                  "pdkernels: a plan's tensors must be contiguous, of int32, with at most a batch dimension in front");
  return t.dim() == dim ? 0 : t.stride(0);
}

inline const int32_t* words(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

// The lists of one side, all in their given order.
inline TileLists tile_lists(const SameDevice& device, const Tensor& offsets, const Tensor& tiles,
                            const Tensor& bitmap_ids, int64_t tokens, int64_t block, int64_t batch) {
  TileLists lists{};
  lists.offsets = words(offsets), lists.offsets_stride = batch_stride(device, offsets, 1, batch);
  lists.tiles = words(tiles), lists.tiles_stride = batch_stride(device, tiles, 1, batch);
  lists.bitmap_ids = words(bitmap_ids), lists.bitmap_ids_stride = batch_stride(device, bitmap_ids, 1, batch);
  lists.num_tiles = (tokens + block - 1) / block;
  lists.visits = tiles.size(tiles.dim() - 1);
  STD_TORCH_CHECK(
      offsets.size(offsets.dim() - 1) == lists.num_tiles + 1 && bitmap_ids.size(bitmap_ids.dim() - 1) == lists.visits,
      "pdkernels: the plan must be for as many tokens as there are, and its lists must fit together");
  return lists;
}

inline void set_order(const SameDevice& device, const Tensor& order, int64_t batch, TileLists& lists) {
  lists.order = words(order), lists.order_stride = batch_stride(device, order, 1, batch);
  STD_TORCH_CHECK(order.size(order.dim() - 1) == lists.num_tiles, "pdkernels: a plan's lists must fit together");
}

inline void unpack_bitmaps(const SameDevice& device, const Tensor& bitmaps, AttentionArgs& args) {
  const int64_t words_per_row = (args.block_k + 31) / 32, dim = bitmaps.dim();
  args.bitmaps = {static_cast<const uint32_t*>(bitmaps.data_ptr()), batch_stride(device, bitmaps, 3, args.batch),
                  bitmaps.size(dim - 3), args.block_q, words_per_row};
  STD_TORCH_CHECK(bitmaps.size(dim - 2) == args.block_q && bitmaps.size(dim - 1) == words_per_row,
                  "pdkernels: a plan's bitmaps must have its tile size");
}

inline void unpack_plan(const SameDevice& device, const PlanTensors& plan, AttentionArgs& args) {
  args.of_q = tile_lists(device, plan.kv_offsets, plan.kv_tiles, plan.kv_bitmaps, args.q_len, args.block_q, args.batch);
  args.of_k = tile_lists(device, plan.q_offsets, plan.q_tiles, plan.q_bitmaps, args.kv_len, args.block_k, args.batch);
  set_order(device, plan.q_order, args.batch, args.of_q);
  set_order(device, plan.k_order, args.batch, args.of_k);
  unpack_bitmaps(device, plan.bitmaps, args);
}

// All but the plan.
inline void unpack_heads(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                         int64_t block_q, int64_t block_k, double scale, AttentionArgs& args) {
  const SameDevice device(q);
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "pdkernels: q, k and v must have 4 dimensions");
  args.element = element_of(q);
  args.batch = q.size(0), args.q_len = q.size(1), args.q_heads = q.size(2), args.head_dim = q.size(3);
  args.kv_len = k.size(1), args.kv_heads = k.size(2);
  args.block_q = block_q, args.block_k = block_k, args.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(args.kv_heads > 0 && args.q_heads > 0 && args.q_heads % args.kv_heads == 0,
                  "pdkernels: q heads must be a multiple of kv heads");
  STD_TORCH_CHECK(args.head_dim % 8 == 0 && args.head_dim >= 16 && args.head_dim <= 256,
                  "pdkernels: head_dim must be a multiple of 8 in [16, 256]");
  STD_TORCH_CHECK(block_q > 0 && block_q % 16 == 0 && block_k > 0 && block_k % 16 == 0,
                  "pdkernels: block_q and block_k must be multiples of 16");
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.q = view(q, args.q_len, args.q_heads);
  args.k = view(k, args.kv_len, args.kv_heads);
  args.v = view(v, args.kv_len, args.kv_heads);
  args.out = view(out, args.q_len, args.q_heads);
  args.lse = row_numbers(device, lse, args);
}

inline void unpack_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const PlanTensors& plan, int64_t block_q, int64_t block_k, double scale,
                             AttentionArgs& args) {
  unpack_heads(q, k, v, out, lse, block_q, block_k, scale, args);
  unpack_plan(SameDevice(q), plan, args);
}

// The part of a plan of (new, new) tokens that a forward pass reads: offsets, tiles and bitmap numbers of the queries.
inline void unpack_tail(const SameDevice& device, const std::array<Tensor, 3>& lists, const Tensor& bitmaps,
                        SpeculativeArgs& args) {
  STD_TORCH_CHECK(args.kv_len == args.q_len, "pdkernels: k_new must have as many tokens as q");
  args.of_q = tile_lists(device, lists[0], lists[1], lists[2], args.q_len, args.block_q, args.batch);
  args.of_k = TileLists{};
  unpack_bitmaps(device, bitmaps, args);
}

inline void unpack_prefix(const SameDevice& device, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                          const OptionalTensor& block_table, SpeculativeArgs& args) {
  STD_TORCH_CHECK(k_cache.dim() == 4, "pdkernels: caches must have 4 dimensions");
  args.pages.num_pages = k_cache.size(0);
  args.pages.page_size = k_cache.size(1);
  args.pages.block_table = index_view(device, block_table, 2, args.batch);
  args.pages.pages_per_sequence = block_table.has_value() ? block_table->size(1) : 1;
  STD_TORCH_CHECK(block_table.has_value() ? args.pages.page_size > 0 : args.pages.num_pages == args.batch,
                  "pdkernels: the cache must have a batch entry a sequence, or pages of at least one slot");
  const auto view = [&](const Tensor& t) {
    return heads_view(device, t, k_cache.scalar_type(), args.pages.num_pages, args.pages.page_size, args.kv_heads,
                      args.head_dim);
  };
  args.k_cache = view(k_cache);
  args.v_cache = view(v_cache);
  STD_TORCH_CHECK(element_of(k_cache) == args.element, "pdkernels: the cache must have the dtype of q");
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.splits = count_splits(args.pages.capacity());
  args.op = "speculative_attention";
  args.append_rows = 0;
}

inline void unpack_append(const SameDevice& device, const OptionalTensor& counts, const OptionalTensor& source_index,
                          SpeculativeArgs& args) {
  args.op = "speculative_attention_append_";
  for (const HeadsView& cache : {args.k_cache, args.v_cache}) {
    require_own_places({{args.pages.num_pages, cache.batch_stride},
                        {args.pages.page_size, cache.token_stride},
                        {args.kv_heads, cache.head_stride}});
  }
  args.counts = index_view(device, counts, 1, args.batch);
  args.source_index = index_view(device, source_index, 2, args.batch);
  args.append_rows = source_index.has_value() ? source_index->size(1) : args.q_len;
}

inline Tensor new_like(const Tensor& t) {
  return torch::stable::new_empty(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type());
}

}  // namespace pdkernels::bindings
