// Tokens as steps of a pushdown automaton.
//
// A token that is read in a rule does one of three things, or several where the grammar has more than one reading: it
// stays in the rule; it calls rules and stops inside them; or the rule ends within it, and the rest of its bytes is
// read where the caller goes on. Such rests are few: all that do the same, whatever the caller, have one number, and
// number 0 is the empty one. Tokens that do the same everywhere form a class.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/automaton.h"
#include "host/pushdown_rules.h"
#include "host/pushdown_walk.h"
#include "host/token_automaton.h"

namespace pdkernels {

class PushdownTokens {
 public:
  static constexpr int32_t kFar = std::numeric_limits<int32_t>::max() / 4;
  // After a token: a state (even), a state inside calls (odd), or the rest that the caller reads (below 0).
  using Outcome = int32_t;
  static bool is_state(Outcome outcome) { return outcome >= 0 && outcome % 2 == 0; }
  static bool is_chain(Outcome outcome) { return outcome >= 0 && outcome % 2 == 1; }
  static int32_t number(Outcome outcome) { return outcome >= 0 ? outcome / 2 : -outcome; }
  struct Chain {
    Outcome inner;  // a state, or a chain
    int32_t back;   // the state where the caller goes on after it
  };
  struct Step {
    int32_t by, to;  // class, number of a set of outcomes
  };
  struct Pair {
    int32_t back, rest;
  };

  // As TokenAutomaton. TooLarge: "work".
  PushdownTokens(const PushdownRules& rules, const std::vector<uint8_t>& text, const std::vector<int64_t>& offsets,
                 const std::vector<int64_t>& ends, int64_t max_work);

  int64_t vocabulary() const { return vocabulary_; }
  int64_t words() const { return (vocabulary_ + 31) / 32; }
  int64_t classes() const { return classes_; }
  int32_t states() const { return static_cast<int32_t>(rule_.size()); }
  int32_t rests() const { return rests_; }
  int32_t token_class(int64_t token) const { return class_of_[token]; }
  bool is_end(int64_t token) const { return is_end_[token] != 0; }
  bool has_ends() const { return has_ends_; }
  bool ends(int32_t state) const { return ends_[state] != 0; }
  int32_t rule(int32_t state) const { return rule_[state]; }
  const std::vector<int32_t>& returns(int32_t rule) const { return returns_[rule]; }
  const std::vector<Step>& steps(int32_t state) const { return steps_[state]; }
  const std::vector<Outcome>& outcomes(int32_t set) const { return sets_[set]; }
  int32_t sets() const { return static_cast<int32_t>(sets_.size()); }
  // All outcomes of tokens.
  const std::vector<Outcome>& following(int32_t state) const { return following_[state]; }
  const std::vector<Chain>& chains() const { return chains_; }
  const std::vector<Pair>& pairs() const { return pairs_; }
  const std::vector<Outcome>& outcomes_of_pair(int32_t pair) const { return sets_[pair_sets_[pair]]; }
  // The number of a state that goes on and the rest (at least 1) that it reads; -1: it cannot.
  int32_t pair(int32_t back, int32_t rest) const {
    const auto found = pair_numbers_.find({back, rest});
    return found == pair_numbers_.end() ? -1 : found->second;
  }

  // What a token of a class does; nothing: -1.
  int32_t follow(int32_t state, int32_t c) const {
    const auto& steps = steps_[state];
    const auto found =
        std::lower_bound(steps.begin(), steps.end(), c, [](const Step& step, int32_t by) { return step.by < by; });
    return found != steps.end() && found->by == c ? found->to : -1;
  }

  // The fewest tokens until the rule ends and leaves a rest, that token included; of a state, a chain and a pair.
  const int32_t* cost(int32_t state) const { return &state_costs_[static_cast<size_t>(state) * rests_]; }
  const int32_t* chain_cost(int32_t chain) const { return &chain_costs_[static_cast<size_t>(chain) * rests_]; }
  const int32_t* pair_cost(int32_t pair) const { return &pair_costs_[static_cast<size_t>(pair) * rests_]; }
  const int32_t* back_cost(int32_t back, int32_t rest) const {
    if (rest == 0) return cost(back);
    const int32_t number = pair(back, rest);
    return number < 0 ? nullptr : pair_cost(number);
  }

