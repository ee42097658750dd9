// Bit tricks, conversions and fast-math intrinsics. The fast ones map to exact functions: accuracy is tested on a GPU.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "collectives.h"

namespace cudasim {
// CUDA overloads min and max for two integers of one size, or two floating-point numbers; mixed types are ambiguous.
template <class A, class B>
concept Comparable = (std::is_floating_point_v<A> && std::is_floating_point_v<B>) ||
                     (std::is_integral_v<A> && std::is_integral_v<B> && sizeof(+A{}) == sizeof(+B{}));
template <class A, class B>
using Common = decltype(A{} + B{});
}  // namespace cudasim

// A number wins over NaN.
template <class A, class B>
  requires cudasim::Comparable<A, B>
constexpr cudasim::Common<A, B> min(A a, B b) {
  const cudasim::Common<A, B> x = a, y = b;
  return x != x || y < x ? y : x;
}
template <class A, class B>
  requires cudasim::Comparable<A, B>
constexpr cudasim::Common<A, B> max(A a, B b) {
  const cudasim::Common<A, B> x = a, y = b;
  return x != x || x < y ? y : x;
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
  const unsigned long long low = __brev(static_cast<unsigned>(x));
  return low << 32 | __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7))) & 0xffu;
    const bool spread_sign = selector >> (4 * i) & 8;
    result |= (spread_sign ? (byte & 0x80u ? 0xffu : 0u) : byte) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((std::uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<std::int64_t>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

namespace cudasim {
// Out-of-range values saturate and NaN gives 0, where C++ would be undefined.
inline int to_int(float whole) {
  if (whole != whole) return 0;
  if (whole >= 2147483648.0f) return 2147483647;
  return whole < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(whole);
}
}  // namespace cudasim
inline int __float2int_rn(float x) { return cudasim::to_int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return cudasim::to_int(truncf(x)); }
inline int __float2int_rd(float x) { return cudasim::to_int(floorf(x)); }
inline int __float2int_ru(float x) { return cudasim::to_int(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// glibc declares functions with these names, hence macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)

[[noreturn]] inline void __trap() { cudasim::fail("__trap() was called"); }
