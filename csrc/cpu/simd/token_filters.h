// The filters of a row's distribution: top-k, top-p, min-p, typical-p. The largest logits of strips tell where tokens
// can pass, so only those strips are read again, and everything else happens among these candidates, in double
// precision. Where there are too many, or where the sums of the other tokens are not exact enough to tell which ones
// pass, many_tokens.h decides.
#pragma once

#include "logit_filters.h"
#include "ops/token_statistics.h"

namespace pdkernels::cpu::PDK_ISA {

typedef double Doubles __attribute__((vector_size(8 * PDK_LANES), may_alias));
typedef double LooseDoubles __attribute__((vector_size(8 * PDK_LANES), may_alias, aligned(8)));

// Calls body(at) for the lanes of a mask.
template <class Body>
PDK_INLINE void for_lanes(Ints mask, int64_t at, const Body& body) {
  for (uint32_t bits = bits_of(mask); bits != 0; bits &= bits - 1) body(at + __builtin_ctz(bits));
}

// The sum of the masses whose keys are at most `key`.
PDK_INLINE double mass_until(const double* keys, const double* masses, int64_t count, double key) {
  Doubles sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Doubles mine = *reinterpret_cast<const LooseDoubles*>(keys + i);
    const Doubles own = *reinterpret_cast<const LooseDoubles*>(masses + i);
    sums += mine <= key ? own : Doubles{};
  }
  double sum = sum_of(sums);
  for (; i < count; ++i) sum += keys[i] <= key ? masses[i] : 0;
  return sum;
}

struct KeyRange {
  double low, high;
};

PDK_INLINE KeyRange range_of(const double* keys, int64_t count) {
  KeyRange range{keys[0], keys[0]};
  Doubles low = keys[0] + Doubles{}, high = low;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Doubles mine = *reinterpret_cast<const LooseDoubles*>(keys + i);
    low = mine < low ? mine : low;
    high = mine > high ? mine : high;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    range.low = low[lane] < range.low ? low[lane] : range.low;
    range.high = high[lane] > range.high ? high[lane] : range.high;
  }
  for (; i < count; ++i) {
    range.low = keys[i] < range.low ? keys[i] : range.low;
    range.high = keys[i] > range.high ? keys[i] : range.high;
  }
  return range;
}

struct Cut {
  double key, before, upto;  // the masses of smaller keys, and of these and its own
};

// The smallest key for which the masses of all keys up to it reach `target`, else the largest key. Reorders its
// arguments. Steps halve the range of the keys that are left, or guess the key as if their masses were spread evenly.
inline Cut key_at_mass(double* keys, double* masses, int64_t count, double target) {
  double before = 0, left = mass_until(keys, masses, count, static_cast<double>(kInfinity));
  for (bool guesses = true;; guesses = !guesses) {
    const auto [low, high] = range_of(keys, count);
    if (!(low < high)) return {high, before, before + left};
    double middle = low + (high - low) * (guesses && left > 0 ? (target - before) / left : 0.5);
    if (!(middle > low)) middle = low;
    if (!(middle < high)) middle = low + (high - low) / 2;
    if (!(middle < high)) middle = low;
    const double mass = mass_until(keys, masses, count, middle);
    const bool reached = before + mass >= target;
    left = reached ? mass : left - mass;
    if (!reached) before += mass;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double key = keys[i];
      keys[kept] = key, masses[kept] = masses[i];
      kept += (key <= middle) == reached;
    }
    count = kept;
  }
}

// More candidates than these are decided by many_tokens.h.
constexpr int64_t kCandidates = 512;
// The relative error of the sums over all tokens: they are of float exponentials, whose exponents are rounded.
constexpr double kTotalError = 2e-6;
// How much that changes a surprise that is compared with the entropy; `mean`: of the exponents.
PDK_INLINE double error_of_entropy(double mean) { return 3 * kTotalError * (1 + __builtin_fabs(mean)); }

// Tokens of a row with their logits, in the order of their ids.
struct Candidates {
  double *keys, *masses;  // scratch
  float* logits;
  uint32_t* ids;
  int64_t count;

