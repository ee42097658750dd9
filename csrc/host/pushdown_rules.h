// Grammars whose rules call each other: an automaton over bytes for each rule, where some edges call a rule and go on
// after its text.
//
// Expressions and their automata know nothing of calls. A call of rule n is written as three bytes, kCall and the two
// of n; kCall is part of no text in UTF-8.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/automaton.h"

namespace pdkernels {

class PushdownRules {
 public:
  static constexpr uint8_t kCall = 0xFE;
  struct Call {
    int32_t rule, back;  // back: the state after the text of the rule
  };

  // The first rule is the whole grammar. std::invalid_argument: a call of a rule that is not there. Rules that no text
  // has are not called. A rule that begins with itself repeats what follows there, if it does so directly.
  explicit PushdownRules(const std::vector<ByteAutomaton>& rules) {
    for (const ByteAutomaton& rule : rules) add(rule, static_cast<int64_t>(rules.size()));
    productive();
    nullable();
    left_recursive();
    gather();
  }

  int64_t states() const { return static_cast<int64_t>(accepting_.size()); }
  int64_t rules() const { return static_cast<int64_t>(entry_.size()); }
  int32_t start() const { return entry_[0]; }
  bool empty() const { return !alive_[entry_[0]]; }
  // A rule that begins with itself through other rules; -1: none.
  int32_t looping() const { return looping_; }
  int32_t rule_of(int32_t state) const { return rule_of_[state]; }
  // Whether the text of the state's rule may end here, when something of it is there.
  bool ends(int32_t state) const { return ends_[state] != 0; }
  // The states that calls of a rule come back to.
  const std::vector<int32_t>& returns(int32_t rule) const { return returns_[rule]; }
  int32_t next(int32_t state, uint8_t byte) const { return next_[static_cast<size_t>(state) * 256 + byte]; }
  const std::vector<Call>& calls(int32_t state) const { return calls_[state]; }
  int32_t entry(int32_t rule) const { return entry_[rule]; }
  // The states that are reached without a byte or a call, itself among them.
  const std::vector<int32_t>& silent(int32_t state) const { return silent_[state]; }

 private:
  void add(const ByteAutomaton& rule, int64_t count) {
    const int32_t first = static_cast<int32_t>(states());
    // An entry of its own, to which nothing leads back.
    const auto copy = [&](int64_t state) {
      const int32_t* line = rule.line(state);
      std::vector<Call> calls;
      for (int32_t byte = 0; byte < 256; ++byte) {
        next_.push_back(byte == kCall || line[byte] < 0 ? -1 : first + 1 + line[byte]);
      }
      for (int32_t high = 0; line[kCall] >= 0 && high < 256; ++high) {
        const int32_t middle = rule.line(line[kCall])[high];
        for (int32_t low = 0; middle >= 0 && low < 256; ++low) {
          const int32_t back = rule.line(middle)[low];
          if (back < 0) continue;
          if (256 * high + low >= count) throw std::invalid_argument("pdkernels.PushdownRules: no such rule.");
          calls.push_back({256 * high + low, first + 1 + back});
        }
      }
      calls_.push_back(std::move(calls));
      accepting_.push_back(rule.accepting[state]);
      rule_of_.push_back(static_cast<int32_t>(entry_.size()));
    };
    if (rule.states() > 0) {
      for (int64_t state = -1; state < rule.states(); ++state) copy(std::max<int64_t>(state, 0));
    } else {
      next_.insert(next_.end(), 256, -1);
      calls_.emplace_back();
      accepting_.push_back(0);
      rule_of_.push_back(static_cast<int32_t>(entry_.size()));
    }
    entry_.push_back(first);
  }

  // Marks the states from which a rule can be completed, and takes out what leads to others.
  void productive() {
    alive_ = accepting_;
    for (bool more = true; more;) {
      more = false;
      for (int64_t state = states() - 1; state >= 0; --state) {
        if (alive_[state]) continue;
        const int32_t* line = &next_[state * 256];
        alive_[state] = std::any_of(line, line + 256, [&](int32_t to) { return to >= 0 && alive_[to]; }) ||
                        std::any_of(calls_[state].begin(), calls_[state].end(),
                                    [&](const Call& call) { return alive_[entry_[call.rule]] && alive_[call.back]; });
        more = more || alive_[state];
      }
    }
    for (int32_t& to : next_) to = to >= 0 && alive_[to] ? to : -1;
    for (auto& calls : calls_) {
      std::erase_if(calls, [&](const Call& call) { return !alive_[entry_[call.rule]] || !alive_[call.back]; });
    }
  }

