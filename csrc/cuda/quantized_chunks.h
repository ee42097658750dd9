// Tiles of a quantised matrix as the lanes of a warp read them ahead, for all products on CUDA.
//
// A lane reads the codes as the tensor core wants them: a word is four columns of an output, and as halves of bytes the
// same 16 columns further on.
#pragma once

#include <algorithm>
#include <type_traits>

#include "elements.h"
#include "launch.h"
#include "ops/quantized_linear.h"

namespace pdkernels::cuda {

using Layout = QuantizedLayout;
using Scales = QuantizedScales::Kind;

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// What the products of one part of a matrix need of it and of the result.
struct PackedPart {
  const uint8_t* data;
  const void* bias;  // of the part's first output, or nullptr
  void* out;         // its first output
  int64_t out_stride, row_count, outputs;
  int64_t tile_bytes, headers;
  int blocks, group_blocks;
  int row_tiles;
  Element element;
};

// The kind of a matrix, and what a lane reads of a block: codes of outputs g and g + 8, words apart as the plane has
// them.
template <Scales kScales, int kBits>
struct Kind {
  static constexpr Layout kLayout{kScales, kBits, 0};
  static constexpr QuantizedScales kFields = kLayout.fields();
  static constexpr int kHeaderBytes = kLayout.header_bytes(), kCodeBytes = kLayout.code_bytes();
  enum : int {  // not every kind has all fields
    kMinimumAt = kLayout.minimum_at(),
    kZeroAt = kLayout.zero_at(),
    kMultiplesAt = kLayout.multiples_at()
  };
  static constexpr int kGroupBlocks = kFields.group_blocks > 0 ? static_cast<int>(kFields.group_blocks) : 1;
  static constexpr bool kMinimum = kFields.minimum, kZeros = kFields.zero, kHalves = kFields.halves;
  static constexpr bool kMultiples = kFields.multiples > 0, kOneBlock = kFields.group_blocks == 1;
  static constexpr int kWords = kBits == 8 ? 2 : kBits == 6 ? 3 : kBits == 5 ? 2 : 1;  // of an output
  static constexpr int kZero = kBits == 8 ? 0 : kLayout.zero();                        // after `codes`
  using Scale = std::conditional_t<kFields.scale_bytes == 4, float, __half>;
};

template <class K, int kBits>
struct Codes {
  uint32_t word[K::kWords][2];

  // `at`: the lane's first word, of output g.
  __device__ void load(const uint8_t* at, int t) {
    const uint8_t* plane = at + 64 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      word[0][i] = __ldcs(reinterpret_cast<const uint32_t*>(plane + 32 * i));
      if constexpr (kBits == 8) word[1][i] = __ldcs(reinterpret_cast<const uint32_t*>(plane + 256 + 32 * i));
      if constexpr (kBits == 5 || kBits == 6) {
        word[1][i] = __ldcs(reinterpret_cast<const uint32_t*>(at + 256 + 32 * i));
      }
      if constexpr (kBits == 6) word[2][i] = __ldcs(reinterpret_cast<const uint32_t*>(at + 320 + 32 * i));
    }
  }

  // Columns 4 t and 16 + 4 t of outputs g and g + 8; those of 8 bits less 128.
  __device__ void unpack(uint32_t (&a)[4], int t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kBits == 8) {
        a[i] = word[0][i] ^ 0x80808080u, a[2 + i] = word[1][i] ^ 0x80808080u;
      } else {
        a[i] = word[0][i] & 0x0f0f0f0fu, a[2 + i] = word[0][i] >> 4 & 0x0f0f0f0fu;
      }
      if constexpr (kBits == 5) {
        a[i] |= (word[1][i] >> t & 0x01010101u) << 4, a[2 + i] |= (word[1][i] >> (4 + t) & 0x01010101u) << 4;
      }
      if constexpr (kBits == 6) {
        a[i] |= (word[1][i] >> 2 * t & 0x03030303u) << 4, a[2 + i] |= (word[2][i] >> 2 * t & 0x03030303u) << 4;
      }
    }
  }
};

// Of a group, for outputs g and g + 8, as they are stored.
template <class K>
struct Header {
  typename K::Scale scale[2];
  __half minimum[2];
  uint8_t zero[2];

  __device__ void load(const uint8_t* header, int g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = reinterpret_cast<const typename K::Scale*>(header)[g + 8 * i];
      if constexpr (K::kMinimum) minimum[i] = reinterpret_cast<const __half*>(header + K::kMinimumAt)[g + 8 * i];
      if constexpr (K::kZeros) zero[i] = header[K::kZeroAt + g + 8 * i];
    }
  }
};

