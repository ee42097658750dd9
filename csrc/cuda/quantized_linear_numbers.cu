// Products of a quantised matrix with rows that stay numbers (W4A16) on CUDA.
//
// A block of threads owns `kTiles` tiles of 16 outputs and `kGroups` groups of eight rows. The width is cut into eight
// pieces, one for each warp, whatever the tiling: it adds up its blocks of 32 columns in ascending order, and the sums
// of the pieces are added up in ascending order at the end. So no warp waits for another one before that, and a row has
// the same bits among any others.
//
// Codes become numbers of x's type in the registers that the tensor core reads, exactly, and rows of 16 bits are read
// as they lie in memory: a lane's four columns of a code word are eight bytes of a row. A number of float32 is three of
// bfloat16, eight bits of its mantissa each, which multiply one after the other.
#include "number_mma.h"
#include "quantized_chunks.h"

namespace pdkernels::cuda {
namespace {

constexpr int kRows = 8, kBlock = Layout::kBlock;

struct NumberProducts : PackedPart {
  const void* x;     // rows of whole blocks, whose four columns are read at once
  int64_t x_stride;  // in bytes
  int piece;         // blocks of a warp
};

template <class T>
struct Terms {
  using Number = T;
  static constexpr int kCount = 1;

  uint2 words[kCount];
  __device__ void load(const char* x) { words[0] = __ldg(reinterpret_cast<const uint2*>(x)); }
};
template <>
struct Terms<float> {
  using Number = __nv_bfloat16;
  static constexpr int kCount = 3;

  uint2 words[kCount];
  // Each the highest bits of what the ones before leave, cut off, so that nothing overflows.
  __device__ void load(const char* x) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(x));
    float left[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int term = 0; term < kCount; ++term) {
      uint32_t bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[i] = static_cast<uint32_t>(__float_as_int(left[i]));
        left[i] = __fsub_rn(left[i], __int_as_float(static_cast<int>(bits[i] & 0xffff0000u)));
      }
      words[kCount - 1 - term] = {__byte_perm(bits[0], bits[1], 0x7632u), __byte_perm(bits[2], bits[3], 0x7632u)};
    }
  }
};

// What a lane multiplies a block of a tile with: numbers of the outputs g and g + 8, of both half blocks.
template <class T, class K, int kBits>
struct TileNumbers {
  using Number = typename Terms<T>::Number;

  uint32_t pairs[2][2][2];  // [half block][output][pair of columns]
  float scale[2][2];        // [half block][output]
  float minimum[2];

  template <class Read>
  __device__ void take(const Read& read, int c, int i, int t) {
    const auto& header = read.header[c < Read::kHeaders ? c : 0][i];
    uint32_t bytes[4];
    read.codes[c][i].unpack(bytes, t);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float zero = K::kZero + (kBits == 8 ? 0 : WholeNumbers<Number>::kAbove);
      if constexpr (K::kZeros) zero += header.zero[j] - (kBits == 8 ? 128 : 0);
      const uint32_t zeros = twice<Number>(zero);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        spread<Number, kBits == 8>(bytes[2 * half + j], zeros, K::kZeros, pairs[half][j]);
      }
      scale[0][j] = scale[1][j] = to_float(header.scale[j]);
      if constexpr (K::kMinimum) minimum[j] = to_float(header.minimum[j]);
      if constexpr (K::kHalves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int multiple = static_cast<int8_t>(read.multiple[c][i][half][j]);
          scale[half][j] = __fmul_rn(scale[half][j], __int2float_rn(multiple));
        }
      } else if constexpr (K::kMultiples) {
        scale[0][j] = __fmul_rn(scale[0][j], __int2float_rn(read.multiple[c][i][0][j]));
        minimum[j] = -__fmul_rn(minimum[j], __int2float_rn(read.multiple[c][i][1][j]));
      }
    }
  }

  __device__ void multiply(float (&sums)[4], int half, const Terms<T>& x) const {
#pragma unroll
    for (int term = 0; term < Terms<T>::kCount; ++term) {
      multiply_numbers<Number>(sums, pairs[half][0], pairs[half][1], x.words[term]);
    }
  }
};

