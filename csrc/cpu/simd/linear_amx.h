// Products of bfloat16 by AMX: 16 outputs times 16 rows at a time, with the weights straight from memory.
//
// An instruction adds up 32 elements of the width for all 256 pairs, so up to 16 rows cost what one costs, and memory
// is the bound. A row's sums do not depend on the other rows of its tile.
#pragma once

#include "kernels.h"
#include "strips.h"
#include "tiles_amx.h"

#ifdef PDK_AMX

namespace pdkernels::cpu::PDK_ISA {
namespace {

struct AmxLinear {
  static constexpr int64_t kTile = 16;         // outputs, or rows, of a tile
  static constexpr int64_t kPair = 2 * kTile;  // two tiles of either are multiplied at a time
  static constexpr int64_t kDepth = AmxTiles::kDepth;
  static constexpr int64_t kLongest = 768;  // elements of the width in one sum; the sums are added up
  static constexpr int64_t kPanels = 4;     // pairs of row tiles that are packed at once

  const LinearArgs& args;
  const Bfloat16* weight;
  int64_t strip;  // elements of a sum, in whole steps

  explicit AmxLinear(const LinearArgs& given) : args(given), weight(static_cast<const Bfloat16*>(given.weight)) {
    const int64_t strips = args.width > kLongest ? (args.width + kLongest - 1) / kLongest : 1;
    strip = rounded_up((args.width + strips - 1) / strips, kDepth);
  }

  void run() const {
    const int64_t panels = (args.rows + kPair - 1) / kPair, blocks = (args.outputs + kPair - 1) / kPair;
    const int64_t size = AmxTiles::panel_size(args.width);
    for_ranges(blocks, kPair * args.width * smaller(panels, 4), [&](int64_t from, int64_t to) {
      const AmxTiles::Session session;
      Arena sizes(nullptr);
      const auto carve = [&](Arena& arena, Scratch& scratch) {
        scratch.packed = arena.take<uint16_t>(size * smaller(panels, kPanels));
        scratch.edge = arena.take<Bfloat16>(kPair * kDepth);
        scratch.part = arena.take<float>(kPair * kPair);
        scratch.total = arena.take<float>(kPair * kPair);
      };
      Scratch scratch;
      carve(sizes, scratch);
      Arena arena(thread_scratch(sizes.used()));
      carve(arena, scratch);
      __builtin_memset(scratch.total, 0, kPair * kPair * sizeof(float));  // which a width of 0 leaves as it is
      __builtin_memset(scratch.part, 0, kPair * kPair * sizeof(float));   // half of it is not written for a few rows
      for (int64_t group = 0; group < panels; group += kPanels) {
        const int64_t last = smaller(group + kPanels, panels);
        for (int64_t p = group; p < last; ++p) pack(p * kPair, scratch.packed + (p - group) * size);
        for (int64_t block = from; block < to; ++block) {
          for (int64_t p = group; p < last; ++p) {
            multiply(block * kPair, p * kPair, scratch.packed + (p - group) * size, scratch, p == group);
          }
        }
      }
    });
  }

 private:
  struct Scratch {
    uint16_t* packed;
    Bfloat16* edge;       // [kPair][kDepth]: weights where a tile is not full, padded with zeros
    float *part, *total;  // [kPair outputs][kPair rows]
  };

  void pack(int64_t row, uint16_t* to) const {
    const Bfloat16* rows[kPair];
    for (int64_t i = 0; i < kPair; ++i) rows[i] = row + i < args.rows ? args.x.row<const Bfloat16>(row + i) : nullptr;
    AmxTiles::pack_panel(rows, args.width, to);
  }

  // Compilers do not know which memory tile instructions read and write.
  static PDK_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

