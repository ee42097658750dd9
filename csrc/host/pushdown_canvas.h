// What may stand in a canvas, rows of tokens where some are still masked, under a pushdown automaton.
//
// A call ends at a boundary between two tokens and leaves a rest of the token before it (0: none); that pair is an
// exit. A first pass goes from the last boundary to the first one and finds the exits of the rule that each state is
// in, whatever called it: those of a call are followed by what its caller does there. This is the product of a grammar
// with a finite automaton (Bar-Hillel, Perles and Shamir 1961), a row of exits at a time. A second pass goes the other
// way and finds, of each state, the exits after which the rest of the canvas can be completed, for calls that really
// lead there. A token is possible if it leads to a state that has one of these.
//
// For n positions this takes time n^3 and memory n^2, both over 64, the bits of a word; n^2 where masks follow each
// other, because there only what differs from the next boundary is followed (pushdown_memo.h). Tokens after the canvas
// are not listed: an exit there is the fewest of them that it takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "host/pushdown_memo.h"
#include "host/pushdown_states.h"

namespace pdkernels {

class PushdownCanvas {
 public:
  static constexpr int64_t kMask = -1;
  using Outcome = PushdownTokens::Outcome;

  // `given`: positions after these are tokens after the canvas, which a text may end before.
  PushdownCanvas(const PushdownStates& states, std::vector<int64_t> canvas, int32_t start, int64_t budget, bool listed,
                 int32_t given = std::numeric_limits<int32_t>::max())
      : states_(states),
        tokens_(states.tokens()),
        canvas_(std::move(canvas)),
        length_(static_cast<int32_t>(canvas_.size())),
        given_(std::min(given, length_)),
        rests_(tokens_.rests()),
        budget_(static_cast<int32_t>(std::min<int64_t>(budget, PushdownTokens::kFar - 1))),
        tail_(length_),
        words_((static_cast<int64_t>(length_ + 1) * rests_ + 63) / 64) {
    if (start == PushdownStates::kDone) {
      possible = true;
      if (listed) fits_.assign(length_, std::vector<uint8_t>(tokens_.classes(), 1));
      return;
    }
    if (states_.places(start).empty()) return;
    for (int32_t at = 0; at <= length_; ++at) {
      for (int32_t rest = 0; rest < rests_; ++rest) exit_of_.emplace_back(at, rest);
    }
    while (tail_ > 0 && canvas_[tail_ - 1] == kMask) --tail_;
    reach(start);
    for (const auto& chain : tokens_.chains()) backs_.push_back(chain.back);
    last_exits_.open(backs_, rests_, words_);
    for (int32_t at = length_; at >= 0; --at) find_exits(at);
    open_calls(start, listed);
    if (listed && possible) find_fits();
  }

  bool possible = false;

  // The bits of the tokens that may stand at a masked position. Returns how many, and the last of them.
  std::pair<int64_t, int64_t> allowed(int64_t position, int32_t* bits) const {
    return tokens_.write(fits_[position].data(), bits);
  }
  int64_t words() const { return tokens_.words(); }
  bool lists(int64_t position) const {
    return possible && position >= 0 && position < static_cast<int64_t>(fits_.size()) && !fits_[position].empty();
  }

 protected:
  // Exits, as bits from a word of their boundary on, and the tokens after the canvas that later ones take, by rests. As
  // a row of what is wanted: how many there may be.
  struct Row {
    uint64_t* bits;  // of word 0, which may be before the memory of the row
    int32_t* late;
  };
  // Rows of some things at one boundary.
  struct Table {
    std::vector<int32_t> members;
    std::vector<uint64_t> bits;
    std::vector<int32_t> late;
  };
  enum Kind { kState, kChain, kPair, kKinds };
  struct Boundary {
    Table exits[kKinds], wanted[kKinds];
  };

  int64_t first_word(int32_t at) const { return static_cast<int64_t>(at) * rests_ / 64; }

