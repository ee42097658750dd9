// The few host calls that launchers make. Streams are accepted and ignored: every call is finished when it returns.
#pragma once

#include <algorithm>
#include <cstring>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidClusterSize = 912,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrClusterLaunch = 120,
};
using cudaStream_t = struct CUstream_st*;

namespace cudasim {
// The limits of an sm_90 device, with few multiprocessors so that grids sized by their number stay small.
inline constexpr int kMaxThreadsPerBlock = 1024;
inline constexpr int kMaxBlockDepth = 64;
inline constexpr unsigned kMaxCluster = 8;
inline constexpr unsigned kMaxGridX = 2147483647u;
inline constexpr unsigned kMaxGridYZ = 65535u;
inline constexpr int kDefaultSharedBytes = 48 * 1024;
inline constexpr int kOptInSharedBytes = 227 * 1024;
inline constexpr int kMultiProcessors = 4;

cudaError_t set_dynamic_shared_limit(const void* kernel, int bytes);
}  // namespace cudasim

// There are no graphs here: the value that a kernel gives a conditional node is kept for `cudasim_condition`.
using cudaGraphConditionalHandle = unsigned long long;
void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);

cudaError_t cudaGetLastError();     // and forgets it
cudaError_t cudaPeekAtLastError();  // and keeps it
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return cudasim::set_dynamic_shared_limit(reinterpret_cast<const void*>(kernel), value);
}

struct cudaFuncAttributes {
  int ptxVersion;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads, std::size_t) {
  *blocks = std::max(1, 2048 / std::max(1, threads));
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* at, int value, std::size_t bytes, cudaStream_t = nullptr) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
