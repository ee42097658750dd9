// Products of 8-bit numbers on the tensor cores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pdkernels::cuda {

// c += a b with 16 rows of a and 8 columns of b, for a whole warp; a word holds four neighbouring columns of a, or rows
// of b. With lane = 4 g + t, a lane has words t of the rows g and g + 8 of a, word t of column g of b, and columns 2 t
// and 2 t + 1 of the rows g and g + 8 of c. Lanes t have k = 4 t .. 4 t + 3.
__device__ inline void multiply(int (&c)[4], uint32_t a, uint32_t a8, uint32_t b) {
#if !defined(PDKERNELS_CUDASIM) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a), "r"(a8), "r"(b));
#else
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 4; ++k) {
    const uint32_t row[2] = {__shfl_sync(0xffffffffu, a, 4 * g + k), __shfl_sync(0xffffffffu, a8, 4 * g + k)};
    const uint32_t column[2] = {__shfl_sync(0xffffffffu, b, 8 * t + k), __shfl_sync(0xffffffffu, b, 8 * t + 4 + k)};
    for (int i = 0; i < 4; ++i) {
      for (int byte = 0; byte < 32; byte += 8) {
        c[i] += static_cast<int8_t>(row[i / 2] >> byte) * static_cast<int8_t>(column[i % 2] >> byte);
      }
    }
  }
#endif
}

// The same with a second word of each row and column, 16 further on: twice the depth in one instruction.
__device__ inline void multiply(int (&c)[4], const uint32_t (&a)[4], uint2 b) {
#if !defined(PDKERNELS_CUDASIM) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
  multiply(c, a[0], a[1], b.x);
  multiply(c, a[2], a[3], b.y);
#endif
}

}  // namespace pdkernels::cuda