  // The bits of the tokens of some classes. Returns how many, and the last of them.
  std::pair<int64_t, int64_t> write(const uint8_t* fits, int32_t* bits) const {
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

 private:
  class Compiler;

  // Shortest ways, by rounds until nothing changes.
  void measure() {
    const size_t width = rests_;
    state_costs_.assign(width * states(), kFar);
    chain_costs_.assign(width * chains_.size(), kFar);
    pair_costs_.assign(width * pairs_.size(), kFar);
    for (int32_t state = 0; state < states(); ++state) {
      if (ends_[state]) state_costs_[state * width] = 0;
    }
    bool more = true;
    const auto lower = [&](int32_t& to, int32_t value) {
      if (value >= to) return;
      to = value;
      more = true;
    };
    const auto through = [&](const std::vector<Outcome>& outcomes, int32_t* to, int32_t taken) {
      for (const Outcome outcome : outcomes) {
        if (outcome < 0) {
          lower(to[-outcome], taken);
          continue;
        }
        const int32_t* from = is_state(outcome) ? cost(number(outcome)) : chain_cost(number(outcome));
        for (size_t rest = 0; rest < width; ++rest) lower(to[rest], from[rest] + taken);
      }
    };
    while (more) {
      more = false;
      for (size_t n = 0; n < chains_.size(); ++n) {
        const auto& [inner, back] = chains_[n];
        const int32_t* from = is_state(inner) ? cost(number(inner)) : chain_cost(number(inner));
        for (int32_t rest = 0; rest < rests_; ++rest) {
          if (from[rest] >= kFar) continue;
          const int32_t* further = back_cost(back, rest);
          for (size_t last = 0; further != nullptr && last < width; ++last) {
            lower(chain_costs_[n * width + last], from[rest] + further[last]);
          }
        }
      }
      for (size_t n = 0; n < pairs_.size(); ++n) through(sets_[pair_sets_[n]], &pair_costs_[n * width], 0);
      for (int32_t state = states() - 1; state >= 0; --state)
        through(following_[state], &state_costs_[state * width], 1);
    }
  }

  int64_t vocabulary_, classes_ = 0;
  int32_t rests_ = 1;
  std::vector<int32_t> class_of_;
  std::vector<uint8_t> is_end_;
  bool has_ends_;
  std::vector<uint8_t> ends_;
  std::vector<int32_t> rule_;
  std::vector<std::vector<int32_t>> returns_;
  std::vector<std::vector<Step>> steps_;
  std::vector<std::vector<Outcome>> sets_, following_;
  std::vector<Chain> chains_;
  std::vector<Pair> pairs_;
  std::vector<int32_t> pair_sets_;
  std::map<std::pair<int32_t, int32_t>, int32_t> pair_numbers_;
  std::vector<int32_t> state_costs_, chain_costs_, pair_costs_;
};

class PushdownTokens::Compiler {
 public:
  Compiler(PushdownTokens& made, const PushdownRules& rules, const std::vector<uint8_t>& text,
           const std::vector<int64_t>& offsets, int64_t max_work)
      : made_(made),
        rules_(rules),
        text_(text),
        offsets_(offsets),
        work_(max_work),
        walk_(rules),
        tree_(text, offsets) {
    for (int32_t rule = 0; rule < rules.rules(); ++rule) {
      all_returns_.insert(all_returns_.end(), rules.returns(rule).begin(), rules.returns(rule).end());
    }
    std::sort(all_returns_.begin(), all_returns_.end());
    all_returns_.erase(std::unique(all_returns_.begin(), all_returns_.end()), all_returns_.end());
  }

  void run() {
    state(rules_.start());
    for (const int32_t back : all_returns_) state(back);
    for (size_t at = 0; at < byte_states_.size(); ++at) read(byte_states_[at]);
    for (int32_t rule = 0; rule < rules_.rules(); ++rule) {
      auto& to = made_.returns_.emplace_back();
      for (const int32_t back : rules_.returns(rule)) to.push_back(numbers_.at(back));
    }
    name_classes();
    list_steps();
  }

 private:
  void spend(int64_t steps) {
    work_ -= steps;
    if (work_ < 0) throw TooLarge("work");
  }

  int32_t state(int32_t byte_state) {
    const auto [place, fresh] = numbers_.emplace(byte_state, static_cast<int32_t>(byte_states_.size()));
    if (fresh) {
      byte_states_.push_back(byte_state);
      made_.ends_.push_back(rules_.ends(byte_state));
      made_.rule_.push_back(rules_.rule_of(byte_state));
    }
    return place->second;
  }

