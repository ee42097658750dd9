// Sums of rows of x with tiles of a quantised matrix.
#pragma once

#include "quantized_panels.h"
#include "quantized_products.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Bytes between what is read and what is fetched from memory meanwhile.
constexpr int64_t kAhead = kFetchesInOrder ? 8192 : 4096;

// As load() of Half, but by a pointer to bytes: compiled through that one, a model's single row took 1.04 of the time.
PDK_INLINE Vec halves(const uint8_t* from) {
#if defined(__AVX512DQ__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__) && PDK_LANES == 8
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_NEON)
  return reinterpret_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)))));
#else
  return load(reinterpret_cast<const Half*>(from), Whole{});
#endif
}
typedef uint8_t LooseBytes __attribute__((vector_size(PDK_LANES), may_alias, aligned(1)));
typedef int8_t LooseSigned __attribute__((vector_size(PDK_LANES), may_alias, aligned(1)));
// GCC 12 converts such vectors lane by lane, for most of the instructions of a block of one row.
PDK_INLINE Ints unsigned_bytes(const uint8_t* from) {
#if defined(__AVX512DQ__)
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_ONE_REGISTER)
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_NEON)
  const uint8x8_t bytes = vreinterpret_u8_s32(vdup_n_s32(word_at(reinterpret_cast<const int8_t*>(from))));
  return reinterpret_cast<Ints>(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseBytes*>(from), Ints);
#endif
}
PDK_INLINE Ints signed_bytes(const uint8_t* from) {
#if defined(__AVX512DQ__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_ONE_REGISTER)
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_NEON)
  const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(word_at(reinterpret_cast<const int8_t*>(from))));
  return reinterpret_cast<Ints>(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseSigned*>(from), Ints);
#endif
}
PDK_INLINE Vec to_vec(Ints x) { return __builtin_convertvector(x, Vec); }

// What is read next of a matrix: fetched from memory while the tiles before it are multiplied. With several rows it
// goes to the second-level cache: lines on their way into the first one would keep what is read there from coming. Of a
// tile that is read in order it is the next block, whose lines are asked for in their order.
template <bool first_level>
struct Stream {
  const uint8_t* at;
  int64_t step;  // bytes that are read of a block; 0: they were fetched before

  PDK_INLINE void advance() {
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + i, 0, first_level ? 3 : 2);
    at += step;
  }
};

// The processor fetches a tile by itself, faster than it could be asked for, as long as addresses ascend. So the
// headers come before the codes, though each block reads but a few bytes of them. And since processors stop at the end
// of a page, each page of the next tile is begun.
PDK_INLINE void begin_tile(const uint8_t* tile, const Tiles& tiles) {
  constexpr int64_t page = 4096;
  for (int64_t i = 0; i < tiles.headers; i += 64) __builtin_prefetch(tile + i, 0, 3);
  const uint8_t *next = tile + tiles.bytes, *end = next + tiles.bytes;
  for (next += -reinterpret_cast<int64_t>(next) & (page - 1); next < end; next += page) {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + 64, 0, 2);
  }
}

