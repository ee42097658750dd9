// A block's shared memory: poisoned before every block, the dynamic part fenced by guard bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace cudasim {

// All `__shared__` variables of this library, for the calling OS thread (see cuda_runtime.h: they are thread-local).
std::span<unsigned char> static_shared();

class DynamicShared {
 public:
  void prepare(std::size_t bytes) {
    bytes_ = bytes;
    memory_.resize(kAlignment + kFront + bytes + kBack);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    // 16-byte aligned, as promised to kernels, and deliberately no better.
    start_ = memory_.data() + (kAlignment - address % kAlignment) + kFront;
  }
  void poison(unsigned char byte) {
    std::memset(start_ - kFront, kGuard, kFront + bytes_ + kBack);
    std::memset(start_, byte, bytes_);
  }
  bool guards_intact() const { return all_guard(start_ - kFront, kFront) && all_guard(start_ + bytes_, kBack); }
  void* start() const { return start_; }

 private:
  static bool all_guard(const unsigned char* at, std::size_t bytes) {
    return at[0] == kGuard && std::memcmp(at, at + 1, bytes - 1) == 0;
  }
  static constexpr unsigned char kGuard = 0xc3;
  static constexpr std::size_t kAlignment = 128;
  static constexpr std::size_t kFront = 128 + 16;
  static constexpr std::size_t kBack = 4096;
  std::vector<unsigned char> memory_;
  unsigned char* start_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace cudasim
