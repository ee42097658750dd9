// An automaton over the tokens of a vocabulary, and its passes over canvases: rows of tokens where some are still
// masked.
//
// Tokens that every state treats alike form a class, and each state lists the classes that lead on from it. State
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

// The tokens of a vocabulary by their bytes: those that begin alike share a path from the root.
class TokenTree {
 public:
  // As in TokenAutomaton.
  TokenTree(const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets) {
    for (int64_t id = 0; id + 1 < static_cast<int64_t>(offsets.size()); ++id) {
      if (offsets[id + 1] > offsets[id]) order_.push_back(id);
    }
    const auto first = [&](int64_t id) { return text.begin() + offsets[id]; };
    const auto last = [&](int64_t id) { return text.begin() + offsets[id + 1]; };
    std::sort(order_.begin(), order_.end(),
              [&](int64_t a, int64_t b) { return std::lexicographical_compare(first(a), last(a), first(b), last(b)); });
    std::vector<size_t> path;  // the nodes of the last token
    for (size_t n = 0; n < order_.size(); ++n) {
      const int64_t id = order_[n], length = offsets[id + 1] - offsets[id];
      int64_t shared = 0;
      while (shared < std::min(length, static_cast<int64_t>(path.size())) &&
             nodes_[path[shared]].byte == text[offsets[id] + shared]) {
        ++shared;
      }
      leave(path, shared);
      for (int64_t at = shared; at < length; ++at) {
        path.push_back(nodes_.size());
        nodes_.push_back({text[offsets[id] + at], static_cast<int32_t>(at), 0, n, n});
      }
      nodes_[path.back()].last = n + 1;
    }
    leave(path, 0);
    for (const Node& node : nodes_) depth_ = std::max(depth_, node.depth + 1);
  }

  // Calls `found(id, state)` for every token that leads from `state` to some state.
  template <typename Found>
  void walk(const ByteAutomaton& bytes, int32_t state, const Found& found) const {
    std::vector<int32_t> states(depth_ + 1, state);
    for (size_t n = 0; n < nodes_.size();) {
      const Node& node = nodes_[n];
      const int32_t to = bytes.next[static_cast<size_t>(states[node.depth]) * 256 + node.byte];
      states[node.depth + 1] = to;
      for (size_t token = node.first; to >= 0 && token < node.last; ++token) found(order_[token], to);
      n = to < 0 ? node.end : n + 1;
    }
  }

  // As `walk`, from any value and below any node (kRoot: all tokens): `step(value, byte, node, to)` says whether a byte
  // leads on, `found(id, length, value)` is called for every token with its length.
  static constexpr size_t kRoot = ~size_t{0};
  template <typename Value, typename Step, typename Found>
  void descend(size_t below, const Value& start, const Step& step, const Found& found) const {
    const size_t first = below == kRoot ? 0 : below + 1, last = below == kRoot ? nodes_.size() : nodes_[below].end;
    const int32_t above = below == kRoot ? 0 : nodes_[below].depth + 1;
    std::vector<Value> values(depth_ - above + 1, start);
    for (size_t n = first; n < last;) {
      const Node& node = nodes_[n];
      const int32_t at = node.depth - above;
      const bool leads = step(values[at], node.byte, n, values[at + 1]);
      for (size_t token = node.first; leads && token < node.last; ++token) {
        found(order_[token], node.depth + 1, values[at + 1]);
      }
      n = leads ? n + 1 : node.end;
    }
  }
  int32_t length(size_t node) const { return nodes_[node].depth + 1; }

 private:
  // A node comes before those below it.
  struct Node {
    uint8_t byte;
    int32_t depth;
    size_t end;          // the first node that is not below
    size_t first, last;  // of the order: the tokens that end here
  };

  void leave(std::vector<size_t>& path, int64_t depth) {
    for (; static_cast<int64_t>(path.size()) > depth; path.pop_back()) nodes_[path.back()].end = nodes_.size();
  }

  std::vector<int64_t> order_;
  std::vector<Node> nodes_;
  int32_t depth_ = 0;
};

class TokenAutomaton {
 public:
  static constexpr int32_t kDead = -1;
  static constexpr int32_t kFar = std::numeric_limits<int32_t>::max();

