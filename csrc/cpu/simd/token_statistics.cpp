// Vocabulary statistics: the results of each part of a row, from one read of memory. A part stays in L1 during its
// passes: the largest logit and the first tokens, sums of exponentials, and the sampled token. One comparison per strip
// rules out tokens that cannot be among the first or be sampled, because a thread knows the results of its earlier
// parts.
#include "ops/token_statistics.h"
#include "kernels.h"
#include "random_words.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The first tokens of a row and the best Gumbel score, over all parts that a thread has read so far.
struct Runners {
  uint64_t top[kMaxTopK] = {};
  double score = -__builtin_inf();

  PDK_INLINE float bound(int count) const { return key_logit(top[count - 1]); }
};

PDK_INLINE void insert(uint64_t* top, int count, uint64_t key) {
  if (key <= top[count - 1]) return;
  int slot = count - 1;
  for (; slot > 0 && top[slot - 1] < key; --slot) top[slot] = top[slot - 1];
  top[slot] = key;
}

// Calls body(at) for the lanes of a mask.
template <class Body>
PDK_INLINE void for_lanes(Ints mask, int64_t at, const Body& body) {
  for (uint32_t bits = bits_of(mask); bits != 0; bits &= bits - 1) body(at + __builtin_ctz(bits));
}

constexpr int kStrips = kVocabularyPart / kStrip;

// The largest logit, the largest of each strip per lane, and the first tokens. NaNs are skipped.
template <class T>
PDK_INLINE float find_top(const T* logits, int64_t count, int64_t first_id, int ranked, Vec (&peaks)[kStrips],
                          uint64_t* top, Runners& runners) {
  Vec largest = splat(-kInfinity);
  float bound = runners.bound(ranked);
  for_strips(0, count, [&](int64_t first, int64_t last) {
    Vec peak = splat(-kInfinity), other = peak;  // two chains
    for_pairs(logits, first, last, -kInfinity, [&](Vec x, Vec y) {
      peak = larger(x, peak);
      other = larger(y, other);
    });
    peak = larger(other, peak);
    largest = larger(peak, largest);
    peaks[first / kStrip] = peak;
    if (bits_of(peak > bound) == 0) return;
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      for_lanes(load(logits + at, lanes, -kInfinity) > bound, at, [&](int64_t index) {
        const uint64_t key = token_key(to_float(logits[index]), first_id + index);
        insert(top, ranked, key);
        insert(runners.top, ranked, key);
        bound = runners.bound(ranked);
      });
    });
  });
  float result = -kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) result = largest[lane] > result ? largest[lane] : result;
  return result;
}

typedef double Doubles __attribute__((vector_size(8 * PDK_LANES), may_alias));

struct VectorSums {
  Doubles total{}, weighted{};
  int64_t first =
      0;  // tokens equal to the largest are counted separately: added to their e^0, small terms would lose bits
};

template <bool kTempered, bool kHoldsFirst, class T>
PDK_INLINE void add_strip(const T* logits, int64_t begin, int64_t end, float shift, float inv_temperature, float rest,
                          VectorSums& sums) {
  Vec total{}, weighted{};
  Ints first{};
  const auto add = [&](Vec x) {
    x -= shift;
    if constexpr (kTempered) {
      x *= inv_temperature;
      x = larger(splat(2 * kLeastExponent), x);
      x += x * rest;
    }
    if constexpr (kHoldsFirst) {
      first += x == 0;
      x = choose(x == 0, splat(-kInfinity), x);
    }
    add_terms(x, total, weighted);
  };
  // Prefetches the next part of the row while this one is computed.
  for_pairs<kVocabularyPart>(logits, begin, end, -kInfinity, [&](Vec x, Vec y) {
    add(x);
    add(y);
  });
  sums.total += __builtin_convertvector(total, Doubles);
  sums.weighted += __builtin_convertvector(weighted, Doubles);
  sums.first -= sum_of(first);
}

// Sums of e^x and x e^x, x = (logit - largest) inv_temperature. `peaks`: the largest logits of each strip, per lane.
template <bool kTempered, class T>
PDK_INLINE DistributionSums sums_of(const T* logits, int64_t count, float largest, const Vec (&peaks)[kStrips],
                                    float inv_temperature, float rest) {
  const float shift = largest == -kInfinity ? 0 : largest;  // NaNs must propagate even if all others are -inf
  VectorSums sums;
  for_strips(0, count, [&](int64_t begin, int64_t end) {
    if (bits_of(peaks[begin / kStrip] == largest) != 0) {
      add_strip<kTempered, true>(logits, begin, end, shift, inv_temperature, rest, sums);
    } else {
      add_strip<kTempered, false>(logits, begin, end, shift, inv_temperature, rest, sums);
    }
  });
  return {largest, static_cast<double>(sums.first) + sum_of(sums.total), sum_of(sums.weighted)};
}

