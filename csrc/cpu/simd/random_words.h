// Random words of Philox in vectors: those of csrc/common/philox.h, for one step and one row of the problem.
#pragma once

#include "common/philox.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

typedef uint64_t Longs __attribute__((vector_size(4 * PDK_LANES), may_alias));
constexpr int kLongs = kLanes / 2;

// The product of the low words of each pair of lanes, ignoring the high words: one instruction, which GCC does not
// find.
PDK_INLINE Longs product(Longs a, Longs b) {
#if defined(PDK_ONE_REGISTER)
  Longs result;
  __asm__("vpmuludq %2, %1, %0" : "=v"(result) : "v"(a), "v"(b));
  return result;
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

PDK_INLINE Longs splat_long(uint64_t x) { return x + Longs{}; }

// a0 b0 a1 b1 ..
PDK_INLINE void interleave(Longs a, Longs b, Longs* result) {
  Longs low{}, high{};
  for (int lane = 0; lane < kLongs; ++lane) {
    low[lane] = lane / 2 + lane % 2 * kLongs;
    high[lane] = low[lane] + kLongs / 2;
  }
#ifdef __clang__
  for (int lane = 0; lane < kLongs; ++lane) {
    result[0][lane] = lane % 2 ? b[lane / 2] : a[lane / 2];
    result[1][lane] = lane % 2 ? b[(kLongs + lane) / 2] : a[(kLongs + lane) / 2];
  }
#else
  result[0] = __builtin_shuffle(a, b, low);
  result[1] = __builtin_shuffle(a, b, high);
#endif
}

// A lane computes one counter, whose four words are in the low halves of four vectors. Most of the first round is the
// same for the whole row.
class RandomWords {
 public:
  PDK_INLINE RandomWords(PhiloxKey key, uint32_t step, uint32_t row, uint32_t kind) {
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * step;
    first_[0] = splat_long(product1 >> 32 ^ row ^ key.low);
    first_[1] = splat_long(product1);
    first_[2] = splat_long(kind ^ key.high);
    for (int round = 1; round < kPhiloxRounds; ++round) {
      keys_[round][0] = splat_long(key.low + static_cast<uint32_t>(round) * kPhiloxKeyStep0);
      keys_[round][1] = splat_long(key.high + static_cast<uint32_t>(round) * kPhiloxKeyStep1);
    }
  }

  // Writes the words of columns first .. first + count - 1, rounded up to two whole vectors; first is a multiple of 4.
  PDK_INLINE void write(void* to, int64_t first, int64_t count) const {
    Longs quads = splat_long(static_cast<uint64_t>(first / 4));
    for (int lane = 0; lane < kLongs; ++lane) quads[lane] += static_cast<uint64_t>(lane);
    const Longs multiplier0 = splat_long(kPhiloxMultiplier0), multiplier1 = splat_long(kPhiloxMultiplier1);
    for (int64_t at = 0; at < count; at += 2 * kLanes, quads += kLongs) {
      Longs c0 = first_[0], c1 = first_[1], c3 = product(quads, multiplier0), c2 = c3 >> 32 ^ first_[2];
      for (int round = 1; round < kPhiloxRounds; ++round) {
        const Longs product0 = product(c0, multiplier0), product1 = product(c2, multiplier1);
        c0 = product1 >> 32 ^ c1 ^ keys_[round][0];
        c1 = product1;
        c2 = product0 >> 32 ^ c3 ^ keys_[round][1];
        c3 = product0;
      }
      interleave((c0 & 0xffffffffu) | c1 << 32, (c2 & 0xffffffffu) | c3 << 32, static_cast<Longs*>(to) + at / kLanes);
    }
  }

 private:
  Longs first_[3], keys_[kPhiloxRounds][2];
};

}  // namespace pdkernels::cpu::PDK_ISA