  void keep(Passing passing) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      logits[kept] = logits[i], ids[kept] = ids[i];
      kept += !passing.drops(logits[i]);
    }
    count = kept;
  }

  // Writes e^((logit - largest) / temperature) and returns the sum.
  double weigh(float largest, double temperature) {
    const double inv_temperature = 1 / temperature;
    double total = 0;
    for (int64_t i = 0; i < count; ++i) {
      masses[i] = __builtin_exp((static_cast<double>(logits[i]) - largest) * inv_temperature);
      total += masses[i];
    }
    return total;
  }

  // The cut of the largest logits whose masses reach `target`; its key is -logit.
  Cut cut_at_mass(double target) {
    for (int64_t i = 0; i < count; ++i) keys[i] = -static_cast<double>(logits[i]);
    return key_at_mass(keys, masses, count, target);
  }
};

// A logit that at least `count` groups of tokens reach, whose largest logits are `peaks`; -inf if there are fewer.
PDK_INLINE float common_bound(const Vec* peaks, int64_t vectors, int64_t count, float largest) {
  const auto reach = [&](float logit) {
    Ints found{};
    for (int64_t i = 0; i < vectors; ++i) found -= peaks[i] >= logit;
    return static_cast<int64_t>(sum_of(found));
  };
  Vec smallest = splat(kInfinity);
  for (int64_t i = 0; i < vectors; ++i) {
    smallest = choose((peaks[i] < smallest) & (peaks[i] > -kInfinity), peaks[i], smallest);
  }
  float low = kInfinity, high = largest;
  for (int lane = 0; lane < kLanes; ++lane) low = smallest[lane] < low ? smallest[lane] : low;
  int64_t found = reach(low);
  if (found < count) return -kInfinity;
  for (int step = 0; step < 24 && found > count + count / 4 + 8; ++step) {
    const float middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    const int64_t here = reach(middle);
    if (here >= count) {
      low = middle, found = here;
    } else {
      high = middle;
    }
  }
  return low;
}

// What a row's filters start from.
struct RowFacts {
  DistributionSums sums;  // at the temperature of the draw, where a filter is of the distribution of all tokens
  bool undefined;
};

PDK_INLINE RowFacts facts_of(const TokenStatisticsArgs& args, int64_t r, const Vec* peaks, int64_t vectors) {
  Vec largest = splat(-kInfinity);
  for (int64_t i = 0; i < vectors; ++i) largest = larger(peaks[i], largest);
  RowFacts facts{{-kInfinity, 0, 0}, false};
  for (int lane = 0; lane < kLanes; ++lane) {
    facts.sums.largest = largest[lane] > facts.sums.largest ? largest[lane] : facts.sums.largest;
  }
  const TokenPart* parts = args.parts + r * args.num_parts();
  for (int64_t c = 0; c < args.num_parts(); ++c) {
    facts.undefined = facts.undefined || parts[c].undefined;
    facts.sums.join(parts[c].tempered, 1 / args.softmax_temperature(), [](double x) { return __builtin_exp(x); });
  }
  facts.undefined = facts.undefined || !(facts.sums.largest > -kInfinity && facts.sums.largest < kInfinity);
  return facts;
}

// The smallest logit of the tokens that are worth looking at.
PDK_INLINE float candidate_bound(const TokenStatisticsArgs& args, const RowFacts& facts, float floor, const Vec* peaks,
                                 int64_t vectors) {
  if (args.keeps_top_k()) return common_bound(peaks, vectors, args.keep_top_k, facts.sums.largest);
  if (args.width <= 4096) return -kInfinity;
  const double share = 1 - (args.filters_all_by_typical_p() ? args.typical_p : args.top_p);
  if (share <= 0) return floor;
  // All tokens below this one together have less than this share of the mass.
  const double temperature = args.softmax_temperature(), mass = share * facts.sums.total;
  const double bound =
      facts.sums.largest + temperature * (__builtin_log(mass / static_cast<double>(args.width)) - 1e-5);
  return bound > floor ? -at_least(-bound) : floor;
}

