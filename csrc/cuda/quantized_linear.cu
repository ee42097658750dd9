// Products of few rows with a quantised matrix on CUDA, bound by reading the matrix.
//
// `kAlong` warps of a block of threads share `kTiles` tiles of 16 outputs and `kGroups` groups of eight rows. They take
// turns along the width: each multiplies a chunk of `kChunk` blocks of 32 columns on the tensor cores while the others'
// chunks are on their way, and adds it to the sums when those before it have been added, so that the order is that of
// the reference. Where there are enough tiles, each warp has its own, and no turns to wait for.
#include "int8_mma.h"
#include "quantized_chunks.h"
#include "quantized_rows.h"

namespace pdkernels::cuda {
namespace {

constexpr int kRows = RowFragments::kRows;

// And of the rows.
struct Products : PackedPart {
  const RowFragments* rows;
};

// The sums of a chunk, before they are added up.
template <class K, int kTiles, int kGroups, int kChunk>
struct Sums {
  float product[kChunk][kTiles][kGroups][4];
  float scaled_sum[kChunk][kGroups][2], minimum[kChunk][kTiles][2];  // where there are minima

  template <int kBits, class Read>
  __device__ void multiply_chunk(const Read& read, const RowFragments* const (&rows)[kGroups], const Products& p,
                                 int first, int g, int t) {
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      const int block = min(first + c, p.blocks - 1);
      uint32_t a[kTiles][4];
      float scale[kTiles][2];
      int zero[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const auto& header = read.header[c < Read::kHeaders ? c : 0][i];
        read.codes[c][i].unpack(a[i], t);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scale[i][j] = to_float(header.scale[j]);
          zero[i][j] = K::kZero;
          if constexpr (K::kZeros) zero[i][j] = header.zero[j] - (kBits == 8 ? 128 : 0);
          if constexpr (K::kMinimum) minimum[c][i][j] = to_float(header.minimum[j]);
          if constexpr (K::kMultiples && K::kMinimum) {
            scale[i][j] = __fmul_rn(scale[i][j], __int2float_rn(read.multiple[c][i][0][j]));
            minimum[c][i][j] = -__fmul_rn(minimum[c][i][j], __int2float_rn(read.multiple[c][i][1][j]));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const RowFragments& row = rows[n][block];
        const uint2 b = row.codes[4 * g + t];
        const float2 x_scale = reinterpret_cast<const float2*>(row.scale)[t];
        const int2 negative = reinterpret_cast<const int2*>(row.negative_sum)[t];
        if constexpr (K::kMinimum) {
          const float2 sum = reinterpret_cast<const float2*>(row.scaled_sum)[t];
          scaled_sum[c][n][0] = sum.x, scaled_sum[c][n][1] = sum.y;
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          int found[4];
          if constexpr (K::kHalves) {
            const int2 half = reinterpret_cast<const int2*>(row.negative_half)[t];
            int low[4] = {32 * half.x, 32 * half.y, 32 * half.x, 32 * half.y};
            int high[4] = {32 * (negative.x - half.x), 32 * (negative.y - half.y), 32 * (negative.x - half.x),
                           32 * (negative.y - half.y)};
            multiply(low, a[i][0], a[i][1], b.x);
            multiply(high, a[i][2], a[i][3], b.y);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              found[j] = low[j] * static_cast<int8_t>(read.multiple[c][i][0][j / 2]) +
                         high[j] * static_cast<int8_t>(read.multiple[c][i][1][j / 2]);
            }
          } else {
            found[0] = negative.x * zero[i][0], found[1] = negative.y * zero[i][0];
            found[2] = negative.x * zero[i][1], found[3] = negative.y * zero[i][1];
            multiply(found, a[i], b);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scaled = __fmul_rn(__int2float_rn(found[j]), j % 2 ? x_scale.y : x_scale.x);
            product[c][i][n][j] = __fmul_rn(scaled, scale[i][j / 2]);
          }
        }
      }
    }
  }

