// A block's shared memory: poisoned when the block starts, the dynamic part fenced by guard bytes. Blocks of a cluster
// take turns: the static memory of those that do not run is kept aside, where the others' mapped addresses point.
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
  std::size_t size() const { return bytes_; }
  bool holds(const void* at) const { return offset(at) < bytes_; }
  // Where the same variable is in the memory of another block.
  void* same_in(const DynamicShared& other, const void* at) const { return other.start_ + offset(at); }

 private:
  std::size_t offset(const void* at) const { return static_cast<const unsigned char*>(at) - start_; }
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

class SavedShared {
 public:
  void prepare(std::span<unsigned char> live) {
    live_ = live;
    memory_.resize(live.size() + 2 * kPage);
    // Aligned as the memory that the block sees.
    const auto there = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = memory_.data() + (reinterpret_cast<std::uintptr_t>(live.data()) - there) % kPage;
  }
  void save() { std::memcpy(start_, live_.data(), live_.size()); }
  void restore() const { std::memcpy(live_.data(), start_, live_.size()); }
  void* same(const void* at) const { return start_ + (static_cast<const unsigned char*>(at) - live_.data()); }

 private:
  static constexpr std::size_t kPage = 4096;
  std::span<unsigned char> live_;
  std::vector<unsigned char> memory_;
  unsigned char* start_ = nullptr;
};

}  // namespace cudasim
