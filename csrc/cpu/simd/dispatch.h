// Calls the kernel that was compiled for this processor. The units of this folder must not include it: it needs the
// standard library.
#pragma once

#include "kernels.h"
#include "host/cpu_isa.h"

#ifdef __x86_64__
#define PDK_DISPATCH(kernel, args)                                                \
  switch (::pdkernels::cpu_isa()) {                                               \
    case CpuIsa::portable: return ::pdkernels::cpu::portable::kernel(args);       \
    case CpuIsa::avx2: return ::pdkernels::cpu::avx2::kernel(args);               \
    case CpuIsa::avx512: return ::pdkernels::cpu::avx512::kernel(args);           \
    case CpuIsa::avx512_bf16: return ::pdkernels::cpu::avx512_bf16::kernel(args); \
    case CpuIsa::amx: return ::pdkernels::cpu::amx::kernel(args);                 \
  }
#else
#define PDK_DISPATCH(kernel, args) return ::pdkernels::cpu::portable::kernel(args);
#endif
