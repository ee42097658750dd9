// Floats as unsigned integers of the same order: kernels select and sort by these.
#pragma once

#include "common/platform.h"

namespace pdkernels {

// Equal for equal floats, so for both zeros. 0 is below every float and all bits set above: which of them NaN has is
// the caller's choice.
PDK_HD uint32_t order_key(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x + 0.0f);  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

PDK_HD float float_of(uint32_t key) { return __builtin_bit_cast(float, key >> 31 ? key & 0x7fffffffu : ~key); }

}  // namespace pdkernels
