// KV cache append, commit and trim on CUDA: byte movers with one launch for all layers, K and V, and all sequences.
//
// Lengths, counts and indices live on the device and are checked there: a sequence with anything out of range is left
// unchanged, so nothing is ever written outside the cache. A block owns a column tile (some bytes of every row)
// of one buffer of one sequence; blocks touch disjoint bytes, so their order does not matter.
#include "launch.h"
#include "ops/kv_cache.h"
#include "packs.h"
#include "rows.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;              // as many as 48 KiB of staging allow; with this bound ptxas does not spill
constexpr int64_t kStagedBytes = 48 * 1024;  // shared memory available without opt-in
constexpr int64_t kTileBytes = 512;          // 32 threads of 16 bytes: whole sectors, and enough blocks at batch 1

// Bytes of one side's rows handled by this block, as vectors of type V.
template <class V>
struct Tile {
  int64_t first;  // vector index in the row
  int32_t width;

  __device__ Tile(const RowLayout& row, int64_t tile_bytes) {
    const int64_t per_row = row.row_bytes() / static_cast<int64_t>(sizeof(V));
    const int64_t per_tile = tile_bytes / static_cast<int64_t>(sizeof(V));
    first = blockIdx.x * per_tile;
    const int64_t left = per_row - first;
    width = static_cast<int32_t>(left < per_tile ? (left < 0 ? 0 : left) : per_tile);
  }
  __device__ int64_t byte(int32_t column) const { return (first + column) * static_cast<int64_t>(sizeof(V)); }
};

template <class V>
__global__ void __launch_bounds__(kThreads)
    kv_append_kernel(const __grid_constant__ AppendArgs args, int64_t tile_bytes) {
  const int64_t b = blockIdx.y;
  const int64_t buffer = blockIdx.z;
  const CacheView& cache = args.cache;
  const int64_t length = args.lengths.load(b);
  const int64_t count = args.count(b);
  if (check_extent(cache.pages, length, count, args.max_rows) != Fault::kNone) return;
  if (!pages_exist(cache.pages, b, length, count)) return;

  const int side = cache.side(buffer);
  const RowLayout& row = cache.rows[side];
  const RowLayout& source_row = args.source_rows[side];
  const Tile<V> tile(row, tile_bytes);
  if (tile.width == 0) return;
  char* to = cache.buffers.base[buffer];
  const char* from = args.source.base[buffer] + b * args.source_batch_stride[side];
  for (int64_t at = threadIdx.x; at < count * tile.width; at += kThreads) {
    const int64_t i = at / tile.width;
    const int64_t byte = tile.byte(static_cast<int32_t>(at % tile.width));
    const Slot slot = cache.pages.locate(b, length + i);
    *reinterpret_cast<V*>(to + row.row_offset(slot.page, slot.slot) + row.byte_offset(byte)) =
        *reinterpret_cast<const V*>(from + i * source_row.slot_stride + source_row.byte_offset(byte));
  }
}

// All rows of the tile are staged in shared memory before the first is written: any pattern of sources is safe in
// place.
template <class V>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    kv_commit_kernel(const __grid_constant__ CommitArgs args, int64_t tile_bytes) {
  PDK_DYNAMIC_SHARED(V, staged);  // [count][tile.width]
  const int64_t b = blockIdx.y;
  const int64_t buffer = blockIdx.z;
  const CacheView& cache = args.cache;
  const int64_t length = args.lengths.load(b);
  const int64_t count = args.counts.load(b);
  if (check_extent(cache.pages, length, count, args.max_rows) != Fault::kNone) return;
  bool fine = true;
  for (int64_t i = threadIdx.x; i < count; i += kThreads)
    fine = fine && check_commit_row(args, b, length, i) == Fault::kNone;
  if (!__syncthreads_and(fine)) return;

  const RowLayout& row = cache.rows[cache.side(buffer)];
  const Tile<V> tile(row, tile_bytes);
  const int32_t vectors = static_cast<int32_t>(count) * tile.width;
  char* base = cache.buffers.base[buffer];
  const auto address = [&](int64_t offset, int32_t column) {
    const Slot slot = cache.pages.locate(b, length + offset);
    return reinterpret_cast<V*>(base + row.row_offset(slot.page, slot.slot) + row.byte_offset(tile.byte(column)));
  };
  for (int32_t at = threadIdx.x; at < vectors; at += kThreads) {
    const int32_t i = at / tile.width;
    const int64_t source = args.source_index.load(b, i);
    if (source != i) staged[at] = *address(source, at % tile.width);
  }
  __syncthreads();
  for (int32_t at = threadIdx.x; at < vectors; at += kThreads) {
    const int32_t i = at / tile.width;
    if (args.source_index.load(b, i) != i) *address(i, at % tile.width) = staged[at];
  }
}

