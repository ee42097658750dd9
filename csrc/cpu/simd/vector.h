// Vectors of the width a unit is compiled for, through the compilers' vector extension: one source for every
// instruction set.
//
// A unit in this folder is compiled once for each level of CpuIsa, with PDK_ISA naming the level's namespace.
// Everything here lives in that namespace and nothing comes from the standard library's templates: the linker keeps one
// copy of an inline function, and a copy with AVX-512 in it must not end up in code for every processor.
#pragma once

#include <cstdint>
#if defined(__AVX512DQ__) || (defined(__F16C__) && PDK_LANES == 8)
#include <immintrin.h>
#endif
#if defined(__aarch64__) && PDK_LANES == 4
#include <arm_neon.h>
#define PDK_NEON
#endif

// Whether a vector is one register, so that its instructions can be named. Tests compile wide ones for narrow
// registers.
#if defined(__AVX512DQ__) || (defined(__AVX2__) && PDK_LANES == 8)
#define PDK_ONE_REGISTER
#endif

namespace pdkernels::cpu::PDK_ISA {

constexpr int kLanes = PDK_LANES;

typedef float Vec __attribute__((vector_size(4 * PDK_LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * PDK_LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * PDK_LANES), may_alias));
typedef float LooseVec __attribute__((vector_size(4 * PDK_LANES), may_alias, aligned(4)));

#define PDK_INLINE inline __attribute__((always_inline))
// For what works on a whole chunk and depends on little of what its callers are compiled for: one copy serves them all.
#define PDK_APART __attribute__((noinline))

constexpr float kInfinity = __builtin_inff();

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

PDK_INLINE Vec splat(float x) { return x - Vec{}; }  // not x + Vec{}: that would turn -0 into 0
PDK_INLINE Ints splat(int32_t x) { return x + Ints{}; }
PDK_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where a is NaN
PDK_INLINE Vec choose(Ints mask, Vec yes, Vec no) { return mask ? yes : no; }

// Keeps a product from being fused with a sum that follows. A score that was rounded before its row's log-sum-exp was
// taken has to be rounded at the same point again, or weights of large scores are off by as much as the rounding.
PDK_INLINE Vec rounded(Vec x) {
#if defined(PDK_ONE_REGISTER)
  __asm__("" : "+v"(x));
#elif defined(__FMA__)
  __asm__("" : "+m"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

// From here on the rounding of a score may exceed what a fused subtraction of the largest one can take: it leaves up to
// half a unit in the last place, whose exponential overflows or vanishes.
constexpr float kFarScore = 0x1p27f;
PDK_INLINE Ints is_far(Vec largest) { return (largest >= kFarScore) | (largest <= -kFarScore); }
PDK_INLINE bool is_far(float largest) { return largest >= kFarScore || largest <= -kFarScore; }

PDK_INLINE Ints lane_numbers() {
  Ints lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// 2^z for z <= 0 or a little above, where the result is rounded to 16 bits anyway: 2^n 2^f with n whole and |f| <= 1/2.
// Exactly 1 at 0, exactly 0 below about -126, NaN for NaN. The polynomial is minimax in the relative error: 3e-6.
PDK_INLINE Vec power_of_two(Vec z) {
#ifdef __AVX512DQ__
  // The processor has instructions for the split and the scaling. Lower lanes are masked, because results below 2^-126
  // take it a hundred times as long.
  const __m512 exponent = reinterpret_cast<__m512>(z);
  const __mmask16 counted = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  const Vec f = reinterpret_cast<Vec>(_mm512_reduce_ps(exponent, _MM_FROUND_TO_NEAREST_INT));
#else
  constexpr float kRounder =
      12582912.0f + 127;  // 1.5 * 2^23 + the bias: what is left of it in the low bits is the exponent
  z = z < -127.0f ? splat(-127.0f) : z;
  const Vec shifted = z + kRounder, f = z - (shifted - kRounder);
#endif
  Vec p = f * 0.009582853231353456f + 0.055906424499157205f;
  p = p * f + 0.24024098606095334f;
  p = p * f + 0.6931241934293345f;
  p = p * f + 1.0f;
#ifdef __AVX512DQ__
  return reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(counted, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(z - f)));
#else
  return p * reinterpret_cast<Vec>(reinterpret_cast<Ints>(shifted) << 23);
#endif
}

// e^x for x <= 0 or a little above, the same for results of 16 bits. For exact ones 2^n e^r with n whole and |r| <=
// log(2) / 2; n log(2) is subtracted in two parts, the first of which is exact (Cody and Waite), so that r is as good
// as x for any n: 2e-9 before rounding.
template <bool kExact>
PDK_INLINE Vec exponential(Vec x) {
  if constexpr (!kExact) {
    return power_of_two(x * 1.44269504f);
  } else {
    constexpr float kRounder = 12582912.0f;
    x = x < -88.0f ? splat(-88.0f) : x;
    const Vec shifted = x * 1.44269504f + kRounder;
    const Vec n = shifted - kRounder;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
    Vec p = r * 0.0013843657f + 0.008374157f;
    p = p * r + 0.041668f;
    p = p * r + 0.16666431f;
    p = p * r + 0.49999994f;
    p = p * r + 1.0f;
    return (p * r + 1.0f) * reinterpret_cast<Vec>(exponent);
  }
}

// tanh x within 2e-7 of it, relative to it: a polynomial near 0, and further away (1 - e^-2|x|) / (1 + e^-2|x|). Source
// of the polynomial: Cephes, tanhf.c.
PDK_INLINE Vec hyperbolic_tangent(Vec x) {
  const Vec size = x < 0.0f ? -x : x, square = x * x;
  const Vec e = exponential<true>(size * -2.0f), far = (1.0f - e) / (1.0f + e);
  Vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return choose(size < 0.625f, p * square * x + x, x < 0.0f ? -far : far);
}

// e^x for x <= 0 and above kLeastExponent, as the terms of long sums need it: exactly 1 at 0, exactly 0 at
// kLeastExponent, NaN for NaN. The polynomial's relative error oscillates around 0 and is at most 9e-8. A quarter fewer
// instructions than exponential<true>.
constexpr float kLeastExponent = -88.02969f;  // -127 ln 2
PDK_INLINE Vec exponential_term(Vec x) {
  constexpr float kRounder =
      12582912.0f + 127;  // 1.5 * 2^23 + the bias: what is left of it in the low bits is the exponent
  const Vec shifted = x * 1.44269504f + kRounder;
  const Vec f = x * 1.44269504f - (shifted - kRounder);
  Vec p = f * 0.001326472731307149f + 0.009671512991189957f;
  p = p * f + 0.05550733581185341f;
  p = p * f + 0.24022242426872253f;
  p = p * f + 0.6931470036506653f;
  return (p * f + 1.0f) * reinterpret_cast<Vec>(reinterpret_cast<Ints>(shifted) << 23);
}

// Adds e^x to `total` and x e^x to `weighted`, for x <= 0: nothing where x <= kLeastExponent, -inf included, and NaN
// for NaN.
PDK_INLINE void add_terms(Vec x, Vec& total, Vec& weighted) {
#ifdef __AVX512DQ__
  // 2^n times 2^f, where reduce leaves f in [0, 1) and scalef uses n = floor(z): 12 instructions instead of 15. The
  // polynomial's relative error is at most 9e-8. Lanes below 2^-126 are masked, since such results take a hundred times
  // as long.
  const __m512 z = reinterpret_cast<__m512>(x * 1.44269504f), f = _mm512_reduce_ps(z, _MM_FROUND_TO_NEG_INF);
  const __mmask16 counted = _mm512_cmp_ps_mask(z, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  const Vec r = reinterpret_cast<Vec>(f);
  Vec p = r * 0.0018671284938131627f + 0.009017034679440056f;
  p = p * r + 0.05579990891059365f;
  p = p * r + 0.2401644517193385f;
  p = p * r + 0.6931513116711748f;
  p = p * r + 1.0f;
  const __m512 e = _mm512_maskz_scalef_ps(counted, reinterpret_cast<__m512>(p), z);
  total += reinterpret_cast<Vec>(e);
  weighted = reinterpret_cast<Vec>(
      _mm512_mask3_fmadd_ps(reinterpret_cast<__m512>(x), e, reinterpret_cast<__m512>(weighted), counted));
#else
  x = larger(splat(kLeastExponent), x);
  const Vec e = exponential_term(x);
  total += e;
  weighted += x * e;
#endif
}

// A bit for each lane of a mask.
PDK_INLINE uint32_t bits_of(Ints mask) {
#if defined(__AVX512DQ__)
  typedef int Native __attribute__((vector_size(64)));
  return __builtin_ia32_cvtd2mask512(reinterpret_cast<Native>(mask));
#elif defined(PDK_ONE_REGISTER)
  typedef float Native __attribute__((vector_size(32)));
  return static_cast<uint32_t>(__builtin_ia32_movmskps256(reinterpret_cast<Native>(mask)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(mask[lane] & 1) << lane;
  return bits;
#endif
}

// One round of a transposition: swaps the off-diagonal squares of size kDistance between two rows.
template <int kDistance>
PDK_INLINE void exchange(Ints& a, Ints& b) {
  Ints low{}, high{};
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & kDistance ? kLanes + lane - kDistance : lane;
    high[lane] = lane & kDistance ? kLanes + lane : lane + kDistance;
  }
#ifdef __clang__
  const Ints old_a = a, old_b = b;
  for (int lane = 0; lane < kLanes; ++lane) {
    a[lane] = low[lane] < kLanes ? old_a[low[lane]] : old_b[low[lane] - kLanes];
    b[lane] = high[lane] < kLanes ? old_a[high[lane]] : old_b[high[lane] - kLanes];
  }
#else
  const Ints old = a;
  a = __builtin_shuffle(old, b, low);
  b = __builtin_shuffle(old, b, high);
#endif
}

// Swaps ever larger off-diagonal squares: log2(kLanes) rounds.
template <int kDistance = 1>
PDK_INLINE void transpose_rounds(Ints (&rows)[kLanes]) {
  if constexpr (kDistance < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (!(i & kDistance)) exchange<kDistance>(rows[i], rows[i + kDistance]);
    }
    transpose_rounds<2 * kDistance>(rows);
  }
}
#ifdef PDKERNELS_EMULATE_ISA  // too much code to have it everywhere
inline PDK_APART
#else
PDK_INLINE
#endif
    void transpose(Ints (&rows)[kLanes]) {
  transpose_rounds(rows);
}

// Elements of tensors and their conversion to and from float, round to nearest even.
struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
// One of the codes of a row of an 8-bit cache (ops/kv_cache.h), which stands for itself times the scale of the row.
struct Code {
  int8_t number;
};
template <class T>
constexpr bool kIsCode = false;
template <>
inline constexpr bool kIsCode<Code> = true;

PDK_INLINE float to_float(float x) { return x; }
PDK_INLINE float to_float(Code x) { return static_cast<float>(x.number); }
PDK_INLINE float to_float(Bfloat16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }
PDK_INLINE float to_float(Half x) {
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  const float value = __builtin_bit_cast(float, magnitude) * 0x1p112f;  // moves the exponent, subnormals included
  const uint32_t special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | special | uint32_t{x.bits & 0x8000u} << 16);
}

template <class T>
PDK_INLINE T from_float(float x);
template <>
PDK_INLINE float from_float<float>(float x) {
  return x;
}
template <>
PDK_INLINE Bfloat16 from_float<Bfloat16>(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(x != x ? bits >> 16 | 0x40u : rounded)};
}
template <>
PDK_INLINE Half from_float<Half>(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  const float lifted = __builtin_bit_cast(float, magnitude) + 0.5f;  // the adder rounds to a multiple of 2^-24
  const uint32_t small = __builtin_bit_cast(uint32_t, lifted) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | (bits >> 16 & 0x8000u))};
}

// Plain loops over rows, which the compiler turns into vector code.
template <class T>
PDK_INLINE void to_floats(const T* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
template <class T>
PDK_INLINE void from_floats(const float* __restrict from, T* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_float<T>(from[i]);
}

}  // namespace pdkernels::cpu::PDK_ISA
