// Codes and scales of a matrix to the order in which products read them, and back.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/quantized_layout.h"

namespace pdkernels {

// Words of four codes in a block.
constexpr int kRuns = QuantizedLayout::kBlock / 4;
constexpr uint32_t kLowHalves = 0x0f0f0f0fu;

inline uint32_t word_at(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// Writes the codes of a block of an output: bytes, or halves of bytes and then what is above four bits.
inline void write_codes(const uint32_t (&codes)[kRuns], int bits, uint8_t* to) {
  uint32_t words[kRuns] = {};
  int count = kRuns;
  if (bits == 8) {
    std::memcpy(words, codes, sizeof(words));
  } else {
    const int more = bits - 4, each = more > 0 ? 8 / more : 0;
    for (int i = 0; i < kRuns / 2; ++i) words[i] = (codes[i] & kLowHalves) | (codes[i + kRuns / 2] & kLowHalves) << 4;
    for (int i = 0; more > 0 && i < kRuns; ++i) {
      words[kRuns / 2 + i / each] |= (codes[i] >> 4 & kLowHalves) << (more * (i % each));
    }
    count = kRuns / 2 + more;
  }
  for (int i = 0; i < count; ++i) std::memcpy(to + i * 4 * QuantizedLayout::kTile, words + i, 4);
}

// The inverse of `write_codes`.
inline void read_codes(const uint8_t* from, int bits, uint32_t (&codes)[kRuns]) {
  const auto stored = [&](int i) { return word_at(from + i * 4 * QuantizedLayout::kTile); };
  const int more = bits - 4, each = more > 0 ? 8 / more : 0;
  const uint32_t mask = ((1u << more) - 1) * 0x01010101u;
  for (int i = 0; i < kRuns; ++i) {
    if (bits == 8) {
      codes[i] = stored(i);
      continue;
    }
    codes[i] = stored(i % (kRuns / 2)) >> (i / (kRuns / 2) * 4) & kLowHalves;
    if (more > 0) codes[i] |= (stored(kRuns / 2 + i / each) >> (more * (i % each)) & mask) << 4;
  }
}

// A field of the headers: numbers of `bytes` bytes, `count` for each output of a group.
struct QuantizedField {
  const char* name;
  int bytes, count;
};

// Those of a kind, as they follow each other in a header.
inline std::vector<QuantizedField> fields_of(const QuantizedScales& scales) {
  std::vector<QuantizedField> fields{{"scale", scales.scale_bytes, 1}};
  if (scales.minimum) fields.push_back({"minimum", 2, 1});
  if (scales.zero) fields.push_back({"zero", 1, 1});
  if (scales.multiples > 0) fields.push_back({"multiples", 1, scales.multiples});
  return fields;
}

// A matrix of codes (outputs, 32 blocks), a byte each, and the fields of its groups, (outputs, groups, count) each.
struct QuantizedMatrixView {
  QuantizedLayout layout;
  int64_t outputs, width;
  uint8_t* codes;
  std::vector<uint8_t*> fields;  // as `fields_of` has them

  int64_t code_bytes() const { return outputs * layout.blocks(width) * QuantizedLayout::kBlock; }
  int64_t field_bytes(const QuantizedField& field) const {
    return outputs * layout.groups(width) * field.bytes * field.count;
  }
  int64_t packed_bytes() const { return QuantizedLayout::tiles(outputs) * layout.tile_bytes(width); }

  void pack(uint8_t* packed) const {
    std::memset(packed, 0, packed_bytes());
    each_block(packed, [&](uint8_t* stored, uint8_t* own) {
      uint32_t words[kRuns];
      std::memcpy(words, own, sizeof(words));
      write_codes(words, layout.bits, stored);
    });
    each_number(packed, [](uint8_t* stored, uint8_t* own, int bytes) { std::memcpy(stored, own, bytes); });
  }

  void unpack(const uint8_t* packed) const {
    each_block(packed, [&](const uint8_t* stored, uint8_t* own) {
      uint32_t words[kRuns];
      read_codes(stored, layout.bits, words);
      std::memcpy(own, words, sizeof(words));
    });
    each_number(packed, [](const uint8_t* stored, uint8_t* own, int bytes) { std::memcpy(own, stored, bytes); });
  }

 private:
  static constexpr int kTile = QuantizedLayout::kTile;

  // Calls body(where it is packed, where it is in `codes`) for the codes of each block of each output.
  template <class Byte, class Body>
  void each_block(Byte* packed, const Body& body) const {
    const int64_t blocks = layout.blocks(width), tile_bytes = layout.tile_bytes(width);
    const int64_t headers = layout.headers(width);
    uint8_t* own = codes;
    for (int64_t o = 0; o < outputs; ++o) {
      Byte* stored = packed + o / kTile * tile_bytes + headers + 4 * (o % kTile);
      for (int64_t b = 0; b < blocks; ++b, stored += layout.code_bytes(), own += QuantizedLayout::kBlock) {
        body(stored, own);
      }
    }
  }

  // Calls body(where it is packed, where it is in `fields`, bytes) for the numbers of each group of each output.
  template <class Byte, class Body>
  void each_number(Byte* packed, const Body& body) const {
    const int64_t groups = layout.groups(width), tile_bytes = layout.tile_bytes(width);
    int first = 0;  // of the field, in a header
    auto field_memory = fields.begin();
    for (const QuantizedField& field : fields_of(layout.fields())) {
      uint8_t* own = *field_memory++;
      for (int64_t o = 0; o < outputs; ++o) {
        Byte* stored = packed + o / kTile * tile_bytes + first + o % kTile * field.bytes;
        for (int64_t g = 0; g < groups; ++g, stored += layout.header_bytes()) {
          for (int i = 0; i < field.count; ++i, own += field.bytes)
            body(stored + i * kTile * field.bytes, own, field.bytes);
        }
      }
      first += field.count * kTile * field.bytes;
    }
  }
};

}  // namespace pdkernels
