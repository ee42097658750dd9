// The rules that select guesses for masked tokens, shared by the CPU and the CUDA kernel.
//
// Every eligible candidate has a 64-bit key that is unique within a sequence. The upper half is its score, which orders
// confidences as unsigned integers with NaN last; the lower half is larger for lower indices. "The best n" are
// therefore all keys from some key up, and the rules only compare keys. 0 means that a candidate is not eligible.
#pragma once

#include "common/index_view.h"
#include "common/order_key.h"
#include "common/philox.h"

namespace pdkernels {

// The fourth word of a counter. Sampled tokens have 0 there, latent noise 1.
constexpr uint32_t kRandomOrder = 2;
// The scores of -inf and +inf. NaN is below the first, nothing is above the second.
constexpr uint32_t kLowestScore = 0x007FFFFFu, kHighestScore = 0xFF800000u;

enum class UnmaskRule { kQuota, kThreshold, kFactor };

PDK_HD float confidence_of(uint32_t score) {
  return float_of(score < kLowestScore ? kLowestScore : score > kHighestScore ? kHighestScore : score);
}

// One number for all segments, or a tensor (batch, segments).
struct PerSegment {
  IndexView view;
  int64_t number = 0;

  PDK_HD int64_t load(int64_t b, int64_t g) const { return view.given() ? view.load(b, g) : number; }
};

struct UnmaskArgs {
  IndexView tokens, ids, positions;  // positions not given: candidate r is for token r
  IndexView starts, ends;            // (batch, segments); not given: one segment, all tokens
  PerSegment quota, min_count;
  IndexView steps;                    // not given: step
  const float* confidence = nullptr;  // nullptr: a random order
  int64_t confidence_stride0 = 0, confidence_stride1 = 0;
  int64_t batch = 0, length = 0, candidates = 0, segments = 1, mask_token = 0, step = 0;
  PhiloxSeeds seeds;
  UnmaskRule rule = UnmaskRule::kQuota;
  double factor = 0;
  uint64_t lowest_passing = 0;  // kThreshold: keys from here up pass
  // Outputs (batch, segments), contiguous.
  int64_t* committed = nullptr;
  int64_t* remaining = nullptr;
  bool* done = nullptr;

  PDK_HD int64_t start(int64_t b, int64_t g) const { return starts.given() ? starts.load(b, g) : 0; }
  PDK_HD int64_t end(int64_t b, int64_t g) const { return ends.given() ? ends.load(b, g) : length; }
  PDK_HD int64_t position(int64_t b, int64_t r) const { return positions.given() ? positions.load(b, r) : r; }

  PDK_HD bool window_fits(int64_t b, int64_t g) const {
    return start(b, g) >= 0 && start(b, g) <= end(b, g) && end(b, g) <= length;
  }
  PDK_HD bool overlap(int64_t b, int64_t g, int64_t h) const {
    const int64_t from = start(b, g) > start(b, h) ? start(b, g) : start(b, h);
    const int64_t to = end(b, g) < end(b, h) ? end(b, g) : end(b, h);
    return from < to;
  }
  PDK_HD bool position_fits(int64_t b, int64_t r) const { return position(b, r) >= -1 && position(b, r) < length; }

  PDK_HD uint32_t score(int64_t b, int64_t r, int64_t position) const {
    if (confidence != nullptr) {
      const float x = confidence[b * confidence_stride0 + r * confidence_stride1];
      return x != x ? 0 : order_key(x);
    }
    const int64_t sequence_step = steps.given() ? steps.load(b) : step;
    const PhiloxWords counter{{0, static_cast<uint32_t>(position), static_cast<uint32_t>(sequence_step), kRandomOrder}};
    return philox4x32(counter, seeds.key(b)).word[0];
  }
  // The key of candidate r for the window [from, to), 0 if it is not eligible.
  PDK_HD uint64_t key(int64_t b, int64_t r, int64_t from, int64_t to) const {
    const int64_t p = position(b, r);
    if (p < from || p >= to || tokens.load(b, p) != mask_token) return 0;
    const int64_t id = ids.load(b, r);
    if (id < 0 || id == mask_token) return 0;
    return static_cast<uint64_t>(score(b, r, p)) << 32 | static_cast<uint64_t>(candidates - r);
  }
  PDK_HD int64_t candidate(uint64_t key) const { return candidates - static_cast<int64_t>(key & 0xFFFFFFFFu); }

  // The value that a rule compares: the confidence, or the uniform random number.
  PDK_HD double value(uint32_t score) const {
    return confidence != nullptr ? static_cast<double>(confidence_of(score))
                                 : (static_cast<double>(score) + 0.5) * 0x1p-32;
  }

  // kQuota and kThreshold: how many of m eligible candidates are committed if `passing` of them pass the threshold.
  PDK_HD int64_t count(int64_t b, int64_t g, int64_t m, int64_t passing) const {
    if (rule == UnmaskRule::kThreshold && passing >= min_count.load(b, g)) return passing;
    const int64_t limit = quota.load(b, g);
    return limit < m ? limit : m;
  }
  // kFactor: whether a key is too low for its rank, which counts from 1. If so, every lower key fails at its own rank.
  PDK_HD bool fails(uint64_t key, int64_t rank) const {
    if (rank < 2) return false;
    return value(static_cast<uint32_t>(key >> 32)) < 1.0 - factor / static_cast<double>(rank + 1);
  }
  // kFactor: how many of m candidates are committed if the first `passing_ranks` pass. As in the released code, a
  // failure at the last rank is ignored.
  PDK_HD static int64_t count(int64_t m, int64_t passing_ranks) { return passing_ranks + 1 == m ? m : passing_ranks; }

  PDK_HD void commit(int64_t b, uint64_t key) const {
    const int64_t r = candidate(key);
    tokens.store(ids.load(b, r), b, position(b, r));
  }
  PDK_HD void write(int64_t b, int64_t g, int64_t n, int64_t masks) const {
    const int64_t at = b * segments + g;
    committed[at] = n;
    remaining[at] = masks - n;
    done[at] = masks == n;
  }
};

// The smallest key that passes the threshold, found by bisection over scores, which are compared exactly, in double.
inline uint64_t lowest_passing_key(const UnmaskArgs& args, double threshold, bool strict) {
  int64_t low = args.confidence != nullptr ? kLowestScore : 0, high = int64_t{1} << 32;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const double value = args.value(static_cast<uint32_t>(middle));
    if (strict ? value > threshold : value >= threshold) high = middle;
    else low = middle + 1;
  }
  if (low == int64_t{1} << 32) return ~uint64_t{0};
  return low == 0 ? 1 : static_cast<uint64_t>(low) << 32;
}

PDK_KERNEL(unmask, UnmaskArgs)

}  // namespace pdkernels
