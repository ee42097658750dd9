// What the shared templates need to know about the compiler that reads them: nvcc, or any host compiler.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PDK_HD __host__ __device__ __forceinline__
#else
#define PDK_HD inline
#endif
