#include <atomic>
#include <map>
#include <mutex>

#include "launch_limits.h"

namespace cudasim {
namespace {

std::atomic<cudaError_t> last_error = cudaSuccess;

std::mutex conditions_mutex;
std::map<cudaGraphConditionalHandle, unsigned int> conditions;

std::mutex limits_mutex;
std::map<const void*, int> shared_limits;  // of the kernels that opted in

cudaError_t launch_error(const void* kernel, unsigned cluster, dim3 grid, dim3 block, std::size_t shared_bytes) {
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreadsPerBlock || block.z > kMaxBlockDepth || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ) {
    return cudaErrorInvalidConfiguration;
  }
  if (cluster == 0 || cluster > kMaxCluster || grid.x % cluster != 0) return cudaErrorInvalidClusterSize;
  const std::lock_guard lock(limits_mutex);
  const auto opted_in = shared_limits.find(kernel);
  const int limit = opted_in == shared_limits.end() ? kDefaultSharedBytes : opted_in->second;
  return shared_bytes > static_cast<std::size_t>(limit) ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

bool launch_allowed(const void* kernel, unsigned cluster, dim3 grid, dim3 block, std::size_t shared_bytes) {
  const cudaError_t error = launch_error(kernel, cluster, grid, block, shared_bytes);
  if (error != cudaSuccess) last_error = error;
  return error == cudaSuccess;
}

cudaError_t set_dynamic_shared_limit(const void* kernel, int bytes) {
  if (bytes < 0 || bytes > kOptInSharedBytes) return last_error = cudaErrorInvalidValue;
  const std::lock_guard lock(limits_mutex);
  shared_limits[kernel] = bytes;
  return cudaSuccess;
}

}  // namespace cudasim

void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value) {
  const std::lock_guard lock(cudasim::conditions_mutex);
  cudasim::conditions[handle] = value;
}

// For the tests: the last value, which is then cleared; -1 if there was none.
extern "C" __attribute__((visibility("default"))) long long cudasim_condition(cudaGraphConditionalHandle handle) {
  const std::lock_guard lock(cudasim::conditions_mutex);
  const auto said = cudasim::conditions.extract(handle);
  return said.empty() ? -1 : static_cast<long long>(said.mapped());
}

cudaError_t cudaGetLastError() { return cudasim::last_error.exchange(cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return cudasim::last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidClusterSize: return "cudaErrorInvalidClusterSize";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidClusterSize: return "cluster misconfiguration";
  }
  return "unrecognized error code";
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = cudasim::kMaxThreadsPerBlock; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = cudasim::kDefaultSharedBytes; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = cudasim::kOptInSharedBytes; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; return cudaSuccess;
    case cudaDevAttrWarpSize: *value = warpSize; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = cudasim::kMultiProcessors; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrClusterLaunch: *value = 1; return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
