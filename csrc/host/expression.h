// Expressions of regular languages, and the nondeterministic automata over bytes that they unfold to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/automaton.h"
#include "host/texts_automaton.h"

namespace pdkernels {

// The parts of an expression, which may share parts. pdkernels/grammar/language.py says what they mean.
struct Expression {
  enum class Kind : uint8_t { characters, sequence, either, repeat, subsequence, automaton };
  struct Part {
    Kind kind = Kind::sequence;
    std::vector<int32_t> items;                       // parts
    std::vector<uint8_t> needed;                      // of a subsequence: which items must be there
    std::vector<std::pair<int32_t, int32_t>> ranges;  // of code points
    int32_t separator = -1, others = -1;              // parts; -1: none
    int64_t minimum = 0, maximum = -1;                // -1: any number
    const ByteAutomaton* automaton = nullptr;
  };
  std::vector<Part> parts;
  int32_t whole = 0;
  std::deque<ByteAutomaton> own;  // those that no one else holds
};

namespace expression_detail {

using Bytes = std::vector<std::pair<uint8_t, uint8_t>>;  // ranges of bytes, one after the other

inline std::vector<uint8_t> utf8(int32_t point) {
  const auto later = [&](int shift) { return static_cast<uint8_t>(0x80 | (point >> shift & 0x3F)); };
  const auto first = [&](int mark, int shift) { return static_cast<uint8_t>(mark | point >> shift); };
  if (point <= 0x7F) return {first(0, 0)};
  if (point <= 0x7FF) return {first(0xC0, 6), later(0)};
  if (point <= 0xFFFF) return {first(0xE0, 12), later(6), later(0)};
  return {first(0xF0, 18), later(12), later(6), later(0)};
}

// Characters of as many bytes each, as ranges whose bytes vary independently.
inline void split(int32_t first, int32_t last, std::vector<Bytes>& lines) {
  const int length = static_cast<int>(utf8(first).size());
  for (int free = 1; free < length; ++free) {
    const int32_t unit = 1 << (6 * free);
    if (first / unit == last / unit || (first % unit == 0 && (last + 1) % unit == 0)) continue;
    const int32_t middle = first % unit ? (first / unit + 1) * unit : (last + 1) / unit * unit;
    split(first, middle - 1, lines);
    split(middle, last, lines);
    return;
  }
  const std::vector<uint8_t> low = utf8(first), high = utf8(last);
  Bytes line;
  for (int at = 0; at < length; ++at) line.emplace_back(low[at], high[at]);
  lines.push_back(std::move(line));
}

inline std::vector<Bytes> lines_of(const std::vector<std::pair<int32_t, int32_t>>& ranges) {
  std::vector<Bytes> lines;
  for (const auto& [first, last] : ranges) {
    int32_t start = 0;
    for (const int32_t end : {0x7F, 0x7FF, 0xFFFF, 0x10FFFF}) {  // the last characters of one byte, two, ..
      const int32_t low = std::max(first, start), high = std::min(last, end);
      if (low <= high) split(low, high, lines);
      start = end + 1;
    }
  }
  return lines;
}

}  // namespace expression_detail

// Built from the end of the texts. Parts that are the same and followed by the same state are one part of the
// automaton: so an expression may share its parts, and endings are shared.
class Unfolding {
 public:
  static constexpr int kMaxLevels = 1000;

  // TooLarge: "levels", "unfolded" or "work".
  Unfolding(const Expression& expression, int64_t max_states, int64_t max_work)
      : expression_(expression), max_states_(max_states), max_work_(max_work), lines_(expression.parts.size()) {
    end = state();
    start = add(expression.whole, end);
  }

  int32_t start = 0, end = 0;
  int64_t work = 0;
  std::vector<ByteEdge> edges;
  std::vector<std::pair<int32_t, int32_t>> empty;
  int64_t states() const { return states_; }

 private:
  using Part = Expression::Part;
  using Kind = Expression::Kind;
  using States = std::map<int64_t, int32_t>;  // by the number of items before them

