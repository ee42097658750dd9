// Attention of new tokens to a cached prefix: see pdkernels/ops/speculative_attention.py. On CUDA it is Triton's.
#pragma once

#include "block_sparse_attention.h"
#include "ops/speculative_attention.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// Packed sequences, (rows, heads, head_dim): one entry until here, from here on as many as there are lengths, under a
// plan of at most `max_new` rows each.
inline void unpack_packed(const SameDevice& device, const Tensor& row_begins, int64_t max_new,
                          const PlanArguments& plan, SpeculativeArgs& args) {
  args.batch = row_begins.size(0) - 1, args.q_len = args.kv_len = max_new;
  args.row_begins = index_view(device, row_begins, 1, args.batch + 1);
  unpack_plan(device, plan, args);
}

inline void unpack_prefix(const SameDevice& device, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                          const OptionalTensor& block_table, SpeculativeArgs& args) {
  STD_TORCH_CHECK(args.kv_len == args.q_len, "pdkernels: k_new must have as many tokens as q");
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
  STD_TORCH_CHECK(row_element(k_cache) == args.element, "pdkernels: the cache must have the dtype of q");
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

inline void unpack_append(const SameDevice& device, const OptionalTensor& counts, const OptionalTensor& source_index,
                          SpeculativeArgs& args) {
  args.op = "speculative_attention_append_";
  args.counts = index_view(device, counts, 1, args.batch);
  args.source_index = index_view(device, source_index, 2, args.batch);
  args.append_rows = source_index.has_value() ? source_index->size(1) : args.q_len;
}

// Packed tensors, (rows, heads, head_dim), as the only entry of a batch.
inline Tensor as_entry(const Tensor& t, bool packed) {
  STD_TORCH_CHECK(t.dim() == (packed ? 3 : 4), "pdkernels: q, k_new and v_new must have a batch, or cu_seqlens none");
  return packed ? torch::stable::unsqueeze(t, 0) : t;
}

// `unpack_rows(args)` says which of the new tokens are stored.
template <class UnpackRows>
std::tuple<Tensor, Tensor> attend_to_prefix(const Tensor& q, const Tensor& k_new, const Tensor& v_new,
                                            const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                                            const PlanArguments& plan, double scale, const OptionalTensor& block_table,
                                            const OptionalTensor& starts, const OptionalTensor& cu_seqlens,
                                            int64_t max_new, const UnpackRows& unpack_rows) {
  const bool packed = cu_seqlens.has_value();
  const Tensor rows = as_entry(q, packed);
  Tensor out = torch::stable::new_empty(q, sizes_of(q), q.scalar_type());
  std::vector<int64_t> of_lse{rows.size(2), rows.size(1)};
  if (!packed) of_lse.insert(of_lse.begin(), rows.size(0));
  Tensor lse = torch::stable::new_empty(q, of_lse, ScalarType::Float);
  SpeculativeArgs args;
  const SameDevice device(q);
  unpack_attention(rows, as_entry(k_new, packed), as_entry(v_new, packed), as_entry(out, packed), lse, plan, scale,
                   packed, args);
  if (packed) unpack_packed(device, *cu_seqlens, max_new, plan, args);
  unpack_prefix(device, k_cache, v_cache, lengths, block_table, args);
  unpack_starts(device, starts, args);
  unpack_rows(args);
  // Results of the splits of the prefix: sized by the capacity, so the same at every step.
  OptionalTensor parts, parts_lse;
  args.parts = args.parts_lse = nullptr;
  if (args.splits > 1) {
    const int64_t batch = rows.size(0), tokens = rows.size(1), heads = rows.size(2);
    parts = torch::stable::new_empty(q, {args.splits, batch, tokens, heads, rows.size(3)}, ScalarType::Float);
    parts_lse = torch::stable::new_empty(q, {args.splits, batch, heads, tokens}, ScalarType::Float);
    args.parts = data<float>(*parts), args.parts_lse = data<float>(*parts_lse);
  }
  const Launch launch(q);
  launch(PDK_DEVICE::speculative_attention, args);
  return {out, lse};
}

inline std::tuple<Tensor, Tensor> speculative_attention(const Tensor& q, const Tensor& k_new, const Tensor& v_new,
                                                        const Tensor& k_cache, const Tensor& v_cache,
                                                        const Tensor& lengths, const Tensor& plan_rows,
                                                        const Tensor& plan_lists, const Tensor& bitmaps,
                                                        int64_t block_q, int64_t block_k, double scale,
                                                        const OptionalTensor& block_table, const OptionalTensor& starts,
                                                        const OptionalTensor& cu_seqlens, int64_t max_new) {
  return attend_to_prefix(q, k_new, v_new, k_cache, v_cache, lengths,
                          {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, block_table, starts, cu_seqlens,
                          max_new, [](SpeculativeArgs&) {});
}

inline std::tuple<Tensor, Tensor> speculative_attention_append(
    const Tensor& q, const Tensor& k_new, const Tensor& v_new, Tensor& k_cache, Tensor& v_cache, const Tensor& lengths,
    const Tensor& plan_rows, const Tensor& plan_lists, const Tensor& bitmaps, int64_t block_q, int64_t block_k,
    double scale, const OptionalTensor& block_table, const OptionalTensor& starts, const OptionalTensor& cu_seqlens,
    int64_t max_new, const OptionalTensor& counts, const OptionalTensor& source_index) {
  return attend_to_prefix(q, k_new, v_new, k_cache, v_cache, lengths,
                          {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, block_table, starts, cu_seqlens,
                          max_new,
                          [&](SpeculativeArgs& args) { unpack_append(SameDevice(q), counts, source_index, args); });
}

PDK_IMPL("speculative_attention", speculative_attention)
PDK_IMPL("speculative_attention_append_", speculative_attention_append)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