  // Those of the first `blocks`.
  __device__ void add_to(float (&total)[kTiles][kGroups][4], int blocks) const {
    if (blocks >= kChunk) {
#pragma unroll
      for (int c = 0; c < kChunk; ++c) add_block(total, c);
    } else {
#pragma unroll
      for (int c = 0; c < kChunk - 1; ++c) {
        if (c < blocks) add_block(total, c);
      }
    }
  }

  __device__ void add_block(float (&total)[kTiles][kGroups][4], int c) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          total[i][n][j] = __fadd_rn(total[i][n][j], product[c][i][n][j]);
          if constexpr (K::kMinimum) {
            total[i][n][j] = __fadd_rn(total[i][n][j], __fmul_rn(scaled_sum[c][n][j % 2], minimum[c][i][j / 2]));
          }
        }
      }
    }
  }
};

template <Scales kScales, int kBits, int kTiles, int kGroups, int kChunk, int kAlong>
__global__ void __launch_bounds__(kThreads, 2) product_kernel(Products p) {
  using K = Kind<kScales, kBits>;
  __shared__ float handed[kTiles * kGroups * 4][32];  // from warp to warp

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int along = warp % kAlong;
  const int64_t first_tile = int64_t{blockIdx.x / p.row_tiles * (kWarps / kAlong) + warp / kAlong} * kTiles;
  const int64_t last_tile = Layout::tiles(p.outputs) - 1;
  const int64_t first_group = static_cast<int64_t>(blockIdx.x % p.row_tiles) * kGroups;
  const int64_t last_group = (p.row_count + kRows - 1) / kRows - 1;
  const uint8_t* tile[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) tile[i] = p.data + min(first_tile + i, last_tile) * p.tile_bytes;
  const RowFragments* rows[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) rows[n] = p.rows + min(first_group + n, last_group) * p.blocks;

  float total[kTiles][kGroups][4] = {};
  Chunk<kScales, kBits, kTiles, kChunk> read;
  using Fetched = Fetching<K>;
  const Fetched fetching(p, lane == 0 ? tile[0] : tile[kTiles - 1], 0, kAlong == 1 ? p.blocks : 0, lane < kTiles);
  if (p.blocks > 0) read.load(p, tile, along * kChunk, g, t);
  for (int round = 0; round < p.blocks; round += kAlong * kChunk) {
    const int first = round + along * kChunk;
    if (kAlong == 1 && round % Fetched::kStep == 0) {
      fetching.ask(round + Fetched::kAhead, round + Fetched::kAhead + Fetched::kStep);
    }
    Sums<K, kTiles, kGroups, kChunk> sums;
    sums.template multiply_chunk<kBits>(read, rows, p, first, g, t);
    read.load(p, tile, first + kAlong * kChunk, g, t);
    if constexpr (kAlong == 1) {
      sums.add_to(total, p.blocks - first);
      continue;
    }
#pragma unroll 1
    for (int turn = 0; turn < kAlong; ++turn) {
      if (turn == along) {
        float* own = &handed[0][lane];
#pragma unroll
        for (int i = 0; i < kTiles * kGroups * 4; ++i) {
          if (round + turn > 0) total[i / 4 / kGroups][i / 4 % kGroups][i % 4] = own[32 * i];
        }
        sums.add_to(total, p.blocks - first);
#pragma unroll
        for (int i = 0; i < kTiles * kGroups * 4; ++i) own[32 * i] = total[i / 4 / kGroups][i / 4 % kGroups][i % 4];
      }
      __syncthreads();
    }
  }
  if (along != kAlong - 1) return;
#pragma unroll
  for (int i = 0; i < kTiles * kGroups * 4; ++i) {
    const int64_t output = (first_tile + i / 4 / kGroups) * Layout::kTile + g + i % 4 / 2 * 8;
    const int64_t row = (first_group + i / 4 % kGroups) * kRows + 2 * t + i % 2;
    const float value = total[i / 4 / kGroups][i / 4 % kGroups][i % 4];
    switch (p.element) {
      case Element::kFloat: store<float>(p, value, row, output); break;
      case Element::kHalf: store<__half>(p, value, row, output); break;
      case Element::kBfloat16: store<__nv_bfloat16>(p, value, row, output); break;
    }
  }
}

