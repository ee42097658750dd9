// Rows of any element type as vectors of floats: whole vectors, then the rest of the row, padded with a neutral value.
// A loop body is written once, for both.
#pragma once

#include "../parallel.h"
#include "vector.h"

namespace pdkernels::cpu::PDK_ISA {

// Sums of a strip are floats; longer ones are added up from strips in double precision.
constexpr int64_t kStrip = 512;

// The lanes of a vector that are elements of the row: all, or the first ones.
struct Whole {};
struct Part {
  int64_t count;
};

PDK_INLINE Ints mask_of(Whole) { return splat(-1); }
PDK_INLINE Ints mask_of(Part part) { return lane_numbers() < splat(static_cast<int32_t>(part.count)); }

// Calls body(at, lanes) for each vector of [begin, end).
template <class Body>
PDK_INLINE void for_vectors(int64_t begin, int64_t end, const Body& body) {
  int64_t at = begin;
  for (; at + kLanes <= end; at += kLanes) body(at, Whole{});
  if (at < end) body(at, Part{end - at});
}

typedef uint32_t LooseWords __attribute__((vector_size(4 * PDK_LANES), may_alias, aligned(2)));
typedef uint16_t LooseShorts __attribute__((vector_size(2 * PDK_LANES), may_alias, aligned(2)));
typedef int8_t LooseBytes __attribute__((vector_size(PDK_LANES), may_alias, aligned(1)));

// The conversions of vector.h for a whole vector: compilers find them in long loops, but not in a handful of lanes.
PDK_INLINE Vec widened(Words bits, Bfloat16) { return reinterpret_cast<Vec>(bits << 16); }
PDK_INLINE Vec widened(Words bits, Half) {
  const Words value = reinterpret_cast<Words>(reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f);
  const Words special = reinterpret_cast<Words>((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Vec>(value | special | (bits & 0x8000u) << 16);
}
PDK_INLINE Words narrowed(Vec x, Bfloat16) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return x != x ? (bits >> 16 | 0x40u) : rounded;
}
PDK_INLINE Words narrowed(Vec x, Half) {
  const Words bits = reinterpret_cast<Words>(x), magnitude = bits & 0x7fffffffu, all = magnitude - magnitude;
  const Words normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Vec>(magnitude) + 0.5f) - 0x3f000000u;
  Words half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? all + 0x7c00u : half;
  half = magnitude > 0x7f800000u ? all + 0x7e00u : half;
  return half | (bits >> 16 & 0x8000u);
}

// A vector of 16-bit floats by the processor's own instruction, where it has one.
PDK_INLINE Vec widened_at(const Half* from) {
#if defined(__AVX512DQ__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__) && PDK_LANES == 8
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(PDK_NEON)
  return reinterpret_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)))));
#else
  return widened(__builtin_convertvector(*reinterpret_cast<const LooseShorts*>(from), Words), Half{});
#endif
}
PDK_INLINE Vec widened_at(const Bfloat16* from) {
  return widened(__builtin_convertvector(*reinterpret_cast<const LooseShorts*>(from), Words), Bfloat16{});
}

template <class T>
PDK_INLINE Vec load(const T* from, Whole, float = 0) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return *reinterpret_cast<const LooseVec*>(from);
  } else if constexpr (kIsCode<T>) {
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const LooseBytes*>(from), Ints), Vec);
  } else {
    return widened_at(from);
  }
}
template <class T>
PDK_INLINE Vec load(const T* from, Part part, float fill = 0) {
  Vec x = splat(fill);
  to_floats(from, reinterpret_cast<float*>(&x), part.count);
  return x;
}

// Calls body(x, y) with vectors that hold the elements of [begin, end), each once and in no particular order, and
// `fill` in lanes that are left over. Meanwhile the elements `kAhead` further on are prefetched, if there are any.
template <int64_t kAhead = 0, class T, class Body>
PDK_INLINE void for_pairs(const T* from, int64_t begin, int64_t end, float fill, const Body& body) {
  int64_t at = begin;
  for (; at + 2 * kLanes <= end; at += 2 * kLanes) {
    if constexpr (kAhead > 0) {
      const char* next = reinterpret_cast<const char*>(from) + (at + kAhead) * static_cast<int64_t>(sizeof(T));
      for (int byte = 0; byte < 2 * kLanes * static_cast<int>(sizeof(T)); byte += 64)
        __builtin_prefetch(next + byte, 0, 2);
    }
    if constexpr (sizeof(T) == sizeof(float)) {
      body(load(from + at, Whole{}), load(from + at + kLanes, Whole{}));
    } else {  // 16 bits become floats in half the instructions where a word of memory holds one of each vector
      const Words words = *reinterpret_cast<const LooseWords*>(from + at);
      body(widened(words & 0xffffu, T{}), widened(words >> 16, T{}));
    }
  }
  for_vectors(at, end, [&](int64_t offset, auto lanes) { body(load(from + offset, lanes, fill), splat(fill)); });
}

// x rounded to T.
template <class T>
PDK_INLINE Vec as(Vec x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return widened(narrowed(x, T{}), T{});
  }
}

// Stores x as T, and returns it rounded to T.
template <class T>
PDK_INLINE Vec store(T* to, Vec x, Whole) {
  if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<LooseVec*>(to) = x;
    return x;
  } else {
    const Words bits = narrowed(x, T{});
    *reinterpret_cast<LooseShorts*>(to) = __builtin_convertvector(bits, LooseShorts);
    return widened(bits, T{});
  }
}
template <class T>
PDK_INLINE Vec store(T* to, Vec x, Part part) {
  from_floats(reinterpret_cast<const float*>(&x), to, part.count);
  return as<T>(x);
}

// Calls body(begin, end) for each strip of [begin, end).
template <class Body>
PDK_INLINE void for_strips(int64_t begin, int64_t end, const Body& body) {
  for (int64_t first = begin; first < end; first += kStrip) body(first, smaller(first + kStrip, end));
}

// The lanes, added up in halves.
template <class Lanes>
PDK_INLINE auto sum_of(Lanes x) {
  decltype(x[0] + x[0]) lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = x[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Calls body(begin, end) on ranges that cover all items, on threads that get at least `elements` elements each.
template <class Body>
void for_ranges(int64_t items, int64_t elements_per_item, const Body& body) {
  constexpr int64_t kElementsPerThread = 16 * 1024;  // with fewer, waking another thread costs more than it saves
  parallel_for(0, items, 1 + kElementsPerThread / (elements_per_item + 1), body);
}

// Calls body(item) for all items, on such threads.
template <class Body>
void for_rows(int64_t items, int64_t elements_per_item, const Body& body) {
  for_ranges(items, elements_per_item, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) body(item);
  });
}

// Runs the template for the element type of its arguments.
#define PDK_BY_ELEMENT(kernel, args)                        \
  switch (args.element) {                                   \
    case Element::kFloat: return kernel<float>(args);       \
    case Element::kHalf: return kernel<Half>(args);         \
    case Element::kBfloat16: return kernel<Bfloat16>(args); \
  }

}  // namespace pdkernels::cpu::PDK_ISA
