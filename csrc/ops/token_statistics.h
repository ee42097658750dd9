// Arguments of the kernels of vocabulary statistics, and the arithmetic that the CPU and CUDA share: the order of
// tokens, Gumbel scores, and a softmax over parts of the vocabulary.
#pragma once

#include "common/element.h"
#include "common/index_view.h"
#include "common/logit_filters.h"
#include "common/order_key.h"
#include "common/philox.h"
#include "common/rows_view.h"

namespace pdkernels {

// Tokens of one work item. The order of summation depends only on the width of a row, so a row gets the same bits in
// any batch and on any number of threads.
constexpr int64_t kVocabularyPart = 8192;
constexpr int64_t kVocabularyStrip = 512;  // of which the CPU keeps the largest logits
constexpr int kMaxTopK = 16;
constexpr int kMaxSuppressed = 16;

// --- the order of tokens: larger logits first, NaN before all of them, the lower id on ties

// A key that is larger for tokens that come first. 0 means no token; a logit of -inf is no token either.
PDK_HD uint64_t token_key(float logit, int64_t id) {
  if (logit == -__builtin_inff()) return 0;
  const uint32_t ordered = order_key(logit), rank = logit != logit ? 0xffffffffu : ordered;
  return static_cast<uint64_t>(rank) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
PDK_HD int64_t key_id(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }
PDK_HD float key_logit(uint64_t key) {
  const float logit = float_of(static_cast<uint32_t>(key >> 32));
  return key == 0 ? -__builtin_inff() : logit;
}

// The smallest float that is not below x.
PDK_HD float at_least(double x) {
  const float nearest = static_cast<float>(x);
  return nearest < x ? key_logit(token_key(nearest, 0) + (uint64_t{1} << 32)) : nearest;
}

// --- sampling

PDK_HD double logarithm(double x) {
#ifdef __CUDA_ARCH__
  return log(x);
#else
  return __builtin_log(x);
#endif
}

// The token with the largest score is a sample of softmax(logits / temperature) (the Gumbel-max trick). The uniform
// number u = (word + 1/2) / 2^32 and 1 - u are exact in a double, so -ln u is accurate in both tails. Kernels call this
// only for the few tokens that can win.
PDK_HD double gumbel_score(float logit, double temperature, uint32_t word) {
  const double u = (word + 0.5) * 0x1p-32;
  return logit - temperature * logarithm(-logarithm(u));
}

// --- a distribution in parts

// Sums over tokens of e^x and x e^x, x = (logit - largest) / temperature.
struct DistributionSums {
  float largest;
  double total, weighted;

  // Adds the sums of another set of tokens. An empty set has largest = -inf.
  template <class Exponential>
  PDK_HD void join(DistributionSums other, double inv_temperature, const Exponential& exponential) {
    if (other.largest > largest) {
      const DistributionSums mine = *this;
      *this = other;
      other = mine;
    }
    if (other.largest == -__builtin_inff()) return;
    const double drop = (static_cast<double>(other.largest) - largest) * inv_temperature, factor = exponential(drop);
    total += factor * other.total;
    weighted += factor * (other.weighted + drop * other.total);
  }
};

// The results of one part of the vocabulary.
struct TokenPart {
  uint64_t top[kMaxTopK];  // keys of its first tokens, descending, padded with 0; tokens that cannot be among the
                           // row's first may be left out
  uint64_t sampled;        // key of the token with the largest score, 0 for none
  double score;
  DistributionSums sums;
  DistributionSums tempered;  // at the temperature of the draw, where a filter needs them (CPU)
  bool undefined;             // a NaN or +inf is among the tokens
};

// The logits that pass the filters of the distribution: [low, high].
struct Passing {
  float low, high;

  PDK_HD bool drops(float logit) const { return logit < low || logit > high; }
  PDK_HD bool all() const { return low == -__builtin_inff() && high == __builtin_inff(); }
};
PDK_HD Passing all_pass() { return {-__builtin_inff(), __builtin_inff()}; }

struct TokenStatisticsArgs {
  Element element;
  RowsView logits;
  int64_t rows;  // to evaluate
  int64_t source_rows, width;
  int64_t first_id;  // id of the first logit, a multiple of 4; only random words use it, all other ids count from 0
  IndexView row_index, positions, steps;  // one entry per row; not given: the row, its number, `step`
  uint32_t step;
  PhiloxSeeds seeds;
  double temperature;    // 0: greedy
  LogitFilters filters;  // of the logits, before everything else
  int64_t keep_top_k;    // 0: all; the filters of the distribution: this one, top_p, min_p, typical_p
  double top_p, min_p, typical_p;
  bool sampling;  // statistics of the sampling distribution (temperature and filters), not of the model's
  int top_k, num_suppressed;
  int64_t suppress[kMaxSuppressed];
  int64_t *ids, *top_ids;
  float *probs, *top_probs, *margin, *entropy, *logsumexp;
  TokenPart* parts;  // (rows, num_parts())
  Passing* passing;  // (rows), only if filtered()
  float* workspace;  // (rows, workspace_width())
  bool staged;       // whether `logits` has the filtered rows of the results

  PDK_HD int64_t num_parts() const { return (width + kVocabularyPart - 1) / kVocabularyPart; }
  PDK_HD int num_ranked() const { return top_k < 2 ? 2 : top_k; }  // the margin needs two
  PDK_HD bool samples_token() const { return temperature > 0; }
  PDK_HD bool keeps_top_k() const { return keep_top_k > 0 && keep_top_k < width; }
  PDK_HD bool filters_all_by_typical_p() const { return typical_p < 1 && !keeps_top_k() && top_p >= 1 && min_p <= 0; }
  PDK_HD bool filtered() const {
    return (keeps_top_k() || top_p < 1 || min_p > 0 || typical_p < 1) && (samples_token() || sampling);
  }
  PDK_HD int64_t num_strips() const { return (width + kVocabularyStrip - 1) / kVocabularyStrip; }
  // The CPU keeps the largest logits of strips, up to 16 each; CUDA the filtered logits.
  int64_t workspace_width(bool cuda) const {
    return cuda ? (filters.any() ? width : 0) : filtered() ? 16 * num_strips() : 0;
  }
  PDK_HD double softmax_temperature() const { return samples_token() ? temperature : 1; }
  // What the logits are multiplied by in the distribution of the statistics.
  PDK_HD double inv_temperature() const { return sampling ? 1 / softmax_temperature() : 1; }
  // The relative error of inv_temperature() as a float. Multiplied by large logits it exceeds a rounding error.
  PDK_HD float inv_temperature_rest() const {
    return static_cast<float>(inv_temperature() / static_cast<float>(inv_temperature()) - 1);
  }
  // The row of logits of an entry, -1 for none.
  PDK_HD int64_t source(int64_t r) const {
    const int64_t row = row_index.given() ? row_index.load(r) : r;
    return row < source_rows ? row : -1;
  }
  // The same row in memory.
  template <class T>
  PDK_HD const T* logits_of(int64_t r) const {
    return logits.row<const T>(staged ? r : source(r));
  }
  PDK_HD uint32_t position(int64_t r) const {
    return static_cast<uint32_t>(positions.given() ? positions.load(r) : source(r));
  }
  PDK_HD uint32_t step_of(int64_t r) const { return steps.given() ? static_cast<uint32_t>(steps.load(r)) : step; }
  PDK_HD bool suppresses_in(int64_t begin, int64_t end) const {
    bool any = false;
    for (int i = 0; i < num_suppressed; ++i) any = any || (suppress[i] >= begin && suppress[i] < end);
    return any;
  }
};

PDK_KERNEL(token_statistics, TokenStatisticsArgs)
PDK_VECTOR_KERNEL(token_statistics, TokenStatisticsArgs)

}  // namespace pdkernels
