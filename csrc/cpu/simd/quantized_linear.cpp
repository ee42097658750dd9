// Products with a quantised matrix: one read of its codes for all rows.
//
// A lane is an output. The products of a block of the width are whole numbers, summed exactly by whatever instructions
// a level has; the blocks of an output are added up in ascending order, each product of scales rounded on its own. So
// an element of the result has the same bits at every level, however many rows and outputs are computed together.
#include "quantized_numbers.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The outputs [first, first + count) of a row from its sums.
template <class T>
PDK_INLINE void finish_row(const QuantizedLinearArgs& args, const float* sums, int64_t row, int64_t first,
                           int64_t count) {
  const T* bias = static_cast<const T*>(args.bias);
  T* out = args.out.row<T>(row) + first;
  for_vectors(0, count, [&](int64_t at, auto lanes) {
    const Vec sum = load(sums + at, Whole{});
    store(out + at, bias == nullptr ? sum : sum + load(bias + first + at, lanes), lanes);
  });
}

// Those of the rows of a piece, where they are not there yet.
template <class T>
void finish(const QuantizedLinearArgs& args, const Piece& piece, int64_t first, int64_t count) {
  for (int64_t row = piece.left(); row < piece.row + piece.rows; ++row) {
    finish_row<T>(args, piece.of(row), row, first, count);
  }
}

// Blocks of a row of x that are quantised together, a lane each.
constexpr int kBlocks = kLanes > 8 ? 8 : 4;

// Lane i of the result joins all lanes of rows[i]; further lanes repeat them.
template <int kDistance = 1, class Join>
PDK_INLINE Ints joined(Ints (&rows)[kBlocks], const Join& join) {
  constexpr bool apart = kDistance < kBlocks;  // rows meet; after that the only one meets itself
#pragma GCC unroll 8
  for (int i = 0; i < (apart ? kBlocks : 1); i += 2 * kDistance) {
    Ints other = rows[apart ? i + kDistance : i];
    exchange<kDistance>(rows[i], other);
    rows[i] = join(rows[i], other);
  }
  if constexpr (2 * kDistance < kLanes) return joined<2 * kDistance>(rows, join);
  return rows[0];
}

// Some blocks of a row from `x` on. Codes are round(x * (127 / max)), ties to even, of blocks whose largest magnitude
// is max. A block below 2^-100 is zero; one with an infinity or NaN has the scale NaN and codes of zero.
template <class T>
PDK_INLINE void quantize_blocks(const T* x, QuantizedBlock* block) {
  constexpr int size = Layout::kBlock, vectors = size / kLanes;
  constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers, which are then in the low bits
  const auto larger_of = [](Ints a, Ints b) { return a > b ? a : b; };
  Ints joins[kBlocks];
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) {
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const Ints magnitude = reinterpret_cast<Ints>(load(x + b * size + i * kLanes, Whole{})) & 0x7fffffff;
      joins[b] = i == 0 ? magnitude : larger_of(magnitude, joins[b]);
    }
  }
  const Ints bits = joined(joins, larger_of), finite = bits < 0x7f800000;
  const Vec max = reinterpret_cast<Vec>(bits);
  const Ints counted = finite & (max >= 0x1p-100f);
  const Vec inverse = choose(counted, 127.0f / max, Vec{});
  T numbers[kBlocks * size];
  if (bits_of(~finite) != 0) {
    for (int i = 0; i < kBlocks * size; ++i) numbers[i] = finite[i / size] ? x[i] : T{};
    x = numbers;
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b, x += size) {
#pragma GCC unroll 8
    for (int i = 0; i < vectors; ++i) {
      const Vec shifted = rounded(load(x + i * kLanes, Whole{}) * inverse[b]) + rounder;
      const Ints whole = reinterpret_cast<Ints>(shifted) - 0x4b400000;
      const Ints placed = i < vectors / 2 ? whole : whole << 16;  // the sum of either half fits
      joins[b] = i == 0 ? placed : joins[b] + placed;
      int8_t* codes = block[b * QuantizedRows::kGroup].codes + i * kLanes;
      *reinterpret_cast<LooseSigned*>(codes) = __builtin_convertvector(whole, LooseSigned);
    }
  }
  const Ints both = joined(joins, [](Ints a, Ints b) { return a + b; });
  const Ints first = both << 16 >> 16, sum = ((both - first) >> 16) + first;
  const Vec scale = choose(counted, max / 127.0f, choose(finite, Vec{}, splat(__builtin_nanf(""))));
  Ints rows[4] = {reinterpret_cast<Ints>(scale), reinterpret_cast<Ints>(to_vec(sum) * scale), -sum, -first};
  exchange<1>(rows[0], rows[1]), exchange<1>(rows[2], rows[3]);
  exchange<2>(rows[0], rows[2]), exchange<2>(rows[1], rows[3]);
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) {
    const auto* four = reinterpret_cast<const char*>(&rows[b % 4]) + b / 4 * 16;
    __builtin_memcpy(&block[b * QuantizedRows::kGroup].scale, four, 16);
  }
}

