// The operations on KV caches. Those that edit one are shared by the CPU and the CUDA kernels; they move bytes and
// ignore element types.
#pragma once

#include "common/cache_layout.h"
#include "common/element.h"

namespace pdkernels {

// The buffers of one launch: K and V of 128 layers. The table is passed as a kernel argument (2 KiB).
constexpr int kMaxBuffers = 256;

struct BufferTable {
  char* base[kMaxBuffers];
};

struct CacheView {
  BufferTable buffers;  // K of every layer, then V of every layer
  int32_t layers = 0;
  RowLayout rows[2];  // K, V
  PageMap pages;
  int64_t batch = 0;

  PDK_HD int side(int64_t buffer) const { return buffer < layers ? 0 : 1; }
};

// Appends rows [layers][batch][count]. Strides are in bytes.
struct AppendArgs {
  CacheView cache;
  BufferTable source;
  int64_t source_batch_stride[2] = {0, 0};
  RowLayout source_rows[2];  // page_stride unused
  IndexView lengths;
  IndexView counts;  // not given: max_rows for every sequence
  int64_t max_rows = 0;

  PDK_HD int64_t count(int64_t sequence) const { return counts.given() ? counts.load(sequence) : max_rows; }
};

// Accepted row i moves from lengths[b] + source(b, i) to lengths[b] + i; all rows are read before any is written.
struct CommitArgs {
  CacheView cache;
  IndexView lengths;
  IndexView counts;
  IndexView source_index;  // not given: the rows are already in their slots
  int64_t max_rows = 0;    // columns of source_index
  bool advance = true;     // false: lengths stay; if the layers take several launches, only the last one advances
};

struct TrimArgs {
  IndexView lengths, new_lengths;
  int64_t batch = 0;
};

constexpr float kLargestCode = 127.0f;

// Rows of a cache that holds another form, for each head of each row of `x`.
struct QuantizeArgs {
  Element element;
  CacheRows form;
  char *x, *rows;
  int64_t sizes[3];                      // batch, tokens, heads
  int64_t x_strides[3], row_strides[3];  // in bytes
  int64_t head_dim;

  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
  static char* at(char* data, const int64_t (&strides)[3], int64_t b, int64_t token, int64_t head) {
    return data + b * strides[0] + token * strides[1] + head * strides[2];
  }
};

// check_extent must have passed.
PDK_HD Fault check_append_row(const AppendArgs& args, int64_t sequence, int64_t length, int64_t row) {
  return args.cache.pages.holds(args.cache.pages.locate(sequence, length + row)) ? Fault::kNone : Fault::kPage;
}

PDK_HD Fault check_commit_row(const CommitArgs& args, int64_t sequence, int64_t length, int64_t row) {
  const PageMap& pages = args.cache.pages;
  const int64_t source = args.source_index.load(sequence, row);
  if (source < 0 || source >= pages.capacity() - length) return Fault::kSource;
  const bool held =
      pages.holds(pages.locate(sequence, length + source)) && pages.holds(pages.locate(sequence, length + row));
  return held ? Fault::kNone : Fault::kPage;
}

PDK_KERNEL(kv_append, AppendArgs)
PDK_KERNEL(kv_commit, CommitArgs)
PDK_KERNEL(kv_trim, TrimArgs)
PDK_VECTOR_KERNEL(kv_quantize, QuantizeArgs)

}  // namespace pdkernels
