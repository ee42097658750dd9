// Deterministic automata over bytes: from nondeterministic ones, and products of two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pdkernels {

struct ByteEdge {
  int32_t from, first, last, to;  // on the bytes first .. last
};

struct ByteAutomaton {
  std::vector<int32_t> next;       // states x 256; -1: no text goes on like this
  std::vector<uint8_t> accepting;  // per state
  int64_t work = 0;                // steps of the construction
  int64_t states() const { return static_cast<int64_t>(accepting.size()); }
  const int32_t* line(int64_t state) const { return next.data() + state * 256; }

  // Ranges of bytes that lead from a state to another one: `use(first, last, to)`.
  template <class Use>
  void runs(int64_t state, Use&& use) const {
    const int32_t* to = line(state);
    for (int32_t first = 0, last = 0; first < 256; first = ++last) {
      while (last < 255 && to[last + 1] == to[first]) ++last;
      if (to[first] >= 0) use(first, last, to[first]);
    }
  }
};

// Says of what there is too much, and the steps that were taken until then, if they were counted.
class TooLarge : public std::runtime_error {
 public:
  explicit TooLarge(const std::string& bound, int64_t work = 0)
      : std::runtime_error(work > 0 ? bound + " " + std::to_string(work) : bound) {}
};

namespace automaton_detail {

// Values of states, those of a state one after another.
template <class Value>
class Grouped {
 public:
  template <class Values, class State>
  Grouped(int64_t states, const Values& values, State&& state_of) : first_(states + 1, 0), values_(values.size()) {
    for (const Value& value : values) ++first_[state_of(value) + 1];
    for (int64_t state = 0; state < states; ++state) first_[state + 1] += first_[state];
    std::vector<int64_t> at(first_.begin(), first_.end() - 1);
    for (const Value& value : values) values_[at[state_of(value)]++] = value;
  }

  std::span<const Value> of(int64_t state) const {
    return {values_.data() + first_[state], static_cast<size_t>(first_[state + 1] - first_[state])};
  }

 private:
  std::vector<int64_t> first_;
  std::vector<Value> values_;
};

struct HashOfStates {
  size_t operator()(const std::vector<int32_t>& states) const {
    uint64_t hash = 14695981039346656037ull;  // FNV-1a, a state at a time
    for (const int32_t state : states) hash = (hash ^ static_cast<uint32_t>(state)) * 1099511628211ull;
    return static_cast<size_t>(hash ^ hash >> 32);
  }
};

// The states that no byte leads away from matter only for their empty edges.
class Closure {
 public:
  Closure(int64_t states, const std::vector<std::pair<int32_t, int32_t>>& empty, const std::vector<uint8_t>& kept)
      : empty_(states, empty, [](const auto& edge) { return edge.first; }), kept_(kept), mark_(states, 0) {}

