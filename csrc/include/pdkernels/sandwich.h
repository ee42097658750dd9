// What the kernels between the matrix products of a sandwich block are given, on the CPU and on CUDA.
#pragma once

#include "pdkernels/block_sparse_attention.h"
#include "pdkernels/kv_cache.h"

namespace pdkernels {

// Rows of contiguous elements, `stride` elements apart.
struct RowsView {
  void* data = nullptr;
  int64_t stride = 0;

  template <class T>
  PDK_HD T* row(int64_t i) const {
    return static_cast<T*>(data) + i * stride;
  }
};

// y = rms_norm(x + residual) * weight, next = rms_norm(y) * next_weight.
struct AddRmsNormArgs {
  Element element;
  RowsView x, residual, y, next;
  void *weight, *next_weight;  // next_weight nullptr: no next
  int64_t rows, width;
  float eps;
};

// out[j] = silu(x[j]) * x[width + j].
struct SiluGateArgs {
  Element element;
  RowsView x, out;
  int64_t rows, width;
};

// q, k and v of new rows: q and k are rotated in place, k and v go to a cache of one layer.
struct RotateAppendArgs {
  Element element;
  void* qkv;  // (batch, rows, heads + 2 * kv_heads, head_dim), strides in elements
  int64_t batch_stride, row_stride, head_stride;
  void* bias;       // (heads + kv_heads, head_dim), or nullptr
  const float *cos, *sin;  // (positions, head_dim)
  char* cache[2];   // K, V
  RowLayout cache_rows[2];
  PageMap pages;
  IndexView lengths;
  IndexView counts;  // not given: rows
  int64_t batch, rows, heads, kv_heads, head_dim, positions;
  bool interleaved;

  PDK_HD int64_t count(int64_t b) const { return counts.given() ? counts.load(b) : rows; }
  PDK_HD int64_t turned_heads() const { return heads + kv_heads; }
  PDK_HD int64_t all_heads() const { return heads + 2 * kv_heads; }
  // Every row that counts has its own place in the tables. The extent must have been checked before.
  PDK_HD bool in_tables(int64_t length, int64_t count) const { return length + count <= positions; }
  // Rows that do not count may stand behind the tables: they take the last place.
  PDK_HD int64_t table_row(int64_t length, int64_t row) const {
    const int64_t position = length + row;
    return (position < positions ? position : positions - 1) * head_dim;
  }
  PDK_HD int64_t head_offset(int64_t b, int64_t row, int64_t head) const {
    return b * batch_stride + row * row_stride + head * head_stride;
  }
  // Where head `head` (behind the q heads) of a row goes.
  PDK_HD char* target(int64_t b, int64_t position, int64_t head) const {
    const int side = head < turned_heads() ? 0 : 1;
    const Slot at = pages.locate(b, position);
    return cache[side] + cache_rows[side].row_offset(at.page, at.slot) + (head - heads) % kv_heads * cache_rows[side].head_stride;
  }
};

}  // namespace pdkernels
