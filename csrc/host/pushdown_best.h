// The most probable completion of a canvas under a pushdown automaton: the passes of PushdownCanvas with the greatest
// sums of log-probabilities in place of bits, as DINGO (arXiv 2505.23061) has them for regular languages.
//
// Exits are found from the last boundary to the first one. Only rows that something goes on from are kept; the tokens
// are found afterwards, call by call, each time for the one exit that the call must have.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "host/pushdown_canvas.h"

namespace pdkernels {

class PushdownBest : private PushdownCanvas {
 public:
  // `scores`: a row of the vocabulary for each mask of the canvas.
  PushdownBest(const PushdownStates& states, const std::vector<int64_t>& canvas, int32_t start, int64_t budget,
               const float* scores)
      : PushdownCanvas(states, extended(canvas, states, start, budget), start, 0, false,
                       static_cast<int32_t>(canvas.size())),
        sums_(length_ + 1) {
    if (!possible) return;
    tokens = canvas_;
    score(scores);
    if (start != PushdownStates::kDone) {
      keep();
      for (int32_t at = length_; at >= 0; --at) find_sums(at);
    }
    choose(start);
    tokens.resize(canvas.size());
    if (!found_) tokens.clear();
  }

  std::vector<int64_t> tokens;  // empty: there is no completion

 private:
  static constexpr float kNever = -std::numeric_limits<float>::infinity();
  struct Exit {
    int32_t at, rest;
  };
  using Sums = std::vector<float>;  // by exits, from a boundary on
  struct Weighted {
    float score = kNever;
    int64_t token = -1;
  };

  static std::vector<int64_t> extended(std::vector<int64_t> canvas, const PushdownStates& states, int32_t start,
                                       int64_t budget) {
    const bool whole = start == PushdownStates::kDone || states.places(start).empty();
    if (!whole) canvas.insert(canvas.end(), static_cast<size_t>(std::max<int64_t>(budget, 0)), kMask);
    return canvas;
  }

  int64_t place(int32_t at, Exit exit) const { return static_cast<int64_t>(exit.at - at) * rests_ + exit.rest; }
  int64_t width(int32_t at) const { return static_cast<int64_t>(length_ + 1 - at) * rests_; }

  // The best tokens of each position: of every class, for every outcome of every state.
  void score(const float* scores) {
    after_end_.resize(length_);
    end_.resize(length_);
    weights_.resize(length_);
    std::vector<Weighted> of_class(tokens_.classes()), of_set(tokens_.sets());
    for (int32_t at = 0; at < length_; ++at) {
      const bool masked = canvas_[at] == kMask, counted = masked && at < given_;
      if (masked) {
        std::fill(of_class.begin(), of_class.end(), Weighted());
        for (int64_t id = 0; id < tokens_.vocabulary(); ++id) {
          const float value = counted ? scores[id] : 0;
          Weighted& best = of_class[tokens_.token_class(id)];
          if (value > best.score) best = {value, id};
          if (value > after_end_[at].score) after_end_[at] = {value, id};
          if (tokens_.is_end(id) && value > end_[at].score) end_[at] = {value, id};
        }
        if (counted) scores += tokens_.vocabulary();
      } else {
        after_end_[at] = {0, canvas_[at]};
        if (may_end(at)) end_[at] = {0, canvas_[at]};
      }
      for (const int32_t state : members(at)) {
        auto& weights = weights_[at].emplace_back();
        const auto& all = outcomes(state, at);
        weights.assign(all.size(), masked ? Weighted() : Weighted{0, canvas_[at]});
        if (!masked) continue;
        for (const auto& [by, set] : tokens_.steps(state)) {
          if (of_class[by].score > of_set[set].score) of_set[set] = of_class[by];
        }
        for (const auto& [by, set] : tokens_.steps(state)) {
          if (of_set[set].score == kNever) continue;
          for (const Outcome outcome : tokens_.outcomes(set)) {
            Weighted& best = weights[std::lower_bound(all.begin(), all.end(), outcome) - all.begin()];
            if (of_set[set].score > best.score) best = of_set[set];
          }
          of_set[set] = Weighted();
        }
      }
    }
  }

  const std::vector<int32_t>& members(int32_t at) const {
    static const std::vector<int32_t> none;
    return boundaries_.empty() ? none : boundaries_[at].exits[kState].members;
  }

  // The states whose sums are needed later: where calls go on, and where they begin.
  void keep() {
    kept_.assign(tokens_.states(), 0);
    const auto mark = [&](Outcome outcome) {
      if (PushdownTokens::is_state(outcome)) kept_[PushdownTokens::number(outcome)] = 1;
    };
    for (const auto& chain : tokens_.chains()) {
      mark(chain.inner);
      kept_[chain.back] = 1;
    }
    for (size_t pair = 0; pair < tokens_.pairs().size(); ++pair) {
      kept_[tokens_.pairs()[pair].back] = 1;
      for (const Outcome outcome : tokens_.outcomes_of_pair(static_cast<int32_t>(pair))) mark(outcome);
    }
  }

