// Where a text may be after its first tokens: states with the calls that are open there.
//
// Open calls are nodes: each has the states that it may come back to, and the node of the caller beneath. Node 0 is the
// whole text, which nothing called. Nodes and places are numbered, so that a text that comes back to the same calls
// comes back to the same number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "host/pushdown_tokens.h"

namespace pdkernels {

class PushdownStates {
 public:
  static constexpr int32_t kDead = -1, kDone = 1 << 30;
  using Outcome = PushdownTokens::Outcome;
  using Edge = std::pair<int32_t, int32_t>;   // the state to come back to, the node beneath
  using Place = std::pair<int32_t, int32_t>;  // state, node

  explicit PushdownStates(std::shared_ptr<const PushdownTokens> tokens) : tokens_(std::move(tokens)) {
    nodes_.emplace_back();
    costs_.emplace_back(tokens_->rests(), PushdownTokens::kFar);
    costs_[0][0] = 0;
    intern({{0, 0}});
  }

  const PushdownTokens& tokens() const { return *tokens_; }
  int32_t size() const { return static_cast<int32_t>(places_.size()); }
  bool known(int32_t state) const { return state == kDone || (state >= 0 && state < size()); }
  const std::vector<Place>& places(int32_t state) const { return places_[state]; }
  const std::vector<Edge>& node(int32_t node) const { return nodes_[node]; }
  // The fewest tokens to complete a text when a call has ended, by the rest of its last token.
  const std::vector<int32_t>& cost(int32_t node) const { return costs_[node]; }

  bool accepting(int32_t state) const {
    if (state == kDone) return true;
    return std::any_of(places_[state].begin(), places_[state].end(),
                       [&](const Place& place) { return place.second == 0 && tokens_->ends(place.first); });
  }

  int32_t distance(int32_t state) const {
    if (state == kDone) return 0;
    int32_t least = PushdownTokens::kFar;
    for (const auto& [here, node] : places_[state]) least = std::min(least, sum(tokens_->cost(here), node));
    return least >= PushdownTokens::kFar ? std::numeric_limits<int32_t>::max() : least;
  }

  int32_t next(int32_t state, int64_t token) {
    if (token < 0 || token >= tokens_->vocabulary()) return kDead;
    if (state == kDone) return kDone;
    if (tokens_->is_end(token)) return accepting(state) ? kDone : kDead;
    const int32_t c = tokens_->token_class(token);
    Reached reached;
    const std::vector<Place> from = places_[state];
    for (const auto& [here, node] : from) {
      const int32_t set = tokens_->follow(here, c);
      if (set >= 0) go(tokens_->outcomes(set), node, reached);
    }
    return taken(reached);
  }

  // A budget that is larger changes no mask.
  int64_t horizon(int32_t) const { return PushdownTokens::kFar; }
  int64_t words() const { return tokens_->words(); }

  // As in TokenAutomaton.
  std::pair<int64_t, int64_t> mask(int32_t state, int64_t budget, int32_t* bits) const {
    std::vector<uint8_t> fits(tokens_->classes(), state == kDone);
    std::vector<int8_t> holds;
    for (size_t n = 0; state != kDone && n < places_[state].size(); ++n) {
      const auto [here, node] = places_[state][n];
      holds.assign(tokens_->sets(), -1);
      for (const auto& [by, set] : tokens_->steps(here)) {
        if (holds[set] < 0) {
          const auto& outcomes = tokens_->outcomes(set);
          holds[set] = std::any_of(outcomes.begin(), outcomes.end(), [&](Outcome outcome) {
            if (outcome < 0) return costs_[node][-outcome] <= budget;
            const int32_t number = PushdownTokens::number(outcome);
            const int32_t* cost =
                PushdownTokens::is_state(outcome) ? tokens_->cost(number) : tokens_->chain_cost(number);
            return sum(cost, node) <= budget;
          });
        }
        fits[by] |= static_cast<uint8_t>(holds[set]);
      }
    }
    if (state != kDone && accepting(state)) {
      for (int64_t id = 0; id < tokens_->vocabulary(); ++id) {
        if (tokens_->is_end(id)) fits[tokens_->token_class(id)] = 1;
      }
    }
    return tokens_->write(fits.data(), bits);
  }