  int32_t state() {
    if (states_ >= max_states_) throw TooLarge("unfolded", work);
    return static_cast<int32_t>(states_++);
  }

  void spend(int64_t steps) {
    work += steps;
    if (work > max_work_) throw TooLarge("work", work);
  }

  // The state that goes on as these do.
  int32_t either(const std::vector<int32_t>& ways) {
    std::vector<int32_t> different;
    for (const int32_t way : ways) {
      if (std::find(different.begin(), different.end(), way) == different.end()) different.push_back(way);
    }
    if (different.size() == 1) return different[0];
    std::sort(different.begin(), different.end());
    const auto known = before_.find(different);
    if (known != before_.end()) return known->second;
    const int32_t start = state();
    for (const int32_t way : different) empty.emplace_back(start, way);
    before_.emplace(std::move(different), start);
    return start;
  }

  // The state from which a part leads to `end`. Nothing may leave it besides.
  int32_t add(int32_t number, int32_t end) {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(number)) << 32 | static_cast<uint32_t>(end);
    const auto known = starts_.find(key);
    if (known != starts_.end()) return known->second;
    spend(1);
    if (++levels_ > kMaxLevels) throw TooLarge("levels", work);
    const int32_t start = added(expression_.parts[number], number, end);
    --levels_;
    starts_.emplace(key, start);
    return start;
  }

  int32_t added(const Part& part, int32_t number, int32_t end) {
    switch (part.kind) {
      case Kind::characters: return characters(number, end);
      case Kind::sequence: {
        int32_t start = end;
        for (auto item = part.items.rbegin(); item != part.items.rend(); ++item) start = add(*item, start);
        return start;
      }
      case Kind::either: {
        std::vector<int32_t> ways;
        for (const int32_t item : part.items) ways.push_back(add(item, end));
        spend(static_cast<int64_t>(ways.size()));
        return either(ways);
      }
      case Kind::repeat: return repeated(part.items[0], part.minimum, part.maximum, end);
      case Kind::subsequence: return subsequence(part, end);
      default: return embedded(*part.automaton, end);
    }
  }

  int32_t characters(int32_t number, int32_t end) {
    auto& lines = lines_[number];
    const auto& ranges = expression_.parts[number].ranges;
    if (lines.empty() && !ranges.empty()) lines = expression_detail::lines_of(ranges);
    const int32_t start = state();
    spend(static_cast<int64_t>(lines.size()));
    for (const auto& line : lines) edges.push_back({start, line[0].first, line[0].second, tail(line, 1, end)});
    return start;
  }

  // The state from which the last bytes of a character lead to `end`.
  int32_t tail(const expression_detail::Bytes& line, size_t at, int32_t end) {
    if (at == line.size()) return end;
    const int32_t next = tail(line, at + 1, end);
    const uint64_t bytes = static_cast<uint64_t>(line[at].first) << 8 | line[at].second;
    const auto [known, fresh] = tails_.emplace(bytes << 32 | static_cast<uint32_t>(next), 0);
    if (fresh) {
      known->second = state();
      edges.push_back({known->second, line[at].first, line[at].second, next});
    }
    return known->second;
  }

  int32_t repeated(int32_t item, int64_t minimum, int64_t maximum, int32_t end) {
    int32_t here = end;
    if (maximum < 0) {
      here = state();
      empty.emplace_back(here, end);
      const int32_t again = add(item, here);
      empty.emplace_back(here, again);
    }
    for (int64_t count = minimum; count < maximum; ++count) {
      const int32_t before = either({end, add(item, here)});
      if (before == here) break;  // nothing, as often as one likes
      here = before;
      spend(1);
    }
    for (int64_t count = 0; count < minimum; ++count) {
      const int32_t before = add(item, here);
      if (before == here) break;
      here = before;
      spend(1);
    }
    return here;
  }

