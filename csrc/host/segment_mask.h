// A segment mask: runs of tokens that attend to all or nothing of other runs, and to themselves causally, fully or not
// at all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pdkernels {

enum class Inside : uint8_t { kNone, kCausal, kFull };

// Segment numbers start, start + step, .. below stop.
struct SegmentRange {
  int32_t start, stop, step;
  bool operator==(const SegmentRange&) const = default;
};

// Keys [begin, end), counted from the first column of the window.
struct KeySpan {
  int32_t begin, end;
  bool operator==(const KeySpan&) const = default;
};

[[noreturn]] inline void fail_mask(const std::string& sentence) {
  throw std::invalid_argument("pdkernels.masks." + sentence);
}

// The square mask over all tokens, and the requested window of rows and columns.
class SegmentMask {
 public:
  // Segments are added in token order; `sees` lists other segments, ascending, no range reaching into the next.
  void add(int64_t length, Inside inside, const std::vector<SegmentRange>& sees) {
    const auto who = [&] { return "SegmentMask: segment " + std::to_string(inside_.size()); };
    if (length < 0) fail_mask(who() + " must have a length of 0 or more, got " + std::to_string(length) + ".");
    if (tokens() + length > std::numeric_limits<int32_t>::max())
      fail_mask(who() + " must end within 2**31 - 1 tokens, got more.");
    begin_.push_back(tokens() + length);
    inside_.push_back(inside);
    for (SegmentRange range : sees) {
      // A stop right after the last number: the gap may belong to the next range.
      if (range.step > 1 && range.start < range.stop) range.stop -= (range.stop - 1 - range.start) % range.step;
      sees_.push_back(range);
    }
    sees_end_.push_back(sees_.size());
  }

  void finish(int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end) {
    row_begin_ = row_begin, row_end_ = row_end, column_begin_ = column_begin, column_end_ = column_end;
    const auto fits = [&](int64_t begin, int64_t end) { return 0 <= begin && begin <= end && end <= tokens(); };
    if (!fits(row_begin, row_end) || !fits(column_begin, column_end)) {
      fail_mask("SegmentMask: the window must lie within the " + std::to_string(tokens()) + " tokens, got rows [" +
                std::to_string(row_begin) + ", " + std::to_string(row_end) + ") and columns [" +
                std::to_string(column_begin) + ", " + std::to_string(column_end) + ").");
    }
    for (int32_t i = 0; i < segments(); ++i) {
      int32_t below = 0;
      for (const SegmentRange& range : sees(i)) {
        const auto refuse = [&](const std::string& expectation, const std::string& remedy) {
          fail_mask("SegmentMask: segment " + std::to_string(i) + " must " + expectation + ", got range(" +
                    std::to_string(range.start) + ", " + std::to_string(range.stop) + ", " +
                    std::to_string(range.step) + ")." + remedy);
        };
        if (range.step < 1 || range.start < below || range.stop > segments())
          refuse("see ascending ranges of other segments below " + std::to_string(segments()), "");
        if (range.start <= i && i < range.stop && (i - range.start) % range.step == 0)
          refuse("not be among the segments it sees", " What it sees of itself is said by `inside`.");
        below = std::max(below, range.stop);
      }
    }
  }

  // The same segments with another window.
  SegmentMask window(std::pair<int64_t, int64_t> rows, std::pair<int64_t, int64_t> columns) const {
    SegmentMask mask = *this;
    mask.finish(rows.first, rows.second, columns.first, columns.second);
    return mask;
  }

  // Equal masks have equal segments and windows.
  bool operator==(const SegmentMask&) const = default;
  int64_t hash() const {
    uint64_t sum = 14695981039346656037u;  // FNV-1a
    const auto add = [&sum](int64_t value) { sum = (sum ^ static_cast<uint64_t>(value)) * 1099511628211u; };
    for (const int64_t begin : begin_) add(begin);
    for (const Inside inside : inside_) add(static_cast<int64_t>(inside));
    for (const SegmentRange& range : sees_) add(range.start), add(range.stop), add(range.step);
    for (const int64_t edge : {row_begin_, row_end_, column_begin_, column_end_}) add(edge);
    return static_cast<int64_t>(sum >> 1);
  }