// A chunk of blocks as it is read ahead.
template <Scales kScales, int kBits, int kTiles, int kChunk>
struct Chunk {
  using K = Kind<kScales, kBits>;
  static constexpr int kBlocks = kChunk;
  static constexpr int kHeaders = K::kMultiples ? 1 : kChunk;  // a chunk lies within a super-block

  Codes<K, kBits> codes[kChunk][kTiles];
  Header<K> header[kHeaders][kTiles];
  uint8_t multiple[kChunk][kTiles][2][2];  // of super-blocks: which of two, and for outputs g and g + 8

  // Blocks past the last one are that one again.
  __device__ void load(const PackedPart& p, const uint8_t* const (&tile)[kTiles], int first, int g, int t) {
    if (first + kChunk <= p.blocks) {
      load_blocks<true>(p, tile, first, g, t);
    } else {
      load_blocks<false>(p, tile, min(first, p.blocks - 1), g, t);
    }
  }

  template <bool kWhole>
  __device__ void load_blocks(const PackedPart& p, const uint8_t* const (&tile)[kTiles], int first, int g, int t) {
    const int left = p.blocks - 1 - first;
    const int64_t at = p.headers + int64_t{first} * K::kCodeBytes + 4 * g;
    const int group = K::kOneBlock ? first : K::kMultiples ? first / K::kGroupBlocks : 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint8_t *blocks = tile[i] + at, *groups = tile[i] + int64_t{group} * K::kHeaderBytes;
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
        const int step = kWhole ? c : min(c, left);
        codes[c][i].load(blocks + step * K::kCodeBytes, t);
        const int further = K::kOneBlock ? step : K::kMultiples ? 0 : (first + step) / p.group_blocks;
        if (c < kHeaders) header[c < kHeaders ? c : 0][i].load(groups + int64_t{further} * K::kHeaderBytes, g);
        if constexpr (K::kMultiples) {
          const uint8_t* own = groups + K::kMultiplesAt + 2 * ((first + step) % K::kGroupBlocks) * Layout::kTile + g;
#pragma unroll
          for (int j = 0; j < 4; ++j) multiple[c][i][j / 2][j % 2] = own[j / 2 * Layout::kTile + j % 2 * 8];
        }
      }
    }
  }
};

// Asks L2 for whole sixteens of bytes, from Hopper on. A warp has registers for one chunk on its way, and would wait
// for memory after each; L2 is four times as near.
__device__ inline void fetch(const uint8_t* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// What a lane fetches of a tile for a warp: the headers of its piece of the width at once, and codes `kAhead` blocks
// ahead.
template <class K>
struct Fetching {
  static constexpr int kStep = 8, kAhead = 2 * kStep;  // whole chunks, and pieces are whole steps

  const uint8_t* codes;
  int last;  // of the piece; 0: another lane does it

  __device__ Fetching(const PackedPart& p, const uint8_t* tile, int first, int last, bool fetches)
      : codes(tile + p.headers), last(fetches && reinterpret_cast<uintptr_t>(tile) % 16 == 0 ? last : 0) {
    if (first >= this->last) return;
    const int size = K::kGroupBlocks > 1 || K::kOneBlock ? K::kGroupBlocks : p.group_blocks;
    const int group = first / size, groups = (last - 1) / size - group + 1;
    fetch(tile + int64_t{group} * K::kHeaderBytes, groups * K::kHeaderBytes);
    ask(first, first + kAhead);
  }
  __device__ void ask(int from, int to) const {
    if (from < last) fetch(codes + int64_t{from} * K::kCodeBytes, (min(to, last) - from) * K::kCodeBytes);
  }
};

template <class T>
__device__ void store(const PackedPart& p, float total, int64_t row, int64_t output) {
  if (row >= p.row_count || output >= p.outputs) return;
  if (p.bias != nullptr) total = __fadd_rn(total, to_float(static_cast<const T*>(p.bias)[output]));
  static_cast<T*>(p.out)[row * p.out_stride + output] = from_float<T>(total);
}

// The products of a part with rows that stay numbers, in quantized_linear_numbers.cu. `padded`: memory for all rows,
// each of whole blocks of float32.
void multiply_numbers(const Layout& layout, const PackedPart& part, const RowsView& x, int64_t width, void* padded,
                      cudaStream_t stream);

}  // namespace pdkernels::cuda
