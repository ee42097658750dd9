// Kernels with one mistake each, which the simulator has to find.
#include "c_abi.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

// Reverses a block's values, but lacks the barrier between writing and reading.
__global__ void missing_barrier(const int* in, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

// Sums by halving, but a fast thread starts a second round before a slow one has read the first.
__global__ void missing_second_barrier(int* out) {
  __shared__ int values[64];
  int sum = 0;
  for (int round = 0; round < 4; ++round) {
    values[threadIdx.x] = round;
    __syncthreads();
    sum += values[(threadIdx.x + 1) % blockDim.x];
  }
  out[threadIdx.x] = sum;
}

// These rely on zeros in the unwritten half of their shared memory.
__device__ void fill_half(int* values, int* out) {
  if (threadIdx.x < 16) values[threadIdx.x] = 5;
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x];
}
__global__ void uninitialised_static(int* out) {
  __shared__ int values[32];
  fill_half(values, out);
}
template <class T>
__global__ void uninitialised_template(T* out) {
  __shared__ T values[32];
  fill_half(values, out);
}
__global__ void uninitialised_dynamic(int* out) {
  PDK_DYNAMIC_SHARED(int, values);
  fill_half(values, out);
}

// One half of each warp waits for the block, the other for the whole warp.
__global__ void deadlock() {
  if (threadIdx.x % 32 < 16) __syncthreads();
  __syncwarp();
}

__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void different_calls(int* out) {
  out[threadIdx.x] = threadIdx.x < 7 ? __shfl_sync(kAll, 1, 0) : __any_sync(kAll, 1);
}

__global__ void foreign_mask(int* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0); }

__global__ void bad_width(int* out) { out[threadIdx.x] = __shfl_sync(kAll, 1, 0, 12); }

__global__ void absent_source(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);
}

__global__ void overrun_dynamic(int past) {
  PDK_DYNAMIC_SHARED(int, values);
  if (threadIdx.x == 0) values[32 + past] = 1;
}

__global__ void overrun_static(int past, int* out) {
  __shared__ int values[32];
  values[threadIdx.x] = 0;
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x + past];
}

__global__ void misaligned(const float* in, float4* out) { *out = *reinterpret_cast<const float4*>(in + 1); }

__global__ void wide_shift(unsigned* out, int by) { *out = 1u << by; }

__global__ void trap() { __trap(); }

// Clusters of two blocks, in which the second writes to the first's memory: which may not have started, is read too
// early, or belongs to a block that has returned.
enum ClusterMistake { kNone, kNotStarted, kReadEarly, kReturned };
template <ClusterMistake kMistake>
__global__ void cluster_pair(int* out) {
  __shared__ int values[32];
  const unsigned rank = __clusterRelativeBlockRank();
  const auto barrier = [] { __cluster_barrier_arrive(), __cluster_barrier_wait(); };
  if (kMistake != kNotStarted) barrier();
  int* there = static_cast<int*>(__cluster_map_shared_rank(values, 1 - rank));
  there[threadIdx.x] = 100 * static_cast<int>(rank) + static_cast<int>(threadIdx.x);
  if (kMistake != kReadEarly) barrier();
  int sum = values[threadIdx.x] + there[threadIdx.x];
  if (kMistake != kReturned) barrier();
  out[32 * rank + threadIdx.x] = sum;
}

__global__ void cluster_twice() { __cluster_barrier_arrive(), __cluster_barrier_arrive(); }
__global__ void cluster_never() { __cluster_barrier_wait(); }
__global__ void cluster_leaves() { __cluster_barrier_arrive(); }
// Some threads wait for their block, the others for the cluster.
__global__ void cluster_alone() {
  if (__clusterRelativeBlockRank() == 0 && threadIdx.x < 16) __syncthreads();
  __cluster_barrier_arrive(), __cluster_barrier_wait();
}
__global__ void cluster_mapped(unsigned rank, int* foreign) {
  __shared__ int values[32];
  __cluster_map_shared_rank(foreign == nullptr ? values : foreign, rank);
}

__global__ void fill(int* out) { out[blockIdx.x] = 1; }

}  // namespace

