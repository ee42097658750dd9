// The distance between two distributions of the next token. A row is cut into chunks, so that a single row keeps many
// threads busy. Each chunk stores its sums, which are merged in the order of the chunks. There are two passes: the
// largest logit and the sum of exponentials, then everything that needs normalised probabilities. Strips are summed in
// float, chunks and rows in double.
#include "kernels.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The result of the first pass, for a chunk and then for a whole row. largest + log(total) is the log-sum-exp.
struct MaxSum {
  double largest, total;
};

// The results of a chunk. Entries of the first pass are read before those of the second are written.
struct Partials {
  double* at;
  MaxSum& now() const { return reinterpret_cast<MaxSum*>(at)[0]; }
  MaxSum& then() const { return reinterpret_cast<MaxSum*>(at)[1]; }
  double& index() const { return at[4]; }
  double& holds_nan() const { return at[5]; }
};

// ln x for positive normal numbers: x = 2^n m with m around 1, and ln m = 2 artanh((m - 1) / (m + 1)) by its series.
PDK_INLINE Vec logarithm(Vec x) {
  const Ints bits = reinterpret_cast<Ints>(x);
  const Ints exponent = (bits - 0x3f3504f3) >> 23;  // m between the roots of 1/2 and 2
  const Vec m = reinterpret_cast<Vec>(bits - (exponent << 23));
  const Vec s = (m - 1.0f) / (m + 1.0f), z = s * s;
  const Vec series = (((z * 0.11111111f + 0.14285714f) * z + 0.2f) * z + 0.33333333f) * z;
  return __builtin_convertvector(exponent, Vec) * 0.69314718f + 2.0f * (s + s * series);
}

// The largest logit of [begin, end), the first strip that has it, and the sum of exponentials below it.
template <class T>
MaxSum max_sum_of(const T* logits, int64_t begin, int64_t end, int64_t& strip) {
  Vec largest = splat(-kInfinity);
  float top = -kInfinity;
  strip = begin;
  for_strips(begin, end, [&](int64_t first, int64_t last) {
    for_vectors(first, last,
                [&](int64_t at, auto lanes) { largest = larger(load(logits + at, lanes, -kInfinity), largest); });
    for (int lane = 0; lane < kLanes; ++lane) {
      if (largest[lane] > top) top = largest[lane], strip = first;
    }
  });
  const float shift = top == -kInfinity ? 0 : top;  // NaNs must propagate even if all others are -inf
  double total = 0;
  for_strips(begin, end, [&](int64_t first, int64_t last) {
    Vec sum{};
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      sum += exponential<true>(load(logits + at, lanes, -kInfinity) - shift);
    });
    total += sum_of(sum);
  });
  return {top, total};
}

template <class T, class Found>
int64_t first_where(const T* logits, int64_t begin, int64_t end, const Found& found) {
  while (begin < end && !found(to_float(logits[begin]))) ++begin;
  return begin;
}

template <class T>
void measure_peaks(const LogitDivergenceArgs& args, int64_t row, int64_t begin, int64_t end, Partials partials) {
  const T* logits = args.logits.row<const T>(row);
  int64_t strip;
  partials.now() = max_sum_of(logits, begin, end, strip);
  const double total = partials.now().total, largest = partials.now().largest;
  int64_t index = end;
  if (total != total) index = first_where(logits, begin, end, [](float x) { return x != x; });
  partials.holds_nan() = index < end;
  if (index == end) index = first_where(logits, strip, end, [&](float x) { return x == largest; });
  partials.index() = static_cast<double>(index);
  if (args.previous.data != nullptr) partials.then() = max_sum_of(args.previous.row<const T>(row), begin, end, strip);
}

// A total of 0 means that there is no distribution: everything becomes NaN.
MaxSum joined(const double* partials, int64_t chunks, int64_t which) {
  MaxSum row{-kInfinity, 0};
  const auto max_sum = [&](int64_t c) {
    return reinterpret_cast<const MaxSum*>(partials + c * kDivergencePartials)[which];
  };
  for (int64_t c = 0; c < chunks; ++c)
    row.largest = max_sum(c).largest > row.largest ? max_sum(c).largest : row.largest;
  for (int64_t c = 0; c < chunks; ++c) {
    // exp(-inf - -inf) is NaN, and a chunk of only -inf adds nothing.
    const double factor = max_sum(c).largest == row.largest ? 1 : __builtin_exp(max_sum(c).largest - row.largest);
    row.total += max_sum(c).total * factor;
  }
  if (row.total == 0) row.total = __builtin_nan("");
  return row;
}

// A distribution as the second pass reads it: log p = logit - largest - log_total.
struct Distribution {
  float largest, log_total;

  explicit Distribution(MaxSum max_sum)
      : largest(static_cast<float>(max_sum.largest)), log_total(static_cast<float>(__builtin_log(max_sum.total))) {}
};

// The contribution of a chunk to the sums of its row. The probabilities sum to 1 up to the rounding of the
// exponentials; dividing by the sum cancels their common error.
struct Sums {
  double entropy = 0, kl = 0, now = 0, then = 0;  // of the distributions
  double minp_kl = 0, levelled_now = 0,
         levelled_then = 0;  // of the flattened distributions, not yet renormalised

  void add(const Sums& other) {
    entropy += other.entropy, kl += other.kl, now += other.now, then += other.then;
    minp_kl += other.minp_kl, levelled_now += other.levelled_now, levelled_then += other.levelled_then;
  }
};
static_assert(sizeof(Sums) <= kDivergencePartials * sizeof(double));

// Probabilities may underflow in a float, so the logits decide whether they are 0.
PDK_INLINE Vec divergence(Vec p, Vec log_then, Vec log_now) {
  const Vec term = choose(log_now == -kInfinity, splat(kInfinity), p * (log_then - log_now));
  return choose(log_then == -kInfinity, splat(0.0f), term);
}

