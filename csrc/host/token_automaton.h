// An automaton over the tokens of a vocabulary, and its passes over canvases: rows of tokens where some are still
// masked.
//
// Tokens that every state treats alike form a class, so that a table of states and classes holds all transitions. State
// `done()` comes after an end token, where every token may follow. Known tokens of a canvas lead one way, a mask leads
// every way there is: a forward pass finds the states that the tokens before a position may lead to, a backward pass
// those that its later ones can complete. The plain form is reference/token_automaton.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "host/automaton.h"

namespace pdkernels {

class TokenAutomaton {
 public:
  static constexpr int32_t kDead = -1;
  static constexpr int32_t kFar = std::numeric_limits<int32_t>::max();

  // `offsets` (vocabulary + 1) cut `text` into the bytes of the tokens; a token without bytes is never part of a text.
  // `ends` are the ids that may follow a whole text. TooLarge: more than `max_cells` states times classes, or more than
  // `max_work` pairs of a state and a token that leads on from it.
  TokenAutomaton(const ByteAutomaton& bytes, const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& ends, int64_t max_cells, int64_t max_work)
      : vocabulary_(static_cast<int64_t>(offsets.size()) - 1), class_of_(vocabulary_, 0) {
    sort_tokens(text, offsets);
    collect(bytes, text, offsets, ends, max_cells, max_work);
    measure();
    force(bytes);
  }

  int64_t states() const { return states_; }
  int64_t classes() const { return classes_; }
  int64_t vocabulary() const { return vocabulary_; }
  int64_t words() const { return (vocabulary_ + 31) / 32; }
  int32_t done() const { return static_cast<int32_t>(states_); }
  bool accepting(int32_t state) const { return state == done() || accepting_[state] != 0; }
  // Tokens that it takes at least from here to a whole text, an end token not counted.
  int32_t distance(int32_t state) const { return state == done() ? 0 : distance_[state]; }
  int32_t token_class(int64_t token) const { return class_of_[token]; }

  int32_t next(int32_t state, int64_t token) const {
    if (token < 0 || token >= vocabulary_) return kDead;
    return follow(state, class_of_[token]);
  }

  // The bytes that every text has next.
  const std::vector<uint8_t>& forced(int32_t state) const {
    static const std::vector<uint8_t> none;
    return state == done() ? none : forced_[state];
  }

  // The bits of the tokens after which at most `budget` more tokens complete the text. Returns how many, and the last
  // of them.
  std::pair<int64_t, int64_t> mask(int32_t state, int64_t budget, int32_t* bits) const {
    std::vector<uint8_t> fits(classes_);
    for (int32_t c = 0; c < classes_; ++c) fits[c] = within(follow(state, c), budget);
    return write(fits, bits);
  }

  // The states of each place of a canvas, before its tokens and after the last: those that its tokens allow. -1 is a
  // mask. Empty if the canvas cannot be completed with at most `budget` tokens after it.
  std::vector<std::vector<int32_t>> places(const std::vector<int64_t>& canvas, const std::vector<int32_t>& starts,
                                           int64_t budget) const {
    const int64_t length = static_cast<int64_t>(canvas.size());
    std::vector<std::vector<int32_t>> found(length + 1);
    found[0] = starts;
    std::sort(found[0].begin(), found[0].end());
    std::vector<uint8_t> mark(states_ + 1, 0);
    for (int64_t at = 0; at < length; ++at) {
      auto& after = found[at + 1];
      const auto add = [&](int32_t state) {
        if (state == kDead || mark[state]) return;
        mark[state] = 1;
        after.push_back(state);
      };
      for (const int32_t state : found[at]) {
        if (canvas[at] >= 0) {
          add(next(state, canvas[at]));
        } else {
          for (const int32_t to : following_[state]) add(to);
        }
      }
      for (const int32_t state : after) mark[state] = 0;
      std::sort(after.begin(), after.end());
      if (after.empty()) return {};
    }
    auto& last = found[length];
    last.erase(std::remove_if(last.begin(), last.end(), [&](int32_t state) { return !within(state, budget); }),
               last.end());
    for (int64_t at = length - 1; at >= 0; --at) {
      for (const int32_t state : found[at + 1]) mark[state] = 1;
      auto& here = found[at];
      here.erase(std::remove_if(here.begin(), here.end(),
                                [&](int32_t state) {
                                  if (canvas[at] >= 0) {
                                    const int32_t to = next(state, canvas[at]);
                                    return to == kDead || !mark[to];
                                  }
                                  const auto& to = following_[state];
                                  return std::none_of(to.begin(), to.end(), [&](int32_t one) { return mark[one]; });
                                }),
                 here.end());
      for (const int32_t state : found[at + 1]) mark[state] = 0;
    }
    if (found[0].empty()) return {};
    return found;
  }

