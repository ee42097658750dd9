// Vocabulary statistics: the results of each part of a row, from one read of memory. A part stays in L1 during its
// passes: the largest logit and the first tokens, sums of exponentials, and the sampled token. One comparison per strip
// rules out tokens that cannot be among the first or be sampled, because a thread knows the results of its earlier
// parts.
#include "ops/token_statistics.h"
#include "kernels.h"
#include "many_tokens.h"
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

constexpr int kStrips = kVocabularyPart / kStrip;
static_assert(kStrip == kVocabularyStrip);
// So few tokens are sampled from directly, one by one: each takes as long as some 32 in vectors.
PDK_INLINE int64_t few_of(int64_t width) { return larger(1024, width / 32); }
// More than one candidate in so many tokens are the whole row.
constexpr int64_t kSpread = 4;
constexpr Passing kSettled{kInfinity, -kInfinity};

PDK_INLINE bool is_settled(Passing passing) { return passing.low > passing.high; }

PDK_INLINE TokenPart empty_part() {
  TokenPart part = {};
  part.score = -__builtin_inf();
  part.sums = part.tempered = {-kInfinity, 0, 0};
  return part;
}

// The largest logit, the largest of each strip per lane, and the first tokens. NaNs are skipped.
template <class T>
PDK_INLINE float find_top(const T* logits, int64_t count, int64_t first_id, int ranked, Vec* peaks, uint64_t* top,
                          Runners& runners) {
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
PDK_INLINE DistributionSums sums_of(const T* logits, int64_t count, float largest, const Vec* peaks,
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
void statistics_of(const TokenStatisticsArgs& args, const T* logits, int64_t count, int64_t first_id, Vec* peaks,
                   Runners& runners, TokenPart& part) {
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

// Whether the tokens of [begin, end) are not those in memory.
PDK_INLINE bool edits(const TokenStatisticsArgs& args, int64_t begin, int64_t end) {
  return args.filters.any() || args.suppresses_in(begin, end);
}

// Converts a piece of a row of logits to floats, filters them, and sets suppressed tokens to -inf.
template <class T>
PDK_INLINE void stage(const TokenStatisticsArgs& args, int64_t r, const T* logits, int64_t begin, int64_t end,
                      float* to) {
  filter_range(args.filters, r, logits, begin, end, to);
  for (int i = 0; i < args.num_suppressed; ++i) {
    if (args.suppress[i] >= begin && args.suppress[i] < end) to[args.suppress[i] - begin] = -kInfinity;
  }
}

PDK_INLINE void drop(float* staged, int64_t count, Passing passing) {
  if (passing.all()) return;
  for_vectors(0, count, [&](int64_t at, auto lanes) {
    const Vec x = load(staged + at, lanes);
    store(staged + at, choose((x < passing.low) | (x > passing.high), splat(-kInfinity), x), lanes);
  });
}

template <class T>
void measure(const TokenStatisticsArgs& args, int64_t r, int64_t c, Runners& runners) {
  const Passing passing = args.filtered() ? args.passing[r] : all_pass();
  if (is_settled(passing)) return;
  const bool surveyed = args.filtered() && !args.sampling;  // the model's statistics are there
  TokenPart& part = args.parts[r * args.num_parts() + c];
  if (!surveyed) part = empty_part();
  const T* logits = args.logits_of<T>(r);
  const int64_t begin = c * kVocabularyPart, end = smaller(begin + kVocabularyPart, args.width), count = end - begin;
  Vec peaks[kStrips];
  if (passing.all() && !edits(args, begin, end)) {
    if (!surveyed) statistics_of(args, logits + begin, count, begin, peaks, runners, part);
    if (args.samples_token()) sample_from(args, r, logits + begin, count, begin, runners, part);
    return;
  }
  alignas(64) float staged[kVocabularyPart];
  stage(args, r, logits, begin, end, staged);
  if (args.sampling) drop(staged, count, passing);
  if (!surveyed) statistics_of<float>(args, staged, count, begin, peaks, runners, part);
  if (!args.samples_token()) return;
  if (!args.sampling) drop(staged, count, passing);
  sample_from<float>(args, r, staged, count, begin, runners, part);
}

// --- filters of the distribution

PDK_INLINE Vec* peaks_of(const TokenStatisticsArgs& args, int64_t r) {
  return reinterpret_cast<Vec*>(args.workspace) + r * args.num_strips();
}

// The largest logits of each strip, per lane; returns whether a logit is NaN.
template <class T>
PDK_INLINE bool find_peaks(const T* logits, int64_t count, Vec* peaks) {
  Ints unordered{};
  for_strips(0, count, [&](int64_t first, int64_t last) {
    Vec peak = splat(-kInfinity), other = peak;
    for_pairs(logits, first, last, -kInfinity, [&](Vec x, Vec y) {
      peak = larger(x, peak);
      other = larger(y, other);
      unordered |= (x != x) | (y != y);
    });
    peaks[first / kStrip] = larger(other, peak);
  });
  return bits_of(unordered) != 0;
}

// What the filters need of a part: the largest logits of its strips and the mass of its tokens. The statistics of the
// model's distribution do not depend on filters, and are computed in the same read.
template <class T>
PDK_INLINE void survey(const TokenStatisticsArgs& args, const T* logits, int64_t count, int64_t first_id, Vec* peaks,
                       Runners& runners, TokenPart& part) {
  if (args.sampling) {
    part.undefined = find_peaks(logits, count, peaks);
  } else {
    statistics_of(args, logits, count, first_id, peaks, runners, part);
  }
  if ((args.top_p >= 1 || args.keeps_top_k()) && !args.filters_all_by_typical_p()) return;
  const double inv_temperature = 1 / args.softmax_temperature();
  if (!args.sampling && inv_temperature == 1) {
    part.tempered = part.sums;
    return;
  }
  float largest = -kInfinity;
  for_strips(0, count, [&](int64_t first, int64_t) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float peak = peaks[first / kStrip][lane];
      largest = peak > largest ? peak : largest;
    }
  });
  if (largest == kInfinity || largest == -kInfinity) return;
  const float factor = static_cast<float>(inv_temperature);
  part.tempered =
      sums_of<true>(logits, count, largest, peaks, factor, static_cast<float>(inv_temperature / factor - 1));
}

template <class T>
void survey_part(const TokenStatisticsArgs& args, int64_t r, int64_t c, Runners& runners) {
  TokenPart& part = args.parts[r * args.num_parts() + c];
  part = empty_part();
  const T* logits = args.logits_of<T>(r);
  const int64_t begin = c * kVocabularyPart, end = smaller(begin + kVocabularyPart, args.width), count = end - begin;
  Vec* peaks = peaks_of(args, r) + begin / kStrip;
  if (!edits(args, begin, end)) return survey(args, logits + begin, count, begin, peaks, runners, part);
  alignas(64) float staged[kVocabularyPart];
  stage(args, r, logits, begin, end, staged);
  survey<float>(args, staged, count, begin, peaks, runners, part);
}

// The tokens from `bound` on. Returns false, without having found all, if there are more than `most`, and if they are
// more than one in `spread` of those that were read.
template <class T>
PDK_INLINE bool collect(const TokenStatisticsArgs& args, int64_t r, float bound, int64_t most, int64_t spread,
                        Candidates& found) {
  const Vec* peaks = peaks_of(args, r);
  const T* logits = args.logits_of<T>(r);
  found.count = 0;
  alignas(64) float staged[kStrip];
  const auto add = [&](const auto* from, int64_t first, int64_t last) {
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      const Vec x = load(from + (at - first), lanes, -kInfinity);
      for_lanes((x >= bound) & (x > -kInfinity), at, [&](int64_t id) {
        found.logits[found.count] = to_float(from[id - first]), found.ids[found.count] = static_cast<uint32_t>(id);
        ++found.count;
      });
    });
  };
  for (int64_t first = 0; first < args.width; first += kStrip) {
    if (found.count > larger(most, first / spread)) return false;
    if (bits_of(peaks[first / kStrip] >= bound) == 0) continue;
    const int64_t last = smaller(first + kStrip, args.width);
    if (edits(args, first, last)) {
      stage(args, r, logits, first, last, staged);
      add(staged, first, last);
    } else {
      add(logits + first, first, last);
    }
  }
  return found.count <= larger(most, args.width / spread);
}

