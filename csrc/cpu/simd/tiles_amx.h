// The same two products by AMX: C[16][16] += A[16 rows][32] B[32][16 lanes], bfloat16 products summed in float.
//
// A tiles come from packed rows or columns, B tiles from panels and weights, in which two neighbours along the summed
// dimension share a 32-bit word. Incomplete tiles are padded with zeros.
//
// Two accumulators at a time: the processor renames tiles, so it continues with the next two while these are stored.
#pragma once

#include "tiles.h"

#ifdef PDK_AMX

#ifdef __AMX_BF16__
#include <immintrin.h>
#else
#include "amx_emulation.h"
#endif

namespace pdkernels::cpu::PDK_ISA {

typedef int32_t LooseInts __attribute__((vector_size(4 * PDK_LANES), may_alias, aligned(2)));

struct AmxTiles {
  static_assert(kLanes == 16, "a tile is 16 lanes wide");
  static constexpr int kVectors = 2;
  static constexpr int kPanel = 32;
  static constexpr int kDepth = 32;  // summed by one instruction
  static constexpr int kTogether = kDepth;
  using Packed = uint16_t;

  static int64_t padded(int64_t head_dim) { return rounded_up(head_dim, kDepth); }
  static int64_t panel_size(int64_t head_dim) { return padded(head_dim) * kPanel; }
  static int64_t sums_size(int64_t head_dim) { return padded(head_dim) * kPanel; }

  // rows [kChunk][padded head_dim], columns [padded head_dim][kChunk]
  static Operand<Packed> take(Arena& arena, int64_t head_dim, bool rows, bool columns) {
    const int64_t size = kChunk * padded(head_dim);
    return {rows ? arena.take<Packed>(size) : nullptr, columns ? arena.take<Packed>(size) : nullptr};
  }

  static void pack(const Bfloat16* const* tokens, int64_t count, int64_t head_dim, Operand<Packed> to) {
    if (to.rows != nullptr) pack_rows(tokens, count, head_dim, to.rows);
    if (to.columns != nullptr) pack_columns(tokens, count, head_dim, to.columns);
  }

  // Word [d / 2][lane] holds elements d and d + 1 of the lane's token.
  static void pack_panel(const Bfloat16* const* lanes, int64_t head_dim, Packed* panel) {
    for (int64_t d = 0; d < head_dim; d += kDepth) {
      for (int half = 0; half < kPanel; half += kLanes) {
        Ints words[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const Bfloat16* token = lanes[half + lane];
          words[lane] = token == nullptr ? Ints{} : elements(token, d, head_dim);
        }
        transpose(words);
        for (int i = 0; i < kLanes; ++i)
          *reinterpret_cast<Ints*>(panel + (d / 2 + i) * 2 * kPanel + 2 * half) = words[i];
      }
    }
  }

