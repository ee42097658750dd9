// The quantised blocks of GGUF files in the order in which products read them: bits are moved, no number changes.
//
// Source: the block structures of ggml-common.h in github.com/ggml-org/ggml.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "host/quantized_packing.h"

namespace pdkernels {

class GgufBlocks {
 public:
  explicit GgufBlocks(const std::string& name) {
    for (const QuantizedFormat& format : kQuantizedFormats) {
      if (name != format.name) continue;
      layout = {format.scales, format.bits, kQuantizedScales[format.scales].group_blocks};
      group_bytes_ = format.group_bytes;
    }
    if (group_bytes_ == 0) throw std::invalid_argument("pdkernels: GGUF has no packed format '" + name + "'.");
  }

  QuantizedLayout layout{};

  int64_t source_bytes(int64_t outputs, int64_t width) const { return outputs * layout.groups(width) * group_bytes_; }
  int64_t target_bytes(int64_t outputs, int64_t width) const {
    return QuantizedLayout::tiles(outputs) * layout.tile_bytes(width);
  }

  // `order[o]` is the row of the source that becomes output o; nullptr: o. The number of scales that are not finite.
  int64_t pack(const uint8_t* source, const int64_t* order, int64_t outputs, int64_t width, uint8_t* target) const {
    const int64_t groups = layout.groups(width), tile_bytes = layout.tile_bytes(width);
    const int64_t size = layout.group_blocks;
    int64_t wrong = 0;
    std::memset(target, 0, target_bytes(outputs, width));
    for (int64_t o = 0; o < outputs; ++o) {
      const uint8_t* from = source + (order == nullptr ? o : order[o]) * groups * group_bytes_;
      uint8_t* tile = target + o / kTile * tile_bytes;
      const int lane = static_cast<int>(o % kTile);
      uint8_t* codes = tile + layout.headers(width) + 4 * lane;
      for (int64_t group = 0; group < groups; ++group, from += group_bytes_) {
        wrong += write_header(from, tile + group * layout.header_bytes(), lane);
        for (int block = 0; block < size; ++block, codes += layout.code_bytes()) {
          uint32_t words[kRuns];
          read_block(from, block, words);
          write_codes(words, layout.bits, codes);
        }
      }
    }
    return wrong;
  }

 private:
  static constexpr int kTile = QuantizedLayout::kTile;

  int group_bytes_ = 0;

  static int put_half(const uint8_t* from, uint8_t* to) {
    std::memcpy(to, from, 2);
    return (from[1] & 0x7c) == 0x7c;  // all bits of the exponent: infinity or NaN
  }

  int write_header(const uint8_t* group, uint8_t* header, int lane) const {
    const QuantizedScales& fields = layout.fields();
    uint8_t* multiples = header + layout.multiples_at() + lane;
    if (fields.halves) {
      for (int i = 0; i < fields.multiples; ++i) multiples[i * kTile] = group[192 + i];
      return put_half(group + 208, header + 2 * lane);
    }
    int wrong = put_half(group, header + 2 * lane);
    if (fields.minimum) wrong += put_half(group + 2, header + layout.minimum_at() + 2 * lane);
    if (fields.multiples == 0) return wrong;
    // Six bits each: those of the last four blocks are completed by the upper bits of the first four.
    const uint8_t* packed = group + 4;
    for (int block = 0; block < 8; ++block) {
      const int i = block % 4;
      const int scale = block < 4 ? packed[i] & 63 : (packed[i + 8] & 15) | packed[i] >> 6 << 4;
      const int minimum = block < 4 ? packed[i + 4] & 63 : packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
      multiples[2 * block * kTile] = static_cast<uint8_t>(scale);
      multiples[(2 * block + 1) * kTile] = static_cast<uint8_t>(minimum);
    }
    return wrong;
  }

  // Four codes a word, in ascending order.
  void read_block(const uint8_t* group, int block, uint32_t (&codes)[kRuns]) const {
    if (layout.fields().halves) {
      const uint8_t *low = group + 64 * (block / 4) + 32 * (block & 1), *high = group + 128 + 32 * (block / 4);
      const int shift = block % 4;
      for (int i = 0; i < kRuns; ++i) {
        codes[i] = (word_at(low + 4 * i) >> (shift / 2 * 4) & kLowHalves) |
                   (word_at(high + 4 * i) >> (2 * shift) & 0x03030303u) << 4;
      }
    } else if (layout.fields().multiples > 0) {
      const uint8_t *high = group + 16, *low = high + (layout.bits == 5 ? 32 : 0) + 32 * (block / 2);
      for (int i = 0; i < kRuns; ++i) {
        codes[i] = word_at(low + 4 * i) >> (block % 2 * 4) & kLowHalves;
        if (layout.bits == 5) codes[i] |= (word_at(high + 4 * i) >> block & 0x01010101u) << 4;
      }
    } else if (layout.bits == 8) {
      for (int i = 0; i < kRuns; ++i) codes[i] = word_at(group + 2 + 4 * i) ^ 0x80808080u;
    } else {
      const uint8_t* bits = group + (layout.fields().minimum ? 4 : 2);
      const uint8_t* low = bits + (layout.bits == 5 ? 4 : 0);
      for (int i = 0; i < kRuns / 2; ++i) {
        const uint32_t both = word_at(low + 4 * i);
        codes[i] = both & kLowHalves, codes[i + kRuns / 2] = both >> 4 & kLowHalves;
      }
      if (layout.bits != 5) return;
      const uint32_t fifth = word_at(bits);
      // Bit n of four goes to byte n.
      for (int i = 0; i < kRuns; ++i) codes[i] |= ((fifth >> (4 * i) & 15u) * 0x00204081u & 0x01010101u) << 4;
    }
  }
};

}  // namespace pdkernels