// Computes what filters change from the few tokens that they leave.
void settle(const TokenStatisticsArgs& args, int64_t r, const Candidates& found) {
  TokenPart& part = args.parts[r * args.num_parts()];
  if (args.sampling) {
    for (int64_t i = 0; i < found.count; ++i) {
      insert(part.top, args.num_ranked(), token_key(found.logits[i], found.ids[i]));
    }
    part.sums.largest = key_logit(part.top[0]);
    for (int64_t i = 0; i < found.count; ++i) {
      const double x = (static_cast<double>(found.logits[i]) - part.sums.largest) * args.inv_temperature();
      const double e = __builtin_exp(x);
      part.sums.total += e, part.sums.weighted += x * e;
    }
  }
  if (!args.samples_token()) return;
  const PhiloxKey key = args.seeds.key(r);
  const uint32_t position = args.position(r), step = args.step_of(r);
  for (int64_t i = 0; i < found.count; ++i) {
    const int64_t column = args.first_id + found.ids[i];
    const PhiloxWords words = philox4x32({{static_cast<uint32_t>(column / 4), position, step, 0}}, key);
    const double score = gumbel_score(found.logits[i], args.temperature, words.word[column % 4]);
    if (score > part.score) part.score = score, part.sampled = token_key(found.logits[i], found.ids[i]);
  }
}

