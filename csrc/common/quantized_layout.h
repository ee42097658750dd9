// How a quantised matrix lies in memory.
#pragma once

#include "common/platform.h"

namespace pdkernels {

// reference/quantized_linear.py has the same in PyTorch.
//
// Sixteen outputs make a tile, whose codes are interleaved so that a vector holds one output in each lane. The width is
// cut into blocks of 32, one or more of which make a group that shares scales. A tile is the headers of its groups,
// padded to 64 bytes, and then the codes of its blocks: for each four columns a 64-byte run of four bytes an output.
struct QuantizedLayout {
  // Of a group's scales.
  enum Scales : int {
    kHalf,      // float16 a group
    kHalfMin,   // float16 and the value of code 0, float16, a group
    kSuper,     // two float16 for 256 columns; a block has 8-bit multiples of them: the scale, and minus the minimum
    kSuper16,   // float16 for 256 columns; half a block has a signed 8-bit multiple of it
    kFloat,     // float32 a group
    kHalfZero,  // float16 and the code of zero, uint8, a group
    kFloatZero  // float32 and the code of zero, uint8, a group
  };

  static constexpr int kTile = 16, kBlock = 32, kMaxSuperBlocks = 8;

  Scales scales;
  int bits;              // of a code: 4, 5, 6 or 8
  int64_t group_blocks;  // blocks in a group; 0: the whole width

  PDK_HD int zero() const {  // the code of zero where it is the same everywhere
    switch (scales) {
      case kHalfMin:
      case kSuper:
      case kHalfZero:
      case kFloatZero: return 0;
      default: return 1 << (bits - 1);
    }
  }
  PDK_HD bool has_zeros() const { return scales == kHalfZero || scales == kFloatZero; }
  PDK_HD bool has_minimum() const { return scales == kHalfMin || scales == kSuper; }
  PDK_HD int64_t blocks(int64_t width) const { return (width + kBlock - 1) / kBlock; }
  PDK_HD int64_t blocks_of_group(int64_t width) const { return group_blocks > 0 ? group_blocks : blocks(width); }
  PDK_HD int64_t groups(int64_t width) const {
    const int64_t size = blocks_of_group(width);
    return size > 0 ? (blocks(width) + size - 1) / size : 0;
  }
  PDK_HD int header_bytes() const {  // of a group
    switch (scales) {
      case kHalf: return 2 * kTile;
      case kHalfMin: return 4 * kTile;
      case kSuper: return (4 + 2 * kMaxSuperBlocks) * kTile;
      case kSuper16: return (2 + 2 * kMaxSuperBlocks) * kTile;
      case kFloat: return 4 * kTile;
      case kHalfZero: return 3 * kTile;
      case kFloatZero: return 5 * kTile;
    }
    return 0;
  }
  PDK_HD int code_bytes() const { return kTile * kBlock / 8 * bits; }  // of a block
  PDK_HD int64_t headers(int64_t width) const { return (groups(width) * header_bytes() + 63) / 64 * 64; }
  PDK_HD int64_t tile_bytes(int64_t width) const { return headers(width) + blocks(width) * code_bytes(); }
  PDK_HD static int64_t tiles(int64_t outputs) { return (outputs + kTile - 1) / kTile; }

  // As a schema carries it; false for numbers that no layout has.
  static bool unpack(int64_t number, QuantizedLayout& layout) {
    layout.scales = static_cast<Scales>(number & 15);
    layout.bits = static_cast<int>(number >> 4 & 15);
    layout.group_blocks = number >> 8;
    if (number < 0 || layout.group_blocks > int64_t{1} << 40) return false;
    const int bits = layout.bits;
    switch (layout.scales) {
      case kHalf: return layout.group_blocks == 1 && (bits == 4 || bits == 5 || bits == 8);
      case kHalfMin: return layout.group_blocks == 1 && (bits == 4 || bits == 5);
      case kSuper: return layout.group_blocks == kMaxSuperBlocks && (bits == 4 || bits == 5);
      case kSuper16: return layout.group_blocks == kMaxSuperBlocks && bits == 6;
      case kFloat:
      case kHalfZero:
      case kFloatZero: return bits == 4 || bits == 8;
    }
    return false;
  }
};

}  // namespace pdkernels
