// The element types of kernels that compute; those that only move rows take bytes.
#pragma once

namespace pdkernels {

enum class Element { kFloat, kHalf, kBfloat16 };

}  // namespace pdkernels
