// CUDA's half: conversions to and from float, differences and maxima. Kernels compute in float; other arithmetic is
// left out.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct alignas(2) __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

// The compiler's own type rounds to nearest even, which is all that is needed.
inline float __half2float(__half h) { return static_cast<float>(std::bit_cast<_Float16>(h.bits)); }
inline __half __float2half_rn(float x) { return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__float2half_rn(v.x), __float2half_rn(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}

// The larger of each pair, NaN if one of them is.
inline __half __hmax_nan(__half a, __half b) {
  const float x = __half2float(a), y = __half2float(b);
  return x != x || y != y ? __half{0x7fff} : x > y ? a : b;
}
inline __half2 __hmax2_nan(__half2 a, __half2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }
