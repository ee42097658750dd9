// Products of a block of a quantised matrix with rows of x: whole numbers, which every level finds by its own
// instructions.
#pragma once

#include "fetching.h"
#include "kernels.h"
#include "strips.h"

#ifdef PDK_ONE_REGISTER  // its names of tile instructions are those of the emulation
#include <immintrin.h>
#endif

namespace pdkernels::cpu::PDK_ISA {
namespace {

using Layout = QuantizedLayout;
using Scales = QuantizedScales::Kind;

// Rows that are multiplied together, and vectors of outputs: as many sums as there are registers for.
#if defined(__AVX512VNNI__) || defined(PDK_AMX)
constexpr int kRows = 8, kVectors = 2;
#elif defined(__AVX512DQ__)
constexpr int kRows = 8, kVectors = 1;
#elif defined(PDK_NEON)
constexpr int kRows = 4, kVectors = 2;
#else
constexpr int kRows = 4, kVectors = 1;
#endif
constexpr int kRuns = Layout::kBlock / 4;  // of four columns in a block
constexpr int kRunBytes = 4 * Layout::kTile;

constexpr int kInTile = Layout::kTile / kLanes;  // vectors of a tile
// Whether so many rows read a tile after the other, in the order in which they lie in memory, as fast as memory is.
// With more arithmetic, tiles that share it cost less.
template <int rows, int bits>
constexpr bool kInOrder = kFetchesInOrder && (rows == 1 || (rows == 2 && bits == 8));
// With few rows narrow vectors share what is loaded of them, and read a tile as it lies in memory.
template <int rows, int bits>
constexpr int kVectorsOf = kInTile > 1 && rows <= 2               ? 2
                           : kInTile == 1 && kInOrder<rows, bits> ? 1
                                                                  : kVectors;
constexpr int kTiles = kVectors > kInTile ? kVectors / kInTile : 1;  // that are multiplied together

// Tiles that are multiplied together, `distance` bytes apart. Their vectors are neighbours in a tile, or one in each.
struct Tiles {
  const uint8_t* data;
  int64_t distance;
  int count;
  int64_t bytes, headers, share;  // of a tile, before its codes, and of the tile for each block

  int64_t tile_at(int v) const { return kInTile > 1 ? 0 : v * distance; }
  static constexpr int lane_at(int v) { return kInTile > 1 ? v * kLanes : 0; }
};

PDK_INLINE Words load_words(const uint8_t* from) { return *reinterpret_cast<const LooseWords*>(from); }

// The codes of a run, a byte each, four columns a word.
template <int bits>
PDK_INLINE Words unpack(const uint8_t* block, int run) {
  if constexpr (bits == 8) return load_words(block + run * kRunBytes);
  const Words both = load_words(block + run % (kRuns / 2) * kRunBytes);
  const Words low = (run < kRuns / 2 ? both : both >> 4) & 0x0f0f0f0fu;
  if constexpr (bits == 4) return low;
  constexpr int more = bits - 4, each = bits == 4 ? 1 : 8 / more;
  const Words high = load_words(block + (kRuns / 2 + run / each) * kRunBytes);
  return low | (high >> (more * (run % each)) & (more == 1 ? 0x01010101u : 0x03030303u)) << 4;
}

// The same of codes that are unpacked already: a vector of each run, one after the other.
template <int bits, bool unpacked>
PDK_INLINE Words codes_of(const uint8_t* block, int run) {
  if constexpr (unpacked) return load_words(block + 4 * kLanes * run);
  return unpack<bits>(block, run);
}

PDK_INLINE int32_t word_at(const int8_t* from) {
  int32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return word;
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && PDK_LANES == 8)
#define PDK_DOT_PRODUCTS  // of unsigned and signed bytes
#endif

// Whether products want codes of 8 bits less 128.
template <int bits>
constexpr bool signed_codes() {
#if (defined(PDK_ONE_REGISTER) && !defined(PDK_DOT_PRODUCTS)) || defined(PDK_NEON)
  return bits == 8;
#else
  return false;
#endif
}

// The run that comes at place `i`: of a whole block halves of a byte one after the other.
template <bool whole_bytes, int runs>
constexpr int run_number(int i) {
  return whole_bytes || runs < kRuns ? i : i / 2 + i % 2 * (kRuns / 2);
}

template <int number>
struct Number {
  static constexpr int kNumber = number;
};

// Calls body(Number<n>) for n in [first, last).
template <int first, int last, class Body>
PDK_INLINE void for_numbers(const Body& body) {
  if constexpr (first < last) {
    body(Number<first>{});
    for_numbers<first + 1, last>(body);
  }
}

#ifdef PDK_ONE_REGISTER
// A sum as it is written: compilers would rather wait for all products, for which there are too few registers.
template <class Register>
PDK_INLINE Register settled(Register sum) {
  __asm__("" : "+v"(sum));
  return sum;
}
#endif

// To the sums of some rows, adds the products of codes and x over the columns of the runs [first, last). Rows take
// turns, so that none waits for its own last sum, and vectors share what is loaded of a row.
template <int bits, int first, int last, bool unpacked = false, int vectors, int rows>
PDK_INLINE void add_products(Ints (&sums)[vectors][rows], const uint8_t* const (&blocks)[vectors],
                             const QuantizedBlock* x) {
  constexpr auto run_at = run_number < bits == 8 || unpacked, last - first > ;
#if defined(PDK_DOT_PRODUCTS)
#if PDK_LANES == 16
  const auto every = [](int32_t word) { return _mm512_set1_epi32(word); };
  const auto add = [](Ints& sum, Words a, __m512i b) {
    sum = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), b));
  };
