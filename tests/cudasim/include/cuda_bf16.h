// CUDA's bfloat16: conversions to and from float, differences and maxima. Kernels compute in float.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(std::uint32_t{h.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {0x7fff};                                                      // the only NaN that CUDA returns
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // to nearest, ties to even
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__float2bfloat16_rn(v.x), __float2bfloat16_rn(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) - __bfloat162float(b.x),
                               __bfloat162float(a.y) - __bfloat162float(b.y));
}

// The larger of each pair, NaN if one of them is.
inline __nv_bfloat16 __hmax_nan(__nv_bfloat16 a, __nv_bfloat16 b) {
  const float x = __bfloat162float(a), y = __bfloat162float(b);
  return x != x || y != y ? __nv_bfloat16{0x7fff} : x > y ? a : b;
}
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)};
}