  Row row(Table& table, int32_t at, int32_t slot) const {
    const int64_t width = words_ - first_word(at);
    return {table.bits.data() + slot * width - first_word(at), table.late.data() + static_cast<int64_t>(slot) * rests_};
  }
  int32_t slot(Kind kind, int32_t at, int32_t number) const { return slots_[kind][at * sizes_[kind] + number]; }
  Row exits(Kind kind, int32_t at, int32_t number) {
    return row(boundaries_[at].exits[kind], at, slot(kind, at, number));
  }
  Row wanted(Kind kind, int32_t at, int32_t number) {
    return row(boundaries_[at].wanted[kind], at, slot(kind, at, number));
  }

  void set(Row to, int32_t at, int32_t rest) const {
    const int64_t bit = static_cast<int64_t>(at) * rests_ + rest;
    to.bits[bit / 64] |= uint64_t{1} << bit % 64;
  }
  bool has(Row row, int32_t at, int32_t rest) const {
    const int64_t bit = static_cast<int64_t>(at) * rests_ + rest;
    return row.bits[bit / 64] >> bit % 64 & 1;
  }

  // From a boundary on, and from a word on.
  void add(Row to, Row from, int32_t at, int64_t low = 0) const {
    for (int64_t word = std::max(first_word(at), low); word < words_; ++word) to.bits[word] |= from.bits[word];
    for (int32_t rest = 0; rest < rests_; ++rest) to.late[rest] = std::min(to.late[rest], from.late[rest]);
  }
  void add_bits(Row to, Row from, int32_t at) const {
    for (int64_t word = first_word(at); word < words_; ++word) to.bits[word] |= from.bits[word];
  }
  bool includes(Row all, Row some, int32_t at) const {
    for (int64_t word = first_word(at); word < words_; ++word) {
      if (some.bits[word] & ~all.bits[word]) return false;
    }
    return true;
  }
  void want(Row to, Row from, int32_t at) const {
    for (int64_t word = first_word(at); word < words_; ++word) to.bits[word] |= from.bits[word];
    for (int32_t rest = 0; rest < rests_; ++rest) to.late[rest] = std::max(to.late[rest], from.late[rest]);
  }
  bool meets(Row exits, Row wanted, int32_t at) const {
    for (int64_t word = first_word(at); word < words_; ++word) {
      if (exits.bits[word] & wanted.bits[word]) return true;
    }
    for (int32_t rest = 0; rest < rests_; ++rest) {
      if (exits.late[rest] <= wanted.late[rest]) return true;
    }
    return false;
  }
  bool any(Row wanted, int32_t at) const {
    return std::any_of(wanted.bits + first_word(at), wanted.bits + words_, [](uint64_t word) { return word != 0; }) ||
           std::any_of(wanted.late, wanted.late + rests_, [](int32_t most) { return most >= 0; });
  }

  // Calls body(boundary, rest) for the exits inside the canvas, but for those that are `known` from a word on.
  template <typename Body>
  void for_exits(Row row, int32_t at, const Body& body, const uint64_t* known = nullptr, int64_t known_from = 0) const {
    for (int64_t word = first_word(at); word < words_; ++word) {
      const uint64_t before = known == nullptr || word < known_from ? 0 : known[word];
      for (uint64_t left = row.bits[word] & ~before; left; left &= left - 1) {
        const auto& [where, rest] = exit_of_[word * 64 + __builtin_ctzll(left)];
        body(where, rest);
      }
    }
  }

  // Where a call goes on: the slot is -1 if nothing does.
  std::pair<Kind, int32_t> resumed(int32_t back, int32_t rest) const {
    return rest == 0 ? std::pair(kState, back) : std::pair(kPair, tokens_.pair(back, rest));
  }
  bool there(Kind kind, int32_t at, int32_t number) const { return number >= 0 && slot(kind, at, number) >= 0; }
  static std::pair<Kind, int32_t> target(Outcome outcome) {
    return {PushdownTokens::is_state(outcome) ? kState : kChain, PushdownTokens::number(outcome)};
  }

