// Feature-cache kernels on CUDA. Rows are read once, in packs of 16 bytes where they are aligned, and rows are selected
// on the device.
#include "launch.h"
#include "ops/feature_cache.h"
#include "packs.h"
#include "rows.h"

namespace pdkernels::cuda {
namespace {

constexpr int kRowThreads = 128;      // a row of 4096 half-precision values is four packs for each
constexpr int kRowBlocksPerSm = 8;    // by default ptxas aims for more and spills
constexpr int64_t kRowBlocks = 1024;  // blocks per sequence: as many as a large GPU runs at once
constexpr int kRowsAtOnce = 64;       // rows that a block looks up together
constexpr int kChoiceThreads = 512;
constexpr int kHeldKeys = 32;  // of a thread
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ bool sequence_fits(const StaleRowsArgs& args, int64_t b) {
  const int64_t start = args.starts.load(b), count = args.count(b);
  if (check_extent(args.pages, start, count, args.rows) != Fault::kNone || args.quota_of(b) < 0) return false;
  return pages_exist(args.pages, b, start, count);
}

// A block takes whole rows. It computes the sums of a row's cosine, and writes the values to the cache if all rows are
// replaced. feature_cache.h defines the order of the sums; a thread adds up kSize adjacent components of a piece.
template <class T, int kSize>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    stale_key_kernel(const __grid_constant__ StaleRowsArgs args) {
  using Elements = Pack<T, kSize>;
  constexpr int kSums = 3, kPieceThreads = kPartialSums / kSize, kPieces = kRowThreads / kPieceThreads;
  __shared__ float numbers[kPieces][kSums][kPartialSums];
  __shared__ float sums[kSums];
  const int64_t b = blockIdx.y;
  if (!sequence_fits(args, b)) return;
  const int64_t dim = args.head_dim, head_pieces = (dim + kPieceComponents - 1) / kPieceComponents;
  const int64_t pieces = dim > 0 ? args.v_row.row_bytes() / (dim * static_cast<int64_t>(sizeof(T))) * head_pieces : 0;
  const int of_piece = threadIdx.x / kPieceThreads, first_number = threadIdx.x % kPieceThreads * kSize;
  const int sum = threadIdx.x / kPartialSums, number = threadIdx.x % kPartialSums;
  for (int64_t row = blockIdx.x; row < args.count(b); row += gridDim.x) {
    const char* fresh = args.fresh(b, row);
    char* cached = args.cached(b, args.starts.load(b) + row);
    float total = 0;
    bool moved = false;
    for (int64_t first = 0; first < pieces; first += kPieces) {
      float own[kSums][kSize] = {};
      const int64_t piece = first + of_piece, head = piece / head_pieces;
      if (piece < pieces) {
        const int64_t start = piece % head_pieces * kPieceComponents, left = dim - start;
        for (int64_t i = first_number; i < kPieceComponents && i < left; i += kPartialSums) {
          const int64_t at = (head * dim + start + i) * static_cast<int64_t>(sizeof(T));
          const Elements x = *reinterpret_cast<const Elements*>(fresh + args.v_row.byte_offset(at));
          Elements* slot = reinterpret_cast<Elements*>(cached + args.cache_row.byte_offset(at));
          const Elements y = *slot;
          for (int j = 0; j < kSize; ++j) {
            const float p = to_float(x.at[j]), q = to_float(y.at[j]);
            own[0][j] += __fmul_rn(p, p);
            own[1][j] += __fmul_rn(q, q);
            own[2][j] += __fmul_rn(p, q);
            moved = moved || p != q;
          }
          if (args.update == Update::kAll) *slot = x;
        }
      }
      __syncthreads();  // earlier pieces may still be read
      for (int s = 0; s < kSums; ++s) {
        for (int j = 0; j < kSize; ++j) numbers[of_piece][s][first_number + j] = own[s][j];
      }
      __syncthreads();
      if (sum < kSums) {
        for (int64_t i = 0; i < kPieces && first + i < pieces; ++i) total += numbers[i][sum][number];
      }
    }
    for (int half = kPartialSums / 2; half > 0; half /= 2) total += __shfl_xor_sync(0xffffffffu, total, half);
    if (sum < kSums && number == 0) sums[sum] = total;
    moved = __syncthreads_or(moved);
    const float lengths = sqrtf(sums[0]) * sqrtf(sums[1]);
    if (threadIdx.x == 0) args.keys[b * args.rows + row] = stale_key(sums[2], lengths, moved || !(lengths > 1e-8f));
    __syncthreads();  // the next row has sums of its own
  }
}

// Which rows of a warp are below the cut, and which are equal to it.
struct Lanes {
  unsigned lower, equal;
};

// One block per sequence: finds the cut of the lowest keys bit by bit, then writes the selected rows in order. The cut
// takes 33 looks at all keys, so that those of the first rows are in registers.
__global__ void __launch_bounds__(kChoiceThreads) choose_rows_kernel(const __grid_constant__ StaleRowsArgs args) {
  constexpr int kWarps = kChoiceThreads / 32;
  __shared__ int lower_of[kWarps], equal_of[kWarps], warp_sums[kWarps];
  const int64_t b = blockIdx.x;
  int64_t* index = args.index + b * args.max_selected;
  const int64_t count = args.count(b), n = sequence_fits(args, b) ? args.chosen(b, count) : 0;
#pragma unroll 1
  for (int64_t j = n + threadIdx.x; j < args.max_selected; j += kChoiceThreads) index[j] = -1;
  if (n == 0) return;
  const uint32_t* keys = args.keys + b * args.rows;
  const auto key_of = [&](int64_t row) { return row < count ? keys[row] : ~0u; };  // no row is above the cut
  constexpr int kHeldRows = kChoiceThreads * kHeldKeys;
  const int rest = static_cast<int>(count - kHeldRows);
  uint32_t held[kHeldKeys];
#pragma unroll
  for (int j = 0; j < kHeldKeys; ++j) held[j] = key_of(int64_t{kChoiceThreads} * j + threadIdx.x);
  const Cut cut = lowest(n, [&](uint32_t key) {
    int smaller = 0;
#pragma unroll
    for (int first = 0; first < kHeldKeys; first += 4) {
      if (int64_t{kChoiceThreads} * first >= count) break;
#pragma unroll
      for (int j = first; j < first + 4; ++j) smaller += held[j] < key;
    }
#pragma unroll 8
    for (int row = threadIdx.x; row < rest; row += kChoiceThreads) smaller += keys[kHeldRows + row] < key;
    return static_cast<int64_t>(block_sum<kChoiceThreads>(smaller, warp_sums));
  });
  // A warp has adjacent rows, whose places follow from how many rows the warps before it have.
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32;
  const int64_t each = (count + kChoiceThreads - 1) / kChoiceThreads * 32, begin = own * each, end = begin + each;
  const auto look = [&](int64_t row) {
    const uint32_t key = key_of(row);
    return Lanes{__ballot_sync(kAllLanes, key < cut.key), __ballot_sync(kAllLanes, row < count && key == cut.key)};
  };
  int lowers = 0, equals = 0;
#pragma unroll 4
  for (int64_t row = begin + lane; row < end; row += 32) {
    const Lanes are = look(row);
    lowers += __popc(are.lower), equals += __popc(are.equal);
  }
  if (lane == 0) lower_of[own] = lowers, equal_of[own] = equals;
  __syncthreads();
  int64_t lower = 0, equal = 0;
  for (int warp = 0; warp < own; ++warp) lower += lower_of[warp], equal += equal_of[warp];
#pragma unroll 4
  for (int64_t row = begin + lane; row < end; row += 32) {
    const Lanes are = look(row);
    const unsigned mine = 1u << lane;
    const int64_t my_lower = lower + __popc(are.lower & (mine - 1)), my_equal = equal + __popc(are.equal & (mine - 1));
    if ((are.lower & mine) != 0 || ((are.equal & mine) != 0 && my_equal < cut.ties))
      index[my_lower + (my_equal < cut.ties ? my_equal : cut.ties)] = row;
    lower += __popc(are.lower), equal += __popc(are.equal);
  }
}

// One block per selected row, if only selected rows replace cached values. A sequence with a fault has none.
template <class Word>
__global__ void __launch_bounds__(kRowThreads) replace_rows_kernel(const __grid_constant__ StaleRowsArgs args) {
  const int64_t b = blockIdx.y, row = args.index[b * args.max_selected + blockIdx.x];
  if (row < 0) return;
  const char* fresh = args.fresh(b, row);
  char* cached = args.cached(b, args.starts.load(b) + row);
  for (int64_t at = threadIdx.x * sizeof(Word); at < args.v_row.row_bytes(); at += kRowThreads * sizeof(Word)) {
    *reinterpret_cast<Word*>(cached + args.cache_row.byte_offset(at)) =
        *reinterpret_cast<const Word*>(fresh + args.v_row.byte_offset(at));
  }
}

// One block per row.
template <class Word>
__global__ void __launch_bounds__(kRowThreads) gather_rows_kernel(GatherRowsArgs args) {
  const int64_t b = blockIdx.y, j = blockIdx.x, row = args.index.load(b, j);
  const bool given = args.fits(row) && row >= 0;
  const Word* from = given ? reinterpret_cast<const Word*>(args.x.row<const char>(b, row)) : nullptr;
  Word* to = reinterpret_cast<Word*>(args.out + (b * args.picked + j) * args.row_bytes);
  for (int64_t at = threadIdx.x; at < args.row_bytes / static_cast<int64_t>(sizeof(Word)); at += kRowThreads)
    to[at] = given ? from[at] : Word{};
}

// A block takes `rows_each` rows, one after the other, and searches the sequence's indices for all of them at once.
template <class T, int kSize>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm)
    add_cached_rows_kernel(AddCachedArgs args, int64_t rows_each) {
  using Elements = Pack<T, kSize>;
  __shared__ int64_t found[kRowsAtOnce];
  const int64_t b = blockIdx.y, first = blockIdx.x * rows_each;
  for (int64_t i = threadIdx.x; i < rows_each; i += kRowThreads) found[i] = -1;
  __syncthreads();
  const bool fine = all_fine(args.replaced, [&](int64_t j) {
    const int64_t at = args.index.load(b, j);
    if (at >= first && at < first + rows_each) found[at - first] = j;
    return args.in_range(at) && args.in_order(b, j);
  });
  for (int64_t row = first; row < first + rows_each && row < args.rows; ++row) {
    const int64_t source = fine ? found[row - first] : -1;
    const T* x = args.x.row<const T>(b, row);
    T *cached = args.cached.row<T>(b, row), *out = static_cast<T*>(args.out) + (b * args.rows + row) * args.width;
    const T* now = source >= 0 ? args.fresh.row<const T>(b, source) : cached;
    for (int64_t pack = threadIdx.x; pack < args.width / kSize; pack += kRowThreads) {
      const Elements p = Elements::load(x, pack), q = Elements::load(now, pack);
      Elements sum;
      for (int j = 0; j < kSize; ++j) sum.at[j] = from_float<T>(to_float(p.at[j]) + to_float(q.at[j]));
      if (source >= 0) q.store(cached, pack);
      sum.store(out, pack);
    }
  }
}

int64_t bits_of(const RowLayout& row) { return row.page_stride | row.slot_stride | row.head_stride | row.head_bytes; }

template <class T>
int64_t bits_of(const BatchRowsView& rows) {
  return reinterpret_cast<int64_t>(rows.data) | (rows.batch_stride | rows.row_stride) * static_cast<int64_t>(sizeof(T));
}

dim3 grid_of(int64_t rows, int64_t batch) { return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(batch)); }

}  // namespace

