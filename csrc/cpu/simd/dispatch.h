// Calls the kernel that was compiled for this processor. The units of this folder must not include it: it needs the
// standard library.
#pragma once

#include "host/cpu_isa.h"
#include "kernels.h"

#ifdef __x86_64__
#define PDK_DISPATCH(kernel, args)                                                \
  switch (::pdkernels::cpu_isa()) {                                               \
    case CpuIsa::kPortable: return ::pdkernels::cpu::portable::kernel(args);      \
    case CpuIsa::kAvx2: return ::pdkernels::cpu::avx2::kernel(args);              \
    case CpuIsa::kAvx2Vnni: return ::pdkernels::cpu::avx2_vnni::kernel(args);     \
    case CpuIsa::kAvx512: return ::pdkernels::cpu::avx512::kernel(args);          \
    case CpuIsa::kAvx512Vnni: return ::pdkernels::cpu::avx512_vnni::kernel(args); \
    case CpuIsa::kAvx512Bf16: return ::pdkernels::cpu::avx512_bf16::kernel(args); \
    case CpuIsa::kAmx: return ::pdkernels::cpu::amx::kernel(args);                \
  }
#elif defined(__aarch64__)
#define PDK_DISPATCH(kernel, args)                                            \
  switch (::pdkernels::cpu_isa()) {                                           \
    case CpuIsa::kPortable: return ::pdkernels::cpu::portable::kernel(args);  \
    case CpuIsa::kNeonDot: return ::pdkernels::cpu::neon_dot::kernel(args);   \
    case CpuIsa::kNeonI8mm: return ::pdkernels::cpu::neon_i8mm::kernel(args); \
  }
#else
#define PDK_DISPATCH(kernel, args) return ::pdkernels::cpu::portable::kernel(args);
#endif