  // Sorted, without the states that are not kept.
  std::vector<int32_t> of(const std::vector<int32_t>& from, int64_t& work) {
    std::vector<int32_t> stack, found;
    ++stamp_;
    for (const int32_t state : from) push(state, stack);
    while (!stack.empty()) {
      const int32_t state = stack.back();
      stack.pop_back();
      ++work;
      if (kept_[state]) found.push_back(state);
      for (const auto& [from, next] : empty_.of(state)) push(next, stack);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  void push(int32_t state, std::vector<int32_t>& stack) {
    if (mark_[state] == stamp_) return;
    mark_[state] = stamp_;
    stack.push_back(state);
  }

  Grouped<std::pair<int32_t, int32_t>> empty_;
  const std::vector<uint8_t>& kept_;
  std::vector<int64_t> mark_;
  int64_t stamp_ = 0;
};

// Numbers of the states from which an accepting one is reached, in their order; -1 of the others. `successors(state,
// use)` calls `use` with each state that follows one.
template <class Successors>
std::vector<int32_t> useful(const std::vector<uint8_t>& accepting, Successors&& successors) {
  const int64_t count = static_cast<int64_t>(accepting.size());
  std::vector<std::vector<int32_t>> before(count);
  std::vector<int32_t> numbers(count, -1), stack;
  const auto reach = [&](int32_t state) {
    if (numbers[state] == 0) return;
    numbers[state] = 0;
    stack.push_back(state);
  };
  for (int32_t state = 0; state < count; ++state) {
    successors(state, [&](int32_t to) { before[to].push_back(state); });
    if (accepting[state]) reach(state);
  }
  while (!stack.empty()) {
    const int32_t state = stack.back();
    stack.pop_back();
    for (const int32_t from : before[state]) reach(from);
  }
  int32_t next = 0;
  for (int32_t& number : numbers) number = number == 0 ? next++ : -1;
  return numbers;
}

}  // namespace automaton_detail

// State 0 is the start. States from which no text is accepted are left out; without any, the result has no states.
// TooLarge: more than `max_states`, or more than `max_work` steps, `work` of which were taken before.
inline ByteAutomaton determinise(int64_t states, const std::vector<ByteEdge>& edges,
                                 const std::vector<std::pair<int32_t, int32_t>>& empty, int32_t start, int32_t accept,
                                 int64_t max_states, int64_t max_work, int64_t work = 0) {
  std::vector<uint8_t> kept(states, 0);
  kept[accept] = 1;
  const automaton_detail::Grouped<ByteEdge> leaving(states, edges, [](const ByteEdge& edge) { return edge.from; });
  std::vector<uint8_t> borders(257, 0);  // bytes between two borders are never told apart
  for (const ByteEdge& edge : edges) {
    kept[edge.from] = 1;
    borders[edge.first] = borders[edge.last + 1] = 1;
  }
  std::vector<int32_t> firsts{0};
  for (int32_t byte = 1; byte < 256; ++byte) {
    if (borders[byte]) firsts.push_back(byte);
  }
  const int64_t parts = static_cast<int64_t>(firsts.size());
  std::vector<int32_t> part_of(257, static_cast<int32_t>(parts));
  for (int64_t part = 0; part < parts; ++part) {
    const int32_t end = part + 1 < parts ? firsts[part + 1] : 256;
    for (int32_t byte = firsts[part]; byte < end; ++byte) part_of[byte] = static_cast<int32_t>(part);
  }

  automaton_detail::Closure closure(states, empty, kept);
  std::unordered_map<std::vector<int32_t>, int32_t, automaton_detail::HashOfStates> known;
  std::vector<const std::vector<int32_t>*> sets;
  std::vector<int32_t> reached;  // by states and parts
  const auto number = [&](std::vector<int32_t> set) {
    const auto [place, fresh] = known.emplace(std::move(set), static_cast<int32_t>(sets.size()));
    if (fresh) {
      if (static_cast<int64_t>(sets.size()) >= max_states) throw TooLarge("states", work);
      sets.push_back(&place->first);
    }
    return place->second;
  };
  number(closure.of({start}, work));
  std::vector<std::vector<int32_t>> targets(parts);
  for (size_t at = 0; at < sets.size(); ++at) {
    for (auto& target : targets) target.clear();
    for (const int32_t state : *sets[at]) {
      for (const ByteEdge& edge : leaving.of(state)) {
        for (int32_t part = part_of[edge.first]; part < part_of[edge.last + 1]; ++part) {
          targets[part].push_back(edge.to);
          ++work;
        }
      }
    }
    reached.resize((at + 1) * parts, -1);
    int32_t* line = reached.data() + at * parts;
    for (int64_t part = 0; part < parts; ++part) {
      if (!targets[part].empty()) {
        // Most bytes lead where their neighbours lead.
        line[part] =
            part > 0 && targets[part] == targets[part - 1] ? line[part - 1] : number(closure.of(targets[part], work));
      }
      if (work > max_work) throw TooLarge("work", work);
    }
  }

  // Leave out what leads nowhere.
  const int64_t count = static_cast<int64_t>(sets.size());
  std::vector<uint8_t> accepting(count);
  for (int64_t state = 0; state < count; ++state) {
    accepting[state] = std::binary_search(sets[state]->begin(), sets[state]->end(), accept);
  }
  const std::vector<int32_t> place = automaton_detail::useful(accepting, [&](int32_t state, auto&& use) {
    int32_t last = -1;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t to = reached[state * parts + part];
      if (to >= 0 && to != last) use(last = to);
    }
  });
  ByteAutomaton made;
  made.work = work;
  if (place[0] < 0) return made;
  for (int64_t state = 0; state < count; ++state) {
    if (place[state] < 0) continue;
    made.accepting.push_back(accepting[state]);
    for (int32_t byte = 0; byte < 256; ++byte) {
      const int32_t to = reached[state * parts + part_of[byte]];
      made.next.push_back(to < 0 ? -1 : place[to]);
    }
  }
  return made;
}

// The texts of the first automaton that the second one has, or (`intersect` false) has not; without any, the result has
// no states. TooLarge: more than `max_states`, or more than `max_work` steps.
inline ByteAutomaton product(const ByteAutomaton& first, const ByteAutomaton& second, bool intersect,
                             int64_t max_states, int64_t max_work) {
  ByteAutomaton all;
  std::vector<std::pair<int32_t, int32_t>> pairs;  // -1: the second one has no such text
  std::unordered_map<int64_t, int32_t> known;
  const auto number = [&](int32_t to, int32_t beside) {
    const auto [place, fresh] = known.emplace(static_cast<int64_t>(to) * (second.states() + 1) + beside + 1,
                                              static_cast<int32_t>(pairs.size()));
    if (fresh) {
      if (static_cast<int64_t>(pairs.size()) >= max_states) throw TooLarge("states", all.work);
      pairs.emplace_back(to, beside);
    }
    return place->second;
  };
  if (first.states() == 0) return all;
  number(0, second.states() > 0 ? 0 : -1);
  for (size_t at = 0; at < pairs.size(); ++at) {
    const auto [here, other] = pairs[at];
    const int32_t *line = first.line(here), *other_line = other < 0 ? nullptr : second.line(other);
    int32_t last_to = -1, last_beside = -1, last = -1;  // most bytes lead where their neighbours lead
    for (int32_t byte = 0; byte < 256; ++byte) {
      const int32_t to = line[byte], beside = other_line == nullptr ? -1 : other_line[byte];
      const bool none = to < 0 || (intersect && beside < 0);
      if (!none && (last < 0 || to != last_to || beside != last_beside)) {
        last = number(to, beside);
        last_to = to;
        last_beside = beside;
      }
      all.next.push_back(none ? -1 : last);
    }
    all.accepting.push_back(first.accepting[here] && (other >= 0 && second.accepting[other]) == intersect);
    all.work += 256;
    if (all.work > max_work) throw TooLarge("work", all.work);
  }
  const std::vector<int32_t> place = automaton_detail::useful(all.accepting, [&](int32_t state, auto&& use) {
    all.runs(state, [&](int32_t, int32_t, int32_t to) { use(to); });
  });
  ByteAutomaton made;
  made.work = all.work;
  if (place[0] < 0) return made;
  for (int64_t state = 0; state < all.states(); ++state) {
    if (place[state] < 0) continue;
    made.accepting.push_back(all.accepting[state]);
    for (int32_t byte = 0; byte < 256; ++byte) {
      const int32_t to = all.line(state)[byte];
      made.next.push_back(to < 0 ? -1 : place[to]);
    }
  }
  return made;
}

}  // namespace pdkernels
