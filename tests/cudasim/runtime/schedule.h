// The order in which blocks, the blocks of a cluster, and threads run. A correct kernel gives the same result under
// every schedule; a missing barrier shows as a difference.
#pragma once

#include <bit>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace cudasim {

class Schedule {
 public:
  // "forward", "reverse" or "random:SEED". Returns false, and changes nothing, for anything else.
  bool parse(const std::string& text) {
    if (text == "forward" || text == "reverse") {
      kind_ = text == "forward" ? Kind::forward : Kind::reverse;
    } else if (text.starts_with("random:") && text.size() > 7 && text.size() < 26 &&
               text.find_first_not_of("0123456789", 7) == std::string::npos) {
      kind_ = Kind::random;
      seed_ = 0;
      for (const char digit : text.substr(7)) seed_ = seed_ * 10 + static_cast<std::uint64_t>(digit - '0');
    } else {
      return false;
    }
    text_ = text;
    return true;
  }
  const std::string& text() const { return text_; }

  // Every launch restarts the order, so that a test's outcome does not depend on the launches before it.
  void restart() { state_ = seed_; }

  std::vector<std::uint64_t> block_order(std::uint64_t blocks) {
    std::vector<std::uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    if (kind_ == Kind::reverse) return {order.rbegin(), order.rend()};
    for (std::uint64_t i = blocks; kind_ == Kind::random && i > 1; --i) std::swap(order[i - 1], order[next() % i]);
    return order;
  }

  // One of the set bits, of which there is at least one.
  int pick(unsigned bits) {
    if (kind_ == Kind::forward) return std::countr_zero(bits);
    if (kind_ == Kind::reverse) return 31 - std::countl_zero(bits);
    for (std::uint64_t skip = next() % static_cast<unsigned>(std::popcount(bits)); skip > 0; --skip) bits &= bits - 1;
    return std::countr_zero(bits);
  }

  // How many threads of a block are resumed before another block of its cluster may have a turn.
  std::uint64_t turns() { return kind_ == Kind::random ? 1 + next() % 256 : ~std::uint64_t{0}; }

  // Shared memory starts as this byte: as floats NaN in one schedule, huge in another, anything in the random ones.
  unsigned char poison() {
    if (kind_ == Kind::random) return static_cast<unsigned char>(1 + next() % 255);
    return kind_ == Kind::forward ? 0xff : 0x7f;
  }

 private:
  std::uint64_t next() {  // splitmix64
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }

  enum class Kind { forward, reverse, random };
  Kind kind_ = Kind::forward;
  std::uint64_t seed_ = 0;
  std::uint64_t state_ = 0;
  std::string text_ = "forward";
};

}  // namespace cudasim