// Adds a chunk of blocks to the sums of a piece, those below `left`.
template <class T, class K, int kBits, bool kWhole, int kTiles, int kGroups, class Read>
__device__ void add_chunk(const Read& read, const char* const (&rows)[kGroups], int groups, int first, int left, int t,
                          float (&total)[kTiles][kGroups][4]) {
  constexpr uint32_t one = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
  constexpr uint32_t ones[2] = {one, one};
  const char* x_at[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) x_at[n] = rows[n] + int64_t{first} * (kBlock * sizeof(T));
#pragma unroll
  for (int c = 0; c < Read::kBlocks; ++c) {
    if (!kWhole && c >= left) break;
    TileNumbers<T, K, kBits> tile[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) tile[i].take(read, c, i, t);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      if (n > 0 && n >= groups) break;
      Terms<T> x[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) { x[half].load(x_at[n] + (c * kBlock + half * kBlock / 2) * sizeof(T)); }
      float sum_of_x[4] = {};
      if constexpr (K::kMinimum) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int term = 0; term < Terms<T>::kCount; ++term) {
            multiply_numbers<typename Terms<T>::Number>(sum_of_x, ones, ones, x[half].words[term]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        float sums[2][4] = {};
        tile[i].multiply(sums[0], 0, x[0]);
        tile[i].multiply(sums[K::kHalves], 1, x[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& to = total[i][n][j];
          to = __fmaf_rn(sums[0][j], tile[i].scale[0][j / 2], to);
          if constexpr (K::kHalves) to = __fmaf_rn(sums[1][j], tile[i].scale[1][j / 2], to);
          if constexpr (K::kMinimum) to = __fmaf_rn(sum_of_x[j % 2], tile[i].minimum[j / 2], to);
        }
      }
    }
  }
}

template <class T, Scales kScales, int kBits, int kTiles, int kGroups, int kChunk>
__global__ void __launch_bounds__(kThreads, 2) number_kernel(NumberProducts p) {
  using K = Kind<kScales, kBits>;
  constexpr int kSums = kTiles * kGroups * 4;
  __shared__ float pieces[kWarps][kSums][32];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_tile = blockIdx.x / p.row_tiles * kTiles, last_tile = Layout::tiles(p.outputs) - 1;
  const int64_t first_row = int64_t{blockIdx.x % p.row_tiles} * (kGroups * kRows);
  const int groups = static_cast<int>(min((p.row_count - first_row + kRows - 1) / kRows, int64_t{kGroups}));
  const uint8_t* tile[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) tile[i] = p.data + min(first_tile + i, last_tile) * p.tile_bytes;
  const char* rows[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int64_t row = min(first_row + n * kRows + g, p.row_count - 1);
    rows[n] = static_cast<const char*>(p.x) + row * p.x_stride + 4 * t * sizeof(T);
  }

  float total[kTiles][kGroups][4] = {};
  const int first = warp * p.piece, last = min(first + p.piece, p.blocks);
  Chunk<kScales, kBits, kTiles, kChunk> read;
  const Fetching<K> fetching(p, lane == 0 ? tile[0] : tile[kTiles - 1], first, last, lane < kTiles);
  if (first < last) read.load(p, tile, first, g, t);
  for (int at = first; at < last; at += kChunk) {
    if (at % fetching.kStep == 0) fetching.ask(at + fetching.kAhead, at + fetching.kAhead + fetching.kStep);
    if (at + kChunk <= last) {
      add_chunk<T, K, kBits, true>(read, rows, groups, at, kChunk, t, total);
    } else {
      add_chunk<T, K, kBits, false>(read, rows, groups, at, last - at, t, total);
    }
    if (at + kChunk < last) read.load(p, tile, at + kChunk, g, t);
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) pieces[warp][i][lane] = total[i / 4 / kGroups][i / 4 % kGroups][i % 4];
  __syncthreads();
  for (int i = warp; i < kSums; i += kWarps) {
    float sum = pieces[0][i][lane];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) sum = __fadd_rn(sum, pieces[other][i][lane]);
    const int64_t output = (first_tile + i / 4 / kGroups) * Layout::kTile + g + i % 4 / 2 * 8;
    store<T>(p, sum, first_row + i / 4 % kGroups * kRows + 2 * t + i % 2, output);
  }
}