  Outcome outcome(int32_t byte_state, int32_t stack) {
    Outcome reached = 2 * state(byte_state);
    for (; stack != 0; stack = walk_.level(stack).below) {
      const std::pair<Outcome, int32_t> chain{reached, state(walk_.level(stack).back)};
      const auto [place, fresh] = chains_.emplace(chain, static_cast<int32_t>(made_.chains_.size()));
      if (fresh) made_.chains_.push_back({chain.first, chain.second});
      reached = 2 * place->second + 1;
    }
    return reached;
  }

  int32_t set(std::vector<Outcome> outcomes) {
    std::sort(outcomes.begin(), outcomes.end());
    outcomes.erase(std::unique(outcomes.begin(), outcomes.end()), outcomes.end());
    const auto [place, fresh] = sets_.emplace(outcomes, static_cast<int32_t>(made_.sets_.size()));
    if (fresh) made_.sets_.push_back(std::move(outcomes));
    return place->second;
  }

  // All tokens that a state may read.
  void read(int32_t byte_state) {
    std::vector<std::pair<int64_t, Outcome>> found;
    const auto popped = [&](size_t node) {
      for (const auto& [id, rest] : below(node, rules_.rule_of(byte_state))) found.emplace_back(id, -rest);
    };
    tree_.descend(
        TokenTree::kRoot, walk_.begin({byte_state}, true),
        [&](const PushdownWalk::Reading& from, uint8_t byte, size_t node, PushdownWalk::Reading& to) {
          const bool leads = walk_.step(from, byte, to);
          spend(1);
          if (leads && to.popped) popped(node);
          return leads;
        },
        [&](int64_t id, int32_t, const PushdownWalk::Reading& reading) {
          for (const auto& [reached, stack] : reading.reached) found.emplace_back(id, outcome(reached, stack));
        });
    std::sort(found.begin(), found.end());
    auto& alive = alive_.emplace_back();
    for (size_t first = 0, last = 0; first < found.size(); first = last) {
      std::vector<Outcome> outcomes;
      for (; last < found.size() && found[last].first == found[first].first; ++last)
        outcomes.push_back(found[last].second);
      alive.emplace_back(static_cast<int32_t>(found[first].first), set(std::move(outcomes)));
    }
    spend(static_cast<int64_t>(found.size()));
  }

  // The tokens that go on after the bytes of a node, where a rule ends, and the rests that they leave.
  const std::vector<std::pair<int64_t, int32_t>>& below(size_t node, int32_t rule) {
    const auto [place, fresh] = below_.emplace(std::pair(node, rule), std::vector<std::pair<int64_t, int32_t>>());
    if (!fresh || rules_.returns(rule).empty()) return place->second;
    std::vector<int64_t> surviving;
    tree_.descend(
        node, walk_.begin(rules_.returns(rule), false, true),
        [&](const PushdownWalk::Reading& from, uint8_t byte, size_t, PushdownWalk::Reading& to) {
          spend(1);
          return walk_.step(from, byte, to, true);
        },
        [&](int64_t id, int32_t, const PushdownWalk::Reading&) { surviving.push_back(id); });
    std::vector<std::pair<int64_t, int32_t>> made;
    for (const int64_t id : surviving) {
      const auto first = text_.begin() + offsets_[id] + tree_.length(node), last = text_.begin() + offsets_[id + 1];
      const int32_t number = rest(std::string(first, last));
      const auto& backs = rules_.returns(rule);
      const bool read = number > 0 && std::any_of(backs.begin(), backs.end(),
                                                  [&](int32_t back) { return made_.pair(state(back), number) >= 0; });
      if (read) made.emplace_back(id, number);
    }
    return below_[std::pair(node, rule)] = std::move(made);
  }

