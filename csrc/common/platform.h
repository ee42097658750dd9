// Macros that hide the differences between nvcc and a host compiler.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PDK_HD __host__ __device__ __forceinline__
#else
#define PDK_HD inline
#endif

// PDK_KERNEL(name, Args) declares the kernel of an op for the device that a file is compiled for. CPU kernels check all
// values and throw std::invalid_argument before they write anything. CUDA launchers do not allocate, synchronise or
// read device values. PDK_VECTOR_KERNEL declares the kernels of csrc/cpu/simd, one for each level of CpuIsa.
#if defined(__CUDACC__) || defined(PDKERNELS_DEVICE_CUDA) || defined(PDKERNELS_CUDASIM)
#include <cuda_runtime.h>
#define PDK_KERNEL(name, Args)                             \
  namespace cuda {                                         \
  cudaError_t name(const Args& args, cudaStream_t stream); \
  }
#define PDK_VECTOR_KERNEL(name, Args) PDK_KERNEL(name, Args)
#define PDK_AMX_KERNEL(name, Args) PDK_KERNEL(name, Args)
#define PDK_BF16_KERNEL(name, Args) PDK_KERNEL(name, Args)
#define PDK_INT8_KERNEL(name, Args) PDK_KERNEL(name, Args)
#else
#define PDK_KERNEL(name, Args) \
  namespace cpu {              \
  void name(const Args& args); \
  }
#define PDK_LEVEL_KERNEL(level, name, Args) \
  namespace cpu::level {                    \
  void name(const Args& args);              \
  }
#define PDK_SAME_KERNEL(level, name, as) \
  namespace cpu::level {                 \
  using as::name;                        \
  }
// Levels have their own kernels where their instructions help (`simd_units` in setup.py), and otherwise those of a
// level below. Those of other architectures are declared and never called.
#define PDK_BASE_KERNEL(name, Args)      \
  PDK_LEVEL_KERNEL(portable, name, Args) \
  PDK_LEVEL_KERNEL(avx2, name, Args)     \
  PDK_SAME_KERNEL(avx2_vnni, name, avx2) \
  PDK_LEVEL_KERNEL(avx512, name, Args)   \
  PDK_SAME_KERNEL(avx512_vnni, name, avx512)
#define PDK_NEON_KERNEL(name)               \
  PDK_SAME_KERNEL(neon_dot, name, portable) \
  PDK_SAME_KERNEL(neon_i8mm, name, portable)
#define PDK_VECTOR_KERNEL(name, Args)        \
  PDK_BASE_KERNEL(name, Args)                \
  PDK_SAME_KERNEL(avx512_bf16, name, avx512) \
  PDK_SAME_KERNEL(amx, name, avx512)         \
  PDK_NEON_KERNEL(name)
#define PDK_AMX_KERNEL(name, Args)           \
  PDK_BASE_KERNEL(name, Args)                \
  PDK_SAME_KERNEL(avx512_bf16, name, avx512) \
  PDK_LEVEL_KERNEL(amx, name, Args)          \
  PDK_NEON_KERNEL(name)
#define PDK_BF16_KERNEL(name, Args)         \
  PDK_BASE_KERNEL(name, Args)               \
  PDK_LEVEL_KERNEL(avx512_bf16, name, Args) \
  PDK_LEVEL_KERNEL(amx, name, Args)         \
  PDK_SAME_KERNEL(neon_dot, name, portable) \
  PDK_LEVEL_KERNEL(neon_i8mm, name, Args)
#define PDK_INT8_KERNEL(name, Args)               \
  PDK_LEVEL_KERNEL(portable, name, Args)          \
  PDK_LEVEL_KERNEL(avx2, name, Args)              \
  PDK_LEVEL_KERNEL(avx2_vnni, name, Args)         \
  PDK_LEVEL_KERNEL(avx512, name, Args)            \
  PDK_LEVEL_KERNEL(avx512_vnni, name, Args)       \
  PDK_SAME_KERNEL(avx512_bf16, name, avx512_vnni) \
  PDK_LEVEL_KERNEL(amx, name, Args)               \
  PDK_LEVEL_KERNEL(neon_dot, name, Args)          \
  PDK_LEVEL_KERNEL(neon_i8mm, name, Args)
#endif