  // part = weights of up to 32 outputs times up to 32 rows over [begin, end) of the width; with one tile of rows the
  // second half of each line of `part` is left as it is.
  template <bool kTwoRowTiles>
  void multiply_strip(int64_t first, int64_t outputs, int64_t begin, int64_t end, const uint16_t* packed,
                      const Scratch& scratch, const char*& ahead, const char* ahead_end) const {
    constexpr int64_t kLaneBytes = 4 * AmxTiles::kPanel, kEdgeBytes = 2 * kDepth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = begin; d < end; d += kDepth) {
      const Bfloat16* from = weight + first * args.weight_stride + d;
      int64_t bytes = 2 * args.weight_stride;
      if (outputs < kPair || d + kDepth > args.width) {
        const int64_t count = smaller(kDepth, args.width - d);
        for (int64_t o = 0; o < kPair; ++o) {
          Bfloat16* line = scratch.edge + o * kDepth;
          __builtin_memset(line, 0, kEdgeBytes);
          if (o < outputs) __builtin_memcpy(line, from + o * args.weight_stride, 2 * count);
        }
        from = scratch.edge, bytes = kEdgeBytes;
        settle_memory();
      }
      const uint16_t* words = packed + d * AmxTiles::kPanel;
      for (int i = 0; i < kPair && ahead < ahead_end; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      _tile_loadd(4, from, bytes);
      _tile_loadd(6, words, kLaneBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, from + kTile * (bytes / 2), bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoRowTiles) {
        _tile_loadd(7, words + kPair, kLaneBytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, scratch.part, kLaneBytes);
    _tile_stored(2, scratch.part + kTile * kPair, kLaneBytes);
    if constexpr (kTwoRowTiles) {
      _tile_stored(1, scratch.part + kTile, kLaneBytes);
      _tile_stored(3, scratch.part + kTile * kPair + kTile, kLaneBytes);
    }
    settle_memory();
  }

  void multiply(int64_t first, int64_t row, const uint16_t* packed, const Scratch& scratch, bool fetches) const {
    const int64_t outputs = smaller(kPair, args.outputs - first), rows = smaller(kPair, args.rows - row);
    // The next outputs' weights, which are read in order while these are multiplied.
    const Bfloat16* next = weight + (first + kPair) * args.weight_stride;
    const int64_t more = fetches ? smaller(kPair, args.outputs - first - kPair) : 0;
    const char* ahead = reinterpret_cast<const char*>(next);
    const char* ahead_end = ahead + (more > 0 ? 2 * more * args.weight_stride : 0);
    settle_memory();
    for (int64_t begin = 0; begin < args.width; begin += strip) {
      const int64_t end = smaller(begin + strip, args.width);
      if (rows > kTile) {
        multiply_strip<true>(first, outputs, begin, end, packed, scratch, ahead, ahead_end);
      } else {
        multiply_strip<false>(first, outputs, begin, end, packed, scratch, ahead, ahead_end);
      }
      auto* total = reinterpret_cast<Vec*>(scratch.total);
      const auto* part = reinterpret_cast<const Vec*>(scratch.part);
      for (int64_t i = 0; i < 2 * kPair; ++i) total[i] = begin == 0 ? part[i] : total[i] + part[i];
    }
    for (int64_t o = 0; o < outputs; o += kTile) {
      for (int64_t r = 0; r < rows; r += kTile) {
        store_tile(first + o, smaller(kTile, outputs - o), row + r, smaller(kTile, rows - r),
                   scratch.total + o * kPair + r);
      }
    }
  }

  // total [outputs][kPair rows], of which a tile -> rows of `out`
  void store_tile(int64_t first, int64_t outputs, int64_t row, int64_t rows, const float* total) const {
    const auto* bias = static_cast<const Bfloat16*>(args.bias);
    Ints lines[kLanes];
    for (int o = 0; o < kLanes; ++o) lines[o] = *reinterpret_cast<const Ints*>(total + o * kPair);
    transpose(lines);
    for (int64_t r = 0; r < rows; ++r) {
      Bfloat16* out = args.out.row<Bfloat16>(row + r) + first;
      for_vectors(0, outputs, [&](int64_t, auto lanes) {
        const Vec sum = reinterpret_cast<const Vec&>(lines[r]);
        store(out, bias == nullptr ? sum : sum + load(bias + first, lanes), lanes);
      });
    }
  }
};

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA

#endif
