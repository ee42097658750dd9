// Products with a quantised matrix: one read of its codes for all rows.
//
// A lane is an output. The products of a block of the width are whole numbers, summed exactly by whatever instructions
// a level has; the blocks of an output are added up in ascending order, each product of scales rounded on its own. So
// an element of the result has the same bits at every level, however many rows and outputs are computed together.
#include "quantized_tiles.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The outputs [first, first + count) of the rows of a piece from their sums.
template <class T>
void finish(const QuantizedLinearArgs& args, const Piece& piece, int64_t first, int64_t count) {
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t row = piece.row; row < piece.row + piece.rows; ++row) {
    const float* sums = piece.of(row);
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
      Piece piece{row, smaller(cut.rows, args.rows - row), reinterpret_cast<float*>(memory), nullptr,
                  args.out.row_stride * static_cast<int64_t>(sizeof(T))};
      for (int64_t t = begin; t < end; t += kTiles) {
        const int count = static_cast<int>(smaller(kTiles, end - t));
        // A tile alone is its own neighbour.
        const Tiles tiles{data + t * bytes, count > 1 ? bytes : 0, count, bytes, headers, share};
        uint8_t* unpacked = cut.panel_bytes > 0 ? panels + (t - begin) / kTiles * cut.panel_bytes : nullptr;
        const int64_t output = t * Layout::kTile;
        piece.out = reinterpret_cast<const char*>(args.out.row<T>(row) + first + output);
        multiply_piece(args, part.layout, tiles, piece, unpacked);
        finish<T>(args, piece, first + output, smaller(count * Layout::kTile, part.outputs - output));
      }
    }
  }
}

// The tiles [from, to) of all rows, which are quantised; `matrix`: the number of the matrix, of those of each part.
template <class T>
void multiply_tiles(const QuantizedLinearArgs& args, int64_t matrix, int64_t from, int64_t to) {
  int64_t first = 0, before = 0;  // outputs and tiles of the parts before
  for (int64_t p = 0; p < args.part_count; ++p) {
    const QuantizedPart& part = args.parts[p];
    const int64_t own = Layout::tiles(part.outputs);
    const uint8_t* data = part.data + matrix * own * part.layout.tile_bytes(args.width);
    multiply_part<T>(args, part, data, larger(from - before, 0), smaller(own, to - before), first);
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
  for_rows(args.rows, args.width,
           [&](int64_t row) { quantize_row(args.x.row<const T>(row), args.width, args.quantized, row); });
  for_ranges(tile_groups(args), kTiles * Layout::kTile * args.width * smaller(args.rows, 4),
             [&](int64_t from, int64_t to) { multiply_tiles<T>(args, 0, kTiles * from, kTiles * to); });
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
  const int64_t tiles = tile_groups(all);
  const int64_t each = kTiles * Layout::kTile * all.width * smaller(all.rows / args.groups.count, 4);
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