// Rows whose four columns cannot be read at once, or that end within a block, with zeros after them.
template <class T>
__global__ void __launch_bounds__(kThreads) pad_rows(RowsView x, T* to, int64_t rows, int64_t width, int64_t columns) {
  const int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (at >= rows * columns) return;
  const int64_t row = at / columns, column = at % columns;
  to[at] = column < width ? x.row<T>(row)[column] : from_float<T>(0.0f);
}

template <class T, Scales kScales, int kBits, int kTiles, int kGroups, int kChunk>
void launch_tiling(NumberProducts& p, cudaStream_t stream) {
  p.row_tiles = static_cast<int>((p.row_count + kGroups * kRows - 1) / (kGroups * kRows));
  const int64_t tiles = (Layout::tiles(p.outputs) + kTiles - 1) / kTiles;
  PDK_LAUNCH((number_kernel<T, kScales, kBits, kTiles, kGroups, kChunk>),
             dim3(static_cast<unsigned>(tiles * p.row_tiles)), dim3(kThreads), 0, stream, p);
}

// From so many tiles on, pairs of them leave two blocks of threads for each of an H200's 132 multiprocessors. With
// fewer a warp reads as much ahead of one tile.
constexpr int64_t kManyTiles = 4 * 132;

template <class T, Scales kScales, int kBits>
void launch_kind(NumberProducts& p, cudaStream_t stream) {
  using K = Kind<kScales, kBits>;
  constexpr int kAhead = K::kWords > 1 || K::kMultiples || K::kMinimum ? 2 : 4;
  if constexpr (sizeof(T) == sizeof(float)) {
    launch_tiling<T, kScales, kBits, 1, 2, kAhead>(p, stream);
  } else if (p.row_count > kRows) {
    constexpr int kTiles = K::kMultiples && K::kMinimum ? 1 : 2;  // what else they hold would not fit the registers
    launch_tiling<T, kScales, kBits, kTiles, 4, kAhead / kTiles>(p, stream);
  } else if (Layout::tiles(p.outputs) >= kManyTiles) {
    launch_tiling<T, kScales, kBits, 2, 1, kAhead>(p, stream);
  } else {
    launch_tiling<T, kScales, kBits, 1, 1, 2 * kAhead>(p, stream);
  }
}

template <class T>
void multiply_rows(const Layout& layout, NumberProducts& p, const RowsView& x, int64_t width, void* padded,
                   cudaStream_t stream) {
  const int64_t columns = int64_t{p.blocks} * kBlock;
  p.x = x.data, p.x_stride = x.row_stride * static_cast<int64_t>(sizeof(T));
  if (columns > 0 && padded != nullptr) {
    const int64_t blocks = (p.row_count * columns + kThreads - 1) / kThreads;
    PDK_LAUNCH((pad_rows<T>), dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, x,
               static_cast<T*>(padded), p.row_count, width, columns);
    p.x = padded, p.x_stride = columns * static_cast<int64_t>(sizeof(T));
  }
  with_quantized_kind(layout.scales, layout.bits,
                      [&]<Scales kScales, int kBits>() { launch_kind<T, kScales, kBits>(p, stream); });
}

}  // namespace

void multiply_numbers(const Layout& layout, const PackedPart& part, const RowsView& x, int64_t width, void* padded,
                      cudaStream_t stream) {
  NumberProducts p{part};
  // Pieces of whole chunks and super-blocks, whatever the tiling.
  constexpr int kWhole = 8;
  p.piece = (p.blocks + kWarps * kWhole - 1) / (kWarps * kWhole) * kWhole;
  with_element(part.element, [&]<class T>(T*) { multiply_rows<T>(layout, p, x, width, padded, stream); });
}

}  // namespace pdkernels::cuda
