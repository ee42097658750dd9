// Detects at run time which vector units the processor and operating system offer: one build runs on any machine.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pdkernels {

// `kPortable` uses what every processor of the architecture has: SSE2 on x86-64, NEON on arm64.
#if defined(__aarch64__)

enum class CpuIsa { kPortable, kNeonDot, kNeonI8mm };

constexpr CpuIsa kCpuIsas[] = {CpuIsa::kPortable, CpuIsa::kNeonDot, CpuIsa::kNeonI8mm};

inline const char* name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kNeonDot: return "neon_dot";
    case CpuIsa::kNeonI8mm: return "neon_i8mm";
    default: return "portable";
  }
}

#else

enum class CpuIsa { kPortable, kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

constexpr CpuIsa kCpuIsas[] = {CpuIsa::kPortable,   CpuIsa::kAvx2,       CpuIsa::kAvx2Vnni, CpuIsa::kAvx512,
                               CpuIsa::kAvx512Vnni, CpuIsa::kAvx512Bf16, CpuIsa::kAmx};

inline const char* name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx2Vnni: return "avx2_vnni";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Vnni: return "avx512_vnni";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
    case CpuIsa::kAmx: return "amx";
    default: return "portable";
  }
}

#endif

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
  // Every processor with AVX2 has the conversions of float16, which not every compiler can ask for.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuIsa::kPortable;
  // Leaf 7: EDX bits 22, 24 and 25 are AMX-BF16, AMX-TILE and AMX-INT8; its subleaf 1: EAX bit 4 is AVX-VNNI. Read
  // here, since not every compiler knows their names.
  const auto leaf7 = [](unsigned subleaf, unsigned& eax, unsigned& edx) {
    unsigned ebx = 0;
    eax = 7, edx = 0;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(subleaf), "=d"(edx));
  };
  unsigned eax = 0, edx = 0;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) {
    leaf7(0, eax, edx);
    if (eax < 1) return CpuIsa::kAvx2;  // no subleaf 1
    leaf7(1, eax, edx);
    return eax >> 4 & 1 ? CpuIsa::kAvx2Vnni : CpuIsa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512vnni")) return CpuIsa::kAvx512;
  if (!__builtin_cpu_supports("avx512bf16")) return CpuIsa::kAvx512Vnni;
  leaf7(0, eax, edx);
  const bool amx = (edx >> 22 & 1) && (edx >> 24 & 1) && (edx >> 25 & 1);
  return amx && request_amx() ? CpuIsa::kAmx : CpuIsa::kAvx512Bf16;
}

#elif defined(__aarch64__)

// `kNeonI8mm` has the dot products and the matrix products of bytes, and the dot products of bfloat16: Armv8.6 has all
// of them.
inline CpuIsa detect_cpu_isa() {
#if defined(__linux__)
  constexpr unsigned long kDot = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // HWCAP_ASIMDDP, HWCAP2_I8MM, _BF16
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const bool dot = first & kDot, i8mm = second & kI8mm, bf16 = second & kBf16;
#elif defined(__APPLE__)
  const auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  const bool dot = has("hw.optional.arm.FEAT_DotProd"), i8mm = has("hw.optional.arm.FEAT_I8MM"),
             bf16 = has("hw.optional.arm.FEAT_BF16");
#else
  constexpr bool dot = false, i8mm = false, bf16 = false;
#endif
  return !dot ? CpuIsa::kPortable : i8mm && bf16 ? CpuIsa::kNeonI8mm : CpuIsa::kNeonDot;
}

#else

inline CpuIsa detect_cpu_isa() { return CpuIsa::kPortable; }

#endif

// PDKERNELS_CPU_ISA, the name of a level, lowers the choice, never raises it.
inline CpuIsa lowered_by_environment(CpuIsa found) {
  const char* requested = std::getenv("PDKERNELS_CPU_ISA");
  if (requested == nullptr) return found;
  constexpr CpuIsa kFirst = CpuIsa::kPortable, kLast = kCpuIsas[sizeof(kCpuIsas) / sizeof(CpuIsa) - 1];
  std::string names;
  for (const CpuIsa level : kCpuIsas) {
    if (std::strcmp(requested, name_of(level)) == 0) return level < found ? level : found;
    names += std::string(level == kFirst ? "" : level == kLast ? " or " : ", ") + name_of(level);
  }
  throw std::invalid_argument("pdkernels: PDKERNELS_CPU_ISA must be " + names + ", got '" + std::string(requested) +
                              "'.");
}

inline CpuIsa cpu_isa() {
#ifdef PDKERNELS_EMULATE_ISA
  // A build for tests: the units of all levels are compiled for any processor, and each call may ask for another level.
  return lowered_by_environment(kCpuIsas[sizeof(kCpuIsas) / sizeof(CpuIsa) - 1]);
#else
  static const CpuIsa isa = lowered_by_environment(detect_cpu_isa());
  return isa;
#endif
}

}  // namespace pdkernels
