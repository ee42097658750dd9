// What bytes do to a pushdown automaton, above a stack that nobody knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "host/pushdown_rules.h"

namespace pdkernels {

// Reads bytes from a state. What has been called since then is a stack; number 0 is the empty one.
class PushdownWalk {
 public:
  using Place = std::pair<int32_t, int32_t>;  // state, stack
  struct Level {
    int32_t back, below;  // the state after the call, the stack below it
  };
  struct Reading {
    std::vector<Place> reached;  // after the bytes so far
    std::vector<Place> open;     // all that may read the next byte
    bool popped = false;         // the rule that the reading began in may end here
  };

  explicit PushdownWalk(const PushdownRules& rules) : rules_(rules) {}

  const Level& level(int32_t stack) const { return levels_[stack - 1]; }

  // Before any byte. `fresh`: whether the rule may not end at once. `anywhere`: after its end, all states that it may
  // come back to are open as well.
  Reading begin(const std::vector<int32_t>& states, bool fresh, bool anywhere = false) {
    Reading reading;
    for (const int32_t state : states) reading.reached.emplace_back(state, 0);
    open(reading, fresh, anywhere);
    return reading;
  }

  // Whether a byte leads on.
  bool step(const Reading& from, uint8_t byte, Reading& to, bool anywhere = false) {
    to.reached.clear();
    for (const auto& [state, stack] : from.open) {
      const int32_t next = rules_.next(state, byte);
      if (next >= 0) to.reached.emplace_back(next, stack);
    }
    std::sort(to.reached.begin(), to.reached.end());
    to.reached.erase(std::unique(to.reached.begin(), to.reached.end()), to.reached.end());
    if (to.reached.empty()) return false;
    open(to, false, anywhere);
    return true;
  }

 private:
  void open(Reading& reading, bool fresh, bool anywhere) {
    reading.open.clear();
    reading.popped = false;
    ended_.clear();
    for (const auto& [state, stack] : reading.reached) visit(reading, state, stack, fresh, anywhere);
    std::sort(reading.open.begin(), reading.open.end());
    reading.open.erase(std::unique(reading.open.begin(), reading.open.end()), reading.open.end());
  }

  void visit(Reading& reading, int32_t state, int32_t stack, bool fresh, bool anywhere) {
    for (const int32_t here : rules_.silent(state)) {
      reading.open.emplace_back(here, stack);
      for (const auto& call : rules_.calls(here))
        visit(reading, rules_.entry(call.rule), push(call.back, stack), true, anywhere);
    }
    if (fresh || !rules_.ends(state)) return;
    if (std::find(ended_.begin(), ended_.end(), Place(state, stack)) != ended_.end()) return;
    ended_.emplace_back(state, stack);
    if (stack != 0) {
      const Level above = level(stack);
      visit(reading, above.back, above.below, false, anywhere);
      return;
    }
    reading.popped = true;
    if (!anywhere) return;
    for (const int32_t back : rules_.returns(rules_.rule_of(state))) visit(reading, back, 0, false, anywhere);
  }

  int32_t push(int32_t back, int32_t below) {
    const auto [place, fresh] = numbers_.emplace(Place(back, below), static_cast<int32_t>(levels_.size()) + 1);
    if (fresh) levels_.push_back({back, below});
    return place->second;
  }

  const PushdownRules& rules_;
  std::vector<Level> levels_;
  std::map<Place, int32_t> numbers_;
  std::vector<Place> ended_;
};

}  // namespace pdkernels