  // The bits of the tokens that may stand at `position`, given the states of its two places.
  std::pair<int64_t, int64_t> allowed(const std::vector<int32_t>& before, const std::vector<int32_t>& after,
                                      int32_t* bits) const {
    std::vector<uint8_t> mark(states_ + 1, 0), fits(classes_, 0);
    for (const int32_t state : after) mark[state] = 1;
    for (const int32_t state : before) {
      for (int32_t c = 0; c < classes_; ++c) {
        const int32_t to = follow(state, c);
        fits[c] |= to != kDead && mark[to];
      }
    }
    return write(fits, bits);
  }

  // The tokens of the most probable completion of a canvas: `scores` has a row of log-probabilities for each of its
  // masks, which may be -inf. Of equals the lowest state and the lowest id win. Empty if there is none.
  std::vector<int64_t> best(const std::vector<int64_t>& canvas, const std::vector<int32_t>& starts, int64_t budget,
                            const float* scores) const {
    const int64_t length = static_cast<int64_t>(canvas.size());
    const auto found = places(canvas, starts, budget);
    if (found.empty()) return {};
    constexpr double kNever = -std::numeric_limits<double>::infinity();
    struct Step {
      int32_t before = kDead;
      int64_t token = -1;
    };
    std::vector<double> now(states_ + 1, kNever), then(states_ + 1, kNever);
    std::vector<uint8_t> mark(states_ + 1, 0);
    std::vector<std::vector<Step>> steps(length, std::vector<Step>(states_ + 1));
    for (const int32_t state : found[0]) now[state] = 0;
    std::vector<int64_t> token(classes_);
    std::vector<double> score(classes_);
    for (int64_t at = 0; at < length; ++at) {
      std::fill(then.begin(), then.end(), kNever);
      for (const int32_t state : found[at + 1]) mark[state] = 1;
      const auto reach = [&](int32_t from, int32_t to, double more, int64_t by) {
        if (to == kDead || !mark[to] || !(now[from] + more > then[to])) return;
        then[to] = now[from] + more;
        steps[at][to] = {from, by};
      };
      if (canvas[at] >= 0) {
        for (const int32_t state : found[at]) reach(state, next(state, canvas[at]), 0, canvas[at]);
      } else {
        std::fill(token.begin(), token.end(), -1);
        std::fill(score.begin(), score.end(), kNever);
        for (int64_t id = 0; id < vocabulary_; ++id) {
          const int32_t c = class_of_[id];
          if (scores[id] > score[c]) {
            score[c] = scores[id];
            token[c] = id;
          }
        }
        scores += vocabulary_;
        for (const int32_t state : found[at]) {
          if (now[state] == kNever) continue;
          for (int32_t c = 0; c < classes_; ++c) {
            if (token[c] >= 0) reach(state, follow(state, c), score[c], token[c]);
          }
        }
      }
      for (const int32_t state : found[at + 1]) mark[state] = 0;
      std::swap(now, then);
    }
    int32_t state = kDead;
    for (const int32_t last : found[length]) {
      if (now[last] != kNever && (state == kDead || now[last] > now[state])) state = last;
    }
    if (state == kDead) return {};
    std::vector<int64_t> made(length);
    for (int64_t at = length - 1; at >= 0; --at) {
      made[at] = steps[at][state].token;
      state = steps[at][state].before;
    }
    return made;
  }

 private:
  int32_t follow(int32_t state, int32_t c) const {
    return state == done() ? done() : table_[static_cast<size_t>(state) * classes_ + c];
  }

  bool within(int32_t state, int64_t budget) const { return state != kDead && distance(state) <= budget; }

