// The arguments of the attention ops as structures (pdkernels/_attention.py has the same), and how they become those of
// the kernels. On CUDA attention is Triton's.
#pragma once

#include "device.h"
#include "ops/speculative_attention.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// The parts of a TilePlan that an op takes.
struct PlanInputs {
  Tensor plan_rows, plan_lists, bitmaps;
  int64_t block_q, block_k;
  auto fields() const { return std::tie(plan_rows, plan_lists, bitmaps, block_q, block_k); }
};

struct AttentionInputs {
  Tensor q, k, v;
  PlanInputs plan;
  double scale;
  OptionalTensor sinks;
  double softcap;
  auto fields() const { return std::tie(q, k, v, plan, scale, sinks, softcap); }
};

struct GradientInputs {
  Tensor grad_out;
  OptionalTensor grad_lse;
  Tensor out, lse;
  AttentionInputs forward;
  auto fields() const { return std::tie(grad_out, grad_lse, out, lse, forward); }
};

// `Cache` is Written where new tokens are stored.
template <class Cache>
struct SpeculativeInputs {
  Tensor q, k_new, v_new;
  Cache k_cache, v_cache;
  Tensor lengths;
  PlanInputs plan;
  double scale;
  OptionalTensor block_table, starts, cu_seqlens;
  int64_t max_new;
  OptionalTensor sinks;
  double softcap;
  auto fields() const {
    return std::tie(q, k_new, v_new, k_cache, v_cache, lengths, plan, scale, block_table, starts, cu_seqlens, max_new,
                    sinks, softcap);
  }

  bool packed() const { return cu_seqlens.has_value(); }
};

