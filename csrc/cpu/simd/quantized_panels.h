// Products of many rows with a quantised matrix: the codes of some tiles are unpacked once for all rows. Units that
// multiply matrices of bytes, AMX on x86-64 and the i8mm instructions on arm64, read them in an order of their own. The
// products of a block are whole numbers and so the same as those of other instructions.
#pragma once

#include "quantized_products.h"

#ifdef PDK_AMX
#ifdef __AMX_INT8__
#include <immintrin.h>
#else
#include "amx_emulation.h"
#endif
#endif

namespace pdkernels::cpu::PDK_ISA {
namespace {

class PanelsBase {
 public:
  // Of unpacked codes of the tiles that are multiplied together.
  static constexpr int64_t bytes(int64_t blocks) { return blocks * kTiles * Layout::kTile * Layout::kBlock; }

  static constexpr bool kUnpacked = true;
  template <int bits>
  static constexpr bool kTakes = true;
  template <int bits>
  static constexpr bool kSigned = false;

  // Before the blocks of some rows, in the same order for all rows.
  PDK_INLINE void begin() { next_ = memory_; }

 protected:
  static constexpr int64_t kVectorBytes = 4 * kLanes * kRuns;  // of a block

  explicit PanelsBase(uint8_t* memory) : memory_(memory), next_(memory) {}

  // Calls unpack_block(to, block) for each vector of the codes of tiles, in the order in which they are multiplied.
  template <int bits, class Body>
  PDK_INLINE void for_blocks(const Tiles& tiles, int64_t blocks, const Body& unpack_block) const {
    constexpr int lanes = kInTile > 1 ? kVectors * kLanes : kLanes;
    uint8_t* to = memory_;
    for (int lane = 0; lane < Layout::kTile; lane += lanes) {
      const uint8_t* block = tiles.data + tiles.headers + 4 * lane;
      for (int64_t b = 0; b < blocks; ++b, block += Layout::kTile * Layout::kBlock / 8 * bits) {
        for (int v = 0; v < kVectors; ++v, to += kVectorBytes) {
          unpack_block(to, block + tiles.tile_at(v) + 4 * Tiles::lane_at(v));
        }
      }
    }
  }
  PDK_INLINE void take_next(const uint8_t* (&blocks)[kVectors]) {
    for (int v = 0; v < kVectors; ++v, next_ += kVectorBytes) blocks[v] = next_;
  }

  uint8_t *memory_, *next_;
};

// A vector of each run after the other.
template <int bits>
PDK_INLINE void unpack_runs(uint8_t* to, const uint8_t* block) {
#pragma GCC unroll 8
  for (int run = 0; run < kRuns; ++run) {
    *reinterpret_cast<LooseWords*>(to + 4 * kLanes * run) = unpack<bits>(block, run);
  }
}

#ifdef PDK_AMX

// Tiles 0 and 1: sums. 2: rows of x. 3 and 4: codes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr explicit TileShapes(int runs) {
    for (int tile = 0; tile < 5; ++tile) {
      row_bytes[tile] = static_cast<uint16_t>(tile == 2 ? 4 * runs : kRunBytes);
      rows[tile] = static_cast<uint8_t>(tile < 3 ? kRows : runs);
    }
  }
};
static_assert(sizeof(TileShapes) == 64);

// A run of four columns is a row of a tile as it lies in memory: 16 outputs, a word each. Rows of x are 8 of a tile.
class FromPanels : public PanelsBase {
 public:
  // With fewer, unpacked codes are not read often enough.
  static constexpr int64_t kMinRows = 16;

  // `halves`: whether the products of half a block are asked for.
  FromPanels(uint8_t* memory, bool halves) : PanelsBase(memory) {
    // Static, because compilers do not know that the instruction reads all of it.
    static constexpr TileShapes kWhole(kRuns), kHalf(kRuns / 2);
    _tile_loadconfig(halves ? &kHalf : &kWhole);
  }
  ~FromPanels() { _tile_release(); }
  FromPanels(const FromPanels&) = delete;
  FromPanels& operator=(const FromPanels&) = delete;

  template <int bits>
  void fill(const Tiles& tiles, int64_t blocks) const {
    if constexpr (bits != 8) for_blocks<bits>(tiles, blocks, unpack_runs<bits>);
  }
  template <int bits>
  PDK_INLINE void take(const uint8_t* (&blocks)[kVectors]) {
    if constexpr (bits != 8) take_next(blocks);
  }