FIXTURE run_missing_barrier(const int* in, int* out, int threads) {
  return guarded([&] { PDK_LAUNCH(missing_barrier, 1, threads, 0, nullptr, in, out); });
}
FIXTURE run_missing_second_barrier(int* out) {
  return guarded([&] { PDK_LAUNCH(missing_second_barrier, 1, 64, 0, nullptr, out); });
}
FIXTURE run_uninitialised_static(int* out) {
  return guarded([&] { PDK_LAUNCH(uninitialised_static, 1, 32, 0, nullptr, out); });
}
FIXTURE run_uninitialised_template(int* out) {
  return guarded([&] { PDK_LAUNCH(uninitialised_template<int>, 1, 32, 0, nullptr, out); });
}
FIXTURE run_uninitialised_dynamic(int* out) {
  return guarded([&] { PDK_LAUNCH(uninitialised_dynamic, 1, 32, 128, nullptr, out); });
}
FIXTURE run_deadlock() {
  return guarded([&] { PDK_LAUNCH(deadlock, 1, 64, 0, nullptr); });
}
FIXTURE run_two_barriers() {
  return guarded([&] { PDK_LAUNCH(two_barriers, 1, 64, 0, nullptr); });
}
FIXTURE run_different_calls(int* out) {
  return guarded([&] { PDK_LAUNCH(different_calls, 1, 32, 0, nullptr, out); });
}
FIXTURE run_foreign_mask(int* out) {
  return guarded([&] { PDK_LAUNCH(foreign_mask, 1, 32, 0, nullptr, out); });
}
FIXTURE run_bad_width(int* out) {
  return guarded([&] { PDK_LAUNCH(bad_width, 1, 32, 0, nullptr, out); });
}
FIXTURE run_absent_source(int* out) {
  return guarded([&] { PDK_LAUNCH(absent_source, 1, 32, 0, nullptr, out); });
}
FIXTURE run_overrun_dynamic(int past) {
  return guarded([&] { PDK_LAUNCH(overrun_dynamic, 1, 32, 128, nullptr, past); });
}
FIXTURE run_overrun_static(int past, int* out) {
  return guarded([&] { PDK_LAUNCH(overrun_static, 1, 32, 0, nullptr, past, out); });
}
FIXTURE run_misaligned(const float* in, float4* out) {
  return guarded([&] { PDK_LAUNCH(misaligned, 1, 1, 0, nullptr, in, out); });
}
FIXTURE run_wide_shift(unsigned* out, int by) {
  return guarded([&] { PDK_LAUNCH(wide_shift, 1, 1, 0, nullptr, out, by); });
}
FIXTURE run_trap() {
  return guarded([&] { PDK_LAUNCH(trap, 1, 1, 0, nullptr); });
}
FIXTURE run_cluster_pair(int* out, int mistake) {
  return guarded([&] {
    switch (mistake) {
      case kNotStarted: PDK_LAUNCH_CLUSTERS(cluster_pair<kNotStarted>, 2, 2, 32, 0, nullptr, out); break;
      case kReadEarly: PDK_LAUNCH_CLUSTERS(cluster_pair<kReadEarly>, 2, 2, 32, 0, nullptr, out); break;
      case kReturned: PDK_LAUNCH_CLUSTERS(cluster_pair<kReturned>, 2, 2, 32, 0, nullptr, out); break;
      default: PDK_LAUNCH_CLUSTERS(cluster_pair<kNone>, 2, 2, 32, 0, nullptr, out);
    }
  });
}
FIXTURE run_cluster_twice() {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_twice, 2, 2, 32, 0, nullptr); });
}
FIXTURE run_cluster_never() {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_never, 2, 2, 32, 0, nullptr); });
}
FIXTURE run_cluster_leaves() {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_leaves, 2, 2, 32, 0, nullptr); });
}
FIXTURE run_cluster_alone() {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_alone, 2, 2, 32, 0, nullptr); });
}
FIXTURE run_cluster_mapped(int rank, int* foreign) {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(cluster_mapped, 2, 2, 32, 0, nullptr, rank, foreign); });
}
FIXTURE run_cluster_shape(int* out, int cluster, int grid) {
  return guarded([&] { PDK_LAUNCH_CLUSTERS(fill, cluster, grid, 32, 0, nullptr, out); });
}
FIXTURE run_fill(int* out, int grid_x, int grid_y, int grid_z, int block_x, int block_z, int shared_bytes, int opt_in) {
  return guarded([&] {
    if (opt_in > 0) cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in);
    PDK_LAUNCH(fill, dim3(grid_x, grid_y, grid_z), dim3(block_x, 1, block_z), shared_bytes, nullptr, out);
  });
}