  // A state before each item for each number of items so far, as far as it matters.
  int32_t subsequence(const Part& part, int32_t end) {
    const bool bounded = part.maximum >= 0;
    const int64_t top = bounded ? part.maximum : std::max<int64_t>(1, part.minimum);
    const int64_t count = static_cast<int64_t>(part.items.size());
    int64_t needed = std::count(part.needed.begin(), part.needed.end(), 1);
    States after = part.others < 0 ? ends(part.minimum, std::min(top, count), end) : others(part, top, end);
    for (int64_t at = count - 1; at >= 0; --at) {
      needed -= part.needed[at];
      States here;
      for (int64_t before = std::min(top, needed); before <= std::min(top, at); ++before) {
        spend(1);
        std::vector<int32_t> ways;
        const auto without = after.find(before);
        if (!part.needed[at] && without != after.end()) ways.push_back(without->second);
        const auto with = after.find(bounded ? before + 1 : std::min(top, before + 1));
        if (with != after.end()) {
          const int32_t item = add(part.items[at], with->second);
          ways.push_back(before > 0 ? add(part.separator, item) : item);
        }
        if (!ways.empty()) here[before] = either(ways);
      }
      after = std::move(here);
    }
    return after.contains(0) ? after[0] : state();
  }

  States ends(int64_t minimum, int64_t top, int32_t end) {
    States after;
    for (int64_t count = minimum; count <= top; ++count) {
      spend(1);
      after[count] = end;
    }
    return after;
  }

  // The states after all items, for each number of them.
  States others(const Part& part, int64_t top, int32_t end) {
    const auto separated = [&](int32_t to) { return add(part.separator, add(part.others, to)); };
    const auto added = [&](int64_t count, int32_t to) { return count > 0 ? separated(to) : add(part.others, to); };
    States after;
    if (part.maximum < 0) {
      const int32_t loop = state();
      empty.emplace_back(loop, end);
      const int32_t again = separated(loop);
      empty.emplace_back(loop, again);
      after = ends(std::max<int64_t>(1, part.minimum), top, loop);
      const int32_t before = added(part.minimum - 1, loop);
      if (part.minimum == 0) {
        after[0] = either({end, before});
      } else {
        after[part.minimum - 1] = before;
      }
      return after;
    }
    after[top] = end;
    int32_t here = end;
    for (int64_t count = top - 1; count >= part.minimum; --count) {
      spend(1);
      here = after[count] = either({end, added(count, here)});
    }
    if (part.minimum > 0) after[part.minimum - 1] = added(part.minimum - 1, here);
    return after;
  }

  int32_t embedded(const ByteAutomaton& automaton, int32_t end) {
    const int32_t start = static_cast<int32_t>(states_);
    for (int64_t count = 0; count < automaton.states(); ++count) state();
    spend(8 * automaton.states());
    for (int32_t from = 0; from < automaton.states(); ++from) {
      automaton.runs(from, [&](int32_t first, int32_t last, int32_t to) {
        edges.push_back({start + from, first, last, start + to});
      });
      if (automaton.accepting[from]) empty.emplace_back(start + from, end);
    }
    return automaton.states() > 0 ? start : state();
  }

  const Expression& expression_;
  int64_t max_states_, max_work_, states_ = 0;
  int levels_ = 0;
  std::vector<std::vector<expression_detail::Bytes>> lines_;  // of characters, by parts
  std::unordered_map<uint64_t, int32_t> starts_;
  std::unordered_map<std::vector<int32_t>, int32_t, automaton_detail::HashOfStates> before_;
  std::unordered_map<uint64_t, int32_t> tails_;
};

// The automaton of an expression. TooLarge: "levels", "unfolded", "states" or "work".
inline ByteAutomaton automaton_of(const Expression& expression, int64_t max_unfolded, int64_t max_states,
                                  int64_t max_work) {
  const Unfolding unfolding(expression, max_unfolded, max_work);
  return determinise(unfolding.states(), unfolding.edges, unfolding.empty, unfolding.start, unfolding.end, max_states,
                     max_work, unfolding.work);
}

}  // namespace pdkernels
