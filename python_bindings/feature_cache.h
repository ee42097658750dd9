// Steps that recompute only some rows: see pdkernels/ops/feature_cache.py.
#pragma once

#include "device.h"
#include "ops/feature_cache.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline Tensor select_stale_rows(const Tensor& v, Tensor& v_cache, const Tensor& starts, int64_t count,
                                const OptionalTensor& quota, const OptionalTensor& counts, const std::string& update,
                                const OptionalTensor& block_table) {
  const Launch launch(v);
  const SameDevice device(v);
  PDK_CHECK(v.dim() == 4 && v_cache.dim() == 4);
  device.require(v_cache, v.scalar_type());
  Cache cache({v_cache}, {v_cache}, block_table, starts);
  cache.add_rows({v}, {v});
  PDK_CHECK(count >= 0 && (count <= int64_t{1} << 20 || count <= v.size(1)) &&
            (update == "all" || update == "selected" || update == "none"));
  StaleRowsArgs args;
  args.element = row_element(v);
  args.v = bytes(v), args.v_row = cache.sources[0]->row;
  args.cache = bytes(v_cache), args.cache_row = cache.sides[0].row;
  args.head_dim = v.size(3);
  if (heads_adjacent(args.v_row) && heads_adjacent(args.cache_row))
    merge_heads(args.v_row), merge_heads(args.cache_row);
  args.pages = cache.pages;
  args.batch = cache.batch, args.rows = v.size(1), args.max_selected = count;
  args.starts = index_view(device, starts, 1, args.batch);
  args.counts = index_view(device, counts, 1, args.batch);
  args.quota = index_view(device, quota, 1, args.batch);
  args.update = update == "all" ? Update::kAll : update == "selected" ? Update::kSelected : Update::kNone;
  Tensor index = torch::stable::new_empty(v, {args.batch, count}, ScalarType::Long);
  Tensor keys = torch::stable::new_empty(v, {args.batch, args.rows}, ScalarType::Int);
  args.index = data<int64_t>(index), args.keys = data<uint32_t>(keys);
  launch(PDK_DEVICE::select_stale_rows, args);
  return index;
}

inline Tensor gather_rows(const Tensor& x, const Tensor& index) {
  const Launch launch(x);
  const SameDevice device(x);
  PDK_CHECK(x.dim() >= 2);
  const Tensor held = with_whole_rows(x);
  const int64_t size = static_cast<int64_t>(x.element_size());
  GatherRowsArgs args;
  args.index = index_view(device, index, 2, x.size(0));
  args.batch = x.size(0), args.rows = x.size(1), args.picked = index.size(1), args.row_bytes = size;
  std::vector<int64_t> shape{args.batch, args.picked};
  for (int64_t d = 2; d < x.dim(); ++d) args.row_bytes *= x.size(d), shape.push_back(x.size(d));
  Tensor out = torch::stable::new_empty(x, shape, x.scalar_type());
  args.x = rows_view(held, size);
  args.out = bytes(out);
  launch(PDK_DEVICE::gather_rows, args);
  return out;
}

inline Tensor add_cached_rows(const Tensor& x, Tensor& cached, const OptionalTensor& rows,
                              const OptionalTensor& index) {
  const Launch launch(x);
  const SameDevice device(x);
  PDK_CHECK(x.dim() == 3);
  device.require(cached, x.scalar_type(), {x.size(0), x.size(1), x.size(2)});
  PDK_CHECK(cached.size(2) <= 1 || cached.stride(2) == 1);
  PDK_CHECK(rows.has_value() == index.has_value());
  AddCachedArgs args;
  args.element = row_element(x);
  args.batch = x.size(0), args.rows = x.size(1), args.width = x.size(2);
  args.index = index_view(device, index, 2, args.batch);
  args.replaced = index.has_value() ? index->size(1) : 0;
  const Tensor held = with_whole_rows(x);
  OptionalTensor fresh;
  if (rows.has_value()) {
    device.require(*rows, x.scalar_type(), {args.batch, args.replaced, args.width});
    fresh = with_whole_rows(*rows);
    args.fresh = rows_view(*fresh);
  }
  args.x = rows_view(held), args.cached = rows_view(cached);
  Tensor out = torch::stable::new_empty(x, {args.batch, args.rows, args.width}, x.scalar_type());
  args.out = out.data_ptr();
  launch(PDK_DEVICE::add_cached_rows, args);
  return out;
}

PDK_IMPL("select_stale_rows_", select_stale_rows)
PDK_IMPL("gather_rows", gather_rows)
PDK_IMPL("add_cached_rows_", add_cached_rows)

}  // namespace pdkernels::PDK_DEVICE::bindings
