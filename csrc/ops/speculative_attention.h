// Arguments of the CPU kernel of speculative attention: block-sparse attention of new tokens over a cached prefix that
// all of them see and a tail of new tokens; and which of the new tokens it stores after that prefix.
#pragma once

#include "common/cache_layout.h"
#include "ops/block_sparse_attention.h"

namespace pdkernels {

// Keys are attended to in splits, so that a long prefix keeps many threads busy even for a single sequence. A split
// begins at a position that depends on its number alone, so that a row gets the same bits whatever part of its keys is
// cached and whatever the capacity. The first kEvenSplits have kSplitTokens each; after them come 32 of twice the size,
// 32 of four times, and so on: every doubling of the capacity adds 32 splits.
constexpr int64_t kSplitTokens = 4096;
constexpr int64_t kEvenSplits = 64;

constexpr int64_t split_begin(int64_t split) {
  if (split < kEvenSplits) return split * kSplitTokens;
  const int64_t doublings = (split - kEvenSplits) / (kEvenSplits / 2), inside = split % (kEvenSplits / 2);
  return (kEvenSplits / 2 + inside) * kSplitTokens << (doublings + 1);
}

// Splits that hold so many positions, at least one.
inline int64_t count_splits(int64_t positions) {
  int64_t splits = 1;
  while (split_begin(splits) < positions) ++splits;
  return splits;
}

struct SpeculativeArgs
    : AttentionArgs {          // k, v: the new tokens; kv_len = q_len; only the lists of the queries are read
  HeadsView k_cache, v_cache;  // (pages, slots of a page, heads, head_dim); a contiguous cache: one page per sequence
  CacheRows form = CacheRows::kSame;  // of the rows of keys and values, new and cached
  PageMap pages;
  IndexView lengths;
  int64_t splits;    // of the capacity and the new tokens
  float* parts;      // (splits, batch, q_len, q_heads, head_dim), where there is more than one split
  float* parts_lse;  // (splits, batch, q_heads, q_len)

  // The first position that a new token sees, the cached and the new ones counted together; not given: 0. (batch,
  // rows), where a stride of 0 says that all rows have the same, or with starts_by_row (packed rows).
  IndexView starts;
  bool starts_by_row = false;
  // Packed sequences: (batch + 1), new token i of sequence b is row row_begins[b] + i of the only batch entry of q, k,
  // v and out. q_len and kv_len are the plan's then.
  IndexView row_begins;

  // What is stored in the cache after the prefix, where no split reads: new token source(b, i) to position lengths[b] +
  // i for all i < count(b).
  const char* op;          // name of the call in errors
  IndexView counts;        // not given: append_rows
  IndexView source_index;  // not given: the new tokens in order
  int64_t append_rows;     // at most; 0 for a call that only reads

  [[gnu::always_inline]] bool packed() const { return row_begins.given(); }
  [[gnu::always_inline]] int64_t rows() const { return packed() ? lse_stride : batch * q_len; }
  [[gnu::always_inline]] int64_t tokens(int64_t b) const {
    return packed() ? row_begins.load(b + 1) - row_begins.load(b) : q_len;
  }
  [[gnu::always_inline]] int64_t start(int64_t b, int64_t row) const {
    if (!starts.given()) return 0;
    return starts_by_row ? starts.load(row_begins.load(b) + row) : starts.load(b, row);
  }
  [[gnu::always_inline]] int64_t count(int64_t b) const {
    return counts.given() ? counts.load(b) : append_rows < tokens(b) || source_index.given() ? append_rows : tokens(b);
  }
  [[gnu::always_inline]] int64_t source(int64_t b, int64_t i) const {
    return source_index.given() ? source_index.load(b, i) : i;
  }
};

PDK_KERNEL(speculative_attention, SpeculativeArgs)
PDK_AMX_KERNEL(speculative_attention, SpeculativeArgs)

}  // namespace pdkernels