  // The exits of a caller that goes on at `back` after those of a call. `known`: those that have been followed.
  void compose(Row to, Row from, int32_t at, int32_t back, const uint64_t* known = nullptr) {
    std::vector<std::pair<Kind, int32_t>> resumed_by(rests_);
    for (int32_t rest = 0; rest < rests_; ++rest) resumed_by[rest] = resumed(back, rest);
    const auto body = [&](int32_t where, int32_t rest) {
      const auto [kind, number] = resumed_by[rest];
      if (there(kind, where, number)) add(to, exits(kind, where, number), where);
    };
    for_exits(from, at, body, known, known == nullptr ? 0 : first_word(at + 1));
    compose_late(to, from, back);
  }
  void compose_late(Row to, Row from, int32_t back) const {
    for (int32_t rest = 0; rest < rests_; ++rest) {
      const int32_t* further = from.late[rest] <= budget_ ? tokens_.back_cost(back, rest) : nullptr;
      for (int32_t last = 0; further != nullptr && last < rests_; ++last) {
        to.late[last] = std::min(to.late[last], from.late[rest] + further[last]);
      }
    }
  }

  // What a state does with the token at a position.
  const std::vector<Outcome>& outcomes(int32_t state, int32_t at) const {
    static const std::vector<Outcome> none;
    if (canvas_[at] == kMask) return tokens_.following(state);
    const int32_t set =
        canvas_[at] < tokens_.vocabulary() ? tokens_.follow(state, tokens_.token_class(canvas_[at])) : -1;
    return set < 0 ? none : tokens_.outcomes(set);
  }

  // The states of each boundary, whatever called them.
  void reach(int32_t start) {
    sizes_[kState] = tokens_.states();
    sizes_[kChain] = static_cast<int32_t>(tokens_.chains().size());
    sizes_[kPair] = static_cast<int32_t>(tokens_.pairs().size());
    boundaries_.resize(length_ + 1);
    for (int kind = 0; kind < kKinds; ++kind) slots_[kind].assign(static_cast<size_t>(length_ + 1) * sizes_[kind], -1);
    for (const auto& [state, node] : states_.places(start)) mark(kState, 0, state);
    for (int32_t node : nodes_of(start)) {
      for (const auto& [back, beneath] : states_.node(node)) mark(kState, 0, back);
    }
    for (int32_t at = 0; at <= length_; ++at) {
      const auto& here = boundaries_[at].exits[kState].members;
      for (size_t n = 0; n < here.size(); ++n) {
        const int32_t state = here[n];
        if (tokens_.ends(state)) {
          for (const int32_t back : tokens_.returns(tokens_.rule(state))) mark(kState, at, back);
        }
      }
      for (size_t n = 0; at < length_ && n < here.size(); ++n)
        mark(outcomes(here[n], at), tokens_.rule(here[n]), at + 1);
      allocate(at);
    }
  }

  bool mark(Kind kind, int32_t at, int32_t number) {
    int32_t& slot = slots_[kind][static_cast<size_t>(at) * sizes_[kind] + number];
    if (slot >= 0) return false;
    auto& members = boundaries_[at].exits[kind].members;
    slot = static_cast<int32_t>(members.size());
    members.push_back(number);
    return true;
  }

  void mark(const std::vector<Outcome>& outcomes, int32_t rule, int32_t at) {
    for (Outcome outcome : outcomes) {
      while (PushdownTokens::is_chain(outcome)) {
        mark(kChain, at, PushdownTokens::number(outcome));
        outcome = tokens_.chains()[PushdownTokens::number(outcome)].inner;
      }
      if (outcome >= 0) {
        mark(kState, at, PushdownTokens::number(outcome));
        continue;
      }
      for (const int32_t back : tokens_.returns(rule)) {
        const int32_t pair = tokens_.pair(back, -outcome);
        if (pair >= 0 && mark(kPair, at, pair)) mark(tokens_.outcomes_of_pair(pair), tokens_.rule(back), at);
      }
    }
  }