// Tests whether a score can still win. -ln u is at least 1 - u, so a logit l needs log2(1 - u) <= (l - best) / (T ln
// 2). The bits of a float, as a multiple of 2^-23, are a lower bound of its logarithm.
class Comparison {
 public:
  explicit PDK_INLINE Comparison(double temperature)
      : scale_(static_cast<float>(0x1p23 / (temperature * 0.6931471805599453))) {}

  PDK_INLINE void set_best(double score) {
    const float nearest = static_cast<float>(score);
    best_ =
        nearest == -kInfinity ? -3.4e38f : nearest - __builtin_fabsf(nearest) * 0x1p-22f - 1e-37f;  // below the score
  }
  // At least 0 where the token can win, negative or NaN where it cannot.
  PDK_INLINE Vec chance(Vec logits, Ints words) const {
    const Vec distance =
        __builtin_convertvector(reinterpret_cast<Ints>(~reinterpret_cast<Words>(words) >> 1), Vec);  // (1 - u) 2^31
    constexpr float kSlack = 0.01f;                                                                  // of all roundings
    return (logits - best_) * scale_ +
           ((127 + 31 + kSlack) * 0x1p23f - __builtin_convertvector(reinterpret_cast<Ints>(distance), Vec));
  }

 private:
  float scale_, best_;
};

template <class T>
PDK_INLINE void sample_from(const TokenStatisticsArgs& args, int64_t r, const T* logits, int64_t count,
                            int64_t first_id, Runners& runners, TokenPart& part) {
  const RandomWords random(args.seeds.key(r), args.step_of(r), args.position(r), 0);
  Comparison comparison(args.temperature);
  comparison.set_best(runners.score);
  alignas(64) uint32_t words[kStrip];
  for_strips(0, count, [&](int64_t first, int64_t last) {
    random.write(words, args.first_id + first_id + first, last - first);
    Vec best = splat(-1.0f);
    const auto chance = [&](int64_t at, auto lanes) {
      return comparison.chance(load(logits + at, lanes, -kInfinity),
                               *reinterpret_cast<const Ints*>(words + (at - first)));
    };
    for_vectors(first, last, [&](int64_t at, auto lanes) { best = larger(chance(at, lanes), best); });
    if (bits_of(best >= 0) == 0) return;
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      for_lanes(chance(at, lanes) >= 0, at, [&](int64_t index) {
        const float logit = to_float(logits[index]);
        const double score = gumbel_score(logit, args.temperature, words[index - first]);
        if (!(score > runners.score)) return;
        runners.score = part.score = score;
        part.sampled = token_key(logit, first_id + index);
        comparison.set_best(score);
      });
    });
  });
}

template <class T>
void statistics_of(const TokenStatisticsArgs& args, const T* logits, int64_t count, int64_t first_id, Runners& runners,
                   TokenPart& part) {
  Vec peaks[kStrips];
  const float largest = find_top(logits, count, first_id, args.num_ranked(), peaks, part.top, runners);
  const float inv_temperature = static_cast<float>(args.inv_temperature());
  part.sums = inv_temperature == 1
                  ? sums_of<false>(logits, count, largest, peaks, inv_temperature, 0)
                  : sums_of<true>(logits, count, largest, peaks, inv_temperature, args.inv_temperature_rest());
  part.undefined = part.sums.total != part.sums.total;
  if (!part.undefined) return;
  for (uint64_t& key : part.top) key = 0;
  for (int64_t i = 0; i < count; ++i) insert(part.top, args.num_ranked(), token_key(to_float(logits[i]), first_id + i));
}

// Converts a piece of a row to floats and sets suppressed tokens to -inf.
template <class T>
PDK_INLINE void stage(const TokenStatisticsArgs& args, const T* logits, int64_t begin, int64_t end, float* to) {
  for_vectors(begin, end, [&](int64_t at, auto lanes) { store(to + (at - begin), load(logits + at, lanes), lanes); });
  for (int i = 0; i < args.num_suppressed; ++i) {
    if (args.suppress[i] >= begin && args.suppress[i] < end) to[args.suppress[i] - begin] = -kInfinity;
  }
}

// Drops logits below the cut.
PDK_INLINE void filter(float* staged, int64_t count, float cut) {
  for_vectors(0, count, [&](int64_t at, auto lanes) {
    const Vec x = load(staged + at, lanes);
    store(staged + at, choose(x < cut, splat(-kInfinity), x), lanes);
  });
}

template <class T>
void measure(const TokenStatisticsArgs& args, int64_t r, int64_t c, Runners& runners) {
  TokenPart& part = args.parts[r * args.num_parts() + c];
  part = {};
  part.score = -__builtin_inf();
  const T* logits = args.logits.row<const T>(args.source(r));
  const int64_t begin = c * kVocabularyPart, end = smaller(begin + kVocabularyPart, args.width), count = end - begin;
  const float cut = args.filtered() ? args.cuts[r] : -kInfinity;
  if (cut == -kInfinity && !args.suppresses_in(begin, end)) {
    statistics_of(args, logits + begin, count, begin, runners, part);
    if (args.samples_token()) sample_from(args, r, logits + begin, count, begin, runners, part);
    return;
  }
  alignas(64) float staged[kVocabularyPart];
  stage(args, logits, begin, end, staged);
  if (args.sampling) filter(staged, count, cut);
  statistics_of<float>(args, staged, count, begin, runners, part);
  if (!args.samples_token()) return;
  if (!args.sampling) filter(staged, count, cut);
  sample_from<float>(args, r, staged, count, begin, runners, part);
}

