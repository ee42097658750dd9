// The smallest automaton that accepts some texts, made in one pass over them in their order (Daciuk, Mihov, Watson and
// Watson, "Incremental construction of minimal acyclic finite-state automata", 2000).
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "host/automaton.h"

namespace pdkernels {

namespace texts_detail {

struct State {
  bool accepting = false;
  std::vector<std::pair<uint8_t, int32_t>> edges;  // ascending

  bool operator<(const State& other) const {
    return accepting != other.accepting ? accepting < other.accepting : edges < other.edges;
  }
};

// States that are finished, and those of the last text, which later ones may still continue.
class Builder {
 public:
  explicit Builder(int64_t max_states) : max_states_(max_states), open_(1) {}

  // `text` comes after the texts before it.
  void add(const std::string& text, size_t shared) {
    finish(shared);
    bytes_ = text;
    open_.resize(text.size() + 1);
    open_.back().accepting = true;
  }

  // The states of the last text after `depth` bytes are open no more.
  void finish(size_t depth) {
    while (open_.size() > depth + 1) {
      const int32_t state = number(std::move(open_.back()));
      open_.pop_back();
      open_.back().edges.emplace_back(static_cast<uint8_t>(bytes_[open_.size() - 1]), state);
    }
  }

  ByteAutomaton made() {
    finish(0);
    number(std::move(open_.front()));
    const int64_t count = static_cast<int64_t>(known_.size());
    ByteAutomaton automaton;
    automaton.next.assign(static_cast<size_t>(count) * 256, -1);
    automaton.accepting.assign(count, 0);
    for (const auto& [state, number] : known_) {
      const int64_t from = count - 1 - number;  // the start was the last to be finished
      automaton.accepting[from] = state.accepting;
      for (const auto& [byte, to] : state.edges) {
        automaton.next[static_cast<size_t>(from) * 256 + byte] = static_cast<int32_t>(count - 1 - to);
      }
    }
    return automaton;
  }

 private:
  // Of an earlier state that goes on in the same ways, or a new one.
  int32_t number(State state) {
    const auto [place, fresh] = known_.emplace(std::move(state), static_cast<int32_t>(known_.size()));
    if (fresh && static_cast<int64_t>(known_.size()) > max_states_) throw TooLarge("states");
    return place->second;
  }

  int64_t max_states_;
  std::string bytes_;
  std::vector<State> open_;
  std::map<State, int32_t> known_;
};

}  // namespace texts_detail

// TooLarge: more than `max_states`. Without texts the result has no states.
inline ByteAutomaton automaton_of_texts(std::vector<std::string> texts, int64_t max_states) {
  if (texts.empty()) return {};
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  texts_detail::Builder builder(max_states);
  int64_t work = 0;
  for (size_t n = 0; n < texts.size(); ++n) {
    size_t shared = 0;
    if (n > 0) {
      const auto parted = std::mismatch(texts[n - 1].begin(), texts[n - 1].end(), texts[n].begin(), texts[n].end());
      shared = static_cast<size_t>(parted.first - texts[n - 1].begin());
    }
    builder.add(texts[n], shared);
    work += static_cast<int64_t>(texts[n].size() - shared);
  }
  ByteAutomaton automaton = builder.made();
  automaton.work = work;
  return automaton;
}

}  // namespace pdkernels
