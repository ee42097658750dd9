// Which blocks of a chunk a panel visits, derived from a tile's bitmap.
#pragma once

#include "ops/block_sparse_attention.h"
#include "tiles.h"

namespace pdkernels::cpu::PDK_ISA {

// Which tokens are in a panel's lanes. Those of all query heads that share a KV head follow each other, head by head.
struct Lanes {
  int32_t count;                    // lanes in use
  int32_t first_head, first_token;  // of lane 0: its head in the group, its token in the tile
  int32_t tokens;                   // that a head has in the tile

  static Lanes from(int64_t first, int64_t count, int64_t tokens) {
    return {static_cast<int32_t>(count), static_cast<int32_t>(first / tokens), static_cast<int32_t>(first % tokens),
            static_cast<int32_t>(tokens)};
  }

  PDK_INLINE void locate(int lane, int32_t& head, int32_t& token) const {
    const int32_t flat = first_token + lane;
    head = first_head + flat / tokens;
    token = flat % tokens;
  }
};

// The blocks of `count` columns from `column` on that are visible to lanes of bitmap rows. Lanes are rows of the
// bitmap.
template <class Tiles>
int blocks_of_rows(const uint32_t* bitmap, int64_t words_per_row, const Lanes& lanes, int64_t column, int64_t count,
                   Block* blocks, Ints* visible) {
  int found = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int32_t size = static_cast<int32_t>(smaller(kBlock, count - begin));
    if (bitmap == nullptr) {
      blocks[found++] = {static_cast<int32_t>(begin), size, nullptr};
      continue;
    }
    const uint32_t all = size == 32 ? ~0u : (1u << size) - 1;
    uint32_t any_visible = 0, all_visible = all;
    Ints words[Tiles::kVectors] = {};
    for (int lane = 0; lane < lanes.count; ++lane) {
      int32_t head, token;
      lanes.locate(lane, head, token);
      const uint32_t word = bitmap[token * words_per_row + (column + begin) / 32] & all;
      any_visible |= word;
      all_visible &= word;
      words[lane / kLanes][lane % kLanes] = static_cast<int32_t>(word);
    }
    if (any_visible == 0) continue;
    if (all_visible == all) {
      blocks[found++] = {static_cast<int32_t>(begin), size, nullptr};
      continue;
    }
    for (int32_t j = 0; j < size; ++j) {
      for (int v = 0; v < Tiles::kVectors; ++v) visible[j * Tiles::kVectors + v] = (words[v] << (31 - j)) >> 31;
    }
    blocks[found++] = {static_cast<int32_t>(begin), size, visible};
    visible += kBlock * Tiles::kVectors;
  }
  return found;
}

// The same transposed: lanes are `lanes` columns from `column` on, and `count` bitmap rows from `row` on run
// down.
template <class Tiles>
int blocks_of_columns(const uint32_t* bitmap, int64_t words_per_row, int64_t column, int32_t lanes, int64_t row,
                      int64_t count, Block* blocks, Ints* visible) {
  // A vector's columns are in one word: it begins at a multiple of kLanes, and kLanes divides 32.
  uint32_t all[Tiles::kVectors];
  for (int v = 0; v < Tiles::kVectors; ++v) {
    const int32_t used = lanes - v * kLanes;
    all[v] = used <= 0 ? 0 : used >= kLanes ? ~0u >> (32 - kLanes) : (1u << used) - 1;
  }
  int found = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int32_t size = static_cast<int32_t>(smaller(kBlock, count - begin));
    bool any_visible = bitmap == nullptr, all_visible = true;
    for (int32_t j = 0; bitmap != nullptr && j < size; ++j) {
      const uint32_t* words = bitmap + (row + begin + j) * words_per_row;
      for (int v = 0; v < Tiles::kVectors && all[v] != 0; ++v) {
        const int64_t at = column + v * kLanes;
        const uint32_t bits = words[at / 32] >> at % 32 & all[v];
        any_visible |= bits != 0;
        all_visible &= bits == all[v];
        visible[j * Tiles::kVectors + v] = (splat(static_cast<int32_t>(bits)) << (31 - lane_numbers())) >> 31;
      }
    }
    if (!any_visible) continue;
    blocks[found++] = {static_cast<int32_t>(begin), size, all_visible ? nullptr : visible};
    if (!all_visible) visible += kBlock * Tiles::kVectors;
  }
  return found;
}

}  // namespace pdkernels::cpu::PDK_ISA