  static void raise(Sums& to, const Sums& from, float more, int64_t first) {
    const float* values = from.data();
    float* sums = to.data() + first;
    const int64_t count = static_cast<int64_t>(from.size());
    for (int64_t n = 0; n < count; ++n) sums[n] = std::max(sums[n], values[n] + more);
  }

  Sums& sums(Kind kind, int32_t at, int32_t number) { return sums_[at][kind][slot(kind, at, number)]; }

  void compose(Sums& to, const Sums& from, int32_t at, int32_t back) {
    for (int32_t where = at; where <= length_; ++where) {
      for (int32_t rest = 0; rest < rests_; ++rest) {
        const float value = from[place(at, {where, rest})];
        const auto [kind, number] = resumed(back, rest);
        if (value == kNever || !there(kind, where, number)) continue;
        raise(to, sums(kind, where, number), value, place(at, {where, 0}));
      }
    }
  }

  void find_sums(int32_t at) {
    for (int kind = 0; kind < kKinds; ++kind) {
      sums_[at][kind].assign(boundaries_[at].exits[kind].members.size(), Sums(width(at), kNever));
    }
    for (size_t n = 0; n < members(at).size(); ++n) {
      const int32_t state = members(at)[n];
      Sums& to = sums_[at][kState][n];
      if (tokens_.ends(state)) to[0] = 0;
      if (at == length_) continue;
      const auto& all = outcomes(state, at);
      for (size_t m = 0; m < all.size(); ++m) {
        const float more = weights_[at][n][m].score;
        if (more == kNever) continue;
        if (all[m] < 0) {
          float& sum = to[place(at, {at + 1, -all[m]})];
          sum = std::max(sum, more);
        } else {
          const auto [kind, number] = target(all[m]);
          raise(to, sums(kind, at + 1, number), more, rests_);
        }
      }
    }
    for (const int32_t chain : boundaries_[at].exits[kChain].members) {
      const auto& [inner, back] = tokens_.chains()[chain];
      const auto [kind, number] = target(inner);
      compose(sums(kChain, at, chain), sums(kind, at, number), at, back);
    }
    for (const int32_t pair : boundaries_[at].exits[kPair].members) {
      Sums& to = sums(kPair, at, pair);
      for (const Outcome outcome : tokens_.outcomes_of_pair(pair)) {
        if (outcome < 0) {
          to[-outcome] = std::max(to[-outcome], 0.0f);
        } else {
          const auto [kind, number] = target(outcome);
          raise(to, sums(kind, at, number), 0, 0);
        }
      }
    }
    for (size_t n = 0; at < length_ && n < members(at + 1).size(); ++n) {
      if (!kept_[members(at + 1)[n]]) Sums().swap(sums_[at + 1][kState][n]);
    }
  }

  void choose(int32_t start) {
    // What follows the end of the text.
    std::vector<float> tail(length_ + 1, 0);
    float free = 0;
    for (int32_t at = length_ - 1; at >= 0; --at) {
      tail[at] = at >= given_ ? 0 : end_[at].score + free;
      free += at >= given_ ? 0 : after_end_[at].score;
    }
    if (start == PushdownStates::kDone) {
      for (int32_t at = 0; at < length_; ++at) tokens[at] = after_end_[at].token;
      found_ = free != kNever;
      return;
    }
    const std::vector<int32_t> nodes = nodes_of(start);
    for (const int32_t node : nodes) open_[node].assign(width(0), kNever);
    for (const auto& [state, node] : states_.places(start)) raise(open_[node], sums(kState, 0, state), 0, 0);
    for (const int32_t node : nodes) {
      for (const auto& [back, beneath] : states_.node(node)) compose(open_[beneath], open_[node], 0, back);
    }
    float most = kNever;
    int32_t last = -1;
    for (int32_t at = 0; at <= length_; ++at) {
      const float sum = may_end(at) ? open_[0][place(0, {at, 0})] + tail[at] : kNever;
      if (sum > most) {
        most = sum;
        last = at;
      }
    }
    found_ = last >= 0;
    if (!found_) return;
    for (int32_t at = last; at < length_; ++at) tokens[at] = (at == last ? end_ : after_end_)[at].token;
    trace_open(start, 0, {last, 0});
  }

  // The way of a call to an exit goes on with the caller: the exit that is left, and where.
  template <typename Value>
  Exit split(int32_t at, int32_t back, Exit exit, const Value& value) {
    float most = kNever;
    Exit best{-1, 0};
    for (int32_t where = at; where <= exit.at; ++where) {
      for (int32_t rest = 0; rest < rests_; ++rest) {
        const float before = value(Exit{where, rest});
        const auto [kind, number] = resumed(back, rest);
        if (before == kNever || !there(kind, where, number)) continue;
        const float sum = before + sums(kind, where, number)[place(where, exit)];
        if (sum <= most) continue;
        most = sum;
        best = {where, rest};
      }
    }
    most_ = most;
    return best;
  }