// Runs after the rows have moved, since every block of the move reads the old lengths.
__global__ void __launch_bounds__(kThreads) kv_advance_kernel(const __grid_constant__ CommitArgs args) {
  const int64_t b = blockIdx.x;
  const int64_t length = args.lengths.load(b);
  const int64_t count = args.counts.load(b);
  bool fine = check_extent(args.cache.pages, length, count, args.max_rows) == Fault::kNone;
  if (fine && args.source_index.given()) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads)
      fine = fine && check_commit_row(args, b, length, i) == Fault::kNone;
  }
  if (__syncthreads_and(fine) && threadIdx.x == 0) args.lengths.store(length + count, b);
}

__global__ void __launch_bounds__(kThreads) kv_trim_kernel(TrimArgs args) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= args.batch) return;
  const int64_t new_length = args.new_lengths.load(b);
  if (new_length >= 0 && new_length <= args.lengths.load(b)) args.lengths.store(new_length, b);
}

// The widest vector (16 bytes at most) whose size divides every address and every run of the call.
int64_t vector_bytes(const CacheView& cache, const BufferTable* source, const RowLayout* source_rows,
                     const int64_t* source_batch_stride) {
  int64_t bits = 0;
  for (int64_t buffer = 0; buffer < 2 * cache.layers; ++buffer) {
    bits |= reinterpret_cast<int64_t>(cache.buffers.base[buffer]);
    if (source != nullptr) bits |= reinterpret_cast<int64_t>(source->base[buffer]);
  }
  for (int side = 0; side < 2; ++side) {
    const RowLayout& row = cache.rows[side];
    bits |= row.page_stride | row.slot_stride | row.head_stride | row.head_bytes;
    if (source != nullptr) {
      bits |= source_rows[side].slot_stride | source_rows[side].head_stride | source_batch_stride[side];
    }
  }
  return widest_word(bits);
}

int64_t widest_row(const CacheView& cache) {
  const int64_t k = cache.rows[0].row_bytes();
  const int64_t v = cache.rows[1].row_bytes();
  return k > v ? k : v;
}

dim3 move_grid(const CacheView& cache, int64_t tile_bytes) {
  const int64_t tiles = (widest_row(cache) + tile_bytes - 1) / tile_bytes;
  return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(cache.batch),
              static_cast<unsigned>(2 * cache.layers));
}

}  // namespace

cudaError_t kv_append(const AppendArgs& args, cudaStream_t stream) {
  const CacheView& cache = args.cache;
  if (cache.batch == 0 || cache.layers == 0 || args.max_rows == 0 || widest_row(cache) == 0) return cudaSuccess;
  const int64_t bytes = vector_bytes(cache, &args.source, args.source_rows, args.source_batch_stride);
  with_word(bytes, [&](auto* vector) {
    using V = std::remove_pointer_t<decltype(vector)>;
    PDK_LAUNCH(kv_append_kernel<V>, move_grid(cache, kTileBytes), dim3(kThreads), 0, stream, args, kTileBytes);
  });
  return cudaGetLastError();
}

cudaError_t kv_commit(const CommitArgs& args, cudaStream_t stream) {
  const CacheView& cache = args.cache;
  if (cache.batch == 0) return cudaSuccess;
  if (args.source_index.given() && cache.layers > 0 && args.max_rows > 0 && widest_row(cache) > 0) {
    // With many rows only narrow tiles fit; with more rows than staged bytes not even one byte of each does.
    if (args.max_rows > kStagedBytes) return cudaErrorInvalidValue;
    int64_t bytes = vector_bytes(cache, nullptr, nullptr, nullptr);
    while (bytes * args.max_rows > kStagedBytes) bytes /= 2;
    const int64_t row_bytes = kStagedBytes / args.max_rows / bytes * bytes;
    const int64_t tile_bytes = row_bytes < kTileBytes ? row_bytes : kTileBytes;
    with_word(bytes, [&](auto* vector) {
      using V = std::remove_pointer_t<decltype(vector)>;
      PDK_LAUNCH(kv_commit_kernel<V>, move_grid(cache, tile_bytes), dim3(kThreads), tile_bytes * args.max_rows, stream,
                 args, tile_bytes);
    });
  }
  if (args.advance)
    PDK_LAUNCH(kv_advance_kernel, dim3(static_cast<unsigned>(cache.batch)), dim3(kThreads), 0, stream, args);
  return cudaGetLastError();
}

cudaError_t kv_trim(const TrimArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((args.batch + kThreads - 1) / kThreads);
  PDK_LAUNCH(kv_trim_kernel, dim3(blocks), dim3(kThreads), 0, stream, args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