// Sums of `rows` rows from `row` on with outputs from `lane` of a tile on: some neighbouring vectors of it, or one in
// each of some tiles.
template <Scales kScales, int bits, int vectors, int rows, bool first_level, class Products>
PDK_INLINE void multiply_lanes(const QuantizedLinearArgs& args, const Layout& layout, const Tiles& tiles, int lane,
                               int64_t row, Stream<first_level> stream, Products& products,
                               Vec (&total)[vectors][rows]) {
  constexpr bool signed_codes = Products::template kSigned<bits>;
  constexpr Layout kind{kScales, bits, 0};
  constexpr QuantizedScales fields = kind.fields();
  constexpr bool multiples = fields.multiples > 0,
                 zeros = fields.zero;  // the type of scales that have zeros is `layout`'s
  constexpr bool symmetric = kind.zero() > 0, one_block = fields.group_blocks == 1;
  constexpr int tile_size = Layout::kTile, shift = bits - 1;  // 2^shift is the code of zero
  const int64_t blocks = args.quantized.blocks;
  const int64_t size = fields.group_blocks > 0 ? fields.group_blocks : layout.blocks_of_group(args.width);
  const int header_bytes = layout.header_bytes();
  const uint8_t* header = tiles.data;
  const uint8_t* codes = header + tiles.headers;
  const QuantizedBlock* x = args.quantized.row(row);
  for (int v = 0; v < vectors; ++v) {
    for (int r = 0; r < rows; ++r) total[v][r] = Vec{};
  }
  for (int64_t first = 0; first < blocks; first += size, header += header_bytes) {
    Vec group_scale[vectors], group_minimum[vectors]{};
    Ints group_zero[vectors]{};
    for (int v = 0; v < vectors; ++v) {
      const uint8_t* own = header + tiles.tile_at(v);
      const int at = lane + Tiles::lane_at(v);
      if (zeros ? layout.fields().scale_bytes == 4 : fields.scale_bytes == 4) {
        group_scale[v] = load(reinterpret_cast<const float*>(own) + at, Whole{});
      } else {
        group_scale[v] = halves(own + 2 * at);
      }
      if constexpr (zeros) group_zero[v] = unsigned_bytes(own + header_bytes - tile_size + at);
      if constexpr (zeros && signed_codes) group_zero[v] -= 128;
      if constexpr (fields.minimum) group_minimum[v] = halves(own + kind.minimum_at() + 2 * at);
    }
    const int64_t last = one_block ? first + 1 : smaller(first + size, blocks);
    for (int64_t b = first; b < last; ++b) {
      stream.advance();
      const uint8_t* block[vectors];
      Vec scale[vectors], minimum[vectors];
      Ints factors[vectors][2]{};
      for (int v = 0; v < vectors; ++v) {
        block[v] = codes + tiles.tile_at(v) + 4 * (lane + Tiles::lane_at(v));
        scale[v] = group_scale[v], minimum[v] = group_minimum[v];
        if constexpr (multiples) {
          const uint8_t* own =
              header + tiles.tile_at(v) + kind.multiples_at() + 2 * tile_size * (b - first) + lane + Tiles::lane_at(v);
          if constexpr (fields.halves) {
            factors[v][0] = signed_bytes(own), factors[v][1] = signed_bytes(own + tile_size);
          } else {
            scale[v] = rounded(scale[v] * to_vec(unsigned_bytes(own)));
            minimum[v] = rounded(minimum[v] * to_vec(unsigned_bytes(own + tile_size)));
          }
        }
      }
      codes += tile_size * Layout::kBlock / 8 * bits;
      products.template take<bits>(block);
      Ints sums[vectors][rows]{};
      if constexpr (fields.halves) {
        Ints second[vectors][rows];
        for (int r = 0; r < rows; ++r) {
          for (int v = 0; v < vectors; ++v) {
            sums[v][r] = splat(x[r].negative_half) << shift;
            second[v][r] = (splat(x[r].negative_sum) << shift) - sums[v][r];
          }
        }
        products.template add<bits, 0, kRuns / 2>(sums, block, x);
        products.template add<bits, kRuns / 2, kRuns>(second, block, x);
        for (int r = 0; r < rows; ++r) {
          for (int v = 0; v < vectors; ++v) sums[v][r] = sums[v][r] * factors[v][0] + second[v][r] * factors[v][1];
        }
      } else {
        for (int r = 0; r < rows; ++r) {
          for (int v = 0; v < vectors; ++v) {
            if constexpr (symmetric && !signed_codes) sums[v][r] = splat(x[r].negative_sum) << shift;
            if constexpr (zeros) sums[v][r] = group_zero[v] * x[r].negative_sum;
          }
        }
        products.template add<bits, 0, kRuns>(sums, block, x);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
          total[v][r] += rounded(rounded(to_vec(sums[v][r]) * x[r].scale) * scale[v]);
          if constexpr (fields.minimum) {
            const Vec added = rounded(x[r].scaled_sum * minimum[v]);
            total[v][r] = multiples ? total[v][r] - added : total[v][r] + added;
          }
        }
      }
      x += QuantizedRows::kGroup;
    }
  }
}

// Rows of x that are multiplied with some tiles before the next tiles, and their sums, (rows, kTiles, 16).
struct Piece {
  static constexpr int64_t kStride = kTiles * Layout::kTile;
  // Groups of so many rows write to the outputs themselves where these are the sums: for others it is too much code.
  template <int rows>
  static constexpr bool kDirect = rows == kRows || rows == 1;

  int64_t row, rows;
  float* sums;
  char* out;  // where the outputs of the tiles go: they are fetched meanwhile
  int64_t out_stride;
  bool same;  // sums are outputs

  float* of(int64_t at) const { return sums + (at - row) * kStride; }
  char* out_of(int64_t at) const { return out + (at - row) * out_stride; }
  // The first row whose sums are not in the outputs.
  int64_t left() const { return !same ? row : rows % kRows > 1 ? row + rows / kRows * kRows : row + rows; }
};