  static void scores(const Packed* rows, const Packed* panel, int64_t head_dim, const Block* blocks, int num_blocks,
                     float* scores) {
    const int64_t depth = padded(head_dim), row_bytes = 2 * depth, lane_bytes = 4 * kPanel;
    settle_memory();
    for (int b = 0; b < num_blocks; ++b) {
      const Packed* half = rows + blocks[b].begin * depth;
      for (int i = 0; i < kBlock; i += 16, half += 16 * depth, scores += 16 * kPanel) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < depth; d += kDepth) {
          const Packed* words = panel + d * kPanel;
          _tile_loadd(2, half + d, row_bytes);
          _tile_loadd(3, words, lane_bytes);
          _tile_loadd(4, words + kPanel, lane_bytes);
          _tile_dpbf16ps(0, 2, 3);
          _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, scores, lane_bytes);
        _tile_stored(1, scores + 16, lane_bytes);
      }
    }
  }

  static void accumulate(const Packed* columns, const float* weights, int64_t head_dim, const Block* blocks,
                         int num_blocks, const Vec* factor, float* sums) {
    constexpr int64_t kColumnBytes = 2 * kChunk, kLaneBytes = 4 * kPanel;
    rescale(factor, padded(head_dim), sums);
    settle_memory();
    for (int64_t d = 0; d < head_dim; d += 16, sums += 16 * kPanel, columns += 16 * kChunk) {
      _tile_loadd(0, sums, kLaneBytes);
      _tile_loadd(1, sums + 16, kLaneBytes);
      for (int b = 0; b < num_blocks; ++b) {
        const float* words = weights + b * kBlock * kPanel;
        _tile_loadd(2, columns + blocks[b].begin, kColumnBytes);
        _tile_loadd(3, words, kLaneBytes);
        _tile_loadd(4, words + 16, kLaneBytes);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
      }
      _tile_stored(0, sums, kLaneBytes);
      _tile_stored(1, sums + 16, kLaneBytes);
    }
  }

  // Word [token / 2][lane]. It never comes after the scores of the two tokens it is made from, so it may overwrite
  // them.
  static PDK_INLINE void put_weights(float* block, int token, int v, Vec even, Vec odd) {
    const Words low = rounded_to_bfloat16(even) >> 16, high = rounded_to_bfloat16(odd) & 0xffff0000u;
    reinterpret_cast<Words*>(block + token / 2 * kPanel)[v] = low | high;
  }
  static void pad_weights(float* block, int count) {
    for (int pair = (count + 1) / 2; pair < kBlock / 2; ++pair) {
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<Ints*>(block + pair * kPanel)[v] = Ints{};
    }
  }

  static PDK_INLINE Vec weight(const float* block, int token, int v) {
    const Words words = reinterpret_cast<const Words*>(block + token / 2 * kPanel)[v];
    return reinterpret_cast<Vec>(token % 2 ? words & 0xffff0000u : words << 16);
  }

  // Configures the tiles for its lifetime: 16 rows of 64 bytes each.
  struct Session {
    Session() {
      // Static, because compilers do not know that the instruction reads all of it.
      struct alignas(64) Shapes {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      static constexpr Shapes kShapes{};
      static_assert(sizeof(Shapes) == 64);
      _tile_loadconfig(&kShapes);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

 private:
  // Compilers do not know that tile loads read memory: all stores must be done before the first of them.
  static PDK_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

  static void pack_rows(const Bfloat16* const* tokens, int64_t count, int64_t head_dim, Packed* rows) {
    const int64_t depth = padded(head_dim);
    for (int64_t i = 0; i < count; ++i, rows += depth) {
      __builtin_memcpy(rows, tokens[i], 2 * head_dim);
      __builtin_memset(rows + head_dim, 0, 2 * (depth - head_dim));
    }
    __builtin_memset(rows, 0, 2 * depth * (rounded_up(count, kBlock) - count));
  }

  static void pack_columns(const Bfloat16* const* tokens, int64_t count, int64_t head_dim, Packed* columns) {
    for (int64_t token = 0; token < count; token += kBlock) {
      for (int64_t d = 0; d < padded(head_dim); d += kDepth) {
        Ints low[kLanes], high[kLanes];  // [pair of tokens][d], of each word's low half and of its high half
        for (int i = 0; i < kLanes; ++i) {
          const int64_t at = token + 2 * i;
          const Words even = at < count ? reinterpret_cast<Words>(elements(tokens[at], d, head_dim)) : Words{};
          const Words odd = at + 1 < count ? reinterpret_cast<Words>(elements(tokens[at + 1], d, head_dim)) : Words{};
          low[i] = reinterpret_cast<Ints>((even & 0xffffu) | odd << 16);
          high[i] = reinterpret_cast<Ints>(even >> 16 | (odd & 0xffff0000u));
        }
        transpose(low);
        transpose(high);
        for (int i = 0; i < kLanes; ++i) {
          *reinterpret_cast<Ints*>(columns + (d + 2 * i) * kChunk + token) = low[i];
          *reinterpret_cast<Ints*>(columns + (d + 2 * i + 1) * kChunk + token) = high[i];
        }
      }
    }
  }

  // 32 elements of a token from d on.
  static PDK_INLINE Ints elements(const Bfloat16* token, int64_t d, int64_t head_dim) {
    Ints words{};
    if (head_dim - d >= kDepth) {
      words = *reinterpret_cast<const LooseInts*>(token + d);
    } else {
      __builtin_memcpy(&words, token + d, 2 * (head_dim - d));
    }
    return words;
  }

  // In the upper half of each word; halves go up. Weights are finite or NaN with the highest bits of the fraction set,
  // so nothing overflows.
  static PDK_INLINE Words rounded_to_bfloat16(Vec x) { return reinterpret_cast<Words>(x) + 0x8000u; }

  static void rescale(const Vec* factor, int64_t depth, float* sums) {
    bool changed = false;
    for (int v = 0; v < kVectors; ++v) {
      const Ints other = factor[v] != 1.0f;
      for (int lane = 0; lane < kLanes; ++lane) changed |= other[lane] != 0;
    }
    for (int64_t d = 0; changed && d < depth; ++d) {
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<Vec*>(sums + d * kPanel)[v] *= factor[v];
    }
  }
};

}  // namespace pdkernels::cpu::PDK_ISA

#endif