  std::pair<int64_t, int64_t> write(const std::vector<uint8_t>& fits, int32_t* bits) const {
    int64_t count = 0, last = -1;
    for (int64_t word = 0; word < words(); ++word) {
      uint32_t value = 0;
      const int64_t first = word * 32, end = std::min(first + 32, vocabulary_);
      for (int64_t id = first; id < end; ++id) value |= static_cast<uint32_t>(fits[class_of_[id]]) << (id - first);
      bits[word] = static_cast<int32_t>(value);
      if (value) {
        count += __builtin_popcount(value);
        last = first + 31 - __builtin_clz(value);
      }
    }
    return {count, last};
  }

  // In the order of their bytes, a token shares its first bytes with the one before it.
  void sort_tokens(const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets) {
    for (int64_t id = 0; id < vocabulary_; ++id) {
      if (offsets[id + 1] > offsets[id]) order_.push_back(id);
    }
    const auto bytes = [&](int64_t id) { return text.begin() + offsets[id]; };
    std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      const auto a_end = text.begin() + offsets[a + 1], b_end = text.begin() + offsets[b + 1];
      return std::lexicographical_compare(bytes(a), a_end, bytes(b), b_end);
    });
    shared_.assign(order_.size(), 0);
    for (size_t n = 1; n < order_.size(); ++n) {
      const int64_t a = order_[n - 1], b = order_[n];
      const int64_t most = std::min(offsets[a + 1] - offsets[a], offsets[b + 1] - offsets[b]);
      while (shared_[n] < most && bytes(a)[shared_[n]] == bytes(b)[shared_[n]]) ++shared_[n];
    }
  }

  // Calls `found(id, state)` for every token that leads from `state` to some state.
  template <typename Found>
  void walk(const ByteAutomaton& bytes, const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets,
            int32_t state, Found found) const {
    std::vector<int32_t> path{state};  // the states after each byte of the last token, as far as it goes
    for (size_t n = 0; n < order_.size(); ++n) {
      const int64_t id = order_[n], length = offsets[id + 1] - offsets[id];
      if (shared_[n] >= static_cast<int64_t>(path.size())) continue;  // it fails where the one before failed
      path.resize(shared_[n] + 1);
      int32_t here = path.back();
      for (int64_t at = shared_[n]; at < length; ++at) {
        here = bytes.next[static_cast<size_t>(here) * 256 + text[offsets[id] + at]];
        if (here < 0) break;
        path.push_back(here);
      }
      if (here >= 0) found(id, here);
    }
  }

  void collect(const ByteAutomaton& bytes, const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets,
               const std::vector<int64_t>& ends, int64_t max_cells, int64_t max_work) {
    std::vector<int32_t> number(bytes.states(), kDead), queue;
    std::vector<int64_t> members{vocabulary_};
    const auto reach = [&](int32_t state) {
      if (number[state] == kDead) {
        number[state] = static_cast<int32_t>(queue.size());
        queue.push_back(state);
      }
    };
    reach(0);
    std::vector<std::pair<int64_t, int32_t>> alive;
    for (size_t at = 0; at < queue.size(); ++at) {
      alive.clear();
      walk(bytes, text, offsets, queue[at], [&](int64_t id, int32_t to) {
        reach(to);
        alive.emplace_back(id, to);
      });
      split(alive, members);
      max_work -= static_cast<int64_t>(alive.size());
      if (max_work < 0) throw TooLarge("work");
      if (static_cast<int64_t>(queue.size() * members.size()) > max_cells) throw TooLarge("cells");
    }
    byte_states_ = queue;
    std::vector<std::pair<int64_t, int32_t>> marked;
    for (const int64_t id : ends) marked.emplace_back(id, 0);
    split(marked, members);

    states_ = static_cast<int64_t>(queue.size());
    std::vector<int32_t> renamed(members.size(), kDead);
    std::vector<int64_t> example;
    for (int64_t id = 0; id < vocabulary_; ++id) {
      int32_t& name = renamed[class_of_[id]];
      if (name == kDead) {
        name = static_cast<int32_t>(example.size());
        example.push_back(id);
      }
      class_of_[id] = name;
    }
    classes_ = static_cast<int64_t>(example.size());
    std::vector<uint8_t> is_end(classes_, 0);
    for (const int64_t id : ends) is_end[class_of_[id]] = 1;
    table_.assign(static_cast<size_t>(states_) * classes_, kDead);
    accepting_.resize(states_);
    following_.resize(states_ + 1);
    for (int32_t state = 0; state < states_; ++state) {
      accepting_[state] = bytes.accepting[queue[state]];
      for (int32_t c = 0; c < classes_; ++c) {
        int32_t& cell = table_[static_cast<size_t>(state) * classes_ + c];
        if (is_end[c]) {
          cell = accepting_[state] ? done() : kDead;
          continue;
        }
        int32_t here = queue[state];
        const int64_t first = offsets[example[c]], last = offsets[example[c] + 1];
        for (int64_t byte = first; here >= 0 && byte < last; ++byte) {
          here = bytes.next[static_cast<size_t>(here) * 256 + text[byte]];
        }
        cell = here < 0 || first == last ? kDead : number[here];
      }
      auto& to = following_[state];
      const auto* line = &table_[static_cast<size_t>(state) * classes_];
      std::copy_if(line, line + classes_, std::back_inserter(to), [](int32_t one) { return one != kDead; });
      std::sort(to.begin(), to.end());
      to.erase(std::unique(to.begin(), to.end()), to.end());
    }
    following_[states_] = {done()};
  }

  // Parts each class by where its tokens lead; `alive` has those that lead somewhere.
  void split(const std::vector<std::pair<int64_t, int32_t>>& alive, std::vector<int64_t>& members) {
    std::unordered_map<uint64_t, int32_t> fresh;
    uint64_t last_key = ~uint64_t{0};
    int32_t last_class = 0;
    for (const auto& [id, to] : alive) {
      const uint64_t key = (static_cast<uint64_t>(class_of_[id]) << 32) | static_cast<uint32_t>(to);
      if (key != last_key) {
        const auto [place, added] = fresh.emplace(key, static_cast<int32_t>(members.size()));
        if (added) members.push_back(0);
        last_key = key;
        last_class = place->second;
      }
      --members[class_of_[id]];
      ++members[last_class];
      class_of_[id] = last_class;
    }
    // Where nothing was parted, the old name is as good.
    std::vector<int32_t> renamed(members.size());
    std::vector<int64_t> left;
    for (size_t name = 0; name < members.size(); ++name) {
      renamed[name] = static_cast<int32_t>(left.size());
      if (members[name] > 0) left.push_back(members[name]);
    }
    if (left.size() == members.size()) return;
    for (int32_t& name : class_of_) name = renamed[name];
    members = std::move(left);
  }

  void measure() {
    std::vector<std::vector<int32_t>> before(states_);
    distance_.assign(states_, kFar);
    std::vector<int32_t> queue;
    for (int32_t state = 0; state < states_; ++state) {
      for (const int32_t to : following_[state]) {
        if (to != done()) before[to].push_back(state);
      }
      if (accepting_[state]) {
        distance_[state] = 0;
        queue.push_back(state);
      }
    }
    for (size_t at = 0; at < queue.size(); ++at) {
      for (const int32_t from : before[queue[at]]) {
        if (distance_[from] != kFar) continue;
        distance_[from] = distance_[queue[at]] + 1;
        queue.push_back(from);
      }
    }
  }

  void force(const ByteAutomaton& bytes) {
    constexpr size_t kMost = 64;
    forced_.resize(states_);
    for (int32_t state = 0; state < states_; ++state) {
      int32_t here = byte_states_[state];
      while (!bytes.accepting[here] && forced_[state].size() < kMost) {
        const int32_t* line = &bytes.next[static_cast<size_t>(here) * 256];
        const int32_t* first = std::find_if(line, line + 256, [](int32_t to) { return to >= 0; });
        if (std::find_if(first + 1, line + 256, [](int32_t to) { return to >= 0; }) != line + 256) break;
        forced_[state].push_back(static_cast<uint8_t>(first - line));
        here = *first;
      }
    }
  }

  int64_t vocabulary_, states_ = 0, classes_ = 0;
  std::vector<int32_t> class_of_;
  std::vector<int64_t> order_, shared_;
  std::vector<int32_t> table_;
  std::vector<uint8_t> accepting_;
  std::vector<std::vector<int32_t>> following_;  // of each state, the states after some token
  std::vector<int32_t> distance_, byte_states_;
  std::vector<std::vector<uint8_t>> forced_;
};

}  // namespace pdkernels