  template <int bits, int first, int last>
  PDK_INLINE void add(Ints (&sums)[kVectors][kRows], const uint8_t* const (&blocks)[kVectors],
                      const QuantizedBlock* x) const {
    alignas(64) int32_t found[kVectors][kRows][Layout::kTile];
    settle_memory();
    _tile_loadd(2, x->codes + 4 * first, sizeof(QuantizedBlock));
    _tile_zero(0);
    _tile_loadd(3, blocks[0] + first * kRunBytes, kRunBytes);
    _tile_dpbsud(0, 2, 3);
    _tile_zero(1);
    _tile_loadd(4, blocks[1] + first * kRunBytes, kRunBytes);
    _tile_dpbsud(1, 2, 4);
    _tile_stored(0, found[0], kRunBytes);
    _tile_stored(1, found[1], kRunBytes);
    settle_memory();
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[v][r] += *reinterpret_cast<const Ints*>(found[v][r]);
    }
  }

 private:
  static_assert(kRows == QuantizedRows::kGroup && kVectors == 2 && kLanes == Layout::kTile);

  // Compilers do not know which memory tile instructions read and write.
  static PDK_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }
};

#elif defined(__ARM_FEATURE_MATMUL_INT8)

// An instruction multiplies eight columns of two outputs with those of two rows.
class FromPanels : public PanelsBase {
 public:
  static constexpr int64_t kMinRows = 8;

  FromPanels(uint8_t* memory, bool) : PanelsBase(memory) {}

  template <int bits>
  void fill(const Tiles& tiles, int64_t blocks) const {
    for_blocks<bits>(tiles, blocks, [](uint8_t* to, const uint8_t* block) {
#pragma GCC unroll 4
      for (int run = 0; run < kRuns; run += 2) {
        const auto a = reinterpret_cast<uint32x4_t>(unpack<bits>(block, run)),
                   b = reinterpret_cast<uint32x4_t>(unpack<bits>(block, run + 1));
        vst1q_u8(to + 4 * kLanes * run, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
        vst1q_u8(to + 4 * kLanes * (run + 1), vreinterpretq_u8_u32(vzip2q_u32(a, b)));
      }
    });
  }
  template <int bits>
  PDK_INLINE void take(const uint8_t* (&blocks)[kVectors]) {
    take_next(blocks);
  }

  template <int bits, int first, int last>
  PDK_INLINE void add(Ints (&sums)[kVectors][kRows], const uint8_t* const (&blocks)[kVectors],
                      const QuantizedBlock* x) const {
    int32x4_t found[kVectors][kRows / 2][2];  // [pair of outputs], two rows of each output
#pragma GCC unroll 4
    for (int run = first; run < last; run += 2) {
#pragma GCC unroll 2
      for (int pair = 0; pair < kRows / 2; ++pair) {
        const int8_t* own = x[2 * pair].codes + 4 * run;
        const int8x16_t rows = vcombine_s8(vld1_s8(own), vld1_s8(own + sizeof(QuantizedBlock)));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const int32x4_t sum = run == first ? vdupq_n_s32(0) : found[v][pair][half];
            const uint8x16_t outputs = vld1q_u8(blocks[v] + 4 * kLanes * (run + half));
            found[v][pair][half] = vusmmlaq_s32(sum, outputs, rows);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
      for (int pair = 0; pair < kRows / 2; ++pair) {
        const auto& own = found[v][pair];
        sums[v][2 * pair] += reinterpret_cast<Ints>(vuzp1q_s32(own[0], own[1]));
        sums[v][2 * pair + 1] += reinterpret_cast<Ints>(vuzp2q_s32(own[0], own[1]));
      }
    }
  }

 private:
  static_assert(kRows % 2 == 0 && kRows <= QuantizedRows::kGroup && kLanes == 4);
};

#else

// The instructions of fewer rows, without unpacking.
class FromPanels : public PanelsBase {
 public:
  static constexpr int64_t kMinRows = 64;
  template <int bits>
  static constexpr bool kTakes = bits != 8;
  template <int bits>
  static constexpr bool kSigned = signed_codes<bits>();

  FromPanels(uint8_t* memory, bool) : PanelsBase(memory) {}

  template <int bits>
  void fill(const Tiles& tiles, int64_t blocks) const {
    for_blocks<bits>(tiles, blocks, unpack_runs<bits>);
  }
  template <int bits>
  PDK_INLINE void take(const uint8_t* (&blocks)[kVectors]) {
    take_next(blocks);
  }
  template <int bits, int first, int last>
  PDK_INLINE void add(Ints (&sums)[kVectors][kRows], const uint8_t* const (&blocks)[kVectors],
                      const QuantizedBlock* x) const {
    add_products<bits, first, last, true>(sums, blocks, x);
  }
};

#endif

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