  void allocate(int32_t at) {
    for (Table& table : boundaries_[at].exits) {
      table.bits.assign(table.members.size() * (words_ - first_word(at)), 0);
      table.late.assign(table.members.size() * rests_, PushdownTokens::kFar);
    }
  }

  // Where only masks follow, exits are as far away as one boundary later: all but those at the end are known. Returns
  // the word from which the others have to be found.
  int64_t shift(Kind kind, int32_t at, int32_t number) {
    if (at < tail_ || at == length_ || rests_ >= 64 || !there(kind, at + 1, number)) return 0;
    const Row to = exits(kind, at, number), from = exits(kind, at + 1, number);
    const int64_t first = first_word(at + 1);
    for (int64_t word = first_word(at); word < words_; ++word) {
      const uint64_t low = word < first ? 0 : from.bits[word] >> rests_;
      const uint64_t high = word + 1 < words_ && word + 1 >= first ? from.bits[word + 1] << (64 - rests_) : 0;
      to.bits[word] = low | high;
    }
    return first_word(length_);
  }

  void find_exits(int32_t at) {
    Boundary& here = boundaries_[at];
    for (const int32_t state : here.exits[kState].members) {
      const int64_t low = shift(kState, at, state);
      const Row to = exits(kState, at, state);
      if (tokens_.ends(state)) set(to, at, 0);
      if (at == length_) {
        std::copy(tokens_.cost(state), tokens_.cost(state) + rests_, to.late);
        continue;
      }
      add(to, outcomes(state, at), at + 1, low);
    }
    note_last(at, 0, 1);
    auto& chains = here.exits[kChain].members;
    std::sort(chains.begin(), chains.end());
    for (size_t n = 0; n < chains.size(); ++n) {
      slots_[kChain][static_cast<size_t>(at) * sizes_[kChain] + chains[n]] = static_cast<int32_t>(n);
    }
    for (const int32_t chain : chains) {
      const auto& [inner, back] = tokens_.chains()[chain];
      const auto [kind, number] = target(inner);
      const Row to = exits(kChain, at, chain), from = exits(kind, at, number);
      if (shift(kChain, at, chain) > 0) {
        for (int32_t rest = 0; rest < rests_; ++rest) {
          if (last_exits_.leads(back, rest, from.bits, first_word(at))) set(to, length_, rest);
        }
        compose_late(to, from, back);
        continue;
      }
      // What has been followed one boundary later is known, if all of it is here as well.
      const bool later =
          at < length_ && there(kChain, at + 1, chain) && includes(from, exits(kind, at + 1, number), at + 1);
      if (later) add_bits(to, exits(kChain, at + 1, chain), at + 1);
      compose(to, from, at, back, later ? exits(kind, at + 1, number).bits : nullptr);
    }
    for (const int32_t pair : here.exits[kPair].members) {
      const int64_t low = shift(kPair, at, pair);
      add(exits(kPair, at, pair), tokens_.outcomes_of_pair(pair), at, low);
    }
    note_last(at, 1, rests_);
  }

  // What goes on here after calls and leads to the last boundary.
  void note_last(int32_t at, int32_t first, int32_t end) {
    if (at < tail_) return;
    last_exits_.for_backs([&](int32_t back, const auto& column) {
      for (int32_t rest = first; rest < end; ++rest) {
        const auto [kind, number] = resumed(back, rest);
        if (!there(kind, at, number)) continue;
        for (int32_t last = 0; last < rests_; ++last) {
          if (has(exits(kind, at, number), length_, last)) set({column(last), nullptr}, at, rest);
        }
      }
    });
  }

  // The exits of what a token leads to, at a boundary.
  void add(Row to, const std::vector<Outcome>& outcomes, int32_t boundary, int64_t low) {
    for (const Outcome outcome : outcomes) {
      if (outcome < 0) {
        set(to, boundary, -outcome);
      } else {
        const auto [kind, number] = target(outcome);
        add(to, exits(kind, boundary, number), boundary, low);
      }
    }
  }

