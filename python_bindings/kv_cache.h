// Edits of KV caches: see pdkernels/ops/kv_cache.py.
#pragma once

#include "device.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline void kv_append(Tensors& k_cache, Tensors& v_cache, const Tensors& k_new, const Tensors& v_new,
                      const Tensor& lengths, const OptionalTensor& counts, const OptionalTensor& block_table) {
  const Launch launch(lengths);
  Cache cache(k_cache, v_cache, block_table, lengths);
  cache.add_rows(k_new, v_new);
  AppendArgs args;
  args.lengths = index_view(cache.device, lengths, 1, cache.batch);
  args.counts = index_view(cache.device, counts, 1, cache.batch);
  args.max_rows = cache.sources[0]->slots;
  cache.for_launches([&](const CacheView& view, int64_t first) {
    args.cache = view;
    for (int s = 0; s < 2; ++s) {
      args.source_rows[s] = cache.sources[s]->row;
      args.source_batch_stride[s] = cache.sources[s]->row.page_stride;
    }
    Cache::fill(args.source, view.layers, first, *cache.sources[0], *cache.sources[1]);
    launch(PDK_DEVICE::kv_append, args);
  });
}

inline void kv_commit(Tensors& k_cache, Tensors& v_cache, Tensor& lengths, const Tensor& counts,
                      const OptionalTensor& source_index, const OptionalTensor& block_table) {
  const Launch launch(lengths);
  Cache cache(k_cache, v_cache, block_table, lengths);
  CommitArgs args;
  args.lengths = index_view(cache.device, lengths, 1, cache.batch);
  args.counts = index_view(cache.device, counts, 1, cache.batch);
  args.source_index = index_view(cache.device, source_index, 2, cache.batch);
  args.max_rows = source_index.has_value() ? source_index->size(1) : cache.pages.capacity();
  const int64_t layers = static_cast<int64_t>(cache.sides[0].layers.size());
  cache.for_launches([&](const CacheView& view, int64_t first) {
    args.cache = view;
    args.advance = first + view.layers == layers;
    launch(PDK_DEVICE::kv_commit, args);
  });
}

inline void kv_trim(Tensor& lengths, const Tensor& new_lengths) {
  const Launch launch(lengths);
  const SameDevice device(lengths);
  PDK_CHECK(lengths.dim() == 1);
  const int64_t batch = lengths.size(0);
  launch(PDK_DEVICE::kv_trim,
         TrimArgs{index_view(device, lengths, 1, batch), index_view(device, new_lengths, 1, batch), batch});
}

#ifndef PDKERNELS_DEVICE_CUDA  // there it is Triton's

// `x` (batch, tokens, heads, head_dim) as rows of an 8-bit cache, written to `rows`.
inline QuantizeArgs unpack_quantize(const Tensor& x, const Tensor& rows) {
  const SameDevice device(x);
  PDK_CHECK(x.dim() == 4 && x.stride(3) == 1);
  QuantizeArgs args;
  args.element = row_element(x), args.head_dim = x.size(3), args.form = CacheRows::kCodes;
  device.require(rows, ScalarType::Char,
                 {x.size(0), x.size(1), x.size(2), args.head_dim + static_cast<int64_t>(sizeof(float))});
  args.x = bytes(x), args.rows = bytes(rows);
  for (int d = 0; d < 3; ++d) {
    args.sizes[d] = x.size(d);
    args.x_strides[d] = x.stride(d) * static_cast<int64_t>(x.element_size()), args.row_strides[d] = rows.stride(d);
  }
  return args;
}

inline Tensor kv_quantize(const Tensor& x) {
  const Launch launch(x);
  PDK_CHECK(x.dim() == 3 || x.dim() == 4);
  const int64_t head_dim = x.size(x.dim() - 1);
  PDK_CHECK(head_dim % 8 == 0 && head_dim >= 16 && head_dim <= 512);
  Tensor rows =
      torch::stable::new_empty(x, shape_of(x, head_dim + static_cast<int64_t>(sizeof(float))), ScalarType::Char);
  const auto in_batch = [](const Tensor& t) { return t.dim() == 4 ? t : torch::stable::unsqueeze(t, 0); };
  launch(PDK_VECTOR(kv_quantize), unpack_quantize(in_batch(x), in_batch(rows)));
  return rows;
}

PDK_IMPL("kv_quantize", kv_quantize)

#endif

PDK_IMPL("kv_append_", kv_append)
PDK_IMPL("kv_commit_", kv_commit)
PDK_IMPL("kv_trim_", kv_trim)

}  // namespace pdkernels::PDK_DEVICE::bindings