template <class T, bool kUniform>
Sums measure(const LogitDivergenceArgs& args, int64_t row, int64_t begin, int64_t end, Distribution now,
             Distribution then) {
  const T *logits = args.logits.row<const T>(row), *previous = args.previous.row<const T>(row);
  const Vec level = splat(1.0f / static_cast<float>(args.width)),
            log_level = splat(-__builtin_logf(static_cast<float>(args.width)));
  Sums sums;
  for_strips(begin, end, [&](int64_t first, int64_t last) {
    Vec entropy{}, kl{}, total_now{}, total_then{}, minp_kl{}, kept_now{}, kept_then{};
    Ints low_of_now{}, low_of_then{};  // minus their count: adding 1 / V many times would accumulate rounding
    for_vectors(first, last, [&](int64_t at, auto lanes) {
      const Ints exists = mask_of(lanes);
      const Vec below_now = load(logits + at, lanes, -kInfinity) - now.largest, log_now = below_now - now.log_total,
                p_now = exponential<true>(log_now);
      const Ints low_now = below_now < args.log_min_p;
      const Vec log_q_now = choose(low_now, log_level, log_now);
      entropy -= p_now * logarithm(p_now + 1e-10f);
      total_now += p_now;
      kept_now += choose(low_now, splat(0.0f), p_now);
      low_of_now += low_now & exists;
      if constexpr (kUniform) {
        kl += choose(exists, level * (log_level - log_now), splat(0.0f));
        minp_kl += choose(exists, level * (log_level - log_q_now), splat(0.0f));
      } else {
        const Vec below_then = load(previous + at, lanes, -kInfinity) - then.largest,
                  log_then = below_then - then.log_total, p_then = exponential<true>(log_then);
        const Ints low_then = below_then < args.log_min_p;
        kl += divergence(p_then, log_then, log_now);
        total_then += p_then;
        kept_then += choose(low_then, splat(0.0f), p_then);
        low_of_then += low_then & exists;
        // Past the end of the row both distributions are low, or their probability is 0.
        minp_kl += divergence(choose(low_then, level, p_then), choose(low_then, log_level, log_then), log_q_now);
      }
    });
    const double uniform = static_cast<double>(last - first) / static_cast<double>(args.width),
                 share = 1.0 / static_cast<double>(args.width);
    sums.add({sum_of(entropy), sum_of(kl), sum_of(total_now), kUniform ? uniform : sum_of(total_then), sum_of(minp_kl),
              sum_of(kept_now) - share * sum_of(low_of_now),
              kUniform ? uniform : sum_of(kept_then) - share * sum_of(low_of_then)});
  });
  return sums;
}

template <class T>
void logit_divergence_of(const LogitDivergenceArgs& args) {
  const int64_t chunks = args.chunks();
  const auto partials = [&](int64_t row, int64_t c) {
    return args.partials + (row * chunks + c) * kDivergencePartials;
  };
  const auto for_chunks = [&](const auto& body) {
    for_rows(args.rows * chunks, smaller(args.width, kDivergenceChunk), [&](int64_t item) {
      const int64_t begin = item % chunks * kDivergenceChunk;
      body(item / chunks, item % chunks, begin, smaller(begin + kDivergenceChunk, args.width));
    });
  };
  for_chunks([&](int64_t row, int64_t c, int64_t begin, int64_t end) {
    measure_peaks<T>(args, row, begin, end, {partials(row, c)});
  });
  // A few numbers per row. The totals that the second pass reads overwrite the results of the first.
  for (int64_t row = 0; row < args.rows; ++row) {
    const MaxSum now = joined(partials(row, 0), chunks, 0);
    const MaxSum then = args.previous.data != nullptr ? joined(partials(row, 0), chunks, 1) : MaxSum{0, 1};
    int64_t best = 0;  // the first chunk with a NaN, or else the first with the largest
    for (int64_t c = 1; c < chunks && !Partials{partials(row, best)}.holds_nan(); ++c) {
      const Partials part{partials(row, c)};
      if (part.holds_nan() != 0 || part.now().largest > Partials{partials(row, best)}.now().largest) best = c;
    }
    args.argmax[row] = static_cast<int64_t>(Partials{partials(row, best)}.index());
    for (int64_t c = 0; c < chunks; ++c)
      Partials{partials(row, c)}.now() = now, Partials{partials(row, c)}.then() = then;
  }
  for_chunks([&](int64_t row, int64_t c, int64_t begin, int64_t end) {
    const Partials part{partials(row, c)};
    const Distribution now(part.now()), then(part.then());
    const bool uniform = args.previous.data == nullptr;
    reinterpret_cast<Sums&>(*part.at) = uniform ? measure<T, true>(args, row, begin, end, now, then)
                                                : measure<T, false>(args, row, begin, end, now, then);
  });
  for (int64_t row = 0; row < args.rows; ++row) {
    Sums all;
    for (int64_t c = 0; c < chunks; ++c) all.add(reinterpret_cast<const Sums&>(*partials(row, c)));
    args.entropy[row] = static_cast<float>(all.entropy / all.now);
    args.kl[row] = static_cast<float>(all.kl / all.then);
    args.minp_kl[row] =
        static_cast<float>(all.minp_kl / all.levelled_then + __builtin_log(all.levelled_now / all.levelled_then));
  }
}

}  // namespace

void logit_divergence(const LogitDivergenceArgs& args) {
  switch (args.element) {
    case Element::kFloat: return logit_divergence_of<float>(args);
    case Element::kHalf: return logit_divergence_of<Half>(args);
    case Element::kBfloat16: return logit_divergence_of<Bfloat16>(args);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