  void trace_open(int32_t start, int32_t node, Exit exit) {
    float most = kNever;
    int32_t from = -1, child = -1, over = -1;
    Exit between{-1, 0};
    for (const auto& [state, of] : states_.places(start)) {
      if (of != node || sums(kState, 0, state)[place(0, exit)] <= most) continue;
      most = sums(kState, 0, state)[place(0, exit)];
      from = state;
    }
    for (const auto& [above, sums_above] : open_) {
      for (const auto& [back, beneath] : states_.node(above)) {
        if (beneath != node) continue;
        const Exit way = split(0, back, exit, [&](Exit way) { return sums_above[place(0, way)]; });
        if (way.at < 0 || most_ <= most) continue;
        most = most_;
        from = -1;
        child = above;
        over = back;
        between = way;
      }
    }
    if (from >= 0) {
      trace(from, 0, exit);
    } else {
      trace_open(start, child, between);
      resume(over, between, exit);
    }
  }

  void resume(int32_t back, Exit from, Exit exit) {
    if (from.rest == 0) return trace(back, from.at, exit);
    const int32_t pair = tokens_.pair(back, from.rest);
    float most = kNever;
    Outcome best = 0;
    for (const Outcome outcome : tokens_.outcomes_of_pair(pair)) {
      if (outcome < 0) {
        if (from.at == exit.at && -outcome == exit.rest) return;
        continue;
      }
      const auto [kind, number] = target(outcome);
      const float sum = sums(kind, from.at, number)[place(from.at, exit)];
      if (sum > most) {
        most = sum;
        best = outcome;
      }
    }
    trace_target(best, from.at, exit);
  }

  void trace_target(Outcome outcome, int32_t at, Exit exit) {
    if (PushdownTokens::is_state(outcome)) return trace(PushdownTokens::number(outcome), at, exit);
    const auto& [inner, back] = tokens_.chains()[PushdownTokens::number(outcome)];
    const auto [kind, number] = target(inner);
    const Sums& of_inner = sums(kind, at, number);
    const Exit between = split(at, back, exit, [&](Exit way) { return of_inner[place(at, way)]; });
    trace_target(inner, at, between);
    resume(back, between, exit);
  }

  // The tokens from a state to an exit of its rule: first the best sums to this exit alone, then the way.
  void trace(int32_t state, int32_t at, Exit exit) {
    std::vector<std::vector<float>> to(exit.at - at + 1);
    const auto value = [&](size_t n, size_t m, int32_t here) {
      const float more = weights_[here][n][m].score;
      const Outcome outcome = outcomes(members(here)[n], here)[m];
      if (more == kNever) return kNever;
      if (outcome < 0) return here + 1 == exit.at && -outcome == exit.rest ? more : kNever;
      const auto [kind, number] = target(outcome);
      if (kind == kState) return more + to[here + 1 - at][slot(kState, here + 1, number)];
      return more + sums(kChain, here + 1, number)[place(here + 1, exit)];
    };
    for (int32_t here = exit.at; here >= at; --here) {
      auto& column = to[here - at];
      column.assign(members(here).size(), kNever);
      for (size_t n = 0; n < column.size(); ++n) {
        if (here == exit.at) {
          if (exit.rest == 0 && tokens_.ends(members(here)[n])) column[n] = 0;
          continue;
        }
        for (size_t m = 0; m < weights_[here][n].size(); ++m) column[n] = std::max(column[n], value(n, m, here));
      }
    }
    for (int32_t here = at; here < exit.at; ++here) {
      const size_t n = slot(kState, here, state);
      float most = kNever;
      size_t best = 0;
      for (size_t m = 0; m < weights_[here][n].size(); ++m) {
        const float sum = value(n, m, here);
        if (sum <= most) continue;
        most = sum;
        best = m;
      }
      tokens[here] = weights_[here][n][best].token;
      const Outcome outcome = outcomes(state, here)[best];
      if (outcome < 0) return;
      if (PushdownTokens::is_chain(outcome)) return trace_target(outcome, here + 1, exit);
      state = PushdownTokens::number(outcome);
    }
  }

  std::vector<std::array<std::vector<Sums>, kKinds>> sums_;
  std::vector<uint8_t> kept_;
  std::vector<Weighted> after_end_, end_;
  std::vector<std::vector<std::vector<Weighted>>> weights_;  // by positions, states and their outcomes
  std::map<int32_t, Sums> open_;
  float most_ = kNever;
  bool found_ = false;
};

}  // namespace pdkernels
