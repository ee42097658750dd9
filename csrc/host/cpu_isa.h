// Detects at run time which vector units the processor and operating system offer: one build runs on any machine.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pdkernels {

enum class CpuIsa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

inline const char* name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
    case CpuIsa::kAmx: return "amx";
    default: return "portable";
  }
}

#if defined(__x86_64__)

// Linux grants AMX tile state to a process on request.
inline bool request_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline CpuIsa detect_cpu_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuIsa::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return CpuIsa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return CpuIsa::kAvx512;
  // Leaf 7: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE. Read directly, because not every compiler knows their names.
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool amx = (edx >> 22 & 1) && (edx >> 24 & 1);
  return amx && request_amx() ? CpuIsa::kAmx : CpuIsa::kAvx512Bf16;
}

#else

inline CpuIsa detect_cpu_isa() { return CpuIsa::kPortable; }

#endif

// PDKERNELS_CPU_ISA=portable|avx2|avx512|avx512_bf16|amx lowers the choice, never raises it.
inline CpuIsa lowered_by_environment(CpuIsa found) {
  const char* requested = std::getenv("PDKERNELS_CPU_ISA");
  if (requested == nullptr) return found;
  for (CpuIsa level : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmx}) {
    if (std::strcmp(requested, name_of(level)) == 0) return level < found ? level : found;
  }
  throw std::invalid_argument("pdkernels: PDKERNELS_CPU_ISA must be portable, avx2, avx512, avx512_bf16 or amx, got '" +
                              std::string(requested) + "'.");
}

inline CpuIsa cpu_isa() {
#ifdef PDKERNELS_EMULATE_ISA
  // A build for tests: the units of all levels are compiled for any processor, and each call may ask for another level.
  return lowered_by_environment(CpuIsa::kAmx);
#else
  static const CpuIsa isa = lowered_by_environment(detect_cpu_isa());
  return isa;
#endif
}

}  // namespace pdkernels