// Sums of `rows` rows from `row` on with the outputs of tiles.
template <Scales kScales, int bits, int rows, class Products>
PDK_INLINE void multiply_panel(const QuantizedLinearArgs& args, const Layout& layout, const Tiles& tiles,
                               const Piece& piece, int64_t row, Products& products) {
  constexpr int vectors = kVectorsOf<rows, bits>, lanes = kInTile > 1 ? vectors * kLanes : kLanes;
  constexpr int at_once = kInTile > 1 ? 1 : vectors, passes = Layout::kTile / lanes;
  if constexpr (rows == kRows) {
    const char* out = piece.out_of(row);
    for (int r = 0; r < rows; ++r, out += piece.out_stride) {
      for (int t = 0; t < kTiles; ++t) __builtin_prefetch(out + 64 * t, 1, 3);
    }
  }
  // The first rows are those that read the codes from memory. Where each tile is read at once, and not in this order,
  // the next one is fetched meanwhile.
  constexpr bool at_first = passes > 1 || Products::kUnpacked;
  const int64_t ahead = at_first ? larger(at_once * tiles.bytes, kAhead) : (at_once - 1) * tiles.bytes + kAhead;
  constexpr bool in_order = kInOrder<rows, bits> && !at_first;
  const int64_t step = row > 0 ? 0 : in_order ? layout.code_bytes() : (at_once * tiles.share + passes - 1) / passes;
  const bool direct = Piece::kDirect<rows> && piece.same;
  const int64_t stride = direct ? piece.out_stride / static_cast<int64_t>(sizeof(float)) : Piece::kStride;
  Tiles own = tiles;
  for (int t = 0; t < tiles.count; t += at_once, own.data += tiles.bytes) {
    if (in_order && row == 0) begin_tile(own.data, tiles);
    Stream<in_order || rows == 1> stream{own.data + (in_order ? tiles.headers : ahead), step};
    float* const sums = (direct ? reinterpret_cast<float*>(piece.out_of(row)) : piece.of(row)) + t * Layout::kTile;
    for (int lane = 0; lane < Layout::kTile; lane += lanes, stream.at += step * args.quantized.blocks) {
      Vec total[vectors][rows];
      multiply_lanes<kScales, bits>(args, layout, own, lane, row, stream, products, total);
      for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < vectors; ++v) {
          store(sums + r * stride + lane + v * (kInTile > 1 ? kLanes : Layout::kTile), total[v][r], Whole{});
        }
      }
    }
  }
}

// Sums of the rows of a piece from `row` on. What is left by groups of rows is a group of its own, so that it costs no
// more than if there were one more.
template <Scales kScales, int bits, int rows = kRows>
void multiply_rows(const QuantizedLinearArgs& args, const Layout& layout, const Tiles& tiles, const Piece& piece,
                   int64_t row) {
  FromCodes products;
  const int64_t end = piece.row + piece.rows;
  for (; row + rows <= end; row += rows) multiply_panel<kScales, bits, rows>(args, layout, tiles, piece, row, products);
  if constexpr (rows > 1) {
    if (row < end) multiply_rows<kScales, bits, rows - 1>(args, layout, tiles, piece, row);
  }
}

// Sums of a piece with tiles. Many rows read codes that the first piece unpacks in `panels`.
template <Scales kScales, int bits>
void multiply_piece(const QuantizedLinearArgs& args, const Layout& layout, const Tiles& tiles, const Piece& piece,
                    uint8_t* panels) {
  int64_t row = piece.row;
  if constexpr (FromPanels::kTakes<bits>) {
    if (panels != nullptr) {
      FromPanels products(panels, kQuantizedScales[kScales].halves);
      if (row == 0) products.fill<bits>(tiles, args.quantized.blocks);
      for (; row + kRows <= piece.row + piece.rows; row += kRows) {
        products.begin();
        multiply_panel<kScales, bits, kRows>(args, layout, tiles, piece, row, products);
      }
    }
  }
  multiply_rows<kScales, bits>(args, layout, tiles, piece, row);
}

void multiply_piece(const QuantizedLinearArgs& args, const Layout& layout, const Tiles& tiles, const Piece& piece,
                    uint8_t* panels) {
  with_quantized_kind(layout.scales, layout.bits, [&]<Scales kScales, int bits>() {
    // Compiled once for both types of scales.
    constexpr Scales kSame = kScales == QuantizedScales::kFloatZero ? QuantizedScales::kHalfZero : kScales;
    multiply_piece<kSame, bits>(args, layout, tiles, piece, panels);
  });
}

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
