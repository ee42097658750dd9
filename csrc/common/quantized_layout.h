// How a quantised matrix lies in memory.
#pragma once

#include "common/quantized_formats.h"

namespace pdkernels {

// reference/quantized_linear.py has the same in PyTorch.
//
// Sixteen outputs make a tile, whose codes are interleaved so that a vector holds one output in each lane. The width is
// cut into blocks of 32, one or more of which make a group that shares scales. A tile is the headers of its groups,
// padded to 64 bytes, and then the codes of its blocks: for each four columns a 64-byte run of four bytes an output.
struct QuantizedLayout {
  static constexpr int kTile = 16, kBlock = 32;

  QuantizedScales::Kind scales;
  int bits;              // of a code: 4, 5, 6 or 8
  int64_t group_blocks;  // blocks in a group; 0: the whole width
  // Whether products leave the rows of x as they are; otherwise they are quantised to 8 bits. Memory is the same.
  bool number_rows = false;

  constexpr const QuantizedScales& fields() const { return kQuantizedScales[scales]; }
  constexpr int zero() const {  // the code of zero where it is the same everywhere
    return fields().minimum || fields().zero ? 0 : 1 << (bits - 1);
  }
  // Where a header has each field, in bytes; `lane` is an output of the tile.
  constexpr int minimum_at() const { return fields().scale_bytes * kTile; }
  constexpr int zero_at() const { return minimum_at() + (fields().minimum ? 2 * kTile : 0); }
  constexpr int multiples_at() const { return zero_at() + (fields().zero ? kTile : 0); }
  constexpr int header_bytes() const { return multiples_at() + fields().multiples * kTile; }  // of a group

  PDK_HD constexpr int64_t blocks(int64_t width) const { return (width + kBlock - 1) / kBlock; }
  PDK_HD constexpr int64_t blocks_of_group(int64_t width) const {
    return group_blocks > 0 ? group_blocks : blocks(width);
  }
  PDK_HD constexpr int64_t groups(int64_t width) const {
    const int64_t size = blocks_of_group(width);
    return size > 0 ? (blocks(width) + size - 1) / size : 0;
  }
  PDK_HD constexpr int code_bytes() const { return kTile * kBlock / 8 * bits; }  // of a block
  constexpr int64_t headers(int64_t width) const { return (groups(width) * header_bytes() + 63) / 64 * 64; }
  constexpr int64_t tile_bytes(int64_t width) const { return headers(width) + blocks(width) * code_bytes(); }
  PDK_HD static constexpr int64_t tiles(int64_t outputs) { return (outputs + kTile - 1) / kTile; }

  // As a schema carries it; false for numbers that no layout has.
  static bool unpack(int64_t number, QuantizedLayout& layout) {
    constexpr int64_t number_rows = int64_t{1} << 56;
    layout.number_rows = (number & number_rows) != 0;
    number &= ~number_rows;
    layout.scales = static_cast<QuantizedScales::Kind>(number & 15);
    layout.bits = static_cast<int>(number >> 4 & 15);
    layout.group_blocks = number >> 8;
    if (number < 0 || layout.group_blocks > int64_t{1} << 40) return false;
    bool is_kind = false;
    for (const QuantizedKind& kind : kQuantizedKinds) {
      is_kind = is_kind || (kind.scales == layout.scales && kind.bits == layout.bits);
    }
    return is_kind && (layout.fields().group_blocks == 0 || layout.fields().group_blocks == layout.group_blocks);
  }
};

}  // namespace pdkernels
