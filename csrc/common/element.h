// The element types of kernels that do arithmetic. Kernels that only move rows work on bytes.
#pragma once

namespace pdkernels {

enum class Element { kFloat, kHalf, kBfloat16 };

}  // namespace pdkernels
