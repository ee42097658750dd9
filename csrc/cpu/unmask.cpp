// Committing guesses on the CPU: threads over sequences, a partial sort of the eligible candidates of each segment.
#include "ops/unmask.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "fault.h"
#include "parallel.h"

namespace pdkernels::cpu {
namespace {

constexpr const char* kOp = "unmask_";
// Tokens and candidates that are worth another thread.
constexpr int64_t kGrain = 4096;

void check_windows(const UnmaskArgs& args, int64_t b) {
  const auto text = [&](int64_t g) {
    std::string pair = "[";
    return pair.append(std::to_string(args.start(b, g)))
        .append(", ")
        .append(std::to_string(args.end(b, g)))
        .append("]");
  };
  const std::string where = " for sequence " + std::to_string(b) + ". ";
  for (int64_t g = 0; g < args.segments; ++g) {
    if (args.window_fits(b, g)) continue;
    fail(kOp, "windows must lie in [0, " + std::to_string(args.length) + "] and not end before they start, got " +
                  text(g) + where + "A window is a half-open range of tokens.");
  }
  for (int64_t g = 0; g < args.segments; ++g) {
    for (int64_t h = 0; h < g; ++h) {
      if (args.overlap(b, g, h))
        fail(kOp, "windows must not overlap, got " + text(h) + " and " + text(g) + where +
                      "A token belongs to one segment.");
    }
  }
}

// `last_seen`: for each token the sequence, counted from 1, in which it was last a candidate's position.
void check_positions(const UnmaskArgs& args, int64_t b, std::vector<int64_t>& last_seen) {
  for (int64_t r = 0; r < args.candidates; ++r) {
    const int64_t p = args.position(b, r);
    if (!args.position_fits(b, r)) {
      fail(kOp, b, "positions", "be in [-1, " + std::to_string(args.length - 1) + "]", p, "-1 means no candidate.");
    }
    if (p < 0) continue;
    if (last_seen[p] == b + 1) {
      fail(kOp, "positions must be distinct in a sequence, got " + std::to_string(p) + " twice for sequence " +
                    std::to_string(b) + ". A token takes one guess.");
    }
    last_seen[p] = b + 1;
  }
}

void check_numbers(const PerSegment& numbers, const char* name, const UnmaskArgs& args, int64_t b) {
  for (int64_t g = 0; g < args.segments; ++g) {
    const int64_t number = numbers.load(b, g);
    if (number < 0) fail(kOp, b, name, "not be negative", number, "It counts candidates.");
  }
}

// Commits what the rule chooses from one segment. `keys` has room for all candidates.
void unmask_segment(const UnmaskArgs& args, int64_t b, int64_t g, uint64_t* keys) {
  const int64_t start = args.start(b, g), end = args.end(b, g);
  int64_t masks = 0, m = 0, passing = 0;
  for (int64_t p = start; p < end; ++p) masks += args.tokens.load(b, p) == args.mask_token;
  const bool has_positions = args.positions.given();
  for (int64_t r = has_positions ? 0 : start; r < (has_positions ? args.candidates : end); ++r) {
    const uint64_t key = args.key(b, r, start, end);
    if (key == 0) continue;
    keys[m++] = key;
    passing += key >= args.lowest_passing;
  }
  int64_t n;
  if (args.rule == UnmaskRule::kFactor) {
    std::sort(keys, keys + m, std::greater<>());
    int64_t passing_ranks = 0;
    while (passing_ranks < m && !args.fails(keys[passing_ranks], passing_ranks + 1)) ++passing_ranks;
    n = args.count(m, passing_ranks);
  } else {
    n = args.count(b, g, m, passing);
    if (n < m) std::nth_element(keys, keys + n, keys + m, std::greater<>());
  }
  for (int64_t i = 0; i < n; ++i) args.commit(b, keys[i]);
  args.write(b, g, n, masks);
}

}  // namespace

void unmask(const UnmaskArgs& args) {
  std::vector<int64_t> last_seen(args.positions.given() ? args.length : 0, 0);
  for (int64_t b = 0; b < args.batch; ++b) {
    if (args.starts.given()) check_windows(args, b);
    if (args.positions.given()) check_positions(args, b, last_seen);
    check_numbers(args.quota, "quota", args, b);
    check_numbers(args.min_count, "min_count", args, b);
  }
  const std::unique_ptr<uint64_t[]> keys(new uint64_t[args.batch * args.candidates]);
  const int64_t work = args.length + args.segments * args.candidates;
  parallel_for(0, args.batch, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work)),
               [&](int64_t first, int64_t last) {
                 for (int64_t b = first; b < last; ++b) {
                   for (int64_t g = 0; g < args.segments; ++g)
                     unmask_segment(args, b, g, keys.get() + b * args.candidates);
                 }
               });
}

}  // namespace pdkernels::cpu