  // The number of a rest; 0: nothing reads it.
  int32_t rest(const std::string& bytes) {
    const auto known = rests_.find(bytes);
    if (known != rests_.end()) return known->second;
    constexpr int32_t kItself = std::numeric_limits<int32_t>::min();
    std::vector<std::vector<Outcome>> all;
    bool any = false;
    for (const int32_t back : all_returns_) {
      auto& outcomes = all.emplace_back();
      PushdownWalk::Reading reading = walk_.begin({back}, false), next;
      if (reading.popped) outcomes.push_back(kItself);
      bool leads = true;
      for (size_t at = 0; leads && at < bytes.size(); ++at) {
        spend(1);
        if (at > 0 && reading.popped) {
          const int32_t further = rest(bytes.substr(at));
          if (further > 0) outcomes.push_back(-further);
        }
        leads = walk_.step(reading, static_cast<uint8_t>(bytes[at]), next);
        std::swap(reading, next);
      }
      for (size_t n = 0; leads && n < reading.reached.size(); ++n) {
        outcomes.push_back(outcome(reading.reached[n].first, reading.reached[n].second));
      }
      std::sort(outcomes.begin(), outcomes.end());
      outcomes.erase(std::unique(outcomes.begin(), outcomes.end()), outcomes.end());
      any = any || (!outcomes.empty() && outcomes.back() != kItself);
    }
    if (!any) return rests_[bytes] = 0;
    const auto [place, fresh] = same_.emplace(all, made_.rests_);
    if (fresh) {
      const int32_t number = made_.rests_++;
      for (size_t n = 0; n < all.size(); ++n) {
        if (all[n].empty()) continue;
        if (all[n][0] == kItself) all[n][0] = -number;
        made_.pair_numbers_[{state(all_returns_[n]), number}] = static_cast<int32_t>(made_.pairs_.size());
        made_.pairs_.push_back({state(all_returns_[n]), number});
        made_.pair_sets_.push_back(set(all[n]));
      }
    }
    return rests_[bytes] = place->second;
  }

  // Parts the tokens by what they do, state by state; ends are classes of their own.
  void name_classes() {
    auto& class_of = made_.class_of_;
    int32_t names = 1;
    for (const auto& alive : alive_) {
      std::unordered_map<uint64_t, int32_t> fresh;
      for (const auto& [id, set] : alive) {
        const uint64_t key = static_cast<uint64_t>(class_of[id]) << 32 | static_cast<uint32_t>(set);
        const auto [place, added] = fresh.emplace(key, names);
        names += added;
        class_of[id] = place->second;
      }
    }
    std::unordered_map<int64_t, int32_t> numbers;
    for (int64_t id = 0; id < made_.vocabulary_; ++id) {
      const int64_t key = 2 * static_cast<int64_t>(class_of[id]) + made_.is_end_[id];
      const auto [place, added] = numbers.emplace(key, static_cast<int32_t>(made_.classes_));
      made_.classes_ += added;
      class_of[id] = place->second;
    }
  }

  void list_steps() {
    std::vector<size_t> seen(made_.classes_, ~size_t{0});
    for (size_t n = 0; n < alive_.size(); ++n) {
      auto& steps = made_.steps_.emplace_back();
      auto& following = made_.following_.emplace_back();
      std::vector<uint8_t> used(made_.sets_.size(), 0);
      for (const auto& [id, set] : alive_[n]) {
        const int32_t c = made_.class_of_[id];
        if (seen[c] == n) continue;
        seen[c] = n;
        steps.push_back({c, set});
        if (used[set]) continue;
        used[set] = 1;
        following.insert(following.end(), made_.sets_[set].begin(), made_.sets_[set].end());
      }
      std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.by < b.by; });
      std::sort(following.begin(), following.end());
      following.erase(std::unique(following.begin(), following.end()), following.end());
      std::vector<std::pair<int32_t, int32_t>>().swap(alive_[n]);
    }
  }

  PushdownTokens& made_;
  const PushdownRules& rules_;
  const std::vector<uint8_t>& text_;
  const std::vector<int64_t>& offsets_;
  int64_t work_;
  PushdownWalk walk_;
  TokenTree tree_;
  std::vector<int32_t> all_returns_, byte_states_;
  std::unordered_map<int32_t, int32_t> numbers_;
  std::map<std::pair<Outcome, int32_t>, int32_t> chains_;
  std::map<std::vector<Outcome>, int32_t> sets_;
  std::map<std::pair<size_t, int32_t>, std::vector<std::pair<int64_t, int32_t>>> below_;
  std::unordered_map<std::string, int32_t> rests_;
  std::map<std::vector<std::vector<Outcome>>, int32_t> same_;
  std::vector<std::vector<std::pair<int32_t, int32_t>>> alive_;  // of each state, tokens and sets of outcomes
};

inline PushdownTokens::PushdownTokens(const PushdownRules& rules, const std::vector<uint8_t>& text,
                                      const std::vector<int64_t>& offsets, const std::vector<int64_t>& ends,
                                      int64_t max_work)
    : vocabulary_(static_cast<int64_t>(offsets.size()) - 1),
      class_of_(vocabulary_, 0),
      is_end_(vocabulary_, 0),
      has_ends_(!ends.empty()) {
  for (const int64_t id : ends) is_end_[id] = 1;
  Compiler(*this, rules, text, offsets, max_work).run();
  measure();
}

}  // namespace pdkernels
