// Tensors -> the argument structs of steps that recompute only some rows.
#pragma once

#include "pdkernels/feature_cache.h"
#include "unpack_transformer_ops.h"

#include <string>

namespace pdkernels::bindings {

template <class Run>
Tensor run_select_stale_rows(const Tensor& v, const Tensor& v_cache, const Tensor& starts, int64_t count,
                             const OptionalTensor& wanted, const OptionalTensor& counts, const std::string& update,
                             const OptionalTensor& block_table, const Run& run) {
  const SameDevice device(v);
  STD_TORCH_CHECK(v.dim() == 4 && v_cache.dim() == 4, "pdkernels: v and its cache must have 4 dimensions");
  require_like(device, v_cache, v);
  Cache cache({v_cache}, {v_cache}, block_table, starts);
  cache.add_rows({v}, {v});
  STD_TORCH_CHECK(count >= 0, "pdkernels: count must be at least 0");
  STD_TORCH_CHECK(update == "all" || update == "selected" || update == "none",
                  "pdkernels: update must be all, selected or none");
  StaleRowsArgs args;
  args.element = row_element(v);
  args.v = bytes(v), args.v_row = cache.sources[0]->row;
  args.cache = bytes(v_cache), args.cache_row = cache.sides[0].row;
  if (heads_adjacent(args.v_row) && heads_adjacent(args.cache_row))
    merge_heads(args.v_row), merge_heads(args.cache_row);
  args.pages = cache.pages;
  args.batch = cache.batch, args.rows = v.size(1), args.most = count;
  args.starts = index_view(device, starts, 1, args.batch);
  args.counts = index_view(device, counts, 1, args.batch);
  args.wanted = index_view(device, wanted, 1, args.batch);
  args.update = update == "all" ? Update::kAll : update == "selected" ? Update::kSelected : Update::kNone;
  Tensor index = torch::stable::new_empty(v, {args.batch, count}, ScalarType::Long);
  Tensor keys = torch::stable::new_empty(v, {args.batch, args.rows}, ScalarType::Int);
  args.index = static_cast<int64_t*>(index.data_ptr());
  args.keys = static_cast<uint32_t*>(keys.data_ptr());
  run(args);
  return index;
}

// A tensor (batch, rows, ...) whose rows are contiguous; one that has others is copied.
inline Tensor with_whole_rows(const Tensor& t) {
  int64_t step = 1;
  for (int64_t d = t.dim() - 1; d > 1; --d) {
    if (t.size(d) != 1 && t.stride(d) != step) return torch::stable::contiguous(t);
    step *= t.size(d);
  }
  return t;
}

inline BatchRows batch_rows(const Tensor& t, int64_t unit = 1) {
  return {t.data_ptr(), t.stride(0) * unit, t.stride(1) * unit};
}

template <class Run>
Tensor run_gather_rows(const Tensor& x, const Tensor& index, const Run& run) {
  const SameDevice device(x);
  STD_TORCH_CHECK(x.dim() >= 2, "pdkernels: x must have at least 2 dimensions");
  const Tensor held = with_whole_rows(x);
  const int64_t size = static_cast<int64_t>(x.element_size());
  GatherRowsArgs args;
  args.index = index_view(device, index, 2, x.size(0));
  args.batch = x.size(0), args.rows = x.size(1), args.picked = index.size(1), args.row_bytes = size;
  std::vector<int64_t> shape{args.batch, args.picked};
  for (int64_t d = 2; d < x.dim(); ++d) args.row_bytes *= x.size(d), shape.push_back(x.size(d));
  Tensor out = torch::stable::new_empty(x, shape, x.scalar_type());
  args.x = batch_rows(held, size);
  args.out = bytes(out);
  run(args);
  return out;
}

template <class Run>
Tensor run_add_cached_rows(const Tensor& x, const Tensor& cached, const OptionalTensor& rows,
                           const OptionalTensor& index, const Run& run) {
  const SameDevice device(x);
  STD_TORCH_CHECK(x.dim() == 3, "pdkernels: x must have 3 dimensions");
  require_like(device, cached, x);
  require_shape(cached, x);
  STD_TORCH_CHECK(cached.size(2) <= 1 || cached.stride(2) == 1,
                  "pdkernels: cached must have a contiguous last dimension");
  STD_TORCH_CHECK(rows.has_value() == index.has_value(), "pdkernels: rows and index must be given together");
  AddCachedArgs args;
  args.element = row_element(x);
  args.batch = x.size(0), args.rows = x.size(1), args.width = x.size(2);
  args.index = index_view(device, index, 2, args.batch);
  args.replaced = index.has_value() ? index->size(1) : 0;
  const Tensor held = with_whole_rows(x);
  OptionalTensor fresh;
  if (rows.has_value()) {
    require_like(device, *rows, x);
    STD_TORCH_CHECK(rows->dim() == 3 && rows->size(0) == args.batch && rows->size(1) == args.replaced &&
                        rows->size(2) == args.width,
                    "pdkernels: rows must have a row for each index");
    fresh = with_whole_rows(*rows);
    args.fresh = batch_rows(*fresh);
  }
  args.x = batch_rows(held), args.cached = batch_rows(cached);
  require_own_places({{args.batch, cached.stride(0)}, {args.rows, cached.stride(1)}, {args.width, 1}});
  Tensor out = torch::stable::new_empty(x, {args.batch, args.rows, args.width}, x.scalar_type());
  args.out = out.data_ptr();
  run(args);
  return out;
}

}  // namespace pdkernels::bindings
