// One piece of memory that is cut into parts, in the order in which they are taken.
#pragma once

#include "common/platform.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace pdkernels {

// Without memory it counts what the parts need. For the address sanitizer a gap after each part finds what runs over.
class MemoryParts {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit MemoryParts(char* memory = nullptr) : memory_(memory) {}

  template <class T = char>
  T* take(int64_t count) {
    const int64_t first = used_, bytes = count * static_cast<int64_t>(sizeof(T));
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
#ifdef __SANITIZE_ADDRESS__
    used_ += kAlignment;
    if (memory_ != nullptr) {  // a part may lie where another layer had a gap
      __asan_unpoison_memory_region(memory_ + first, bytes);
      __asan_poison_memory_region(memory_ + first + bytes, used_ - first - bytes);
    }
#endif
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + first);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace pdkernels
