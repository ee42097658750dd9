// Vocabulary statistics on the CPU: checks the values, has simd/token_statistics.cpp compute the parts of each row, and
// merges them in the order of the vocabulary.
#include <cmath>

#include "check_filters.h"
#include "ops/token_statistics.h"
#include "parallel.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

constexpr const char* kOp = "token_statistics";

void check_values(const TokenStatisticsArgs& args) {
  constexpr int64_t kWords = int64_t{1} << 32;
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t row = args.row_index.given() ? args.row_index.load(r) : r;
    const auto refuse = [&](const char* name, int64_t low, int64_t high, int64_t actual) {
      fail(kOp, std::string(name) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "], got " +
                    std::to_string(actual) + " for row " + std::to_string(r) + ".");
    };
    if (row < -1 || row >= args.source_rows) refuse("row_index", -1, args.source_rows - 1, row);
    if (row < 0 || !args.samples_token()) continue;
    const auto check_word = [&](const char* name, const IndexView& given) {
      if (given.given() && (given.load(r) < 0 || given.load(r) >= kWords)) refuse(name, 0, kWords - 1, given.load(r));
    };
    check_word("positions", args.positions);
    check_word("step", args.steps);
  }
  check_filters(kOp, args.filters, args.rows, args.width);
}

void parts_of(const TokenStatisticsArgs& args) { PDK_DISPATCH(token_statistics, args) }

// A row of the results, merged from its parts.
class Row {
 public:
  Row(const TokenStatisticsArgs& args, int64_t r) : args_(args), r_(r) {
    if (args.source(r) < 0) return;
    for (int64_t c = 0; c < args.num_parts(); ++c) add(args.parts[r * args.num_parts() + c]);
  }

  void write() const {
    uint64_t sampled = args_.samples_token() && !undefined_ ? sampled_ : top_[0];
    const bool missing = top_[0] == 0;
    const auto number = [&](double x) { return static_cast<float>(undefined_ ? NAN : x); };
    args_.ids[r_] = missing ? -1 : key_id(sampled);
    args_.probs[r_] = missing ? 0.0f : number(probability(sampled));
    args_.margin[r_] =
        missing
            ? 0.0f
            : number((0 - std::expm1((double{key_logit(top_[1])} - sums_.largest) * inv_temperature_)) / sums_.total);
    args_.entropy[r_] = missing ? 0.0f : number(std::log(sums_.total) - sums_.weighted / sums_.total);
    args_.logsumexp[r_] = missing ? -INFINITY : number(sums_.largest * inv_temperature_ + std::log(sums_.total));
    for (int i = 0; i < args_.top_k; ++i) {
      args_.top_ids[r_ * args_.top_k + i] = missing ? -1 : top_[i] != 0 ? key_id(top_[i]) : impossible(i);
      args_.top_probs[r_ * args_.top_k + i] = missing ? 0.0f : number(probability(top_[i]));
    }
  }

 private:
  void add(const TokenPart& part) {
    sums_.join(part.sums, inv_temperature_, [](double x) { return std::exp(x); });
    undefined_ = undefined_ || part.undefined;
    if (part.sampled != 0 && part.score > score_) score_ = part.score, sampled_ = part.sampled;
    for (int i = 0; i < args_.num_ranked() && part.top[i] != 0; ++i) {
      int slot = kMaxTopK;
      for (; slot > 0 && top_[slot - 1] < part.top[i]; --slot) top_[slot] = top_[slot - 1];
      top_[slot] = part.top[i];
    }
  }
  double probability(uint64_t key) const {
    return key == 0 ? 0 : std::exp((double{key_logit(key)} - sums_.largest) * inv_temperature_) / sums_.total;
  }
  // After the possible tokens come the others, the lowest id first.
  int64_t impossible(int rank) const {
    int possible = 0;
    while (top_[possible] != 0) ++possible;
    const auto listed = [&](int64_t id) {
      bool found = false;
      for (int i = 0; i < possible; ++i) found = found || key_id(top_[i]) == id;
      return found;
    };
    int64_t id = 0;
    for (int skip = rank - possible;; ++id) {
      if (!listed(id) && skip-- == 0) return id;
    }
  }

  const TokenStatisticsArgs& args_;
  const int64_t r_;
  const double inv_temperature_ = args_.inv_temperature();
  uint64_t top_[kMaxTopK + 1] = {};
  uint64_t sampled_ = 0;
  double score_ = -INFINITY;
  DistributionSums sums_{-INFINITY, 0, 0};
  bool undefined_ = false;
};

}  // namespace

void token_statistics(const TokenStatisticsArgs& args) {
  check_values(args);
  parts_of(args);
  parallel_for(0, args.rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) Row(args, r).write();
  });
}

}  // namespace pdkernels::cpu
