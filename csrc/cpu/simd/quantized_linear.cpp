// Products with a quantised matrix: one read of its codes for all rows.
//
// A lane is an output. The products of a block of the width are whole numbers, summed exactly by whatever instructions
// a level has; the blocks of an output are added up in ascending order, each product of scales rounded on its own. So
// an element of the result has the same bits at every level, however many rows and outputs are computed together.
#include "quantized_panels.h"
#include "quantized_products.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

constexpr int64_t kAhead = 8192;  // bytes between what is read and what is fetched from memory meanwhile

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

// What is read next of a matrix: fetched from memory while the tiles before it are multiplied.
struct Stream {
  const uint8_t* at;
  int64_t step;  // bytes that are read of a block

  PDK_INLINE void advance() {
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(at + i, 0, 3);
    at += step;
  }
};

// Sums of `rows` rows from `row` on with outputs from `lane` of a tile on, a vector in each of some neighbouring tiles.
template <Scales kScales, int bits, int vectors, int rows, class Products>
PDK_INLINE void multiply_lanes(const QuantizedLinearArgs& args, const Layout& layout, const uint8_t* tile, int lane,
                               int64_t row, Stream stream, Products& products, Vec (&total)[vectors][rows]) {
  constexpr bool signed_codes = Products::template kSigned<bits>;
  constexpr Layout kind{kScales, bits, 0};
  constexpr QuantizedScales fields = kind.fields();
  constexpr bool multiples = fields.multiples > 0,
                 zeros = fields.zero;  // the type of scales that have zeros is `layout`'s
  constexpr bool symmetric = kind.zero() > 0, one_block = fields.group_blocks == 1;
  constexpr int tile_size = Layout::kTile, shift = bits - 1;  // 2^shift is the code of zero
  const int64_t blocks = args.quantized.blocks, distance = layout.tile_bytes(args.width);
  const int64_t size = fields.group_blocks > 0 ? fields.group_blocks : layout.blocks_of_group(args.width);
  const int header_bytes = layout.header_bytes();
  const uint8_t* header = tile;
  const uint8_t* codes = tile + layout.headers(args.width) + 4 * lane;
  const QuantizedBlock* x = args.quantized.row(row);
  for (int v = 0; v < vectors; ++v) {
    for (int r = 0; r < rows; ++r) total[v][r] = Vec{};
  }
  for (int64_t first = 0; first < blocks; first += size, header += header_bytes) {
    Vec group_scale[vectors], group_minimum[vectors]{};
    Ints group_zero[vectors]{};
    for (int v = 0; v < vectors; ++v) {
      const uint8_t* own = header + v * distance;
      if (zeros ? layout.fields().scale_bytes == 4 : fields.scale_bytes == 4) {
        group_scale[v] = load(reinterpret_cast<const float*>(own) + lane, Whole{});
      } else {
        group_scale[v] = halves(own + 2 * lane);
      }
      if constexpr (zeros) group_zero[v] = unsigned_bytes(own + header_bytes - tile_size + lane);
      if constexpr (zeros && signed_codes) group_zero[v] -= 128;
      if constexpr (fields.minimum) group_minimum[v] = halves(own + kind.minimum_at() + 2 * lane);
    }
    const int64_t last = one_block ? first + 1 : smaller(first + size, blocks);
    for (int64_t b = first; b < last; ++b) {
      if (stream.step > 0) stream.advance();
      const uint8_t* block[vectors];
      Vec scale[vectors], minimum[vectors];
      Ints factors[vectors][2]{};
      for (int v = 0; v < vectors; ++v) {
        block[v] = codes + v * distance;
        scale[v] = group_scale[v], minimum[v] = group_minimum[v];
        if constexpr (multiples) {
          const uint8_t* own = header + v * distance + kind.multiples_at() + 2 * tile_size * (b - first) + lane;
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

// Sums of `rows` rows from `row` on with the outputs of neighbouring tiles.
template <Scales kScales, int bits, int vectors, int rows, class Products>
PDK_INLINE void multiply_panel(const QuantizedLinearArgs& args, const Layout& layout, const uint8_t* tile, int64_t row,
                               Products& products, float* sums) {
  for (int lane = 0; lane < Layout::kTile; lane += kLanes) {
    const int64_t bytes = layout.tile_bytes(args.width), blocks = larger(args.quantized.blocks, 1);
    // The first rows and outputs are those that read the codes from memory.
    const bool is_first = row == 0 && lane == 0;
    const Stream stream{tile + (vectors - 1) * bytes + kAhead, is_first ? (vectors * bytes + blocks - 1) / blocks : 0};
    Vec total[vectors][rows];
    multiply_lanes<kScales, bits>(args, layout, tile, lane, row, stream, products, total);
    for (int v = 0; v < vectors; ++v) {
      for (int r = 0; r < rows; ++r) {
        store(sums + (v * args.rows + row + r) * Layout::kTile + lane, total[v][r], Whole{});
      }
    }
  }
}

// Sums of the rows from `row` on with the outputs of neighbouring tiles, (tiles, rows, 16) in `sums`.
//
// A group of rows less than all is one of half its size and what that leaves, so that fewer functions are compiled.
template <Scales kScales, int bits, int vectors, int rows = kRows>
void multiply_rows(const QuantizedLinearArgs& args, const Layout& layout, const uint8_t* tile, int64_t row,
                   float* sums) {
  FromCodes products;
  for (; row + rows <= args.rows; row += rows) {
    multiply_panel<kScales, bits, vectors, rows>(args, layout, tile, row, products, sums);
  }
  if constexpr (rows > 1) {
    if (row < args.rows)
      multiply_rows<kScales, bits, vectors, rows == 4 ? 3 : rows == 3 ? 2 : rows / 2>(args, layout, tile, row, sums);
  }
}

// Sums of all rows. Whole panels of many rows go through the unit that multiplies matrices, if there is one.
template <Scales kScales, int bits, int vectors>
void multiply_all(const QuantizedLinearArgs& args, const Layout& layout, const uint8_t* tile, float* sums) {
  int64_t row = 0;
#ifdef PDK_PANELS
  if constexpr (vectors == kVectors) {
    if (args.rows >= FromPanels::kMinRows) {
      FromPanels products(reinterpret_cast<uint8_t*>(sums + kVectors * args.rows * Layout::kTile),
                          kQuantizedScales[kScales].halves);
      for (; row + kRows <= args.rows; row += kRows) {
        products.begin(row == 0);
        multiply_panel<kScales, bits, vectors, kRows>(args, layout, tile, row, products, sums);
      }
    }
  }
#endif
  multiply_rows<kScales, bits, vectors>(args, layout, tile, row, sums);
}

template <int vectors>
void multiply_rows(const QuantizedLinearArgs& args, const Layout& layout, const uint8_t* tile, float* sums) {
  with_quantized_kind(layout.scales, layout.bits, [&]<Scales kScales, int bits>() {
    // Compiled once for both types of scales.
    constexpr Scales kSame = kScales == QuantizedScales::kFloatZero ? QuantizedScales::kHalfZero : kScales;
    multiply_all<kSame, bits, vectors>(args, layout, tile, sums);
  });
}

// The outputs [first, first + count) of all rows from their sums.
template <class T>
void finish(const QuantizedLinearArgs& args, const float* sums, int64_t first, int64_t count) {
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t row = 0; row < args.rows; ++row, sums += Layout::kTile) {
    T* out = args.out.row<T>(row) + first;
    for_vectors(0, count, [&](int64_t at, auto lanes) {
      const Vec sum = load(sums + at, Whole{});
      store(out + at, bias == nullptr ? sum : sum + load(bias + first + at, lanes), lanes);
    });
  }
}

// The largest of all lanes, and the sum of all: by halves, as the compiler does not.
template <class Lanes, class Join>
PDK_INLINE auto joined(Lanes x, const Join& join) {
  constexpr int lanes = sizeof(Lanes) / sizeof(x[0]);
  if constexpr (lanes == 1) {
    return x[0];
  } else {
    typedef decltype(x[0] + 0) Number;
    typedef Number HalfOf __attribute__((vector_size(sizeof(Lanes) / 2)));
    struct {
      HalfOf low, high;
    } parts = __builtin_bit_cast(decltype(parts), x);
    return joined(join(parts.low, parts.high), join);
  }
}

// A row of x: codes are round(x * (127 / max)), ties to even, of blocks whose largest magnitude is max. A block below
// 2^-100 is zero; one with an infinity or NaN has the scale NaN.
template <class T>
void quantize_row(const T* x, int64_t width, const QuantizedRows& to, int64_t row) {
  constexpr int size = Layout::kBlock, vectors = size / kLanes;
  const auto plus = [](auto a, auto b) { return a + b; };
  const auto most = [](auto a, auto b) { return a > b ? a : b; };
  QuantizedBlock* block = to.row(row);
  for (int64_t b = 0; b < to.blocks; ++b, block += QuantizedRows::kGroup) {
    const int64_t begin = b * size;
    Vec values[vectors];
    Words largest{};
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const int64_t at = begin + i * kLanes;
      values[i] = at + kLanes <= width ? load(x + at, Whole{}) : at < width ? load(x + at, Part{width - at}) : Vec{};
      largest = most(largest, reinterpret_cast<Words>(values[i]) & 0x7fffffffu);
    }
    const uint32_t bits = joined(largest, most);
    const float max = __builtin_bit_cast(float, bits);
    const bool finite = bits < 0x7f800000u, counted = finite && max >= 0x1p-100f;
    const float inverse = counted ? 127.0f / max : 0.0f;
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers, which are then in the low bits
    Ints halves[2]{};
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const Vec shifted = rounded(values[i] * inverse) + rounder;
      const Ints whole = counted ? reinterpret_cast<Ints>(shifted) - 0x4b400000 : Ints{};
      halves[i / (vectors / 2)] += whole;
      *reinterpret_cast<LooseSigned*>(block->codes + i * kLanes) = __builtin_convertvector(whole, LooseSigned);
    }
    const int32_t first = joined(halves[0], plus), sum = first + joined(halves[1], plus);
    block->scale = counted ? max / 127.0f : finite ? 0.0f : __builtin_nanf("");
    block->scaled_sum = static_cast<float>(sum) * block->scale;
    block->negative_sum = -sum, block->negative_half = -first;
  }
}

// The tiles [from, to) of all rows, which are quantised; `matrix`: the number of the matrix, of those of each part.
template <class T>
void multiply_tiles(const QuantizedLinearArgs& args, int64_t matrix, int64_t from, int64_t to) {
  int64_t scratch = kVectors * args.rows * Layout::kTile * static_cast<int64_t>(sizeof(float));
#ifdef PDK_PANELS
  if (args.rows >= FromPanels::kMinRows) scratch += args.quantized.blocks * kVectors * FromPanels::kBlockBytes;
#endif
  auto* sums = reinterpret_cast<float*>(thread_scratch(scratch));
  int64_t first = 0;  // outputs and tiles of the parts before
  int64_t before = 0;
  for (int64_t p = 0; p < args.part_count; ++p) {
    const QuantizedPart& part = args.parts[p];
    const int64_t own = Layout::tiles(part.outputs), bytes = part.layout.tile_bytes(args.width);
    const uint8_t* data = part.data + matrix * own * bytes;
    const int64_t last = smaller(own, to - before);
    for (int64_t t = from > before ? from - before : 0; t < last;) {
      const uint8_t* tile = data + t * bytes;
      const bool several = args.rows > 1 && t + kVectors <= last;  // else every vector would be a stream of its own
      several ? multiply_rows<kVectors>(args, part.layout, tile, sums)
              : multiply_rows<1>(args, part.layout, tile, sums);
      for (int v = 0; v < (several ? kVectors : 1); ++v, ++t) {
        finish<T>(args, sums + v * args.rows * Layout::kTile, first + t * Layout::kTile,
                  smaller(Layout::kTile, part.outputs - t * Layout::kTile));
      }
    }
    first += part.outputs, before += own;
  }
}

PDK_INLINE int64_t tiles_of(const QuantizedLinearArgs& args) {
  int64_t tiles = 0;
  for (int64_t p = 0; p < args.part_count; ++p) tiles += Layout::tiles(args.parts[p].outputs);
  return tiles;
}

template <class T>
void linear_of(const QuantizedLinearArgs& args) {
  for_rows(args.rows, args.width,
           [&](int64_t row) { quantize_row(args.x.row<const T>(row), args.width, args.quantized, row); });
  for_ranges(tiles_of(args), Layout::kTile * args.width * smaller(args.rows, 4),
             [&](int64_t from, int64_t to) { multiply_tiles<T>(args, 0, from, to); });
}

template <class T>
void grouped_linear_of(const QuantizedGroupedLinearArgs& args) {
  const QuantizedLinearArgs& all = args.all;
  const RowGroup* used = args.groups.used;
  for_rows(args.groups.count, all.width * (all.rows / args.groups.count), [&](int64_t u) {
    for (int64_t i = 0; i < used[u].count; ++i) {
      quantize_row(all.x.row<const T>(used[u].first + i), all.width, all.quantized, used[u].slot + i);
    }
  });
  const int64_t tiles = tiles_of(all);
  const int64_t each = Layout::kTile * all.width * smaller(all.rows / args.groups.count, 4);
  for_ranges(args.groups.count * tiles, each, [&](int64_t from, int64_t to) {
    for (int64_t next; from < to; from = next) {
      const RowGroup& group = used[from / tiles];
      const int64_t first = from / tiles * tiles;
      next = smaller(first + tiles, to);
      QuantizedLinearArgs own = all;
      own.rows = group.count;
      own.out.data = all.out.row<T>(group.first);
      own.quantized.data = all.quantized.row(group.slot);
      if (own.bias != nullptr) own.bias = static_cast<const T*>(own.bias) + group.matrix * args.outputs;
      multiply_tiles<T>(own, group.matrix, from - first, next - first);
    }
  });
}

PDK_INLINE float half_at(const uint8_t* from) {
  Half half;
  __builtin_memcpy(&half, from, sizeof(half));
  return to_float(half);
}
PDK_INLINE float float_at(const uint8_t* from) {
  float x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

// The code in a column of a block, of the output in a lane of the tile.
PDK_INLINE int code_at(const uint8_t* block, int bits, int lane, int column) {
  const int run = column / 4, byte = 4 * lane + column % 4;
  if (bits == 8) return block[run * kRunBytes + byte];
  const int low = block[run % (kRuns / 2) * kRunBytes + byte] >> (run < kRuns / 2 ? 0 : 4) & 15;
  if (bits == 4) return low;
  const int more = bits - 4, each = 8 / more;
  const int high = block[(kRuns / 2 + run / each) * kRunBytes + byte] >> (more * (run % each)) & ((1 << more) - 1);
  return low | high << 4;
}

// A row of the matrix: `lane` of a tile.
template <class T>
void dequantize_row(const Layout& layout, const uint8_t* tile, int lane, int64_t width, T* out) {
  const int64_t size = layout.blocks_of_group(width);
  const uint8_t* codes = tile + layout.headers(width);
  constexpr int tile_size = Layout::kTile;
  const QuantizedScales& fields = layout.fields();
  const bool floats = fields.scale_bytes == 4;
  for (int64_t b = 0; b < layout.blocks(width); ++b, codes += layout.code_bytes()) {
    const uint8_t* header = tile + b / size * layout.header_bytes();
    const uint8_t* multiples = header + layout.multiples_at() + 2 * tile_size * (b % size) + lane;
    const float scale = floats ? float_at(header + 4 * lane) : half_at(header + 2 * lane);
    const int zero = fields.zero ? header[layout.zero_at() + lane] : layout.zero();
    const int64_t first = b * Layout::kBlock;
    for (int i = 0; i < smaller(Layout::kBlock, width - first); ++i) {
      float own = scale, minimum = 0;
      if (fields.minimum) minimum = half_at(header + layout.minimum_at() + 2 * lane);
      if (fields.halves) {
        own = scale * static_cast<float>(static_cast<int8_t>(multiples[i / 16 * tile_size]));
      } else if (fields.multiples > 0) {
        own = scale * static_cast<float>(multiples[0]);
        minimum = -minimum * static_cast<float>(multiples[tile_size]);
      }
      const float value = rounded(splat(own * static_cast<float>(code_at(codes, layout.bits, lane, i) - zero)))[0];
      out[first + i] = from_float<T>(fields.minimum ? value + minimum : value);
    }
  }
}

template <class T>
void embedding_of(const QuantizedEmbeddingArgs& args) {
  for_rows(args.rows, 8 * args.width, [&](int64_t row) {
    int64_t number = args.ids.load(row);
    for (int64_t p = 0; p < args.part_count; ++p) {
      const QuantizedPart& part = args.parts[p];
      if (number < part.outputs) {
        const int64_t tile = number / Layout::kTile;
        return dequantize_row(part.layout, part.data + tile * part.layout.tile_bytes(args.width),
                              static_cast<int>(number % Layout::kTile), args.width, args.out.row<T>(row));
      }
      number -= part.outputs;
    }
  });
}

}  // namespace

void quantized_linear(const QuantizedLinearArgs& args) { PDK_BY_ELEMENT(linear_of, args) }
void quantized_grouped_linear(const QuantizedGroupedLinearArgs& args) {
  switch (args.all.element) {
    case Element::kFloat: return grouped_linear_of<float>(args);
    case Element::kHalf: return grouped_linear_of<Half>(args);
    case Element::kBfloat16: return grouped_linear_of<Bfloat16>(args);
  }
}
void quantized_embedding(const QuantizedEmbeddingArgs& args) { PDK_BY_ELEMENT(embedding_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
