// How what is read next comes from memory.
#pragma once

namespace pdkernels::cpu::PDK_ISA {

// Whether the processor fetches what is read in the order of its addresses faster than lines could be asked for. Those
// with AVX-512 (Zen 4) do; on one without (Zen 3) that takes 1.5 times as long.
#ifdef __AVX512DQ__
constexpr bool kFetchesInOrder = true;
#else
constexpr bool kFetchesInOrder = false;
#endif

}  // namespace pdkernels::cpu::PDK_ISA
