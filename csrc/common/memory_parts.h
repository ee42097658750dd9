// One piece of memory that is cut into parts, in the order in which they are taken.
#pragma once

#include "common/platform.h"

namespace pdkernels {

// Without memory it counts what the parts need.
class MemoryParts {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit MemoryParts(char* memory = nullptr) : memory_(memory) {}

  template <class T = char>
  T* take(int64_t count) {
    char* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace pdkernels
