// Elements of tensors as floats, float, half or bfloat16, and sums over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/element.h"

namespace pdkernels::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x converted to T.
template <class T>
__device__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Calls launch with a null pointer to the element type.
template <class Launch>
void with_element(Element element, const Launch& launch) {
  switch (element) {
    case Element::kFloat: return launch(static_cast<float*>(nullptr));
    case Element::kHalf: return launch(static_cast<__half*>(nullptr));
    case Element::kBfloat16: return launch(static_cast<__nv_bfloat16*>(nullptr));
  }
}

template <class T>
__device__ T warp_sum(T x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// The sum of x over the threads of a block, returned to all of them, in a fixed order. `warp_sums` is shared memory for
// one T per warp; consecutive calls may share it without a barrier.
template <int kThreads, class T>
__device__ T block_sum(T x, T* warp_sums) {
  x = warp_sum(x);
  __syncthreads();  // an earlier call may still read the shared memory
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) total += warp_sums[warp];
  return total;
}

}  // namespace pdkernels::cuda