cudaError_t select_stale_rows(const StaleRowsArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  const int64_t word = widest_word(reinterpret_cast<int64_t>(args.v) | reinterpret_cast<int64_t>(args.cache) |
                                   bits_of(args.v_row) | bits_of(args.cache_row));
  if (args.rows > 0) {
    with_element(args.element, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      constexpr int kSize = 16 / sizeof(T);
      const dim3 keys = grid_of(row_blocks(args.rows, kRowBlocks), args.batch);
      if (word == 16 && args.head_dim % kSize == 0) {
        PDK_LAUNCH((stale_key_kernel<T, kSize>), keys, dim3(kRowThreads), 0, stream, args);
      } else {
        PDK_LAUNCH((stale_key_kernel<T, 1>), keys, dim3(kRowThreads), 0, stream, args);
      }
    });
  }
  if (args.max_selected == 0) return cudaGetLastError();
  PDK_LAUNCH(choose_rows_kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kChoiceThreads), 0, stream, args);
  if (args.update == Update::kSelected && args.rows > 0) {
    with_word(word, [&](auto* vector) {
      using Word = std::remove_pointer_t<decltype(vector)>;
      PDK_LAUNCH(replace_rows_kernel<Word>, grid_of(args.max_selected, args.batch), dim3(kRowThreads), 0, stream, args);
    });
  }
  return cudaGetLastError();
}

