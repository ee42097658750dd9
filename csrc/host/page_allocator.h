// Page ids of a paged KV cache. Always the lowest free id, so that a run is reproducible and pools stay dense.
#pragma once

#include <cstdint>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace pdkernels {

class PageAllocator {
 public:
  explicit PageAllocator(int64_t num_pages) : used_(check_size(num_pages), false) {
    for (int64_t page = 0; page < num_pages; ++page) free_.insert(free_.end(), page);
  }

  int64_t num_pages() const { return static_cast<int64_t>(used_.size()); }
  int64_t available() const { return static_cast<int64_t>(free_.size()); }

  std::vector<int64_t> allocate(int64_t count) {
    if (count < 0)
      throw std::invalid_argument("pdkernels.PageAllocator: count must be 0 or more, got " + std::to_string(count) +
                                  ".");
    if (count > available()) throw std::bad_alloc();
    const auto end = std::next(free_.begin(), count);
    const std::vector<int64_t> pages(free_.begin(), end);
    free_.erase(free_.begin(), end);
    for (const int64_t page : pages) used_[page] = true;
    return pages;
  }

  void release(const std::vector<int64_t>& pages) {
    const std::set<int64_t> unique(pages.begin(), pages.end());
    for (const int64_t page : unique) {
      if (page < 0 || page >= num_pages() || !used_[page]) {
        throw std::invalid_argument("pdkernels.PageAllocator: pages must be in use, got " + std::to_string(page) + ".");
      }
    }
    if (unique.size() != pages.size()) {
      throw std::invalid_argument("pdkernels.PageAllocator: pages must be distinct, got one twice.");
    }
    for (const int64_t page : pages) {
      used_[page] = false;
      free_.insert(page);
    }
  }

 private:
  static int64_t check_size(int64_t num_pages) {
    if (num_pages < 0) {
      throw std::invalid_argument("pdkernels.PageAllocator: num_pages must be 0 or more, got " +
                                  std::to_string(num_pages) + ".");
    }
    return num_pages;
  }

  std::vector<bool> used_;
  std::set<int64_t> free_;
};

}  // namespace pdkernels
