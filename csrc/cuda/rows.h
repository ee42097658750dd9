// Rows of a sequence that blocks share, and the check of a sequence that each of them makes by itself.
//
// A bad sequence is left unchanged as a whole, so every block has to look at all of its rows. A bounded number of
// blocks keeps that linear in the rows: with more rows a block takes several.
#pragma once

#include "common/cache_layout.h"

namespace pdkernels::cuda {

inline unsigned row_blocks(int64_t rows, int64_t most) { return static_cast<unsigned>(rows < most ? rows : most); }

// Whether `fine(i)` holds for all i below `count`, found by the whole block together. Loads of several rows are under
// way.
template <class Fine>
__device__ bool all_fine(int64_t count, const Fine& fine) {
  bool all = true;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) all &= fine(i);
  return __syncthreads_and(all);
}

// Whether the pages of `count` positions exist, found by the whole block together. A contiguous cache has them all.
__device__ inline bool pages_exist(const PageMap& pages, int64_t b, int64_t start, int64_t count) {
  if (!pages.block_table.given() || count <= 0) return true;
  const int64_t first = start / pages.page_size, last = (start + count - 1) / pages.page_size;
  return all_fine(last - first + 1, [&](int64_t i) {
    const int64_t page = pages.block_table.load(b, first + i);
    return page >= 0 && page < pages.num_pages;
  });
}

}  // namespace pdkernels::cuda
