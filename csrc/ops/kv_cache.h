// Geometry of KV caches and of the three operations on them, shared by the CPU and the CUDA kernels.
//
// A cache is a table of buffers: K of every layer, then V of every layer. A buffer holds pages, a page holds slots, a
// slot holds one row: the K (or V) of one token in all heads. A contiguous cache is a paged one whose sequence b owns
// page b, as large as the capacity. Kernels move bytes and ignore element types.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// Buffers a single launch can carry: 128 layers of K and V. The table travels as a kernel argument (2 KiB).
constexpr int kMaxBuffers = 256;

// Layout of the rows of one side (all K buffers, or all V buffers) in memory, in bytes.
struct RowLayout {
  int64_t page_stride = 0;
  int64_t slot_stride = 0;
  int64_t head_stride = 0;
  int64_t heads = 0;  // a row is `heads` runs of `head_bytes`; a single run if the heads are adjacent
  int64_t head_bytes = 0;

  PDK_HD int64_t row_bytes() const { return heads * head_bytes; }
  PDK_HD int64_t row_offset(int64_t page, int64_t slot) const { return page * page_stride + slot * slot_stride; }
  // Offset of byte `at` of a row from the row's start.
  PDK_HD int64_t byte_offset(int64_t at) const {
    return heads == 1 ? at : (at / head_bytes) * head_stride + at % head_bytes;
  }
};

struct Slot {
  int64_t page;
  int64_t slot;
};

// Logical position -> page and slot.
struct PageMap {
  IndexView block_table;  // not given: contiguous cache
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t pages_per_sequence = 1;

  PDK_HD int64_t capacity() const { return pages_per_sequence * page_size; }

  // Always inlined: no copy of it may stay in the units of one vector level.
  [[gnu::always_inline]] PDK_HD Slot locate(int64_t sequence, int64_t position) const {
    if (!block_table.given()) return {sequence, position};
    return {block_table.load(sequence, position / page_size), position % page_size};
  }

  PDK_HD bool holds(const Slot& at) const { return at.page >= 0 && at.page < num_pages; }
};

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

// New rows [layers][batch][count] to append, with their own strides, in bytes.
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

// Row i of the accepted ones moves from lengths[b] + source(b, i) to lengths[b] + i; all reads before all writes.
struct CommitArgs {
  CacheView cache;
  IndexView lengths;
  IndexView counts;
  IndexView source_index;  // not given: the rows are already in their slots
  int64_t max_rows = 0;    // columns of source_index
  bool advance = true;     // lengths grow only after the last launch, if a model needs several for its layers
};

struct TrimArgs {
  IndexView lengths, new_lengths;
  int64_t batch = 0;
};

// What can be wrong with one sequence of a call. A sequence with a fault is left unchanged.
enum class Fault : int32_t { none, length, count, room, source, page };

PDK_HD Fault check_extent(const PageMap& pages, int64_t length, int64_t count, int64_t max_rows) {
  if (length < 0 || length > pages.capacity()) return Fault::length;
  if (count < 0 || count > max_rows) return Fault::count;
  if (count > pages.capacity() - length) return Fault::room;
  return Fault::none;
}

// The extent must have been checked before.
PDK_HD Fault check_append_row(const AppendArgs& args, int64_t sequence, int64_t length, int64_t row) {
  return args.cache.pages.holds(args.cache.pages.locate(sequence, length + row)) ? Fault::none : Fault::page;
}

PDK_HD Fault check_commit_row(const CommitArgs& args, int64_t sequence, int64_t length, int64_t row) {
  const PageMap& pages = args.cache.pages;
  const int64_t source = args.source_index.load(sequence, row);
  if (source < 0 || source >= pages.capacity() - length) return Fault::source;
  const bool held =
      pages.holds(pages.locate(sequence, length + source)) && pages.holds(pages.locate(sequence, length + row));
  return held ? Fault::none : Fault::page;
}

PDK_KERNEL(kv_append, AppendArgs)
PDK_KERNEL(kv_commit, CommitArgs)
PDK_KERNEL(kv_trim, TrimArgs)

}  // namespace pdkernels
