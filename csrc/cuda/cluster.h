// Blocks that share a row: a thread block cluster, or one block. Before sm_90 there are no clusters.
#pragma once

#include "launch.h"

namespace pdkernels::cuda {

#if defined(PDKERNELS_CUDASIM) || __CUDA_ARCH__ >= 900
#define PDK_CLUSTERS
#endif

// The cluster of the calling thread. Its threads meet in the order of the functions below; start() and started() once,
// before any memory of another block is touched.
struct Cluster {
  unsigned size, rank;

#ifdef PDK_CLUSTERS
  __device__ Cluster() : size(__clusterSizeInBlocks()), rank(__clusterRelativeBlockRank()) {}
  __device__ void start() const {
    if (size > 1) __cluster_barrier_arrive_relaxed();
  }
  __device__ void started() const {
    if (size > 1) __cluster_barrier_wait();
  }
  // What was written before by any of the threads can be read after it.
  __device__ void meet() const {
    if (size == 1) return __syncthreads();
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }
  // The shared variable in the block of this rank, which must not have returned.
  template <class T>
  __device__ T* shared_of(T* variable, unsigned of) const {
    return size == 1 ? variable : static_cast<T*>(__cluster_map_shared_rank(variable, of));
  }
#else
  __device__ Cluster() : size(1), rank(0) {}
  __device__ void start() const {}
  __device__ void started() const {}
  __device__ void meet() const { __syncthreads(); }
  template <class T>
  __device__ T* shared_of(T* variable, unsigned) const {
    return variable;
  }
#endif
};

constexpr unsigned kMostBlocks = 8;  // that every GPU with clusters runs together

// How many blocks share each of `rows` rows, a power of two: as many as the device holds at once, `resident` on an SM,
// and at most `parts`. One where neither the device nor the kernel's code has clusters.
template <class Kernel>
unsigned blocks_of_row(Kernel* kernel, int64_t rows, int64_t parts, int resident) {
  int device = 0, clusters = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (parts < 2 || 2 * rows > resident * sms) return 1;
  cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  cudaFuncAttributes attributes;  // of its code for this device
  if (clusters == 0 || cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess || attributes.ptxVersion < 90)
    return 1;
  unsigned blocks = 1;
  while (blocks < kMostBlocks && 2 * blocks <= parts && 2 * blocks * rows <= resident * sms) blocks *= 2;
  return blocks;
}

}  // namespace pdkernels::cuda