cudaError_t gather_rows(const GatherRowsArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.picked == 0 || args.row_bytes == 0) return cudaSuccess;
  with_word(
      widest_word(bits_of<char>(args.x) | reinterpret_cast<int64_t>(args.out) | args.row_bytes), [&](auto* vector) {
        using Word = std::remove_pointer_t<decltype(vector)>;
        PDK_LAUNCH(gather_rows_kernel<Word>, grid_of(args.picked, args.batch), dim3(kRowThreads), 0, stream, args);
      });
  return cudaGetLastError();
}

cudaError_t add_cached_rows(const AddCachedArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.rows == 0 || args.width == 0) return cudaSuccess;
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const int64_t rows_per_block = (args.rows + kRowBlocks - 1) / kRowBlocks,
                  each = rows_per_block < kRowsAtOnce ? rows_per_block : kRowsAtOnce;
    const dim3 grid = grid_of((args.rows + each - 1) / each, args.batch);
    const int64_t out = reinterpret_cast<int64_t>(args.out) | args.width * static_cast<int64_t>(sizeof(T));
    if (widest_word(bits_of<T>(args.x) | bits_of<T>(args.cached) | bits_of<T>(args.fresh) | out) == 16) {
      PDK_LAUNCH((add_cached_rows_kernel<T, kSize>), grid, dim3(kRowThreads), 0, stream, args, each);
    } else {
      PDK_LAUNCH((add_cached_rows_kernel<T, 1>), grid, dim3(kRowThreads), 0, stream, args, each);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