  // The nodes below the places of a state, callers after what they called.
  std::vector<int32_t> nodes_of(int32_t start) const {
    std::vector<int32_t> nodes;
    for (const auto& [state, node] : states_.places(start)) nodes.push_back(node);
    for (size_t n = 0; n < nodes.size(); ++n) {
      for (const auto& [back, beneath] : states_.node(nodes[n])) {
        if (std::find(nodes.begin(), nodes.end(), beneath) == nodes.end()) nodes.push_back(beneath);
      }
    }
    std::sort(nodes.begin(), nodes.end(), std::greater<>());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    return nodes;  // a caller was numbered before what it called
  }

  // Whether the text may end before the token at a position.
  bool may_end(int32_t at) const {
    if (at >= given_) return true;
    return canvas_[at] == kMask ? tokens_.has_ends()
                                : canvas_[at] < tokens_.vocabulary() && tokens_.is_end(canvas_[at]);
  }

  struct Node {
    std::vector<uint64_t> bits, wanted_bits;
    std::vector<int32_t> late, wanted_late;
  };

  // The exits of the calls that are open at the start, and what is wanted of them.
  void open_calls(int32_t start, bool listed) {
    const std::vector<int32_t> nodes = nodes_of(start);
    std::map<int32_t, Node> open;
    for (const int32_t node : nodes) {
      open[node] = {std::vector<uint64_t>(words_, 0), std::vector<uint64_t>(words_, 0),
                    std::vector<int32_t>(rests_, PushdownTokens::kFar), std::vector<int32_t>(rests_, -1)};
    }
    const auto exits_of = [&](int32_t node) { return Row{open[node].bits.data(), open[node].late.data()}; };
    const auto wanted_of = [&](int32_t node) {
      return Row{open[node].wanted_bits.data(), open[node].wanted_late.data()};
    };
    for (const auto& [state, node] : states_.places(start)) add(exits_of(node), exits(kState, 0, state), 0);
    for (const int32_t node : nodes) {
      for (const auto& [back, beneath] : states_.node(node)) compose(exits_of(beneath), exits_of(node), 0, back);
    }
    const Row text = exits_of(0), whole = wanted_of(0);
    for (int32_t at = 0; at <= length_; ++at) {
      if (!may_end(at) || !has(text, at, 0)) continue;
      set(whole, at, 0);
      done_.push_back(at);
    }
    whole.late[0] = budget_;
    possible = meets(text, whole, 0);
    if (!listed || !possible) return;
    for (int32_t at = 0; at <= length_; ++at) {
      for (int kind = 0; kind < kKinds; ++kind) {
        const Table& from = boundaries_[at].exits[kind];
        Table& to = boundaries_[at].wanted[kind];
        to.bits.assign(from.bits.size(), 0);
        to.late.assign(from.late.size(), -1);
      }
    }
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      for (const auto& [back, beneath] : states_.node(*node))
        go_back(wanted_of(*node), exits_of(*node), wanted_of(beneath), 0, back);
    }
    for (const auto& [state, node] : states_.places(start)) {
      if (meets(exits(kState, 0, state), wanted_of(node), 0)) want(wanted(kState, 0, state), wanted_of(node), 0);
    }
  }

