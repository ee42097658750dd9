// Products of a quantised matrix with rows that stay numbers: the codes of a block become floats once for all rows.
//
// Sums are those of reference/quantized_linear.py. The products of codes with numbers of 16 bits are exact, so that
// only those of float32 must be kept from being fused with the sums.
#pragma once

#include "quantized_tiles.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Some rows of x in float32, zeros after the width, and the sums of their blocks.
struct NumberRows {
  static constexpr int64_t kMost = 64;

  float *numbers, *sums;
  int64_t rows, blocks;

  static int64_t floats(int64_t rows, int64_t blocks) { return rows * blocks * (Layout::kBlock + 1); }
  const float* row(int64_t r) const { return numbers + r * blocks * Layout::kBlock; }

  template <class T>
  void fill(const QuantizedLinearArgs& args, int64_t first) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = args.x.row<const T>(first + r);
      float* to = numbers + r * blocks * Layout::kBlock;
      for (int64_t at = args.width; at < blocks * Layout::kBlock; ++at) to[at] = 0;
      for_vectors(0, args.width, [&](int64_t at, auto lanes) { store(to + at, load(from + at, lanes), lanes); });
      for (int64_t b = 0; b < blocks; ++b, to += Layout::kBlock) {
        sums[r * blocks + b] = half_sum(to) + half_sum(to + Layout::kBlock / 2);
      }
    }
  }

 private:
  static float half_sum(const float* x) {
    float columns[4]{};
    for (int run = 0; run < kRuns / 2; ++run) {
      for (int i = 0; i < 4; ++i) columns[i] += x[4 * run + i];
    }
    return (columns[0] + columns[1]) + (columns[2] + columns[3]);
  }
};

// What a vector of outputs multiplies a block with: codes less the code of zero, a vector for each column, and the
// scales of both halves.
struct BlockNumbers {
  Vec values[Layout::kBlock], scale[2], minimum;

  template <int bits>
  PDK_INLINE void read(const Layout& layout, const uint8_t* header, int64_t block_of_group, const uint8_t* codes,
                       int lane) {
    const QuantizedScales& fields = layout.fields();
    Ints zero = splat(layout.zero());
    if (fields.zero) zero = unsigned_bytes(header + layout.zero_at() + lane);
    scale[0] = fields.scale_bytes == 4 ? load(reinterpret_cast<const float*>(header) + lane, Whole{})
                                       : halves(header + 2 * lane);
    if (fields.minimum) minimum = halves(header + layout.minimum_at() + 2 * lane);
    const uint8_t* multiples = header + layout.multiples_at() + 2 * Layout::kTile * block_of_group + lane;
    scale[1] = scale[0];
    if (fields.halves) {
      scale[0] = rounded(scale[0] * to_vec(signed_bytes(multiples)));
      scale[1] = rounded(scale[1] * to_vec(signed_bytes(multiples + Layout::kTile)));
    } else if (fields.multiples > 0) {
      scale[0] = rounded(scale[0] * to_vec(unsigned_bytes(multiples)));
      minimum = -rounded(minimum * to_vec(unsigned_bytes(multiples + Layout::kTile)));
    }
#pragma GCC unroll 8
    for (int run = 0; run < kRuns; ++run) {
      const Words words = unpack<bits>(codes + 4 * lane, run);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        values[4 * run + i] = to_vec(reinterpret_cast<Ints>(words >> 8 * i & 0xffu) - zero);
      }
    }
  }
};

// Adds a block of `rows` rows to their sums, of which those of a row are `kTile` apart.
template <bool exact, int rows>
PDK_INLINE void add_block(const QuantizedScales& fields, const BlockNumbers& block, const NumberRows& x, int64_t row,
                          int64_t b, float* total) {
  Vec both[rows][2];
  const int64_t stride = x.blocks * Layout::kBlock;
  for (int half = 0; half < 2; ++half) {
    const float* from = x.row(row) + b * Layout::kBlock + half * Layout::kBlock / 2;
    const Vec* values = block.values + half * Layout::kBlock / 2;
    Vec columns[rows][4]{};
    for (int run = 0; run < kRuns / 2; ++run, from += 4, values += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const Vec product = splat(from[r * stride + i]) * values[i];
          columns[r][i] += exact ? product : rounded(product);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      both[r][half] = (columns[r][0] + columns[r][1]) + (columns[r][2] + columns[r][3]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r, total += Layout::kTile) {
    Vec sum = load(total, Whole{});
    if (fields.halves) {
      sum += rounded(both[r][0] * block.scale[0]);
      sum += rounded(both[r][1] * block.scale[1]);
    } else {
      sum += rounded((both[r][0] + both[r][1]) * block.scale[0]);
    }
    if (fields.minimum) sum += rounded(splat(x.sums[(row + r) * x.blocks + b]) * block.minimum);
    store(total, sum, Whole{});
  }
}

#if defined(__AVX512DQ__) || defined(PDK_NEON)
constexpr int kNumberRows = 4;  // whose sums fit the registers, four each
#else
constexpr int kNumberRows = 2;
#endif

template <bool exact, int rows = kNumberRows>
PDK_INLINE void add_rows(const QuantizedScales& fields, const BlockNumbers& block, const NumberRows& x, int64_t b,
                         float* total, int64_t row = 0) {
  for (; row + rows <= x.rows; row += rows) {
    add_block<exact, rows>(fields, block, x, row, b, total + row * Layout::kTile);
  }
  if constexpr (rows > 1) {
    if (row < x.rows) add_rows<exact, rows - 1>(fields, block, x, b, total, row);
  }
}

// Sums of rows with a tile, (rows, 16).
template <int bits, bool exact>
PDK_APART void multiply_numbers(const Layout& layout, const uint8_t* tile, int64_t width, const NumberRows& x,
                                float* total) {
  const int64_t size = layout.blocks_of_group(width);
  const uint8_t* first = tile + layout.headers(width);
  for (int64_t i = 0; i < x.rows * Layout::kTile; ++i) total[i] = 0;
  for (int lane = 0; lane < Layout::kTile; lane += kLanes) {
    const uint8_t* codes = first;
    for (int64_t b = 0; b < x.blocks; ++b, codes += layout.code_bytes()) {
      BlockNumbers block;
      block.template read<bits>(layout, tile + b / size * layout.header_bytes(), b % size, codes, lane);
      add_rows<exact>(layout.fields(), block, x, b, total + lane);
    }
  }
}

template <bool exact>
void multiply_numbers(const Layout& layout, const uint8_t* tile, int64_t width, const NumberRows& x, float* total) {
  switch (layout.bits) {
    case 4: return multiply_numbers<4, exact>(layout, tile, width, x, total);
    case 5: return multiply_numbers<5, exact>(layout, tile, width, x, total);
    case 6: return multiply_numbers<6, exact>(layout, tile, width, x, total);
    default: return multiply_numbers<8, exact>(layout, tile, width, x, total);
  }
}

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
