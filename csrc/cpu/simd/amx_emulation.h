// The AMX instructions in plain C++, for tests on processors that lack them.
//
// Like the instructions: subnormal operands count as zero, sums that become subnormal are flushed, and memory is only
// touched inside the configured rows and bytes. The order in which products are summed differs from the processor's.
#pragma once

#include <cstdint>

namespace pdkernels::cpu::PDK_ISA {

struct EmulatedTiles {
  uint8_t rows[8] = {};
  uint16_t row_bytes[8] = {};
  alignas(64) uint8_t bytes[8][16][64];
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x; }

inline void _tile_loadconfig(const void* from) {
  EmulatedTiles& tiles = emulated_tiles();
  const auto* bytes = static_cast<const uint8_t*>(from);
  __builtin_memcpy(tiles.row_bytes, bytes + 16, sizeof(tiles.row_bytes));
  __builtin_memcpy(tiles.rows, bytes + 48, sizeof(tiles.rows));
  if (bytes[0] != 1) __builtin_trap();
}

inline void _tile_release() { emulated_tiles() = EmulatedTiles{}; }

inline void _tile_zero(int tile) {
  __builtin_memset(emulated_tiles().bytes[tile], 0, sizeof(emulated_tiles().bytes[tile]));
}

inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  EmulatedTiles& tiles = emulated_tiles();
  if (tiles.rows[tile] == 0) __builtin_trap();  // no configuration: the processor would trap here too
  _tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    __builtin_memcpy(tiles.bytes[tile][row], static_cast<const uint8_t*>(from) + row * stride, tiles.row_bytes[tile]);
  }
}

inline void _tile_stored(int tile, void* to, int64_t stride) {
  const EmulatedTiles& tiles = emulated_tiles();
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    __builtin_memcpy(static_cast<uint8_t*>(to) + row * stride, tiles.bytes[tile][row], tiles.row_bytes[tile]);
  }
}

inline void _tile_dpbf16ps(int sums, int a, int b) {
  EmulatedTiles& tiles = emulated_tiles();
  const auto element = [&](int tile, int row, int at) {
    uint16_t bits;
    __builtin_memcpy(&bits, tiles.bytes[tile][row] + 2 * at, 2);
    return flushed(__builtin_bit_cast(float, uint32_t{bits} << 16));
  };
  for (int m = 0; m < tiles.rows[sums]; ++m) {
    for (int n = 0; n < tiles.row_bytes[sums] / 4; ++n) {
      float sum;
      __builtin_memcpy(&sum, tiles.bytes[sums][m] + 4 * n, 4);
      for (int k = 0; k < tiles.row_bytes[a] / 4; ++k) {
        for (int i = 0; i < 2; ++i) sum = flushed(sum + element(a, m, 2 * k + i) * element(b, k, 2 * n + i));
      }
      __builtin_memcpy(tiles.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

// Signed bytes of `a` with unsigned ones of `b`.
inline void _tile_dpbsud(int sums, int a, int b) {
  EmulatedTiles& tiles = emulated_tiles();
  for (int m = 0; m < tiles.rows[sums]; ++m) {
    for (int n = 0; n < tiles.row_bytes[sums] / 4; ++n) {
      int32_t sum;
      __builtin_memcpy(&sum, tiles.bytes[sums][m] + 4 * n, 4);
      for (int k = 0; k < tiles.row_bytes[a]; ++k) {
        sum += static_cast<int8_t>(tiles.bytes[a][m][k]) * tiles.bytes[b][k / 4][4 * n + k % 4];
      }
      __builtin_memcpy(tiles.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
