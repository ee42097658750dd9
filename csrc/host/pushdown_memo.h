// What the passes over a canvas have found out at other boundaries. Neighbouring boundaries of masks have nearly the
// same exits, and want nearly the same of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace pdkernels {

// Of the states that calls come back to: after which exits of a call (bits) they lead to the last boundary, by the rest
// that is left there.
class LastExits {
 public:
  void open(const std::vector<int32_t>& backs, int32_t rests, int64_t words) {
    rests_ = rests;
    words_ = words;
    for (const int32_t back : backs) places_.emplace(back, static_cast<int64_t>(places_.size()) * rests);
    bits_.assign(places_.size() * rests * words, 0);
  }

  // Calls body(back, column) for each state.
  template <typename Body>
  void for_backs(const Body& body) {
    for (const auto& [back, place] : places_) body(back, [&, first = place](int32_t rest) { return row(first, rest); });
  }

  // Whether one of the exits from a word on leads to the last boundary and leaves a rest.
  bool leads(int32_t back, int32_t rest, const uint64_t* exits, int64_t first) {
    const uint64_t* last = row(places_.at(back), rest);
    for (int64_t word = first; word < words_; ++word) {
      if (exits[word] & last[word]) return true;
    }
    return false;
  }

 private:
  uint64_t* row(int64_t place, int32_t rest) { return bits_.data() + (place + rest) * words_; }

  int32_t rests_ = 0;
  int64_t words_ = 0;
  std::map<int32_t, int64_t> places_;
  std::vector<uint64_t> bits_;
};

// Exits of calls that have been followed for what their caller wants, and those of them after which it has that.
struct Followed {
  std::vector<uint64_t> wanted, done, good;
  std::vector<int32_t> late;
};

// By the state that calls come back to.
class FollowedCalls {
 public:
  // Those for which the same is wanted, from a bit on; if there are none, new ones.
  Followed& of(int32_t back, const uint64_t* wanted, const int32_t* late, int32_t rests, int64_t words, int64_t bit) {
    const int64_t first = bit / 64;
    const uint64_t above = ~uint64_t{0} << bit % 64;  // earlier bits are none of this boundary
    auto& [next, known] = calls_[back];
    for (Followed& one : known) {
      if (((one.wanted[first] ^ wanted[first]) & above) == 0 &&
          std::equal(wanted + first + 1, wanted + words, one.wanted.begin() + first + 1) &&
          std::equal(late, late + rests, one.late.begin())) {
        return one;
      }
    }
    if (known.size() < kMost) known.emplace_back();
    Followed& fresh = known[next++ % kMost];
    fresh.wanted.assign(words, 0);
    std::copy(wanted + first, wanted + words, fresh.wanted.begin() + first);
    fresh.late.assign(late, late + rests);
    fresh.done.assign(words, 0);
    fresh.good.assign(words, 0);
    return fresh;
  }

 private:
  static constexpr size_t kMost = 8;
  std::map<int32_t, std::pair<size_t, std::vector<Followed>>> calls_;
};

// The tokens that a state offers, by which of its outcomes are good.
struct Offered {
  std::vector<uint8_t> good;      // of each outcome
  std::vector<uint64_t> classes;  // bits
};

}  // namespace pdkernels
