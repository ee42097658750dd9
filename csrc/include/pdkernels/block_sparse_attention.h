// What the block-sparse attention kernels of the CPU are given, and how a plan's bitmaps are read.
#pragma once

#include <cstdint>

#include "pdkernels/platform.h"

namespace pdkernels {

enum class Element { kFloat, kHalf, kBfloat16 };

// (batch, tokens, heads, head_dim) with a contiguous last dimension; strides in elements.
struct HeadsView {
  void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  template <class T>
  T* row(int64_t batch, int64_t token, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// One direction of a tile plan: for each tile of this side, the tiles of the other side that it meets. Batch strides
// are 0 where all samples share a tensor.
struct TileLists {
  const int32_t *offsets, *tiles, *bitmap_ids, *order;
  int64_t offsets_stride, tiles_stride, bitmap_ids_stride, order_stride;
  int64_t num_tiles;  // of this side
  int64_t visits;     // entries in each sample's tensor of tiles

  // Without an order: as they come.
  int64_t tile_at(int64_t batch, int64_t place) const { return order ? order[batch * order_stride + place] : place; }
  int64_t begin(int64_t batch, int64_t tile) const { return offsets[batch * offsets_stride + tile]; }
  int64_t end(int64_t batch, int64_t tile) const { return offsets[batch * offsets_stride + tile + 1]; }
  int64_t other(int64_t batch, int64_t visit) const { return tiles[batch * tiles_stride + visit]; }
  int64_t bitmap_id(int64_t batch, int64_t visit) const { return bitmap_ids[batch * bitmap_ids_stride + visit]; }
};

// Bit c % 32 of word [row][c / 32] of a bitmap is the pair (row, column c) of a tile.
struct Bitmaps {
  const uint32_t* words;
  int64_t batch_stride, count;
  int64_t block_q, words_per_row;

  // nullptr for a tile that shows all its pairs.
  const uint32_t* of(int64_t batch, int64_t id) const {
    return id < 0 ? nullptr : words + batch * batch_stride + id * block_q * words_per_row;
  }
};

struct AttentionArgs {
  Element element;
  HeadsView q, k, v, out;
  float* lse;  // (batch, q_heads, q_len), natural logarithm
  TileLists of_q, of_k;
  Bitmaps bitmaps;
  int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim, block_q, block_k;
  float scale;
};

struct AttentionGradArgs : AttentionArgs {
  HeadsView grad_out, dq, dk, dv;
  const float* grad_lse;  // like lse, or nullptr
  // (2, batch, q_heads, q_len), written by the first pass and read by the second: rowsum(grad_out * out) - grad_lse;
  // and, for float32, what makes weights computed from `lse` sum up to 1.
  float* delta;
};

PDK_KERNEL(block_sparse_attention, AttentionArgs)
PDK_TILE_KERNEL(block_sparse_attention, AttentionArgs)
PDK_KERNEL(block_sparse_attention_backward, AttentionGradArgs)
PDK_TILE_KERNEL(block_sparse_attention_backward, AttentionGradArgs)

}  // namespace pdkernels
