// Floats as unsigned integers with the same order, by which kernels select and sort.
#pragma once

#include "common/platform.h"

namespace pdkernels {

// Equal floats have equal keys, including both zeros. The keys 0 and ~0 belong to no number; callers use one of them
// for NaN.
PDK_HD uint32_t order_key(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x + 0.0f);  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

PDK_HD float float_of(uint32_t key) { return __builtin_bit_cast(float, key >> 31 ? key & 0x7fffffffu : ~key); }

}  // namespace pdkernels
