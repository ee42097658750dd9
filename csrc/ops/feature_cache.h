// Arguments of the feature-cache kernels, for the CPU and CUDA: a step recomputes only some rows.
#pragma once

#include "common/cache_layout.h"
#include "common/element.h"
#include "common/order_key.h"
#include "common/rows_view.h"

namespace pdkernels {

// Which cached values a selection replaces.
enum class Update : int32_t { kAll, kSelected, kNone };

// The cosine of two rows as an integer key of the same order, 0 if it is not finite. `norms` is the product of the
// norms. Unchanged rows get the largest key, because their cosine is 1 but may round to less.
PDK_HD uint32_t stale_key(float dot, float norms, bool changed) {
  constexpr float kMaxFloat = 3.4028235e38f;
  if (!(norms <= kMaxFloat) || dot != dot) return 0;
  if (!changed) return ~0u;
  return order_key(dot / (norms > 1e-8f ? norms : 1e-8f));
}

// The order of the sums of a cosine, on all devices and in the reference. A head is cut into pieces of kPieceComponents
// components. Component i of a piece is added to partial sum i % kPartialSums, as a rounded product; the partial sums
// of the pieces are added up piece by piece, those of the row in halves: i and i + 8, then i and i + 4, ...
constexpr int kPieceComponents = 128;
constexpr int kPartialSums = 16;

// The n lowest keys: all keys below `key`, and the first `ties` of the keys equal to it.
struct Cut {
  uint32_t key;
  int64_t ties;
};

// Selects the n lowest keys, n > 0; there are at least n. below(key) counts the keys that are smaller.
template <class Below>
PDK_HD Cut lowest(int64_t n, const Below& below) {
  uint32_t key = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (below(key | bit) < n) key |= bit;
  }
  return {key, n - below(key)};
}

// Fresh values and the cached ones of one layer.
struct StaleRowsArgs {
  Element element;
  char* v;  // (batch, rows): a sequence is laid out as a page
  RowLayout v_row;
  char* cache;
  RowLayout cache_row;
  int64_t head_dim;  // the layouts may have merged the heads
  PageMap pages;
  IndexView starts;
  IndexView counts;  // not given: rows
  IndexView quota;   // not given: max_selected
  int64_t batch, rows, max_selected;
  Update update;
  uint32_t* keys;  // (batch, rows), scratch
  int64_t* index;  // (batch, max_selected)

  PDK_HD int64_t count(int64_t b) const { return counts.given() ? counts.load(b) : rows; }
  PDK_HD int64_t quota_of(int64_t b) const { return quota.given() ? quota.load(b) : max_selected; }
  // How many of `count` rows are selected; the quota must have been checked before.
  PDK_HD int64_t chosen(int64_t b, int64_t count) const {
    const int64_t limit = count < max_selected ? count : max_selected;
    return quota_of(b) < limit ? quota_of(b) : limit;
  }
  PDK_HD char* fresh(int64_t b, int64_t row) const { return v + v_row.row_offset(b, row); }
  PDK_HD char* cached(int64_t b, int64_t position) const {
    const Slot at = pages.locate(b, position);
    return cache + cache_row.row_offset(at.page, at.slot);
  }
};

// out[b, j] = x[b, index[b, j]], in bytes; -1 gives zeros.
struct GatherRowsArgs {
  BatchRowsView x;
  char* out;  // (batch, picked, row_bytes)
  IndexView index;
  int64_t batch, rows, picked, row_bytes;

  PDK_HD bool fits(int64_t at) const { return at >= -1 && at < rows; }
};

// cached[b, index[b, j]] = rows[b, j], then out = x + cached.
struct AddCachedArgs {
  Element element;
  BatchRowsView x, cached, fresh;
  void* out;  // (batch, rows, width)
  IndexView index;
  int64_t batch, rows, width, replaced;

  PDK_HD bool in_range(int64_t at) const { return at >= -1 && at < rows; }
  // Indices ascend and end with -1, so that every row is replaced once and can be found by bisection.
  PDK_HD bool in_order(int64_t b, int64_t j) const {
    if (j == 0 || index.load(b, j) == -1) return true;
    const int64_t before = index.load(b, j - 1);
    return before != -1 && before < index.load(b, j);
  }
};

PDK_KERNEL(select_stale_rows, StaleRowsArgs)
PDK_VECTOR_KERNEL(select_stale_rows, StaleRowsArgs)
PDK_KERNEL(gather_rows, GatherRowsArgs)
PDK_KERNEL(add_cached_rows, AddCachedArgs)
PDK_VECTOR_KERNEL(add_cached_rows, AddCachedArgs)

}  // namespace pdkernels