// --- filters

constexpr int kBins = 2048;

// Narrows the logits, from the largest down, to the first bin at which the running mass reaches `target`.
struct Nucleus {
  float* logits;
  float* masses;
  int64_t count;
  double before, target;

  // `bin_of` grows from the largest logits to the smallest, 0 .. kBins - 1.
  template <class BinOf>
  void narrow(const BinOf& bin_of) {
    double bins[kBins] = {};
    for (int64_t i = 0; i < count; ++i) bins[bin_of(logits[i])] += masses[i];
    int last = kBins - 1;
    while (last > 0 && bins[last] == 0) --last;  // by rounding the target may exceed the total mass
    int bin = 0;
    for (; bin < last && (bins[bin] == 0 || before + bins[bin] < target); ++bin) before += bins[bin];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (bin_of(logits[i]) == bin) logits[kept] = logits[i], masses[kept] = masses[i], ++kept;
    }
    count = kept;
  }
};

// The smallest logit that passes the filters, -inf if nothing is dropped or the row has no distribution.
template <class T>
float cut_of(const TokenStatisticsArgs& args, int64_t r) {
  const double temperature = args.softmax_temperature();
  const int64_t width = args.width;
  float* logits = reinterpret_cast<float*>(thread_scratch(2 * width * static_cast<int64_t>(sizeof(float)) + 64));
  float* masses = logits + width;
  stage(args, args.logits.row<const T>(args.source(r)), 0, width, logits);
  Vec peak = splat(-kInfinity);
  Ints unordered{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec x = load(logits + at, lanes, -kInfinity);
    peak = larger(x, peak);
    unordered |= x != x;
  });
  float largest = -kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) largest = peak[lane] > largest ? peak[lane] : largest;
  if (bits_of(unordered) != 0 || largest == -kInfinity || largest == kInfinity) return -kInfinity;

  const float floor = args.min_p > 0 ? at_least(largest + temperature * __builtin_log(args.min_p)) : -kInfinity;
  if (args.top_p >= 1) return floor;

  // A token with less than (1 - top_p) / V of the total mass is outside the nucleus.
  const double reach = temperature * __builtin_log((1 - args.top_p) / static_cast<double>(width)) - 1e-5 * temperature;
  const float inv_temperature = static_cast<float>(1 / temperature), lowest = static_cast<float>(reach * 1.00001);
  double total = 0;
  int64_t count = 0;
  for_strips(0, width, [&](int64_t first, int64_t last) {
    Vec sum{};
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      const Vec logit = load(logits + at, lanes, -kInfinity), below = logit - largest;
      Vec x = below * inv_temperature;
      x = x < kLeastExponent ? splat(kLeastExponent) : x;
      const Vec e = exponential_term(x);
      sum += e;
      for (uint32_t bits = bits_of(below >= lowest); bits != 0; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        logits[count] = logit[lane], masses[count] = e[lane], ++count;
      }
    });
    total += sum_of(sum);
  });

  Nucleus nucleus{logits, masses, count, 0, args.top_p * total};
  const float bins_per_logit = static_cast<float>(kBins) / -lowest;
  nucleus.narrow([&](float logit) {
    const int bin = static_cast<int>((largest - logit) * bins_per_logit);
    return bin < kBins ? bin : kBins - 1;
  });
  // Many logits may be left, possibly all equal. They are narrowed by the bits of their keys.
  for (int shift = 21; shift >= 0 && nucleus.count > 1; shift -= shift > 10 ? 11 : 10) {
    nucleus.narrow(
        [&](float logit) { return kBins - 1 - static_cast<int>(token_key(logit, 0) >> (32 + shift) & (kBins - 1)); });
  }
  return nucleus.logits[0] > floor ? nucleus.logits[0] : floor;
}

template <class T>
void token_statistics_of(const TokenStatisticsArgs& args) {
  const int64_t parts = args.num_parts();
  if (args.filtered()) {
    for_rows(args.rows, args.width,
             [&](int64_t r) { args.cuts[r] = args.source(r) < 0 ? -kInfinity : cut_of<T>(args, r); });
  }
  for_ranges(args.rows * parts, smaller(args.width, kVocabularyPart), [&](int64_t begin, int64_t end) {
    Runners runners;
    for (int64_t item = begin; item < end; ++item) {
      if (item % parts == 0) runners = {};
      if (args.source(item / parts) >= 0) measure<T>(args, item / parts, item % parts, runners);
    }
  });
}

}  // namespace

void token_statistics(const TokenStatisticsArgs& args) {
  switch (args.element) {
    case Element::kFloat: return token_statistics_of<float>(args);
    case Element::kHalf: return token_statistics_of<Half>(args);
    case Element::kBfloat16: return token_statistics_of<Bfloat16>(args);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
