// Philox4x32-10, the counter-based random numbers of this project: reference/philox.py, word for word.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u;  // golden ratio
constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85u;  // sqrt(3) - 1

struct PhiloxWords {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t low, high;  // of a seed
};

// The seeds of a call: one for each row (or sequence) of the problem, or one for all.
struct PhiloxSeeds {
  IndexView each;  // not given: all
  int64_t all = 0;

  PDK_HD PhiloxKey key(int64_t row) const {
    const uint64_t seed = static_cast<uint64_t>(each.given() ? each.load(row) : all);
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  }
};

PDK_HD PhiloxWords philox4x32(PhiloxWords counter, PhiloxKey key) {
  uint32_t* c = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * c[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * c[2];
    c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key.low;
    c[1] = static_cast<uint32_t>(product1);
    c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key.high;
    c[3] = static_cast<uint32_t>(product0);
    key.low += kPhiloxKeyStep0;
    key.high += kPhiloxKeyStep1;
  }
  return counter;
}

}  // namespace pdkernels