 private:
  struct Reached {
    std::vector<Place> places;
    std::map<int32_t, std::vector<int32_t>> calls;  // of a chain, the nodes that it was called from
    std::vector<Place> gone;                        // pairs that have been followed, with their nodes
  };

  int32_t sum(const int32_t* cost, int32_t node) const {
    int32_t least = PushdownTokens::kFar;
    for (int32_t rest = 0; rest < tokens_->rests(); ++rest) least = std::min(least, cost[rest] + costs_[node][rest]);
    return least;
  }

  void go(const std::vector<Outcome>& outcomes, int32_t node, Reached& reached) {
    for (const Outcome outcome : outcomes) {
      const int32_t number = PushdownTokens::number(outcome);
      if (PushdownTokens::is_state(outcome)) {
        reached.places.emplace_back(number, node);
      } else if (PushdownTokens::is_chain(outcome)) {
        reached.calls[number].push_back(node);
      } else {
        const std::vector<Edge> edges = nodes_[node];
        for (const auto& [back, beneath] : edges) {
          const int32_t pair = tokens_->pair(back, number);
          if (pair < 0 ||
              std::find(reached.gone.begin(), reached.gone.end(), Place(pair, beneath)) != reached.gone.end()) {
            continue;
          }
          reached.gone.emplace_back(pair, beneath);
          go(tokens_->outcomes_of_pair(pair), beneath, reached);
        }
      }
    }
  }

  int32_t taken(Reached& reached) {
    for (auto& [first, nodes] : reached.calls) {
      std::vector<Edge> edges;
      int32_t chain = first;
      for (const int32_t node : nodes) edges.emplace_back(tokens_->chains()[chain].back, node);
      int32_t node = node_of(std::move(edges));
      Outcome inner = tokens_->chains()[chain].inner;
      for (; PushdownTokens::is_chain(inner); inner = tokens_->chains()[chain].inner) {
        chain = PushdownTokens::number(inner);
        node = node_of({{tokens_->chains()[chain].back, node}});
      }
      reached.places.emplace_back(PushdownTokens::number(inner), node);
    }
    return reached.places.empty() ? kDead : intern(std::move(reached.places));
  }

  int32_t node_of(std::vector<Edge> edges) {
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    const auto [place, fresh] = node_numbers_.emplace(edges, static_cast<int32_t>(nodes_.size()));
    if (!fresh) return place->second;
    auto& costs = costs_.emplace_back(tokens_->rests(), PushdownTokens::kFar);
    for (const auto& [back, beneath] : edges) {
      for (int32_t rest = 0; rest < tokens_->rests(); ++rest) {
        const int32_t* further = tokens_->back_cost(back, rest);
        if (further != nullptr) costs[rest] = std::min(costs[rest], sum(further, beneath));
      }
    }
    nodes_.push_back(std::move(edges));
    return place->second;
  }

  // With the places after calls that have ended, without those that no text goes on from.
  int32_t intern(std::vector<Place> places) {
    for (size_t n = 0; n < places.size(); ++n) {
      if (!tokens_->ends(places[n].first)) continue;
      const int32_t node = places[n].second;
      for (const auto& [back, beneath] : nodes_[node]) {
        const Place place(back, beneath);
        if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
      }
    }
    std::erase_if(places, [&](const Place& place) {
      return sum(tokens_->cost(place.first), place.second) >= PushdownTokens::kFar;
    });
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    if (places.empty() && size() > 0) return kDead;
    const auto [place, fresh] = numbers_.emplace(places, size());
    if (fresh) places_.push_back(std::move(places));
    return place->second;
  }

  std::shared_ptr<const PushdownTokens> tokens_;
  std::vector<std::vector<Edge>> nodes_;
  std::vector<std::vector<int32_t>> costs_;
  std::map<std::vector<Edge>, int32_t> node_numbers_;
  std::vector<std::vector<Place>> places_;
  std::map<std::vector<Place>, int32_t> numbers_;
};

}  // namespace pdkernels