  // Of the exits of a call, those after which its caller has one of `of_caller`; and what is wanted where it goes on.
  void go_back(Row of_call, Row exits_of_call, Row of_caller, int32_t at, int32_t back) {
    Followed& followed =
        followed_.of(back, of_caller.bits, of_caller.late, rests_, words_, static_cast<int64_t>(at) * rests_);
    const auto body = [&](int32_t where, int32_t rest) {
      const auto [kind, number] = resumed(back, rest);
      if (!there(kind, where, number) || !meets(exits(kind, where, number), of_caller, where)) return;
      set({followed.good.data(), nullptr}, where, rest);
      want(wanted(kind, where, number), of_caller, where);
    };
    for_exits(exits_of_call, at, body, followed.done.data());
    for (int64_t word = first_word(at); word < words_; ++word) {
      followed.done[word] |= exits_of_call.bits[word];
      of_call.bits[word] |= followed.good[word] & exits_of_call.bits[word];
    }
    for (int32_t rest = 0; rest < rests_; ++rest) {
      const int32_t* further = exits_of_call.late[rest] <= budget_ ? tokens_.back_cost(back, rest) : nullptr;
      for (int32_t last = 0; further != nullptr && last < rests_; ++last) {
        of_call.late[rest] = std::max(of_call.late[rest], of_caller.late[last] - further[last]);
      }
    }
  }

  bool equal(Row one, Row other, int32_t at) const {
    return std::equal(one.bits + first_word(at), one.bits + words_, other.bits + first_word(at)) &&
           std::equal(one.late, one.late + rests_, other.late);
  }

  // What is wanted of the calls that begin before a boundary, the outer ones first. Those that go on at the same state
  // for the same exits are followed together.
  void want_of_calls(int32_t at) {
    const auto& chains = boundaries_[at].exits[kChain].members;
    std::vector<int32_t> depths(chains.size());
    for (size_t n = 0; n < chains.size(); ++n) {
      const Outcome inner = tokens_.chains()[chains[n]].inner;
      const bool nested = PushdownTokens::is_chain(inner);
      depths[n] = nested ? depths[slot(kChain, at, PushdownTokens::number(inner))] + 1 : 1;
    }
    std::vector<uint64_t> bits(2 * words_);
    std::vector<int32_t> late(2 * static_cast<size_t>(rests_));
    const Row together{bits.data(), late.data()}, found{bits.data() + words_, late.data() + rests_};
    for (int32_t depth = chains.empty() ? 0 : *std::max_element(depths.begin(), depths.end()); depth > 0; --depth) {
      std::vector<std::vector<int32_t>> groups;
      for (size_t n = 0; n < chains.size(); ++n) {
        const Row of_chain = wanted(kChain, at, chains[n]);
        if (depths[n] != depth || !any(of_chain, at)) continue;
        const auto group = std::find_if(groups.begin(), groups.end(), [&](const std::vector<int32_t>& one) {
          return tokens_.chains()[one[0]].back == tokens_.chains()[chains[n]].back &&
                 equal(wanted(kChain, at, one[0]), of_chain, at);
        });
        if (group == groups.end()) {
          groups.push_back({chains[n]});
        } else {
          group->push_back(chains[n]);
        }
      }
      for (const auto& group : groups) {
        std::fill(bits.begin(), bits.end(), 0);
        std::fill(late.begin(), late.begin() + rests_, PushdownTokens::kFar);
        std::fill(late.begin() + rests_, late.end(), -1);
        for (const int32_t chain : group) {
          const auto [kind, number] = target(tokens_.chains()[chain].inner);
          add(together, exits(kind, at, number), at);
        }
        go_back(found, together, wanted(kChain, at, group[0]), at, tokens_.chains()[group[0]].back);
        for (const int32_t chain : group) {
          const auto [kind, number] = target(tokens_.chains()[chain].inner);
          const Row of_call = wanted(kind, at, number), exits_of_call = exits(kind, at, number);
          for (int64_t word = first_word(at); word < words_; ++word) {
            of_call.bits[word] |= found.bits[word] & exits_of_call.bits[word];
          }
          for (int32_t rest = 0; rest < rests_; ++rest)
            of_call.late[rest] = std::max(of_call.late[rest], found.late[rest]);
        }
      }
    }
  }