  // Calls of rules that have the empty text may be left out.
  void nullable() {
    empty_.assign(rules(), 0);
    silent_.resize(states());
    for (int32_t state = 0; state < states(); ++state) silent_[state] = {state};
    for (bool more = true; more;) {
      more = false;
      for (int32_t state = 0; state < states(); ++state) {
        for (const Call& call : calls_[state]) {
          if (empty_[call.rule]) more |= join(state, call.back);
        }
      }
      for (int32_t rule = 0; rule < rules(); ++rule) {
        const auto& reached = silent_[entry_[rule]];
        if (empty_[rule] || std::none_of(reached.begin(), reached.end(), [&](int32_t to) { return accepting_[to]; })) {
          continue;
        }
        empty_[rule] = 1;
        more = true;
      }
    }
  }

  // Whether it is new that a state leads to another, and to all that that one leads to.
  bool join(int32_t from, int32_t to) {
    auto& reached = silent_[from];
    const size_t before = reached.size();
    const std::vector<int32_t> further = silent_[to];
    for (const int32_t state : further) {
      if (std::find(reached.begin(), reached.end(), state) == reached.end()) reached.push_back(state);
    }
    return reached.size() > before;
  }

  void left_recursive() {
    std::vector<std::pair<int32_t, int32_t>> repeats;  // of a rule, where its text goes on after itself
    for (int32_t rule = 0; rule < rules(); ++rule) {
      const int32_t entry = entry_[rule];
      std::vector<Call> first;
      for (const int32_t state : silent_[entry]) {
        first.insert(first.end(), calls_[state].begin(), calls_[state].end());
      }
      if (std::none_of(first.begin(), first.end(), [&](const Call& call) { return call.rule == rule; })) continue;
      if (silent_[entry].size() > 1) continue;  // what precedes it may be empty: found below
      for (const Call& call : first) {
        if (call.rule == rule) repeats.emplace_back(rule, call.back);
      }
      std::erase_if(calls_[entry], [&](const Call& call) { return call.rule == rule; });
    }
    for (const auto& [rule, back] : repeats) {
      for (int32_t state = 0; state < states(); ++state) {
        if (rule_of_[state] == rule && accepting_[state]) join(state, back);
      }
    }
    for (bool more = !repeats.empty(); more;) {
      more = false;
      for (int32_t state = 0; state < states(); ++state) {
        for (const int32_t to : std::vector<int32_t>(silent_[state])) more |= to != state && join(state, to);
      }
    }
    // What else begins with itself.
    std::vector<uint8_t> colour(rules(), 0);
    for (int32_t rule = 0; rule < rules() && looping_ < 0; ++rule) visit(rule, colour);
  }

  void visit(int32_t rule, std::vector<uint8_t>& colour) {
    if (colour[rule] == 2 || looping_ >= 0) return;
    if (colour[rule] == 1) {
      looping_ = rule;
      return;
    }
    colour[rule] = 1;
    for (const int32_t state : silent_[entry_[rule]]) {
      for (const Call& call : calls_[state]) visit(call.rule, colour);
    }
    colour[rule] = 2;
  }

  void gather() {
    returns_.resize(rules());
    ends_.resize(states());
    for (int32_t state = 0; state < states(); ++state) {
      for (const Call& call : calls_[state]) returns_[call.rule].push_back(call.back);
      ends_[state] =
          std::any_of(silent_[state].begin(), silent_[state].end(), [&](int32_t to) { return accepting_[to]; });
    }
    for (auto& states : returns_) {
      std::sort(states.begin(), states.end());
      states.erase(std::unique(states.begin(), states.end()), states.end());
    }
  }

  std::vector<int32_t> next_;
  std::vector<std::vector<Call>> calls_;
  std::vector<uint8_t> accepting_, alive_, empty_, ends_;
  std::vector<int32_t> rule_of_, entry_;
  std::vector<std::vector<int32_t>> silent_, returns_;
  int32_t looping_ = -1;
};

}  // namespace pdkernels
