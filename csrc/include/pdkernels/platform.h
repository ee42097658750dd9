// What the shared templates need to know about the compiler that reads them: nvcc, or any host compiler.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PDK_HD __host__ __device__ __forceinline__
#else
#define PDK_HD inline
#endif

// PDK_KERNEL(name, Args) declares the kernel of an op for the device that a file is compiled for. CPU kernels check all
// values first and throw std::invalid_argument with nothing written; CUDA launchers neither allocate nor synchronise
// nor read device values. PDK_VECTOR_KERNEL declares those of csrc/cpu/simd, one for each level of CpuIsa.
#if defined(__CUDACC__) || defined(PDKERNELS_DEVICE_CUDA) || defined(PDKERNELS_CUDASIM)
#include <cuda_runtime.h>
#define PDK_KERNEL(name, Args)                             \
  namespace cuda {                                         \
  cudaError_t name(const Args& args, cudaStream_t stream); \
  }
#define PDK_VECTOR_KERNEL(name, Args) PDK_KERNEL(name, Args)
#else
#define PDK_KERNEL(name, Args) \
  namespace cpu {              \
  void name(const Args& args); \
  }
#define PDK_VECTOR_KERNEL(name, Args) \
  namespace cpu {                     \
  namespace portable {                \
  void name(const Args& args);        \
  }                                   \
  namespace avx2 {                    \
  void name(const Args& args);        \
  }                                   \
  namespace avx512 {                  \
  void name(const Args& args);        \
  }                                   \
  namespace amx {                     \
  void name(const Args& args);        \
  }                                   \
  }
#endif