  // `offsets` (vocabulary + 1) cut `text` into the bytes of the tokens; a token without bytes is never part of a text.
  // `ends` are the ids that may follow a whole text. TooLarge: more than `max_work` pairs of a state and a token that
  // leads on from it.
  TokenAutomaton(const ByteAutomaton& bytes, const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& ends, int64_t max_work)
      : vocabulary_(static_cast<int64_t>(offsets.size()) - 1), class_of_(vocabulary_, 0) {
    const TokenTree tokens(text, offsets);
    collect(bytes, tokens, max_work);
    name_classes(ends);
    list_members();
    list_steps(bytes, tokens, ends);
    measure();
    look_ahead();
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
  // A budget that is larger changes no mask.
  int64_t horizon(int32_t state) const { return state == done() ? 0 : horizon_[state]; }

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
    std::vector<uint8_t> fits(classes_, 0);
    for_steps(state, [&](int32_t c, int32_t to) { fits[c] = within(to, budget); });
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
      for_steps(state, [&](int32_t c, int32_t to) { fits[c] |= mark[to]; });
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
    struct Origin {
      int32_t before = kDead;
      int64_t token = -1;
    };
    std::vector<double> now(states_ + 1, kNever), then(states_ + 1, kNever);
    std::vector<uint8_t> mark(states_ + 1, 0);
    std::vector<std::vector<Origin>> steps(length, std::vector<Origin>(states_ + 1));
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
          for_steps(state, [&](int32_t c, int32_t to) {
            if (token[c] >= 0) reach(state, to, score[c], token[c]);
          });
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
  struct Step {
    int32_t by, to;  // class, state
  };
  struct Members {
    int32_t count, last;
  };
  struct Group {
    int32_t word, bits;
  };

  int32_t follow(int32_t state, int32_t c) const {
    if (state == done()) return done();
    const auto first = steps_.begin() + first_step_[state], last = steps_.begin() + first_step_[state + 1];
    const auto found = std::lower_bound(first, last, c, [](const Step& step, int32_t name) { return step.by < name; });
    return found != last && found->by == c ? found->to : kDead;
  }

  // Calls body(class, state) for all classes that lead on from a state.
  template <typename Body>
  void for_steps(int32_t state, const Body& body) const {
    if (state == done()) {
      for (int32_t c = 0; c < classes_; ++c) body(c, done());
      return;
    }
    for (int64_t n = first_step_[state]; n < first_step_[state + 1]; ++n) body(steps_[n].by, steps_[n].to);
  }

  bool within(int32_t state, int64_t budget) const { return state != kDead && distance(state) <= budget; }

  // The bits of the tokens of some classes. What is shorter is written: the tokens of these classes, or of the others.
  std::pair<int64_t, int64_t> write(const std::vector<uint8_t>& fits, int32_t* bits) const {
    int64_t count = 0, last = -1, groups = 0;
    for (int32_t c = 0; c < classes_; ++c) {
      if (!fits[c]) continue;
      groups += first_group_[c + 1] - first_group_[c];
      count += members_[c].count;
      last = std::max<int64_t>(last, members_[c].last);
    }
    const bool few = 2 * groups <= static_cast<int64_t>(groups_.size());
    std::fill(bits, bits + words(), few ? 0 : -1);
    if (!few && vocabulary_ % 32 != 0) bits[words() - 1] = static_cast<int32_t>((1u << vocabulary_ % 32) - 1);
    for (int32_t c = 0; c < classes_; ++c) {
      if ((fits[c] != 0) != few) continue;
      for (int64_t n = first_group_[c]; n < first_group_[c + 1]; ++n) bits[groups_[n].word] ^= groups_[n].bits;
    }
    return {count, last};
  }

  void collect(const ByteAutomaton& bytes, const TokenTree& tokens, int64_t max_work) {
    std::vector<uint8_t> seen(bytes.states(), 0);
    const auto reach = [&](int32_t state) {
      if (seen[state]) return;
      seen[state] = 1;
      byte_states_.push_back(state);
    };
    reach(0);
    std::vector<int64_t> members{vocabulary_};
    std::vector<int32_t> unused;
    std::vector<std::pair<int64_t, int32_t>> alive;
    for (size_t at = 0; at < byte_states_.size(); ++at) {
      alive.clear();
      tokens.walk(bytes, byte_states_[at], [&](int64_t id, int32_t to) {
        reach(to);
        alive.emplace_back(id, to);
      });
      split(alive, members, unused);
      max_work -= static_cast<int64_t>(alive.size());
      if (max_work < 0) throw TooLarge("work");
    }
    states_ = static_cast<int64_t>(byte_states_.size());
  }

  // Parts each class by where its tokens lead; `alive` has those that lead somewhere. `unused` are names of classes
  // that have no members any more.
  void split(const std::vector<std::pair<int64_t, int32_t>>& alive, std::vector<int64_t>& members,
             std::vector<int32_t>& unused) {
    std::unordered_map<uint64_t, int32_t> fresh;
    std::vector<int32_t> emptied;
    uint64_t last_key = ~uint64_t{0};
    int32_t last_class = 0;
    for (const auto& [id, to] : alive) {
      const uint64_t key = (static_cast<uint64_t>(class_of_[id]) << 32) | static_cast<uint32_t>(to);
      if (key != last_key) {
        const auto [place, added] = fresh.emplace(key, 0);
        if (added && unused.empty()) {
          place->second = static_cast<int32_t>(members.size());
          members.push_back(0);
        } else if (added) {
          place->second = unused.back();
          unused.pop_back();
        }
        last_key = key;
        last_class = place->second;
      }
      if (--members[class_of_[id]] == 0) emptied.push_back(class_of_[id]);
      ++members[last_class];
      class_of_[id] = last_class;
    }
    unused.insert(unused.end(), emptied.begin(), emptied.end());
  }

  // Ends are classes of their own, and classes are numbered by their first tokens.
  void name_classes(const std::vector<int64_t>& ends) {
    std::vector<uint8_t> is_end(vocabulary_, 0);
    for (const int64_t id : ends) is_end[id] = 1;
    std::unordered_map<int64_t, int32_t> names;
    for (int64_t id = 0; id < vocabulary_; ++id) {
      const auto [place, added] = names.emplace(2 * class_of_[id] + is_end[id], static_cast<int32_t>(classes_));
      classes_ += added;
      class_of_[id] = place->second;
    }
  }

  // The tokens of each class, those of one word of bits together.
  void list_members() {
    members_.assign(classes_, {0, -1});
    first_group_.assign(classes_ + 1, 0);
    const auto begins = [&](int64_t id) {
      const int32_t last = members_[class_of_[id]].last;
      return last < 0 || last / 32 != id / 32;
    };
    for (int64_t id = 0; id < vocabulary_; ++id) {
      Members& members = members_[class_of_[id]];
      first_group_[class_of_[id] + 1] += begins(id);
      ++members.count;
      members.last = static_cast<int32_t>(id);
    }
    std::partial_sum(first_group_.begin(), first_group_.end(), first_group_.begin());
    groups_.assign(first_group_.back(), {0, 0});
    std::vector<int64_t> next(first_group_.begin(), first_group_.end() - 1);
    for (Members& members : members_) members.last = -1;
    for (int64_t id = 0; id < vocabulary_; ++id) {
      const int32_t c = class_of_[id];
      next[c] += begins(id);
      Group& group = groups_[next[c] - 1];
      group.word = static_cast<int32_t>(id / 32);
      group.bits |= static_cast<int32_t>(1u << id % 32);
      members_[c].last = static_cast<int32_t>(id);
    }
  }

  void list_steps(const ByteAutomaton& bytes, const TokenTree& tokens, const std::vector<int64_t>& ends) {
    std::vector<int32_t> number(bytes.states(), kDead);
    for (int32_t state = 0; state < states_; ++state) number[byte_states_[state]] = state;
    std::vector<int32_t> last_state(classes_, kDead);
    accepting_.resize(states_);
    following_.resize(states_ + 1);
    first_step_.push_back(0);
    for (int32_t state = 0; state < states_; ++state) {
      const auto add = [&](int64_t id, int32_t to) {
        const int32_t c = class_of_[id];
        if (last_state[c] == state) return;
        last_state[c] = state;
        steps_.push_back({c, to});
        following_[state].push_back(to);
      };
      tokens.walk(bytes, byte_states_[state], [&](int64_t id, int32_t to) { add(id, number[to]); });
      accepting_[state] = bytes.accepting[byte_states_[state]];
      for (size_t n = 0; accepting_[state] && n < ends.size(); ++n) add(ends[n], done());
      std::sort(steps_.begin() + first_step_.back(), steps_.end(),
                [](const Step& a, const Step& b) { return a.by < b.by; });
      first_step_.push_back(static_cast<int64_t>(steps_.size()));
      auto& to = following_[state];
      std::sort(to.begin(), to.end());
      to.erase(std::unique(to.begin(), to.end()), to.end());
      to.shrink_to_fit();
    }
    following_[states_] = {done()};
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

  void look_ahead() {
    horizon_.assign(states_, 0);
    for (int32_t state = 0; state < states_; ++state) {
      for (const int32_t to : following_[state]) {
        if (distance(to) != kFar) horizon_[state] = std::max(horizon_[state], distance(to));
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
  std::vector<Members> members_;      // of each class
  std::vector<int64_t> first_group_;  // of each class
  std::vector<Group> groups_;
  std::vector<int64_t> first_step_;  // of each state
  std::vector<Step> steps_;
  std::vector<uint8_t> accepting_;
  std::vector<std::vector<int32_t>> following_;  // of each state, the states after some token
  std::vector<int32_t> distance_, horizon_, byte_states_;
  std::vector<std::vector<uint8_t>> forced_;
};

}  // namespace pdkernels
