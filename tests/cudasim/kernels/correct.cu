// Correct kernels, which give the same result under every schedule.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "c_abi.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

__device__ int warp_sum(int value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(kAll, value, offset);
  return value;
}

__global__ void __launch_bounds__(1024) block_sum(const int* in, int* out) {
  __shared__ int partial[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sum = warp_sum(in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  const int total = warp_sum(lane < static_cast<int>(blockDim.x + 31) / 32 ? partial[lane] : 0);
  if (lane == 0) out[blockIdx.x] = total;
}

// Keeps the positive values in order, each block within its own range.
__global__ void compact(const float* in, float* out, int* counts) {
  __shared__ int warp_count[32];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool keep = in[at] > 0;
  const unsigned votes = __ballot_sync(kAll, keep);
  if (lane == 0) warp_count[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) before += warp_count[w];
  if (keep) out[blockIdx.x * blockDim.x + before] = in[at];
  const int kept = __syncthreads_count(keep);
  if (threadIdx.x == 0) counts[blockIdx.x] = kept;
}

__global__ void histogram(const int* in, int n, int* bins) {
  __shared__ int local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) atomicAdd(&local[in[i] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

template <class T, int kSide>
__global__ void transpose_static(const T* in, T* out, int rows, int columns) {
  __shared__ T tile[kSide][kSide + 1];
  const int row = blockIdx.y * kSide + threadIdx.y, column = blockIdx.x * kSide + threadIdx.x;
  if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = in[row * columns + column];
  __syncthreads();
  const int out_row = blockIdx.x * kSide + threadIdx.y, out_column = blockIdx.y * kSide + threadIdx.x;
  if (out_row < columns && out_column < rows) out[out_row * rows + out_column] = tile[threadIdx.x][threadIdx.y];
}

template <class T>
__global__ void transpose_dynamic(const T* in, T* out, int rows, int columns) {
  PDK_DYNAMIC_SHARED(T, tile);
  const int side = blockDim.x, pitch = side + 1;
  const int row = blockIdx.y * side + threadIdx.y, column = blockIdx.x * side + threadIdx.x;
  if (row < rows && column < columns) tile[threadIdx.y * pitch + threadIdx.x] = in[row * columns + column];
  __syncthreads();
  const int out_row = blockIdx.x * side + threadIdx.y, out_column = blockIdx.y * side + threadIdx.x;
  if (out_row >= columns || out_column >= rows) return;
  out[out_row * rows + out_column] = tile[threadIdx.x * pitch + threadIdx.y];
}

__global__ void coordinates(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  atomicAdd(&out[block * threads + thread], block * 1000 + thread);
}

// Threads leave before, between and after barriers; the rest must not wait for them.
__global__ void early_return(int* out, int n) {
  __shared__ int first[64];
  const int t = threadIdx.x;
  if (t >= n) return;
  first[t] = t;
  __syncthreads();
  const int next = first[(t + 1) % n];
  if (t % 3 == 0) {
    out[t] = next;
    return;
  }
  const int left = __syncthreads_count(1);
  out[t] = next + 100 * left;
}

// The two halves of each warp diverge, with their own masks and numbers of rounds.
__global__ void divergent(int* out) {
  const int lane = threadIdx.x % 32;
  int value = lane;
  if (lane < 16) {
    for (int i = 0; i < 3; ++i) value += __shfl_xor_sync(0x0000ffffu, value, 1 << i);
  } else {
    value = __any_sync(0xffff0000u, lane == 20) ? __shfl_sync(0xffff0000u, value, 31) : -1;
  }
  __syncwarp();
  value += __shfl_sync(kAll, value, 0);
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// Every intrinsic with a known answer: 16 results per lane.
__global__ void intrinsics(long long* out) {
  const int lane = threadIdx.x;
  long long* to = out + lane * 16;
  int all_same = 0;
  to[0] = __shfl_up_sync(kAll, lane, 3, 8);
  to[1] = __shfl_down_sync(kAll, lane, 3, 8);
  to[2] = __shfl_sync(kAll, lane, 9, 8);
  to[3] = static_cast<long long>(__shfl_xor_sync(kAll, lane + 0.5, 5) * 2);
  to[4] = __shfl_sync(kAll, (1LL << 40) + lane, 31 - lane);
  to[5] = __match_any_sync(kAll, lane % 4);
  to[6] = __match_all_sync(kAll, 7, &all_same) + static_cast<long long>(all_same);
  to[7] = __reduce_add_sync(kAll, lane) + 1000 * __reduce_max_sync(kAll, static_cast<unsigned>(lane));
  to[8] = __all_sync(kAll, lane < 32) + 2 * __all_sync(kAll, lane < 31) + 4 * __any_sync(kAll, lane == 5);
  to[9] = __clz(lane) + 100 * __ffs(lane) + 10000 * __popc(lane);
  to[10] = __brev(lane);
  to[11] = __umulhi(0x80000000u, lane) + min(lane, 3u) + max(lane, 7);
  to[12] = __float2int_rn(lane + 0.5f) + __float_as_int(1.0f);
  to[13] = static_cast<long long>(__half2float(__float2half_rn(lane + 0.0001f)) * 1024);
  to[14] = static_cast<long long>(__bfloat162float(__float2bfloat16_rn(256.0f + lane)));
  to[15] = __byte_perm(0x03020100u + lane, 0x07060504u, 0x7810u);
}

// The last block to finish adds up the results of the others: independent of the order, no waiting.
__global__ void grid_sum(const int* in, int n, int* partial, unsigned* finished, int* out) {
  __shared__ bool last;
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
  sum = __reduce_add_sync(kAll, sum);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    int total = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) total += __ldcg(&partial[b]);
    *out = total;
  }
}

__device__ void cluster_barrier() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// The first block of a cluster gets the sums of all of them, and the others may leave.
__global__ void cluster_sum(const int* in, int* out) {
  __shared__ int sums[8];
  __cluster_barrier_arrive_relaxed();
  const int sum = __reduce_add_sync(kAll, in[blockIdx.x * blockDim.x + threadIdx.x]);
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  __cluster_barrier_wait();  // all have started
  if (threadIdx.x == 0) static_cast<int*>(__cluster_map_shared_rank(sums, 0))[rank] = sum;
  cluster_barrier();
  if (rank != 0) return;
  int total = 0;
  for (unsigned other = 0; other < size; ++other) total += sums[other];
  if (threadIdx.x == 0) out[blockIdx.x / size] = total;
}

// Values go round in a cluster, from memory of the next block.
__global__ void cluster_turns(int* out, int turns) {
  PDK_DYNAMIC_SHARED(int, mine);
  const unsigned rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
  int value = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int turn = 0; turn < turns; ++turn) {
    mine[threadIdx.x] = value;
    cluster_barrier();
    value = static_cast<const int*>(__cluster_map_shared_rank(mine, (rank + 1) % size))[threadIdx.x];
    cluster_barrier();  // it is overwritten, or its block returns
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

__global__ void copy_vectors(const float4* in, float4* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) __stcs(&out[i], __ldg(&in[i]));
}

}  // namespace

FIXTURE run_block_sum(const int* in, int* out, int blocks, int threads) {
  return guarded([&] { PDK_LAUNCH(block_sum, blocks, threads, 0, nullptr, in, out); });
}
FIXTURE run_compact(const float* in, float* out, int* counts, int blocks, int threads) {
  return guarded([&] { PDK_LAUNCH(compact, blocks, threads, 0, nullptr, in, out, counts); });
}
FIXTURE run_histogram(const int* in, int n, int* bins, int blocks, int threads) {
  return guarded([&] { PDK_LAUNCH(histogram, blocks, threads, 0, nullptr, in, n, bins); });
}
FIXTURE run_transpose_static(const float* in, float* out, int rows, int columns) {
  const dim3 grid((columns + 15) / 16, (rows + 15) / 16);
  return guarded(
      [&] { PDK_LAUNCH((transpose_static<float, 16>), grid, dim3(16, 16), 0, nullptr, in, out, rows, columns); });
}
FIXTURE run_transpose_dynamic(const float* in, float* out, int rows, int columns, int side) {
  const dim3 grid((columns + side - 1) / side, (rows + side - 1) / side);
  const size_t bytes = sizeof(float) * side * (side + 1);
  return guarded(
      [&] { PDK_LAUNCH(transpose_dynamic<float>, grid, dim3(side, side), bytes, nullptr, in, out, rows, columns); });
}
FIXTURE run_coordinates(int* out) {
  return guarded([&] { PDK_LAUNCH(coordinates, dim3(2, 3, 4), dim3(5, 3, 2), 0, nullptr, out); });
}
FIXTURE run_early_return(int* out, int n) {
  return guarded([&] { PDK_LAUNCH(early_return, 1, 64, 0, nullptr, out, n); });
}
FIXTURE run_divergent(int* out, int blocks, int threads) {
  return guarded([&] { PDK_LAUNCH(divergent, blocks, threads, 0, nullptr, out); });
}
FIXTURE run_intrinsics(long long* out) {
  return guarded([&] { PDK_LAUNCH(intrinsics, 1, 32, 0, nullptr, out); });
}
FIXTURE run_grid_sum(const int* in, int n, int* partial, unsigned* finished, int* out, int blocks) {
  return guarded([&] { PDK_LAUNCH(grid_sum, blocks, 32, 0, nullptr, in, n, partial, finished, out); });
}
FIXTURE run_cluster_sum(const int* in, int* out, int clusters, int blocks) {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_sum, blocks, clusters * blocks, 32, 0, nullptr, in, out); });
}
FIXTURE run_cluster_turns(int* out, int clusters, int blocks, int threads, int turns) {
  return guarded([&] {
    PDK_LAUNCH_CLUSTERS(cluster_turns, blocks, clusters * blocks, threads, sizeof(int) * threads, nullptr, out, turns);
  });
}
FIXTURE run_copy_vectors(const float4* in, float4* out, int n) {
  return guarded([&] { PDK_LAUNCH(copy_vectors, (n + 63) / 64, 64, 0, nullptr, in, out, n); });
}