// A row's logits as floats, filtered.
template <class T>
void copy_row(const TokenStatisticsArgs& args, int64_t r, float* to) {
  const T* logits = args.logits_of<T>(r);
  for_strips(0, args.width, [&](int64_t first, int64_t last) {
    if (edits(args, first, last)) return stage(args, r, logits, first, last, to + first);
    for_vectors(first, last, [&](int64_t at, auto lanes) { store(to + at, load(logits + at, lanes), lanes); });
  });
}

// Finds the logits that pass. Where few tokens have them, nothing is left to do for the row.
template <class T>
void narrow(const TokenStatisticsArgs& args, int64_t r) {
  const Vec* peaks = peaks_of(args, r);
  const int64_t strips = args.num_strips(), width = args.width, few = few_of(width);
  args.passing[r] = all_pass();
  const RowFacts facts = facts_of(args, r, peaks, strips);
  if (facts.undefined) return;
  const double drop = args.min_p > 0 ? args.softmax_temperature() * __builtin_log(args.min_p) : 0;
  const float floor = args.min_p > 0 ? at_least(facts.sums.largest + drop) : -kInfinity;

  const int64_t most = larger(larger(kCandidates, few), width / kSpread) + kStrip, room = width + kLanes;
  char* scratch = thread_scratch((2 * most + 3 * room) * static_cast<int64_t>(sizeof(double)) +
                                 (2 * most + 3 * room) * static_cast<int64_t>(sizeof(float)));
  const auto take = [&](auto kind, int64_t count) {
    auto* taken = reinterpret_cast<decltype(kind)*>(scratch);
    scratch += count * static_cast<int64_t>(sizeof(kind));
    return taken;
  };
  Candidates found{take(0.0, most), take(0.0, most), nullptr, nullptr, 0};
  double *masses = take(0.0, room), *near_masses = take(0.0, room), *keys = take(0.0, room);
  found.logits = take(0.0f, most), found.ids = take(uint32_t{0}, most);
  float *logits = take(0.0f, room), *weights = take(0.0f, room), *near_logits = take(0.0f, room);
  const auto pass_these = [&](float* from, int64_t count, float bound, bool& whole) {
    ManyTokens tokens(from, weights, near_logits, masses, near_masses, keys, count);
    args.passing[r] = pass_many(args, facts, floor, bound, peaks, tokens, whole);
  };
  const float bound = candidate_bound(args, facts, floor, peaks, strips);
  bool whole = collect<T>(args, r, bound, kCandidates, kSpread, found);
  if (whole && found.count <= kCandidates) {
    args.passing[r] = pass(args, facts, floor, bound, found, whole);
  } else if (!args.keeps_top_k() && args.top_p >= 1 && args.typical_p >= 1) {
    args.passing[r] = {floor, kInfinity};
    if (!whole && !collect<T>(args, r, floor, few, width, found)) return;
    whole = true;
  } else if (whole && bound > -kInfinity) {
    pass_these(found.logits, found.count, bound, whole);
    found.keep(args.passing[r]);
  } else {
    whole = false;
  }
  if (!whole) {
    copy_row<T>(args, r, logits);
    pass_these(logits, width, -kInfinity, whole);
    if (!collect<T>(args, r, args.passing[r].low, few, width, found)) return;
    found.keep(args.passing[r]);
  }
  if (found.count > few) return;
  settle(args, r, found);
  args.passing[r] = kSettled;
}

// Calls body(r, part, runners) for all parts of all rows.
template <class Body>
void for_parts(const TokenStatisticsArgs& args, const Body& body) {
  const int64_t parts = args.num_parts();
  for_ranges(args.rows * parts, smaller(args.width, kVocabularyPart), [&](int64_t begin, int64_t end) {
    Runners runners;
    for (int64_t item = begin; item < end; ++item) {
      if (item % parts == 0) runners = {};
      if (args.source(item / parts) >= 0) body(item / parts, item % parts, runners);
    }
  });
}

template <class T>
void token_statistics_of(const TokenStatisticsArgs& args) {
  if (args.filtered()) {
    for_parts(args, [&](int64_t r, int64_t c, Runners& runners) { survey_part<T>(args, r, c, runners); });
    bool left = false;
    for_rows(args.rows, args.width, [&](int64_t r) {
      if (args.source(r) >= 0) narrow<T>(args, r);
    });
    for (int64_t r = 0; r < args.rows; ++r) left = left || (args.source(r) >= 0 && !is_settled(args.passing[r]));
    if (!left) return;
  }
  for_parts(args, [&](int64_t r, int64_t c, Runners& runners) { measure<T>(args, r, c, runners); });
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
