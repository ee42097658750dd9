// Arguments of the ops between a transformer's matrix products, for the CPU and CUDA.
#pragma once

#include "common/cache_layout.h"
#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// y = rms_norm(x + residual) * weight, next = rms_norm(y) * next_weight. Arguments that are nullptr are left out.
struct AddRmsNormArgs {
  Element element;
  RowsView x, residual, y, next;
  void *weight, *next_weight;  // at least one of them; without the first, y is the sum
  int64_t rows, width;
  float eps;
};

// out[j] = f(x[j]) * x[width + j], where f is silu, or the approximation of GELU with tanh.
struct GateArgs {
  Element element;
  RowsView x, out;
  int64_t rows, width;
};
struct SiluAndMulArgs : GateArgs {};
struct GeluAndMulArgs : GateArgs {};

// That approximation is x times the sigmoid of x (kGeluSlope + kGeluCube x^2): 2 sqrt(2 / pi), and 0.044715 times that.
constexpr float kGeluSlope = 1.5957691216f, kGeluCube = 0.0713548163f;

// q, k and v of new rows: q and k are rotated in place, k and v are appended to the cache of one layer.
struct ApplyRopeAppendArgs {
  Element element;
  void* qkv;  // (batch, rows, heads + 2 * kv_heads, head_dim), strides in elements
  int64_t batch_stride, row_stride, head_stride;
  void* bias;              // (heads + kv_heads, head_dim), or nullptr
  const float *cos, *sin;  // (positions, head_dim)
  char* cache[2];          // K, V
  RowLayout cache_rows[2];
  PageMap pages;
  IndexView lengths;
  IndexView counts;  // not given: rows
  IndexView slots;   // (batch, rows); not given: row i has slot i
  int64_t batch, rows, heads, kv_heads, head_dim, positions;
  bool interleaved;

  PDK_HD int64_t count(int64_t b) const { return counts.given() ? counts.load(b) : rows; }
  PDK_HD int64_t turned_heads() const { return heads + kv_heads; }
  PDK_HD int64_t all_heads() const { return heads + 2 * kv_heads; }
  // Offset of a row from lengths[b]; -1: padding, which is neither read nor written.
  PDK_HD int64_t slot(int64_t b, int64_t row) const { return slots.given() ? slots.load(b, row) : row; }
  // With slots, only the slots that are written can be outside the cache.
  PDK_HD Fault check_lengths(int64_t length, int64_t count) const {
    const Fault fault = check_extent(pages, length, count, rows);
    return fault == Fault::kCapacity && slots.given() ? Fault::kNone : fault;
  }
  // The first `count` positions from `length` on have rows in the tables. The length must have been checked before.
  PDK_HD bool in_tables(int64_t length, int64_t count) const { return count <= positions - length; }
  PDK_HD bool in_cache(int64_t length, int64_t slot) const { return slot < pages.capacity() - length; }
  // Whether the slot of a row is valid. A padding row may have any slot after `length`.
  PDK_HD bool row_fits(int64_t b, int64_t row, int64_t length, int64_t count) const {
    const int64_t at = slot(b, row);
    if (at < 0 || row >= count) return at >= -1;
    return in_cache(length, at) && in_tables(length, at + 1) && pages.holds(pages.locate(b, length + at));
  }
  // Padding rows may be past the end of the tables; they use the last entry.
  PDK_HD int64_t table_row(int64_t length, int64_t slot) const {
    return (slot < positions - length ? length + slot : positions - 1) * head_dim;
  }
  PDK_HD int64_t head_offset(int64_t b, int64_t row, int64_t head) const {
    return b * batch_stride + row * row_stride + head * head_stride;
  }
  // Destination of head `head` (counted after the q heads) of a row.
  PDK_HD char* target(int64_t b, int64_t position, int64_t head) const {
    const int side = head < turned_heads() ? 0 : 1;
    const Slot at = pages.locate(b, position);
    return cache[side] + cache_rows[side].row_offset(at.page, at.slot) +
           (head - heads) % kv_heads * cache_rows[side].head_stride;
  }
};

// Rows that are rotated in place, each at its given position.
struct ApplyRopeArgs {
  Element element;
  void* x;  // (batch, rows, heads, head_dim), strides in elements
  int64_t batch_stride, row_stride, head_stride;
  const float *cos, *sin;  // (table_rows, head_dim)
  IndexView positions;     // (batch, rows)
  int64_t batch, rows, heads, head_dim, table_rows;
  bool interleaved;

  PDK_HD bool in_tables(int64_t position) const { return position >= 0 && position < table_rows; }
  PDK_HD int64_t row_offset(int64_t b, int64_t row) const { return b * batch_stride + row * row_stride; }
};

PDK_VECTOR_KERNEL(add_rms_norm, AddRmsNormArgs)
PDK_VECTOR_KERNEL(silu_and_mul, SiluAndMulArgs)
PDK_VECTOR_KERNEL(gelu_and_mul, GeluAndMulArgs)
PDK_KERNEL(apply_rope_append, ApplyRopeAppendArgs)
PDK_VECTOR_KERNEL(apply_rope_append, ApplyRopeAppendArgs)
PDK_KERNEL(apply_rope, ApplyRopeArgs)
PDK_VECTOR_KERNEL(apply_rope, ApplyRopeArgs)

}  // namespace pdkernels