struct AppendInputs {
  SpeculativeInputs<Written> attention;
  OptionalTensor counts, source_index;
  auto fields() const { return std::tie(attention, counts, source_index); }
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

inline float* row_sums(const SameDevice& device, const Tensor& t, const AttentionArgs& args) {
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
inline void unpack_plan(const SameDevice& device, const PlanInputs& plan, AttentionArgs& args) {
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

// The form of rows of a dtype beside queries of another.
inline CacheRows form_of(ScalarType dtype_of_q, ScalarType dtype) {
  if (dtype == ScalarType::Char) return CacheRows::kCodes;
  return dtype == ScalarType::Half && dtype_of_q == ScalarType::Float ? CacheRows::kHalves : CacheRows::kSame;
}

// Rows of keys and values in some form. The scale after codes must be aligned, or it could not be read on every device.
struct KeyRows {
  ScalarType dtype;
  int64_t width;

  KeyRows(ScalarType dtype_of_q, int64_t head_dim, CacheRows form) : dtype(dtype_of_q), width(head_dim) {
    if (form == CacheRows::kCodes) dtype = ScalarType::Char, width += kScaleBytes;
    if (form == CacheRows::kHalves) dtype = ScalarType::Half;
  }

  HeadsView view(const SameDevice& device, const Tensor& t, int64_t batch, int64_t tokens, int64_t heads) const {
    if (dtype == ScalarType::Char) {
      PDK_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % sizeof(float) == 0);
      for (int64_t d = 0; d + 1 < t.dim(); ++d) PDK_CHECK(t.stride(d) % static_cast<int64_t>(sizeof(float)) == 0);
    }
    return heads_view(device, t, dtype, batch, tokens, heads, width);
  }
};

// The heads and the sizes of tiles that the kernels take.
inline void require_sizes(const AttentionArgs& args) {
  STD_TORCH_CHECK(args.kv_heads > 0 && args.q_heads > 0 && args.q_heads % args.kv_heads == 0,
                  "pdkernels: q heads must be a multiple of kv heads");
  STD_TORCH_CHECK(args.head_dim % 8 == 0 && args.head_dim >= 16 && args.head_dim <= 512,
                  "pdkernels: head_dim must be a multiple of 8 in [16, 512]");
  STD_TORCH_CHECK(args.block_q > 0 && args.block_q % 16 == 0 && args.block_k > 0 && args.block_k % 16 == 0,
                  "pdkernels: block_q and block_k must be multiples of 16");
}

// Everything but the lists of the plan.
inline void unpack_attention(const AttentionInputs& in, const Tensor& out, const Tensor& lse, AttentionArgs& args,
                             CacheRows form = CacheRows::kSame) {
  const SameDevice device(in.q);
  STD_TORCH_CHECK(in.q.dim() == 4 && in.k.dim() == 4, "pdkernels: q, k and v must have 4 dimensions");
  args.element = row_element(in.q);
  args.batch = in.q.size(0), args.q_len = in.q.size(1), args.q_heads = in.q.size(2), args.head_dim = in.q.size(3);
  args.kv_len = in.k.size(1), args.kv_heads = in.k.size(2);
  args.block_q = in.plan.block_q, args.block_k = in.plan.block_k, args.scale = static_cast<float>(in.scale);
  args.softcap = static_cast<float>(in.softcap);
  PDK_CHECK(args.softcap >= 0);
  require_sizes(args);
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, in.q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.q = view(in.q, args.q_len, args.q_heads);
  const KeyRows rows(in.q.scalar_type(), args.head_dim, form);
  args.k = rows.view(device, in.k, args.batch, args.kv_len, args.kv_heads);
  args.v = rows.view(device, in.v, args.batch, args.kv_len, args.kv_heads);
  args.out = view(out, args.q_len, args.q_heads);
  args.lse = row_sums(device, lse, args);
  args.lse_stride = args.q_len;
  args.sinks = nullptr, args.sinks_stride = 0;
  if (in.sinks.has_value()) {
    device.require(*in.sinks);
    STD_TORCH_CHECK(
        in.sinks->scalar_type() == ScalarType::Float && in.sinks->dim() == 1 && in.sinks->size(0) == args.q_heads,
        "pdkernels: sinks must be float32, one for each head");
    args.sinks = static_cast<const float*>(in.sinks->data_ptr()), args.sinks_stride = in.sinks->stride(0);
  }
}

// The caches of a layer, for `args` of which the new tokens are known; `dtype`: that of q.
inline void unpack_prefix(const SameDevice& device, ScalarType dtype, const Tensor& k_cache, const Tensor& v_cache,
                          const Tensor& lengths, const OptionalTensor& block_table, SpeculativeArgs& args) {
  STD_TORCH_CHECK(args.kv_len == args.q_len, "pdkernels: k_new must have as many tokens as q");
  STD_TORCH_CHECK(k_cache.dim() == 4, "pdkernels: caches must have 4 dimensions");
  args.pages.num_pages = k_cache.size(0);
  args.pages.page_size = k_cache.size(1);
  args.pages.block_table = index_view(device, block_table, 2, args.batch);
  args.pages.pages_per_sequence = block_table.has_value() ? block_table->size(1) : 1;
  STD_TORCH_CHECK(block_table.has_value() ? args.pages.page_size > 0 : args.pages.num_pages == args.batch,
                  "pdkernels: the cache must have a batch entry a sequence, or pages of at least one slot");
  const KeyRows rows(dtype, args.head_dim, args.form);
  const auto view = [&](const Tensor& t) {
    return rows.view(device, t, args.pages.num_pages, args.pages.page_size, args.kv_heads);
  };
  args.k_cache = view(k_cache);
  args.v_cache = view(v_cache);
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.splits = count_splits(args.pages.capacity() + args.q_len);
  args.op = "speculative_attention";
  args.append_rows = 0;
}

inline void unpack_starts(const SameDevice& device, const OptionalTensor& starts, SpeculativeArgs& args) {
  if (!starts.has_value()) return;
  STD_TORCH_CHECK(starts->dim() == 2, "pdkernels: starts must have 2 dimensions");
  const int64_t entries = starts->size(0), rows = starts->size(1);
  args.starts = index_view(device, starts, 2, entries);
  args.starts_by_row = args.packed() && entries == 1 && rows == args.lse_stride && !(args.batch == 1 && rows == 1);
  if (args.starts_by_row) {
    args.starts.stride0 = args.starts.stride1;
  } else {
    STD_TORCH_CHECK(entries == args.batch && (rows == 1 || (rows == args.q_len && !args.packed())),
                    "pdkernels: starts must have an entry a sequence or a row");
    if (rows == 1) args.starts.stride1 = 0;
  }
}

// Packed tensors, (rows, heads, head_dim), as the only entry of a batch.
inline Tensor as_entry(const Tensor& t, bool packed) {
  STD_TORCH_CHECK(t.dim() == (packed ? 3 : 4), "pdkernels: q, k_new and v_new must have a batch, or cu_seqlens none");
  return packed ? torch::stable::unsqueeze(t, 0) : t;
}

// Packed sequences are one entry for unpack_attention(), and from then on as many as there are lengths, under a plan of
// at most `max_new` rows each.
template <class Cache>
void unpack_speculative(const SpeculativeInputs<Cache>& in, const Tensor& out, const Tensor& lse,
                        SpeculativeArgs& args) {
  const bool packed = in.packed();
  const SameDevice device(in.q);
  args.form = form_of(in.q.scalar_type(), in.k_cache.scalar_type());
  unpack_attention({as_entry(in.q, packed), as_entry(in.k_new, packed), as_entry(in.v_new, packed), in.plan, in.scale,
                    in.sinks, in.softcap},
                   as_entry(out, packed), lse, args, args.form);
  if (packed) {
    args.batch = in.cu_seqlens->size(0) - 1, args.q_len = args.kv_len = in.max_new;
    args.row_begins = index_view(device, in.cu_seqlens, 1, args.batch + 1);
  }
  unpack_plan(device, in.plan, args);
  unpack_prefix(device, in.q.scalar_type(), in.k_cache, in.v_cache, in.lengths, in.block_table, args);
  unpack_starts(device, in.starts, args);
}

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