template <class T>
void quantize_row(const T* x, int64_t width, const QuantizedRows& to, int64_t row) {
  constexpr int size = Layout::kBlock;
  for (int64_t begin = 0; begin < to.blocks; begin += kBlocks) {
    // Some of the last blocks may have been there already.
    const int64_t at = larger(smaller(begin, to.blocks - kBlocks), 0), left = width - at * size;
    const bool whole = left >= kBlocks * size;
    QuantizedBlock *block = to.row(row) + at * QuantizedRows::kGroup, found[kBlocks * QuantizedRows::kGroup];
    T padded[kBlocks * size];
    for (int64_t i = 0; !whole && i < kBlocks * size; ++i) padded[i] = i < left ? x[at * size + i] : T{};
    quantize_blocks(whole ? x + at * size : padded, whole ? block : found);
    for (int64_t b = 0; !whole && b < smaller(kBlocks, to.blocks); ++b) {
      block[b * QuantizedRows::kGroup] = found[b * QuantizedRows::kGroup];
    }
  }
}

// How all rows are multiplied with a part: pieces of rows that stay in the second-level cache with the codes of some
// tiles, unpacked.
struct Cut {
  static constexpr int64_t kMost = 64, kPanelBytes = 256 * 1024;

  int64_t rows, tiles;  // of a piece, and how many share a cache with it
  int64_t panel_bytes;  // of kTiles tiles; 0: too few rows

  Cut(const QuantizedLinearArgs& args) {
    const int64_t pieces = larger((args.rows + kMost - 1) / kMost, 1), own = FromPanels::bytes(args.quantized.blocks);
    rows = pieces == 1 ? args.rows : rounded_up((args.rows + pieces - 1) / pieces, QuantizedRows::kGroup);
    tiles = pieces == 1 ? kTiles : larger(kPanelBytes / larger(own, 1), 1) * kTiles;
    panel_bytes = args.rows < FromPanels::kMinRows ? 0 : own;
  }
  int64_t sums_bytes() const {
    return rounded_up(rows * kTiles * Layout::kTile * static_cast<int64_t>(sizeof(float)), 64);
  }
  int64_t bytes() const { return sums_bytes() + tiles / kTiles * panel_bytes; }
};

// The tiles [from, to) of a part, `data` the first of all of them, whose outputs follow `first` others.
template <class T>
void multiply_part(const QuantizedLinearArgs& args, const QuantizedPart& part, const uint8_t* data, int64_t from,
                   int64_t to, int64_t first) {
  const Cut cut(args);
  char* memory = thread_scratch(cut.bytes());
  auto* panels = reinterpret_cast<uint8_t*>(memory + cut.sums_bytes());
  const int64_t bytes = part.layout.tile_bytes(args.width), headers = part.layout.headers(args.width);
  const int64_t blocks = larger(args.quantized.blocks, 1), share = (bytes + blocks - 1) / blocks;
  for (int64_t begin = from, end; begin < to; begin = end) {
    end = smaller(begin + cut.tiles, to);
    for (int64_t row = 0; row < args.rows; row += cut.rows) {
      Piece piece{row,
                  smaller(cut.rows, args.rows - row),
                  reinterpret_cast<float*>(memory),
                  nullptr,
                  args.out.row_stride * static_cast<int64_t>(sizeof(T)),
                  false};
      for (int64_t t = begin; t < end; t += kTiles) {
        const int count = static_cast<int>(smaller(kTiles, end - t));
        // A tile alone is its own neighbour.
        const Tiles tiles{data + t * bytes, count > 1 ? bytes : 0, count, bytes, headers, share};
        uint8_t* unpacked = cut.panel_bytes > 0 ? panels + (t - begin) / kTiles * cut.panel_bytes : nullptr;
        const int64_t output = t * Layout::kTile;
        piece.out = reinterpret_cast<char*>(args.out.row<T>(row) + first + output);
        // A tile alone is multiplied twice, and has no room for that.
        piece.same = sizeof(T) == sizeof(float) && args.bias == nullptr && count == kTiles &&
                     kTiles * Layout::kTile <= part.outputs - output;
        multiply_piece(args, part.layout, tiles, piece, unpacked);
        finish<T>(args, piece, first + output, smaller(count * Layout::kTile, part.outputs - output));
      }
    }
  }
}

