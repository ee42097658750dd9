// The memory layout of a KV cache, and the faults of a range of rows.
//
// A cache is a table of buffers: K of every layer, then V of every layer. A buffer holds pages, a page holds slots, a
// slot holds one row: the K (or V) of one token in all heads. A contiguous cache is a paged one whose sequence b owns
// page b, as large as the capacity.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// What a cache holds of a row of a head: its numbers as they are; `head_dim` codes in [-127, 127] and their scale, a
// float; or, of float32, numbers of 16 bits.
enum class CacheRows : uint8_t { kSame, kCodes, kHalves };

constexpr int64_t kScaleBytes = sizeof(float);

// Bytes of a row of `head_dim` elements of `element_bytes`.
constexpr int64_t cache_row_bytes(CacheRows rows, int64_t head_dim, int64_t element_bytes) {
  if (rows == CacheRows::kCodes) return head_dim + kScaleBytes;
  return head_dim * (rows == CacheRows::kHalves ? static_cast<int64_t>(sizeof(uint16_t)) : element_bytes);
}

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

  // Always inlined: the linker keeps one copy of an inline function, which must not be that of a vector level.
  [[gnu::always_inline]] PDK_HD Slot locate(int64_t sequence, int64_t position) const {
    if (!block_table.given()) return {sequence, position};
    return {block_table.load(sequence, position / page_size), position % page_size};
  }

  PDK_HD bool holds(const Slot& at) const { return at.page >= 0 && at.page < num_pages; }
};

// The fault of one sequence of a call. A sequence with a fault is left unchanged.
enum class Fault : int32_t { kNone, kLength, kCount, kCapacity, kSource, kPage };

PDK_HD Fault check_extent(const PageMap& pages, int64_t length, int64_t count, int64_t max_rows) {
  if (length < 0 || length > pages.capacity()) return Fault::kLength;
  if (count < 0 || count > max_rows) return Fault::kCount;
  if (count > pages.capacity() - length) return Fault::kCapacity;
  return Fault::kNone;
}

}  // namespace pdkernels
