// Steps of layers with a state on the CPU: values are checked here, simd/recurrent_state.cpp computes, and the new rows
// become the pending ones once nobody reads those of before. The updates of the delta rule belong to one head: they are
// stored where they are computed.
#include "ops/recurrent_state.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "check_rows.h"
#include "check_steps.h"
#include "parallel.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

constexpr int64_t kLongest = 0x7fffffff;

void require(bool condition, const char* op, int64_t b, const char* argument, const std::string& expectation,
             int64_t actual, const char* remedy) {
  if (!condition) fail(op, b, argument, expectation, actual, remedy);
}

void check_sequence(const StateStep& step, int64_t b) {
  const char* op = step.op;
  const int64_t count = step.count(b), most = step.max_pending, row = step.row(b);
  if (count < 0 || count > step.rows) {
    fail(op, b, "counts", range(0, step.rows), count, "Only the rows given can be computed.");
  }
  if (step.keep < 0 && count > most) {
    fail(op, b, "counts", "be at most max_pending (" + std::to_string(most) + "), or keep be given", count,
         "keep says how many of the last rows stay pending.");
  }
  if (count == 0) return;
  const int64_t held = step.state_lengths.load(row), length = step.lengths.load(row);
  if (held < 0 || held > kLongest) fail(op, b, "state_lengths", range(0, kLongest), held, "It counts positions.");
  if (length < held || length > held + most) {
    fail(op, b, "lengths", range(held, held + most) + ", up to max_pending more than state_lengths", length,
         "Commit what the last step settled, and run every layer before the next commit.");
  }
  if (length + count > kLongest) {
    fail(op, b, "lengths + counts", "be at most " + std::to_string(kLongest), length + count, "Start a new sequence.");
  }
  for (int64_t i = 0; i < length - held; ++i) {
    const int64_t source = step.source(row, i);
    if (source < 0 || source >= most) {
      fail(op, b, "pending_index", range(0, most - 1), source, "state_commit_ writes it.");
    }
  }
  const int64_t settled = step.settled(count);
  for (int64_t i = 0; step.parents.given() && i < count; ++i) {
    const int64_t parent = step.parent(b, i), lowest = std::min(i, settled) - 1;
    if (parent < lowest || parent >= i) {
      fail(op, b, "parents", range(lowest, i - 1) + " for row " + std::to_string(i), parent,
           "A row comes after its parent, and settled rows are a path that the others follow; -1 is the last committed "
           "row.");
    }
  }
}

}  // namespace

void require_step(const StateStep& step) {
  std::vector<bool> seen(step.cache_rows.given() ? step.cache_size : 0);
  for (int64_t b = 0; b < step.batch; ++b) {
    if (step.cache_rows.given()) {
      const int64_t row = step.row(b);
      if (row < 0 || row >= step.cache_size) {
        fail(step.op, b, "cache_rows", range(0, step.cache_size - 1), row, "A row of the cache is a sequence.");
      }
      if (seen[row]) {
        fail(step.op, b, "cache_rows", "be different for each sequence", row, "Both would write the same state.");
      }
      seen[row] = true;
    }
    check_sequence(step, b);
  }
}

namespace {

void keep_row(const StateInput& input, int64_t b, int64_t i, int64_t row, int64_t slot) {
  if (!input.fresh.given()) return;
  const int64_t bytes = input.width * input.fresh.bytes();
  if (bytes == 0) return;
  for (int64_t head = 0; head < input.heads; ++head) {
    std::memcpy(input.pending.at(row, slot, head), input.fresh.at(b, i, head), bytes);
  }
}

// The rows that are not settled become the pending ones.
void finish_step(const StateStep& step, std::initializer_list<const StateInput*> inputs) {
  int64_t width = 0;
  for (const StateInput* input : inputs) width += input->heads * input->width;
  parallel_for(0, step.batch, 1 + 16 * 1024 / (step.rows * width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t count = step.count(b), settled = step.settled(count), row = step.row(b);
      for (int64_t i = settled; i < count; ++i) {
        for (const StateInput* input : inputs) keep_row(*input, b, i, row, i - settled);
      }
      if (count > 0) step.state_lengths.store(step.lengths.load(row) + settled, row);
    }
  });
}

void scan_at_level(const StateScanArgs& args) { PDK_DISPATCH(state_scan, args) }
void conv_at_level(const ShortConvArgs& args) { PDK_DISPATCH(short_conv, args) }

}  // namespace

void state_scan(const StateScanArgs& args) {
  require_step(args);
  scan_at_level(args);
  const StateInput updates{};  // of the delta rule: whoever has computed them keeps them
  finish_step(args, {&args.k, args.delta ? &updates : &args.v, &args.gate});
}

void short_conv(const ShortConvArgs& args) {
  require_step(args);
  conv_at_level(args);
  finish_step(args, {&args.x});
}

void state_commit(const StateCommitArgs& args) {
  const char* op = "state_commit_";
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t count = args.counts.load(b), most = args.max_rows;
    if (count < 0 || count > most) fail(op, b, "counts", range(0, most), count, "It counts accepted rows.");
    if (count == 0) continue;
    const int64_t held = args.layers.lengths[0].load(b), length = args.lengths.load(b), end = held + args.max_pending;
    for (int64_t layer = 1; layer < args.layers.count; ++layer) {
      const int64_t other = args.layers.lengths[layer].load(b);
      require(other == held, op, b, "state_lengths", "be the same for all layers", other,
              "Run every layer before a commit.");
    }
    require(held >= 0 && held <= kLongest, op, b, "state_lengths", range(0, kLongest), held, "It counts positions.");
    require(length >= 0 && length <= end, op, b, "lengths", range(0, end), length,
            "Run a step before the next commit.");
    if (length + count < held || length + count > end) {
      fail(op, b, "lengths + counts", range(held, end), length + count,
           "What a step has settled stays, and only pending rows can be accepted.");
    }
    const int64_t ahead = length - held;  // negative: so many of the new rows are in the state already
    for (int64_t i = 0; args.source_index.given() && i < count; ++i) {
      const int64_t source = args.source_index.load(b, i);
      const int64_t low = ahead + i < 0 ? i : std::max<int64_t>(0, -ahead);
      const int64_t high = ahead + i < 0 ? i : args.max_pending - 1 - ahead;
      if (source < low || source > high) {
        fail(op, b, "source_index", range(low, high) + " for row " + std::to_string(i), source,
             "Sources are counted from the sequence's length.");
      }
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t count = args.counts.load(b);
    if (count == 0) continue;
    const int64_t length = args.lengths.load(b), ahead = length - args.layers.lengths[0].load(b);
    for (int64_t i = std::max<int64_t>(0, -ahead); i < count; ++i) {
      args.pending_index.store(ahead + (args.source_index.given() ? args.source_index.load(b, i) : i), b, ahead + i);
    }
    if (args.advance) args.lengths.store(length + count, b);
  }
}

void state_trim(const StateTrimArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), wanted = args.new_lengths.load(b);
    int64_t lowest = 0;
    for (int64_t layer = 0; wanted != length && layer < args.layers.count; ++layer) {
      const int64_t held = args.layers.lengths[layer].load(b);
      if (layer == 0 || held > lowest) lowest = held;
    }
    if (wanted < lowest || wanted > length) {
      fail("state_trim_", b, "new_lengths", range(lowest, length), wanted,
           "Rows that are in the state can't be taken out of it. Restore a copy of an earlier state instead.");
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) args.lengths.store(args.new_lengths.load(b), b);
}

}  // namespace pdkernels::cpu