// The same with rows that stay numbers.
template <class T>
void multiply_part_by_numbers(const QuantizedLinearArgs& args, const QuantizedPart& part, const uint8_t* data,
                              int64_t from, int64_t to, int64_t first) {
  const int64_t blocks = args.quantized.blocks, most = smaller(args.rows, NumberRows::kMost);
  const int64_t floats = most * Layout::kTile + NumberRows::floats(most, blocks);
  auto* memory = reinterpret_cast<float*>(thread_scratch(floats * static_cast<int64_t>(sizeof(float))));
  for (int64_t row = 0; row < args.rows && from < to; row += most) {
    float* numbers = memory + most * Layout::kTile;
    const NumberRows x{numbers, numbers + most * blocks * Layout::kBlock, smaller(most, args.rows - row), blocks};
    x.fill<T>(args, row);
    for (int64_t t = from; t < to; ++t) {
      const uint8_t* tile = data + t * part.layout.tile_bytes(args.width);
      multiply_numbers<(sizeof(T) < sizeof(float))>(part.layout, tile, args.width, x, memory);
      const int64_t output = t * Layout::kTile, count = smaller(Layout::kTile, part.outputs - output);
      for (int64_t r = 0; r < x.rows; ++r) {
        finish_row<T>(args, memory + r * Layout::kTile, row + r, first + output, count);
      }
    }
  }
}

// The tiles [from, to) of all rows, which are quantised where a part needs it; `matrix`: the number of the matrix, of
// those of each part.
template <class T>
void multiply_tiles(const QuantizedLinearArgs& args, int64_t matrix, int64_t from, int64_t to) {
  int64_t first = 0, before = 0;  // outputs and tiles of the parts before
  for (int64_t p = 0; p < args.part_count; ++p) {
    const QuantizedPart& part = args.parts[p];
    const int64_t own = Layout::tiles(part.outputs);
    const uint8_t* data = part.data + matrix * own * part.layout.tile_bytes(args.width);
    const auto multiply = part.layout.number_rows ? multiply_part_by_numbers<T> : multiply_part<T>;
    multiply(args, part, data, larger(from - before, 0), smaller(own, to - before), first);
    first += part.outputs, before += own;
  }
}

// Of tiles that are multiplied together.
PDK_INLINE int64_t tile_groups(const QuantizedLinearArgs& args) {
  int64_t tiles = 0;
  for (int64_t p = 0; p < args.part_count; ++p) tiles += Layout::tiles(args.parts[p].outputs);
  return (tiles + kTiles - 1) / kTiles;
}

template <class T>
void linear_of(const QuantizedLinearArgs& args) {
  for_rows(args.quantizes() ? args.rows : 0, args.width,
           [&](int64_t row) { quantize_row(args.x.row<const T>(row), args.width, args.quantized, row); });
  for_ranges(tile_groups(args), kTiles * Layout::kTile * args.width * smaller(args.rows, 4),
             [&](int64_t from, int64_t to) { multiply_tiles<T>(args, 0, kTiles * from, kTiles * to); });
}

template <class T>
void grouped_linear_of(const QuantizedGroupedLinearArgs& args) {
  const QuantizedLinearArgs& all = args.all;
  const RowGroup* used = args.groups.used;
  for_rows(all.quantizes() ? args.groups.count : 0, all.width * (all.rows / args.groups.count), [&](int64_t u) {
    for (int64_t i = 0; i < used[u].count; ++i) {
      quantize_row(all.x.row<const T>(used[u].first + i), all.width, all.quantized, used[u].slot + i);
    }
  });
  const int64_t tiles = tile_groups(all);
  const int64_t each = kTiles * Layout::kTile * all.width * smaller(all.rows / args.groups.count, 4);
  for_ranges(args.groups.count * tiles, each, [&](int64_t from, int64_t to) {
    for (int64_t next; from < to; from = next) {
      const RowGroup& group = used[from / tiles];
      const int64_t first = from / tiles * tiles;
      next = smaller(first + tiles, to);
      QuantizedLinearArgs own = all;
      own.rows = group.count;
      own.x.data = all.x.row<T>(group.first), own.out.data = all.out.row<T>(group.first);
      own.quantized.data = all.quantized.row(group.slot);
      if (own.bias != nullptr) own.bias = static_cast<const T*>(own.bias) + group.matrix * args.outputs;
      multiply_tiles<T>(own, group.matrix, kTiles * (from - first), kTiles * (next - first));
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
