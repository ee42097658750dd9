// How what is read next comes from memory.
#pragma once

namespace pdkernels::cpu::PDK_ISA {

// Whether what is read in the order of its addresses is left to the processor to fetch. On one with AVX-512 (Zen 4)
// that is faster than asking for lines; on one without (Zen 3) it takes 1.3 to 1.5 times as long.
#ifdef __AVX512DQ__
constexpr bool kFetchesInOrder = true;
#else
constexpr bool kFetchesInOrder = false;
#endif

}  // namespace pdkernels::cpu::PDK_ISA