template <Scales kScales, int kBits, int kTiles, int kGroups, int kChunk, int kAlong>
void launch_tiling(Products& p, cudaStream_t stream) {
  const int64_t groups = (p.row_count + kRows - 1) / kRows;
  p.row_tiles = static_cast<int>((groups + kGroups - 1) / kGroups);
  constexpr int kOwned = kTiles * (kWarps / kAlong);
  const int64_t tiles = (Layout::tiles(p.outputs) + kOwned - 1) / kOwned;
  PDK_LAUNCH((product_kernel<kScales, kBits, kTiles, kGroups, kChunk, kAlong>),
             dim3(static_cast<unsigned>(tiles * p.row_tiles)), dim3(kThreads), 0, stream, p);
}

// From twelve tiles for each of an H200's 132 multiprocessors on, its warps are busy without turns.
constexpr int64_t kManyTiles = 12 * 132;

// Sums and what is read ahead fill the registers of two blocks of threads on a multiprocessor, and no more.
template <Scales kScales, int kBits>
void launch_kind(Products& p, cudaStream_t stream) {
  using K = Kind<kScales, kBits>;
  constexpr int kLess = K::kMultiples ? 2 : 1;
  if (p.row_count <= kRows) {
    constexpr int kChunk = K::kWords > 1 || K::kMultiples || K::kMinimum ? 4 : 8;
    if (Layout::tiles(p.outputs) >= kManyTiles) {
      launch_tiling<kScales, kBits, 1, 1, kChunk, 1>(p, stream);
    } else {
      launch_tiling<kScales, kBits, 1, 1, kChunk, kWarps>(p, stream);
    }
  } else if (p.row_count <= 2 * kRows) {
    launch_tiling<kScales, kBits, 1, 2, 4 / kLess, kWarps>(p, stream);
  } else {
    launch_tiling<kScales, kBits, 1, 4, 2 / kLess, kWarps>(p, stream);
  }
}

void launch_products(const Layout& layout, Products& p, cudaStream_t stream) {
  with_quantized_kind(layout.scales, layout.bits,
                      [&]<Scales kScales, int kBits>() { launch_kind<kScales, kBits>(p, stream); });
}

}  // namespace

cudaError_t quantized_linear(const QuantizedLinearArgs& args, cudaStream_t stream) {
  const int64_t blocks = args.quantized.blocks;
  auto* fragments = reinterpret_cast<RowFragments*>(args.quantized.data);
  const int64_t warps = (args.rows + kRows - 1) / kRows * kRows * blocks;
  const dim3 grid(static_cast<unsigned>((warps + kWarps - 1) / kWarps));
  int64_t first = 0;
  with_element(args.element, [&]<class T>(T*) {
    if (warps > 0 && args.quantizes()) {
      PDK_LAUNCH((quantize_rows<T, kThreads>), grid, dim3(kThreads), 0, stream, args.x, fragments, args.rows,
                 args.width, blocks);
    }
    for (int64_t i = 0; i < args.part_count; ++i) {
      const QuantizedPart& part = args.parts[i];
      if (part.outputs == 0) continue;
      Products p{{part.data}, fragments};
      p.bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + first;
      p.out = args.out.row<T>(0) + first, p.out_stride = args.out.row_stride;
      p.row_count = args.rows, p.outputs = part.outputs;
      p.tile_bytes = part.layout.tile_bytes(args.width), p.headers = part.layout.headers(args.width);
      p.blocks = static_cast<int>(blocks);
      p.group_blocks = static_cast<int>(std::min<int64_t>(part.layout.blocks_of_group(args.width), blocks));
      p.element = args.element;
      if (part.layout.number_rows) {
        void* const padded = args.pads(args.x, args.rows) ? args.padded_rows() : nullptr;
        multiply_numbers(part.layout, p, args.x, args.width, padded, stream);
      } else {
        launch_products(part.layout, p, stream);
      }
      first += part.outputs;
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
