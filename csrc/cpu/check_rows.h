// Checks, with their messages, of ops that write rows after the committed ones of a cache.
#pragma once

#include "common/cache_layout.h"
#include "fault.h"

namespace pdkernels::cpu {

inline std::string range(int64_t low, int64_t high) {
  return "be in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
}

inline void report(const char* op, Fault fault, const PageMap& pages, int64_t b, int64_t length, int64_t count,
                   int64_t max_rows, const std::string& lengths = "lengths") {
  const int64_t capacity = pages.capacity();
  switch (fault) {
    case Fault::kNone:
    case Fault::kSource:  // reported once the row is known
    case Fault::kPage: return;
    case Fault::kLength:
      fail(op, b, lengths, range(0, capacity), length,
           "The cache holds " + std::to_string(capacity) + " rows per sequence.");
    case Fault::kCount: fail(op, b, "counts", range(0, max_rows), count, "Only the rows given can be written.");
    case Fault::kCapacity:
      fail(op, b, lengths + " + counts", "be at most the capacity " + std::to_string(capacity), length + count,
           "Make the cache larger, reserve more pages, or write fewer rows.");
  }
}

// Every page that holds one of the positions [first, first + count) must exist.
inline void require_pages(const char* op, const PageMap& pages, int64_t b, int64_t first, int64_t count,
                          const char* remedy = "Reserve pages for the rows before writing them.") {
  if (!pages.block_table.given() || count == 0) return;
  const int64_t last_page = (first + count - 1) / pages.page_size;
  for (int64_t page = first / pages.page_size; page <= last_page; ++page) {
    const int64_t id = pages.block_table.load(b, page);
    if (id < 0 || id >= pages.num_pages) {
      fail(op, b, "block_table[" + std::to_string(b) + ", " + std::to_string(page) + "]", range(0, pages.num_pages - 1),
           id, remedy);
    }
  }
}

}  // namespace pdkernels::cpu
