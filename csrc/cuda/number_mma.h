// Products of 16-bit numbers on the tensor cores, and codes of bytes as such numbers.
#pragma once

#include "elements.h"

namespace pdkernels::cuda {

// c += a b with 16 rows of a and 8 columns of b, for a whole warp; a word holds two neighbouring columns of a, or rows
// of b. With lane = 4 g + t, a lane has two words of the rows g and g + 8 of a and of column g of b, and columns 2 t
// and 2 t + 1 of the rows g and g + 8 of c. Which of the 16 columns of a a lane's four are is open, as long as they are
// the same rows of b. Sums are float32, in an order that the tensor core chooses and that no other row or column
// changes.
template <class T>
__device__ inline void multiply_numbers(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&a8)[2], uint2 b) {
#if !defined(PDKERNELS_CUDASIM) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
#define PDK_NUMBER_MMA(type)                                                 \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
      : "r"(a[0]), "r"(a8[0]), "r"(a[1]), "r"(a8[1]), "r"(b.x), "r"(b.y))
  if constexpr (std::is_same_v<T, __half>) {
    PDK_NUMBER_MMA("f16");
  } else {
    PDK_NUMBER_MMA("bf16");
  }
#undef PDK_NUMBER_MMA
#else
  const auto number = [](uint32_t word, int half) {
    const auto bits = static_cast<uint16_t>(word >> 16 * half);
    T value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return to_float(value);
  };
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 4; ++k) {
    for (int word = 0; word < 2; ++word) {
      const uint32_t mine = word == 0 ? b.x : b.y;
      const uint32_t row[2] = {__shfl_sync(0xffffffffu, a[word], 4 * g + k),
                               __shfl_sync(0xffffffffu, a8[word], 4 * g + k)};
      const uint32_t column[2] = {__shfl_sync(0xffffffffu, mine, 8 * t + k),
                                  __shfl_sync(0xffffffffu, mine, 8 * t + 4 + k)};
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) c[i] += number(row[i / 2], half) * number(column[i % 2], half);
      }
    }
  }
#endif
}

// A pair of 16-bit numbers as a word and back.
template <class Pair>
__device__ inline uint32_t word_of(Pair pair) {
  uint32_t word;
  static_assert(sizeof(word) == sizeof(pair));
  __builtin_memcpy(&word, &pair, sizeof(word));
  return word;
}
template <class Pair>
__device__ inline Pair pair_of(uint32_t word) {
  Pair pair;
  __builtin_memcpy(&pair, &word, sizeof(word));
  return pair;
}

// Whole numbers as a byte in the low bits of a 16-bit number that is a power of two: bfloat16 has seven bits above 128,
// half ten above 1024. The subtraction that takes the power away is exact.
template <class T>
struct WholeNumbers;

template <>
struct WholeNumbers<__half> {
  using Pair = __half2;
  static constexpr uint32_t kPower = 0x64646464u;
  static constexpr float kAbove = 1024;
};
template <>
struct WholeNumbers<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr uint32_t kPower = 0x43434343u;
  static constexpr float kAbove = 128;
};

template <class T>
__device__ inline uint32_t less(uint32_t a, uint32_t b) {
  using Pair = typename WholeNumbers<T>::Pair;
  return word_of(__hsub2(pair_of<Pair>(a), pair_of<Pair>(b)));
}

// A whole number from -255 to 255 twice.
template <class T>
__device__ inline uint32_t twice(float x) {
  const T value = from_float<T>(x);
  uint16_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits * 0x10001u;
}

// The four bytes of a word as numbers: codes below 128, or with kSigned signed ones, less what `zero` says: pairs of
// kAbove and the code of zero, or with kSigned of the code of zero alone.
template <class T, bool kSigned>
__device__ inline void spread(uint32_t bytes, uint32_t zero, bool with_zero, uint32_t (&pairs)[2]) {
  constexpr uint32_t power = WholeNumbers<T>::kPower;
  constexpr bool in_half = std::is_same_v<T, __half>;
  if (kSigned && in_half) bytes ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t wide = __byte_perm(bytes, power, i == 0 ? 0x4140u : 0x4342u);
    if constexpr (!kSigned) {
      pairs[i] = less<T>(wide, zero);
    } else if constexpr (in_half) {
      pairs[i] = less<T>(wide, 0x64806480u);  // 1024 and 128
    } else {                                  // 128 or 256, as the sign is
      pairs[i] = less<T>(wide & 0xff7fff7fu, (wide & 0x00800080u) | 0x43004300u);
    }
    if (kSigned && with_zero) pairs[i] = less<T>(pairs[i], zero);
  }
}

}  // namespace pdkernels::cuda