#else
  const auto every = [](int32_t word) { return _mm256_set1_epi32(word); };
  const auto add = [](Ints& sum, Words a, __m256i b) {
    sum = reinterpret_cast<Ints>(
        _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(a), b));
  };
#endif
#pragma GCC unroll 8
  for (int i = first; i < last; ++i) {
    const int run = run_at(i);
    Words codes[vectors];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) codes[v] = codes_of<bits, unpacked>(blocks[v], run);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const auto own = every(word_at(x[r].codes + 4 * run));
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) add(sums[v][r], codes[v], own);
    }
  }
#elif defined(PDK_ONE_REGISTER)
  // Products of pairs are added up in 16 bits, where they must fit: those of so few runs. Codes of 8 bits are
  // multiplied without their signs, which x takes over.
  constexpr int at_once = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
#if PDK_LANES == 16
  typedef __m512i Register;
  const auto every = [](int32_t word) { return _mm512_set1_epi32(word); };
  const auto pairs = [](Register a, Register b) { return _mm512_maddubs_epi16(a, b); };
  const auto plus = [](Register a, Register b) { return settled(_mm512_add_epi16(a, b)); };
  const auto words = [](Register a) { return reinterpret_cast<Ints>(_mm512_madd_epi16(a, _mm512_set1_epi16(1))); };
  const auto magnitude = [](Register a) { return _mm512_abs_epi8(a); };
  const auto signs = [](Register b, Register a) {
    return _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
  };
#else
  typedef __m256i Register;
  const auto every = [](int32_t word) { return _mm256_set1_epi32(word); };
  const auto pairs = [](Register a, Register b) { return _mm256_maddubs_epi16(a, b); };
  const auto plus = [](Register a, Register b) { return settled(_mm256_add_epi16(a, b)); };
  const auto words = [](Register a) { return reinterpret_cast<Ints>(_mm256_madd_epi16(a, _mm256_set1_epi16(1))); };
  const auto magnitude = [](Register a) { return _mm256_abs_epi8(a); };
  const auto signs = [](Register b, Register a) { return _mm256_sign_epi8(b, a); };
