// Memory in huge pages, if the system has them: a stream of weights crosses into a new page every few rows otherwise.
#pragma once

#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace pdkernels {

// Zeros, until written. Every block has pages of its own and gives them back when it is destroyed. Small blocks are
// neighbours in one mapping, so that together they fill huge pages.
//
// Callers take turns: Python's lock, which a fork holds too.
class HugePages {
 public:
  explicit HugePages(int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0 || bytes > kMost) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    static const int64_t page = sysconf(_SC_PAGESIZE);
    size_ = rounded_up(bytes, page);
    if (size_ >= kShared / 2) {
      data_ = map(size_);
      return;
    }
    Shared& shared = open();
    if (shared.end - shared.next < size_) {
      char* fresh = map(kShared);
      if (shared.next < shared.end) munmap(shared.next, shared.end - shared.next);
      shared = {fresh, fresh + kShared};
    }
    data_ = shared.next;
    shared.next += size_;
#else
    throw std::bad_alloc();
#endif
  }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  ~HugePages() {
#if defined(__linux__)
    if (data_ != nullptr) munmap(data_, size_);
#endif
  }

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kHuge = int64_t{1} << 21, kShared = int64_t{1} << 25, kMost = int64_t{1} << 46;

  static int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#if defined(__linux__) && defined(MADV_HUGEPAGE)
  struct Shared {
    char *next = nullptr, *end = nullptr;
  };
  static Shared& open() {
    static Shared shared;
    return shared;
  }

  // Address space that begins with a huge page. Nothing of it takes memory before it is written.
  static char* map(int64_t size) {
    void* found = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    char* const begin = static_cast<char*>(found);
    char* const aligned = reinterpret_cast<char*>(rounded_up(reinterpret_cast<int64_t>(begin), kHuge));
    if (aligned > begin) munmap(begin, aligned - begin);
    munmap(aligned + size, begin + kHuge - aligned);
    madvise(aligned, size, MADV_HUGEPAGE);  // advice: without it the memory is as good as any other
    return aligned;
  }
#endif

  int64_t bytes_, size_ = 0;
  char* data_ = nullptr;
};

}  // namespace pdkernels
