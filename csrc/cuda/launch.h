// Where CUDA needs syntax that host compilers do not know: a launch and dynamic shared memory (and power_of_2 in
// token_regions.h, one instruction). With these macros a .cu file is ordinary C++, so the tests can execute it on a CPU
// (tests/cudasim).
//
//   PDK_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, arguments...);
//   PDK_LAUNCH((kernel<T, 4>), ...);     a template kernel with a comma goes in parentheses
//
//   PDK_LAUNCH_CLUSTERS(kernel, blocks, ...);   the same with clusters of so many blocks, which are neighbours along x
//
//   PDK_DYNAMIC_SHARED(float, tile);     in a kernel: `float* tile`, 16-byte aligned; all uses name the same bytes
//
// A launch never throws for bad sizes: check `cudaGetLastError()` afterwards, as with <<<>>>.
#pragma once

#include <cuda_runtime.h>

#ifdef PDKERNELS_CUDASIM

#define PDK_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...) \
  ::cudasim::launch(#kernel, kernel, 1, grid, block, dynamic_shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__)
#define PDK_LAUNCH_CLUSTERS(kernel, blocks, grid, block, dynamic_shared_bytes, stream, ...) \
  ::cudasim::launch(#kernel, kernel, blocks, grid, block, dynamic_shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__)
#define PDK_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::cudasim::dynamic_shared())

#else

#define PDK_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (dynamic_shared_bytes), (stream)>>>(__VA_ARGS__)
#define PDK_LAUNCH_CLUSTERS(kernel, blocks, grid, block, dynamic_shared_bytes, stream, ...) \
  ::pdkernels::cuda::launch_clusters(kernel, blocks, grid, block, dynamic_shared_bytes,     \
                                     stream __VA_OPT__(, ) __VA_ARGS__)

namespace pdkernels::cuda {

template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), unsigned blocks, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
                     cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = stream, config.attrs = &cluster, config.numAttrs = blocks > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);  // an error is left for cudaGetLastError()
}

}  // namespace pdkernels::cuda

#define PDK_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char pdk_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(pdk_dynamic_shared)

#endif