// Drops the candidates, which are all tokens from `bound` on, that do not pass, and returns the logits that do. Sets
// `whole` to false if it takes the others to decide.
PDK_INLINE Passing pass(const TokenStatisticsArgs& args, const RowFacts& facts, float floor, float bound,
                        Candidates& found, bool& whole) {
  const double temperature = args.softmax_temperature();
  Passing passing{floor, kInfinity};
  if (args.keeps_top_k() && found.count > args.keep_top_k) {
    for (int64_t i = 0; i < found.count; ++i) found.masses[i] = 1;
    found.keep({static_cast<float>(-found.cut_at_mass(static_cast<double>(args.keep_top_k)).key), kInfinity});
  }
  const auto raise = [&](float low) { passing.low = low > passing.low ? low : passing.low; };
  if (args.keeps_top_k()) {
    float smallest = kInfinity;
    for (int64_t i = 0; i < found.count; ++i) smallest = found.logits[i] < smallest ? found.logits[i] : smallest;
    raise(smallest);
  }
  if (args.top_p < 1) {
    const double weight = found.weigh(facts.sums.largest, temperature);
    const bool all = args.keeps_top_k() || bound == -kInfinity;
    const double target = args.top_p * (all ? weight : facts.sums.total), slack = all ? 0 : kTotalError * target;
    const Cut cut = found.cut_at_mass(target);
    raise(static_cast<float>(-cut.key));
    const int64_t before = found.count;
    found.keep(passing);
    const bool none_dropped = found.count == before && bound == floor;
    whole = all || (cut.before < target - slack && (cut.upto >= target + slack || none_dropped));
    if (!whole) return passing;
  } else {
    found.keep(passing);
  }
  if (args.typical_p >= 1) return passing;

  // The distribution is that of the candidates, or of all tokens, of which the candidates are the more probable ones.
  const bool all = args.filters_all_by_typical_p() && bound > -kInfinity;
  const double weight = found.weigh(facts.sums.largest, temperature);
  const double total = all ? facts.sums.total : weight, log_total = __builtin_log(total);
  // A quotient is not fused with a difference, so a distance has the same bits wherever it is computed.
  const auto exponent_of = [&](float logit) { return (static_cast<double>(logit) - facts.sums.largest) / temperature; };
  double weighted = all ? facts.sums.weighted : 0;
  for (int64_t i = 0; i < found.count && !all; ++i) {
    if (found.masses[i] > 0) weighted += found.masses[i] * exponent_of(found.logits[i]);
  }
  const double entropy = log_total - weighted / total;
  const auto distance = [&](float logit) { return __builtin_fabs(log_total - exponent_of(logit) - entropy); };
  for (int64_t i = 0; i < found.count; ++i) found.keys[i] = distance(found.logits[i]);
  const double target = args.typical_p * total;
  const Cut cut = key_at_mass(found.keys, found.masses, found.count, target);
  const double reach = cut.key;
  if (all) {
    // Tokens below the bound are further from the entropy than it is.
    const double slack = kTotalError * target, error = 2 * error_of_entropy(weighted / total);
    whole = cut.before < target - slack && cut.upto >= target + slack &&
            log_total - exponent_of(bound) - entropy > reach + error;
    float at_reach = kInfinity;
    for (int64_t i = 0; i < found.count && whole; ++i) {
      if (__builtin_fabs(distance(found.logits[i]) - reach) > error) continue;
      whole = at_reach == kInfinity || at_reach == found.logits[i];
      at_reach = found.logits[i];
    }
    if (!whole) return passing;
  }
  passing = {kInfinity, -kInfinity};
  for (int64_t i = 0; i < found.count; ++i) {
    if (distance(found.logits[i]) > reach) continue;
    passing.low = found.logits[i] < passing.low ? found.logits[i] : passing.low;
    passing.high = found.logits[i] > passing.high ? found.logits[i] : passing.high;
  }
  found.keep(passing);
  return passing;
}

}  // namespace pdkernels::cpu::PDK_ISA
