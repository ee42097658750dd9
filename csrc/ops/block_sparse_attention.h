// Arguments of the CPU kernels of block-sparse attention, and how a plan's bitmaps are read.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/platform.h"

namespace pdkernels {

// (batch, tokens, heads, head_dim) with a contiguous last dimension; strides in elements.
struct HeadsView {
  void* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  template <class T>
  T* row(int64_t batch, int64_t token, int64_t head) const {
    return static_cast<T*>(data) + batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// Two words of a plan's lists: a range [first, second) of full tiles, or a tile and the number of its bitmap.
struct TilePair {
  int32_t first, second;
};

// One direction of a tile plan, in the layout of tile_plan.h: for each tile of this side, the tiles of the other side
// that it visits.
struct TileLists {
  struct Pairs {
    const TilePair *first, *last;
    const TilePair* begin() const { return first; }
    const TilePair* end() const { return last; }
  };

  const int32_t* rows;    // four words per tile
  int64_t rows_stride;    // from sample to sample, 0 if all share them
  int64_t num_tiles;      // of this side
  const TilePair* pairs;  // of both sides and all samples
  int64_t num_pairs;

  const int32_t* row(int64_t batch, int64_t tile) const { return rows + batch * rows_stride + 4 * tile; }
  int64_t tile_at(int64_t batch, int64_t rank) const { return row(batch, rank)[3]; }
  Pairs full(int64_t batch, int64_t tile) const {
    const int32_t* at = row(batch, tile);
    return {pairs + at[0], pairs + at[1]};
  }
  Pairs others(int64_t batch, int64_t tile) const {
    const int32_t* at = row(batch, tile);
    return {pairs + at[1], pairs + at[2]};
  }
};

// Bit c % 32 of word [row][c / 32] of a bitmap is the pair (row, column c) of a tile.
struct Bitmaps {
  const uint32_t* words;
  int64_t count, block_q, words_per_row;

  // nullptr for a tile whose pairs are all visible.
  const uint32_t* of(int64_t id) const { return id < 0 ? nullptr : words + id * block_q * words_per_row; }
};

struct AttentionArgs {
  Element element;
  HeadsView q, k, v, out;
  float* lse;          // (batch, q_heads, q_len), natural logarithm
  int64_t lse_stride;  // from head to head: q_len, or the rows of all sequences where they are packed
  TileLists of_q, of_k;
  Bitmaps bitmaps;
  int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim, block_q, block_k;
  float scale;
  float softcap;       // scores lie between its negative and it: softcap tanh(score / softcap); 0: anywhere
  const float* sinks;  // of each head, a score without a value that every row sees; or nullptr
  int64_t sinks_stride;

  float sink(int64_t head) const { return sinks[head * sinks_stride]; }
};

struct AttentionGradArgs : AttentionArgs {
  HeadsView grad_out, dq, dk, dv;
  const float* grad_lse;  // like lse, or nullptr
  // (2, batch, q_heads, q_len), written by the first pass and read by the second: rowsum(grad_out * out) - grad_lse;
  // and, for float32, what makes weights computed from `lse` sum up to 1.
  float* delta;
};

PDK_KERNEL(block_sparse_attention, AttentionArgs)
PDK_AMX_KERNEL(block_sparse_attention, AttentionArgs)
PDK_KERNEL(block_sparse_attention_backward, AttentionGradArgs)
PDK_AMX_KERNEL(block_sparse_attention_backward, AttentionGradArgs)

}  // namespace pdkernels
