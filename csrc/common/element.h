// The element types of kernels that do arithmetic. Kernels that only move rows work on bytes.
#pragma once

#include "common/platform.h"

namespace pdkernels {

enum class Element { kFloat, kHalf, kBfloat16 };

PDK_HD int64_t bytes_of(Element element) { return element == Element::kFloat ? 4 : 2; }

}  // namespace pdkernels