#endif
#pragma GCC unroll 8
  for (int i = first; i < last; i += at_once) {
    Register found[vectors][rows];
#pragma GCC unroll 8
    for (int j = i; j < i + at_once; ++j) {
      const int run = run_at(j);
      Register codes[vectors], whole[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        whole[v] = reinterpret_cast<Register>(codes_of<bits, unpacked>(blocks[v], run));
        if constexpr (signed_codes<bits>()) {
          whole[v] = reinterpret_cast<Register>(reinterpret_cast<Words>(whole[v]) ^ 0x80808080u);
          codes[v] = magnitude(whole[v]);
        } else {
          codes[v] = whole[v];
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const Register own = every(word_at(x[r].codes + 4 * run));
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
          const Register product = pairs(codes[v], signed_codes<bits>() ? signs(own, whole[v]) : own);
          found[v][r] = j == i ? product : plus(found[v][r], product);
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) sums[v][r] = settled(sums[v][r] + words(found[v][r]));
    }
  }
#elif defined(PDK_NEON)
  // Codes below 64 are signed bytes too.
  const auto signed_at = [&](int v, int run) {
    const Words codes = codes_of<bits, unpacked>(blocks[v], run);
    return reinterpret_cast<int8x16_t>(signed_codes<bits>() ? codes ^ 0x80808080u : codes);
  };
#if defined(__ARM_FEATURE_DOTPROD)
  int8x16_t own[rows][2];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    if constexpr (first < kRuns / 2) own[r][0] = vld1q_s8(x[r].codes);
    if constexpr (last > kRuns / 2) own[r][1] = vld1q_s8(x[r].codes + Layout::kBlock / 2);
  }
  for_numbers<first, last>([&](auto i) __attribute__((always_inline)) {
    constexpr int run = run_at(decltype(i)::kNumber);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const int8x16_t codes = signed_at(v, run);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const auto sum = reinterpret_cast<int32x4_t>(sums[v][r]);
        sums[v][r] = reinterpret_cast<Ints>(vdotq_laneq_s32(sum, codes, own[r][run / 4], run % 4));
      }
    }
  });
#else
  // Products are added up in 16 bits, where those of so many runs fit.
  constexpr int at_once = bits <= 5 ? 8 : bits == 6 ? 4 : 2, count = last - first < at_once ? last - first : at_once;
#pragma GCC unroll 8
  for (int i = first; i < last; i += count) {
    int16x8_t low[vectors][rows], high[vectors][rows];
#pragma GCC unroll 8
    for (int j = i; j < i + count; ++j) {
      const int run = run_at(j);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        const int8x16_t codes = signed_at(v, run);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const int8x16_t own = reinterpret_cast<int8x16_t>(splat(word_at(x[r].codes + 4 * run)));
          low[v][r] = j == i ? vmull_s8(vget_low_s8(codes), vget_low_s8(own))
                             : vmlal_s8(low[v][r], vget_low_s8(codes), vget_low_s8(own));
          high[v][r] = j == i ? vmull_high_s8(codes, own) : vmlal_high_s8(high[v][r], codes, own);
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        sums[v][r] += reinterpret_cast<Ints>(vpaddq_s32(vpaddlq_s16(low[v][r]), vpaddlq_s16(high[v][r])));
      }
    }
  }
#endif
#else
  for (int i = first; i < last; ++i) {
    const int run = run_at(i);
    for (int v = 0; v < vectors; ++v) {
      const Words codes = codes_of<bits, unpacked>(blocks[v], run);
      for (int byte = 0; byte < 4; ++byte) {
        const Ints code = reinterpret_cast<Ints>(codes >> (8 * byte) & 0xffu);
        for (int r = 0; r < rows; ++r) sums[v][r] += code * static_cast<int32_t>(x[r].codes[4 * run + byte]);
      }
    }
  }
#endif
}

// The products of a block, of codes as they lie in memory.
struct FromCodes {
  static constexpr bool kUnpacked = false;
  template <int bits>
  static constexpr bool kSigned = signed_codes<bits>();

  // Where the codes of the next block are, whose products are then added.
  template <int bits, int vectors>
  PDK_INLINE void take(const uint8_t* (&)[vectors]) {}
  template <int bits, int first, int last, int vectors, int rows>
  PDK_INLINE void add(Ints (&sums)[vectors][rows], const uint8_t* const (&blocks)[vectors],
                      const QuantizedBlock* x) const {
    add_products<bits, first, last>(sums, blocks, x);
  }
};

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