  // The classes of tokens of which an outcome is good, under a mask.
  void offer(Offered& offered, int32_t state, const std::vector<uint8_t>& good) const {
    const auto& all = tokens_.following(state);
    std::vector<int8_t> holds(tokens_.sets(), -1);
    offered.good = good;
    offered.classes.assign((tokens_.classes() + 63) / 64, 0);
    for (const auto& [by, set] : tokens_.steps(state)) {
      if (holds[set] < 0) {
        const auto& several = tokens_.outcomes(set);
        holds[set] = std::any_of(several.begin(), several.end(), [&](Outcome outcome) {
          return good[std::lower_bound(all.begin(), all.end(), outcome) - all.begin()] != 0;
        });
      }
      offered.classes[by / 64] |= static_cast<uint64_t>(holds[set]) << by % 64;
    }
  }

  void find_fits() {
    fits_.resize(length_);
    std::vector<Offered> offered(sizes_[kState]);
    std::vector<uint8_t> good;
    std::vector<uint64_t> classes((tokens_.classes() + 63) / 64);
    for (int32_t at = 0; at <= length_; ++at) {
      Boundary& here = boundaries_[at];
      for (const int32_t pair : here.exits[kPair].members) {
        const Row of_pair = wanted(kPair, at, pair);
        if (!any(of_pair, at)) continue;
        for (const Outcome outcome : tokens_.outcomes_of_pair(pair)) {
          if (outcome < 0) continue;
          const auto [kind, number] = target(outcome);
          want(wanted(kind, at, number), of_pair, at);
        }
      }
      want_of_calls(at);
      if (at == length_) break;
      const bool masked = canvas_[at] == kMask;
      std::fill(classes.begin(), classes.end(), 0);
      for (const int32_t state : here.exits[kState].members) {
        const Row of_state = wanted(kState, at, state);
        if (!any(of_state, at) || !meets(exits(kState, at, state), of_state, at)) continue;
        const auto& all = outcomes(state, at);
        good.clear();
        for (const Outcome outcome : all) {
          if (outcome < 0) {
            good.push_back(has(of_state, at + 1, -outcome));
            continue;
          }
          const auto [kind, number] = target(outcome);
          good.push_back(meets(exits(kind, at + 1, number), of_state, at + 1));
          if (good.back()) want(wanted(kind, at + 1, number), of_state, at + 1);
        }
        if (!masked || all.empty()) continue;
        if (offered[state].good != good) offer(offered[state], state, good);
        for (size_t word = 0; word < classes.size(); ++word) classes[word] |= offered[state].classes[word];
      }
      if (!masked) continue;
      fits_[at].resize(tokens_.classes());
      for (size_t c = 0; c < fits_[at].size(); ++c) fits_[at][c] = classes[c / 64] >> c % 64 & 1;
    }
    // The ends of texts, and what follows them.
    for (int32_t at = 0; at < length_ && !done_.empty(); ++at) {
      if (fits_[at].empty()) continue;
      const bool ends = std::find(done_.begin(), done_.end(), at) != done_.end();
      for (int64_t id = 0; ends && id < tokens_.vocabulary(); ++id) {
        if (tokens_.is_end(id)) fits_[at][tokens_.token_class(id)] = 1;
      }
      if (at > done_[0]) std::fill(fits_[at].begin(), fits_[at].end(), 1);
    }
  }

  const PushdownStates& states_;
  const PushdownTokens& tokens_;
  std::vector<int64_t> canvas_;
  int32_t length_, given_, rests_, budget_;
  int32_t tail_;  // only masks from here on
  int64_t words_;
  std::vector<std::pair<int32_t, int32_t>> exit_of_;  // of each bit
  int32_t sizes_[kKinds] = {};
  std::vector<int32_t> slots_[kKinds];
  std::vector<Boundary> boundaries_;
  std::vector<int32_t> backs_;  // the states that calls come back to
  LastExits last_exits_;
  FollowedCalls followed_;
  std::vector<int32_t> done_;               // boundaries where the text may end
  std::vector<std::vector<uint8_t>> fits_;  // of masks, the classes that they may hold
};

}  // namespace pdkernels
