// The filters of a distribution where thousands of tokens may pass: those of a whole row, or those from some logit on.
// Their masses are computed in double precision. Which tokens stay is decided by their distance from a logit: the
// largest one, or the one whose surprise is the entropy. Reads of the row narrow that distance down by float sums, and
// the few tokens that are left between two bounds are decided in double precision.
#pragma once

#include "token_filters.h"

namespace pdkernels::cpu::PDK_ISA {

// Numbers in double precision, one register of them.
constexpr int kDoubles = kLanes / 2;
typedef double DoubleVec __attribute__((vector_size(8 * kDoubles), may_alias));
typedef double LooseDoubleVec __attribute__((vector_size(8 * kDoubles), may_alias, aligned(8)));
typedef int64_t DoubleInts __attribute__((vector_size(8 * kDoubles), may_alias));
typedef float ShortVec __attribute__((vector_size(4 * kDoubles), may_alias));
typedef float LooseShortVec __attribute__((vector_size(4 * kDoubles), may_alias, aligned(4)));

PDK_INLINE double sum_of(DoubleVec x) {
  for (int half = kDoubles / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

// 2^z for z <= 0, with a relative error below 1e-12; 0 below -1000.
PDK_INLINE DoubleVec power_of_two(DoubleVec z) {
#ifdef __AVX512DQ__
  // As in vector.h.
  const __m512d exponent = reinterpret_cast<__m512d>(z);
  const __mmask8 counted = _mm512_cmp_pd_mask(exponent, _mm512_set1_pd(-1000), _CMP_GT_OQ);
  const DoubleVec f = reinterpret_cast<DoubleVec>(_mm512_reduce_pd(exponent, _MM_FROUND_TO_NEAREST_INT));
#else
  constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52: the low bits of a sum with it are the whole part
  const DoubleInts counted = z > -1000.0;
  z = counted ? z : DoubleVec{};
  const DoubleVec shifted = z + kRounder, f = z - (shifted - kRounder);
#endif
  // ln(2)^n / n!
  DoubleVec p = f * 7.0549116208011234e-09 + 1.0178086009239699e-07;
  p = p * f + 1.3215486790144309e-06;
  p = p * f + 1.5252733804059841e-05;
  p = p * f + 0.00015403530393381609;
  p = p * f + 0.0013333558146428441;
  p = p * f + 0.0096181291076284769;
  p = p * f + 0.055504108664821576;
  p = p * f + 0.24022650695910069;
  p = p * f + 0.69314718055994529;
  p = p * f + 1.0;
#ifdef __AVX512DQ__
  return reinterpret_cast<DoubleVec>(_mm512_maskz_scalef_pd(counted, reinterpret_cast<__m512d>(p),
                                                            _mm512_roundscale_pd(exponent, _MM_FROUND_TO_NEAREST_INT)));
#else
  const DoubleVec power = p * reinterpret_cast<DoubleVec>((reinterpret_cast<DoubleInts>(shifted) + 1023) << 52);
  return counted ? power : DoubleVec{};
#endif
}

PDK_INLINE Vec absolute(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<Ints>(x) & 0x7fffffff); }
PDK_INLINE DoubleVec absolute(DoubleVec x) {
  return reinterpret_cast<DoubleVec>(reinterpret_cast<DoubleInts>(x) & INT64_MAX);
}

class ManyTokens {
 public:
  // All arrays are of `count` and kLanes more. The last three are for the tokens between two bounds.
  ManyTokens(float* logits, float* weights, float* near_logits, double* masses, double* near_masses, double* keys,
             int64_t count)
      : logits_(logits),
        weights_(weights),
        near_logits_(near_logits),
        masses_(masses),
        near_masses_(near_masses),
        keys_(keys),
        count_(count) {}

  float* logits() { return logits_; }

  // Returns the sum of the masses.
  double weigh(double largest, double temperature) {
    const double factor = 1 / (temperature * 0.6931471805599453);
    DoubleVec sums{};
    for_doubles(0, count_, [&](int64_t at, DoubleVec x) {
      const DoubleVec e = power_of_two((x - largest) * factor);
      masses(at) = e, sums += e;
      reinterpret_cast<LooseShortVec&>(weights_[at]) = __builtin_convertvector(e, ShortVec);
    });
    return sum_of(sums);
  }

  // The sum of x e^x, x = (logit - largest) / temperature.
  double weighted(double largest, double temperature) {
    const double factor = 1 / temperature;
    DoubleVec sums{};
    for_doubles(0, count_, [&](int64_t at, DoubleVec x) {
      const DoubleVec e = masses(at);
      sums += e > 0.0 ? (x - largest) * factor * e : DoubleVec{};
    });
    return sum_of(sums);
  }

  // Leaves only the tokens from this logit on. Returns the sum of their masses.
  double drop_below(float low) {
    DoubleVec sums{};
    for_doubles(0, count_, [&](int64_t at, DoubleVec x) {
      const DoubleVec kept = x >= low ? masses(at) : DoubleVec{};
      masses(at) = kept, sums += kept;
    });
    for_vectors(0, count_, [&](int64_t at, auto lanes) {
      const Vec x = load(logits_ + at, lanes, -kInfinity);
      store(logits_ + at, choose(x >= low, x, splat(-kInfinity)), lanes);
      store(weights_ + at, choose(x >= low, load(weights_ + at, lanes), Vec{}), lanes);
    });
    return sum_of(sums);
  }

  // The lowest and the highest logit of the tokens that are left, if those are taken by their distance from `centre`
  // until their masses, or with kCounts their number, reach `target`. They are expected to do so within `guess`.
  // Without kBothSides `centre` is the largest logit, and the highest one is not looked for.
  template <bool kCounts, bool kBothSides>
  Passing nearest(double centre, double target, float guess) {
    centre_ = static_cast<float>(centre);
    float low = -1, high = guess;
    for (int round = 0;; ++round) {
      const float last_low = low, last_high = high;
      narrow<kCounts>(target, low, high);
      if (round < (count_ > kNear ? 2 : 1)) continue;
      const bool settled = round == kRounds || (low == last_low && high == last_high);
      const float slack = slack_of(high);
      if (!part<kCounts, kBothSides>(low - slack, high + slack, centre, settled ? count_ : kNear)) continue;
      if (!(sure_ < target && sure_ + near_mass_ >= target)) part<kCounts, kBothSides>(-1, kInfinity, centre, count_);
      return decided(centre, target);
    }
  }

  // Whether the last decision would be the same for any target that differs by less than `slack`.
  bool is_clear(double target, double slack) const { return before_ < target - slack && upto_ >= target + slack; }

  double reach() const { return reach_; }

  // Whether it would be the same if `centre` were another by up to `error`: no other logit is as far away.
  bool is_alone(double centre, double error) const {
    if (reach_ - 2 * error < listed_.low || reach_ + 2 * error > listed_.high) return false;
    float alone = kInfinity;
    for (int64_t i = 0; i < near_count_; ++i) {
      const float logit = near_logits_[i];
      if (__builtin_fabs(__builtin_fabs(logit - centre) - reach_) > 2 * error) continue;
      if (alone < kInfinity && alone != logit) return false;
      alone = logit;
    }
    return true;
  }

 private:
  static constexpr int kRounds = 6, kLimits = 8;
  static constexpr int64_t kNear = 16 * 1024, kBlock = 2048;

  // Calls body(at, logits) for all tokens of [begin, end), and -inf after the last ones of a row. Arrays have room
  // there.
  template <class Body>
  PDK_INLINE void for_doubles(int64_t begin, int64_t end, const Body& body) const {
    for (int64_t at = begin; at < end; at += kDoubles) {
      ShortVec x = reinterpret_cast<const LooseShortVec&>(logits_[at]);
      for (int64_t i = end - at; i < kDoubles; ++i) x[i] = -kInfinity;
      body(at, __builtin_convertvector(x, DoubleVec));
    }
  }
  PDK_INLINE LooseDoubleVec& masses(int64_t at) { return reinterpret_cast<LooseDoubleVec&>(masses_[at]); }
  // What rounding may change of distances up to `high`.
  PDK_INLINE float slack_of(float high) const { return 4e-7f * (__builtin_fabsf(centre_) + high); }
  // Infinite where no token is left.
  template <class Lanes>
  PDK_INLINE Vec distance(int64_t at, Lanes lanes) const {
    return absolute(load(logits_ + at, lanes, -kInfinity) - centre_);
  }

  // Moves `low` and `high` together: what is within `low` does not reach the target, what is within `high` does, as far
  // as float sums can tell. `high` becomes the largest distance if the target is further away.
  template <bool kCounts>
  void narrow(double target, float& low, float& high) {
    Vec limits[kLimits];
    const float first = low > 0 ? low : 0, step = (high - first) / kLimits;
    for (int i = 0; i < kLimits; ++i) {
      limits[i] = splat(i + 1 < kLimits ? first + step * static_cast<float>(i + 1) : high);
    }
    double sums[kLimits] = {};
    for (int64_t begin = 0; begin < count_; begin += kBlock) {
      Vec partial[kLimits] = {};
      for_vectors(begin, smaller(begin + kBlock, count_), [&](int64_t at, auto lanes) {
        const Vec here = distance(at, lanes), weight = kCounts ? splat(1.0f) : load(weights_ + at, lanes);
#pragma GCC unroll 8
        for (int i = 0; i < kLimits; ++i) partial[i] += choose(here <= limits[i], weight, Vec{});
      });
      for (int i = 0; i < kLimits; ++i) sums[i] += static_cast<double>(sum_of(partial[i]));
    }
    constexpr double kSlack = 2e-5;
    const double beneath = target * (1 - kSlack), above = target * (1 + kSlack);
    if (sums[kLimits - 1] < above) {
      low = sums[kLimits - 1] < beneath ? high : low;
      high = largest_distance();
      return;
    }
    for (int i = kLimits - 1; i >= 0 && sums[i] >= above; --i) high = limits[i][0];
    for (int i = 0; i < kLimits && sums[i] < beneath; ++i) low = limits[i][0];
  }

  float largest_distance() const {
    Vec found{};
    for_vectors(0, count_, [&](int64_t at, auto lanes) {
      const Vec here = distance(at, lanes);
      found = choose((here > found) & (here < kInfinity), here, found);
    });
    float result = 0;
    for (int lane = 0; lane < kLanes; ++lane) result = found[lane] > result ? found[lane] : result;
    return result;
  }

  // Sums the tokens within `low`, and lists those further away up to `high`. Returns whether there are at most `most`.
  template <bool kCounts, bool kBothSides>
  bool part(float low, float high, double centre, int64_t most) {
    const double inner = low, outer = high;
    DoubleVec sums{}, lowest = DoubleVec{} + static_cast<double>(kInfinity), highest = -lowest;
    near_count_ = 0, near_mass_ = 0, listed_ = {low, high};
    for (int64_t begin = 0; begin < count_; begin += kStrip) {
      if (near_count_ > most) return false;
      const int64_t end = smaller(begin + kStrip, count_);
      for_doubles(begin, end, [&](int64_t at, DoubleVec x) {
        const DoubleInts inside = absolute(x - centre) <= inner;
        sums += inside ? (kCounts ? DoubleVec{} + 1.0 : masses(at)) : DoubleVec{};
        if constexpr (kBothSides) {
          lowest = inside & (x < lowest) ? x : lowest;
          highest = inside & (x > highest) ? x : highest;
        }
      });
      // As floats the distances of these tokens are between wider bounds.
      const float slack = 2 * slack_of(high);
      for_vectors(begin, end, [&](int64_t at, auto lanes) {
        const Vec here = distance(at, lanes);
        for_lanes((here >= low - slack) & (here <= high + slack) & (here < kInfinity), at, [&](int64_t token) {
          const double exact = __builtin_fabs(static_cast<double>(logits_[token]) - centre);
          if (exact <= inner || exact > outer) return;
          near_logits_[near_count_] = logits_[token];
          near_mass_ += near_masses_[near_count_] = kCounts ? 1.0 : masses_[token];
          ++near_count_;
        });
      });
    }
    sure_ = sum_of(sums);
    passing_ = {kInfinity, -kInfinity};
    for (int lane = 0; lane < kDoubles; ++lane) {
      include(static_cast<float>(lowest[lane])), include(static_cast<float>(highest[lane]));
    }
    return near_count_ <= most;
  }

  PDK_INLINE void include(float logit) {
    if (!(logit > -kInfinity && logit < kInfinity)) return;
    passing_.low = logit < passing_.low ? logit : passing_.low;
    passing_.high = logit > passing_.high ? logit : passing_.high;
  }

  // Of the tokens between the bounds, those that are needed for the target.
  Passing decided(double centre, double target) {
    const auto key = [&](int64_t i) { return __builtin_fabs(static_cast<double>(near_logits_[i]) - centre); };
    for (int64_t i = 0; i < near_count_; ++i) keys_[i] = key(i);
    const Cut cut = key_at_mass(keys_, near_masses_, near_count_, target - sure_);
    reach_ = cut.key, before_ = sure_ + cut.before, upto_ = sure_ + cut.upto;
    for (int64_t i = 0; i < near_count_; ++i) {
      if (key(i) <= cut.key) include(near_logits_[i]);
    }
    return passing_;
  }

  float *logits_, *weights_, *near_logits_;
  double *masses_, *near_masses_, *keys_;
  int64_t count_;
  float centre_ = 0;
  int64_t near_count_ = 0;
  double sure_ = 0, near_mass_ = 0, before_ = 0, upto_ = 0, reach_ = 0;
  Passing listed_{};  // the distances of the tokens between the bounds
  Passing passing_{};
};

// The smallest of the largest logits of strips.
PDK_INLINE float lowest_peak(const Vec* peaks, int64_t strips) {
  Vec lowest = splat(kInfinity);
  for (int64_t i = 0; i < strips; ++i) lowest = choose((peaks[i] > -kInfinity) & (peaks[i] < lowest), peaks[i], lowest);
  float result = kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) result = lowest[lane] < result ? lowest[lane] : result;
  return result;
}

// The logits that pass, of all tokens or, if `bound` is a number, of those from it on. Sets `whole` to false if it
// takes the others to decide.
inline Passing pass_many(const TokenStatisticsArgs& args, const RowFacts& facts, float floor, float bound,
                         const Vec* peaks, ManyTokens& tokens, bool& whole) {
  const double temperature = args.softmax_temperature(), largest = facts.sums.largest;
  Passing passing = all_pass();
  const auto raise = [&](float low) { passing.low = low > passing.low ? low : passing.low; };
  // As far as candidate_bound() goes: all tokens beyond have less than the rest of the mass.
  const auto far = [&](double share) {
    const double rest = (1 - share > 1e-9 ? 1 - share : 1e-9) / static_cast<double>(args.width);
    return static_cast<float>(-temperature * __builtin_log(rest));
  };
  whole = true;
  double total = tokens.weigh(largest, temperature);
  if (args.keeps_top_k()) {
    const float guess = static_cast<float>(largest - lowest_peak(peaks, args.num_strips()));
    raise(tokens.nearest<true, false>(largest, static_cast<double>(args.keep_top_k), guess).low);
    total = tokens.drop_below(passing.low);
  }
  if (args.top_p < 1) {
    const bool all = args.keeps_top_k() || bound == -kInfinity;
    const double target = args.top_p * (all ? total : facts.sums.total), slack = all ? 0 : kTotalError * target;
    const bool none_dropped = !all && bound == floor && total < target - slack;
    if (!none_dropped) raise(tokens.nearest<false, false>(largest, target, far(args.top_p)).low);
    whole = all || none_dropped || tokens.is_clear(target, slack);
  }
  raise(floor);
  if (args.typical_p >= 1 || !whole) return passing;

  const bool all = !args.filters_all_by_typical_p() || bound == -kInfinity;
  if (!passing.all()) total = tokens.drop_below(passing.low);
  if (!all) total = facts.sums.total;
  const double weighted = all ? tokens.weighted(largest, temperature) : facts.sums.weighted;
  const double entropy = __builtin_log(total) - weighted / total, target = args.typical_p * total;
  const double centre = largest + temperature * (__builtin_log(total) - entropy);
  const double above = largest - centre, below = far(args.typical_p) - above;
  passing = tokens.nearest<false, true>(centre, target, static_cast<float>(above > below ? above : below));
  if (!all) {
    const double error = temperature * error_of_entropy(weighted / total);
    whole = tokens.is_clear(target, kTotalError * target) && tokens.is_alone(centre, error) &&
            centre - bound > tokens.reach() + 2 * error;
  }
  return passing;
}

}  // namespace pdkernels::cpu::PDK_ISA