  int32_t segments() const { return static_cast<int32_t>(inside_.size()); }
  int64_t tokens() const { return begin_.back(); }
  int64_t length(int32_t segment) const { return begin_[segment + 1] - begin_[segment]; }
  int32_t q_len() const { return static_cast<int32_t>(row_end_ - row_begin_); }
  int32_t kv_len() const { return static_cast<int32_t>(column_end_ - column_begin_); }

  // The segment that holds a row of the window; among empty ones at the same start the last, which does hold it.
  int32_t segment_of_row(int32_t row) const {
    const auto after = std::upper_bound(begin_.begin(), begin_.end(), row + row_begin_);
    return static_cast<int32_t>(after - begin_.begin()) - 1;
  }

  // Row of the window after the last row of a segment.
  int32_t row_end(int32_t segment) const {
    return static_cast<int32_t>(std::min(begin_[segment + 1], row_end_) - row_begin_);
  }

  struct Ranges {
    const SegmentRange *first, *last;
    const SegmentRange* begin() const { return first; }
    const SegmentRange* end() const { return last; }
  };
  Ranges sees(int32_t segment) const {
    return {sees_.data() + sees_end_[segment], sees_.data() + sees_end_[segment + 1]};
  }

  Inside inside(int32_t segment) const { return inside_[segment]; }

  // Column of the token of a row. It may be outside the window.
  int32_t column_of_row(int32_t row) const { return static_cast<int32_t>(row + row_begin_ - column_begin_); }

  // Appends the keys that every row of the segment from `row` on attends to: ascending, disjoint, never touching. For a
  // causal segment that includes its tokens before `row`; the triangle that begins at `row` is left to the caller.
  void append_spans(int32_t segment, int32_t row, std::vector<KeySpan>& spans) const {
    const size_t first = spans.size();
    const auto append = [&](int64_t begin, int64_t end) {
      const auto low = static_cast<int32_t>(std::max(begin, column_begin_) - column_begin_);
      const auto high = static_cast<int32_t>(std::min(end, column_end_) - column_begin_);
      if (low >= high) return;
      if (spans.size() > first && spans.back().end == low) {
        spans.back().end = high;
      } else {
        spans.push_back({low, high});
      }
    };
    bool own_done = inside_[segment] == Inside::kNone;
    const auto append_own = [&] {
      own_done = true;
      append(begin_[segment], inside_[segment] == Inside::kFull ? begin_[segment + 1] : row + row_begin_);
    };
    for (const SegmentRange& range : sees(segment)) {
      if (range.step == 1) {
        if (!own_done && range.start > segment) append_own();
        append(begin_[range.start], begin_[std::max(range.start, range.stop)]);
        continue;
      }
      for (int32_t other = range.start; other < range.stop; other += range.step) {
        if (!own_done && other > segment) append_own();
        append(begin_[other], begin_[other + 1]);
      }
    }
    if (!own_done) append_own();
  }

  // Row-major segments x segments: 0 for nothing, 1 for all, 2 (only on the diagonal) for causal attention.
  void write_relation(uint8_t* relation) const {
    const int64_t count = segments();
    std::fill(relation, relation + count * count, uint8_t{0});
    for (int32_t i = 0; i < count; ++i) {
      uint8_t* line = relation + i * count;
      for (const SegmentRange& range : sees(i)) {
        for (int32_t other = range.start; other < range.stop; other += range.step) line[other] = 1;
      }
      line[i] = inside_[i] == Inside::kFull ? 1 : inside_[i] == Inside::kCausal ? 2 : 0;
    }
  }

 private:
  std::vector<int64_t> begin_{0};  // first token of each segment, then the number of tokens
  std::vector<Inside> inside_;
  std::vector<SegmentRange> sees_;
  std::vector<size_t> sees_end_{0};
  int64_t row_begin_ = 0, row_end_ = 0, column_begin_ = 0, column_end_ = 0;
};

}  // namespace pdkernels
