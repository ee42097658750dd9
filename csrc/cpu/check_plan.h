// Checks a plan before a kernel runs, because kernels derive addresses from it: four words for each tile, and two for
// each range and each tile that needs a mask.
#pragma once

#include <string>
#include <vector>

#include "fault.h"
#include "ops/block_sparse_attention.h"

namespace pdkernels::cpu {

// `whole` of the `other_tiles` on the other side are entirely inside the lengths.
inline void check_lists(const char* op, const TileLists& lists, int64_t batch, int64_t other_tiles, int64_t whole,
                        int64_t bitmaps) {
  const auto require = [op](bool fine, const char* what) {
    if (!fine) fail(op, std::string("plan must ") + what + ". Make plans with SegmentMask.plan().");
  };
  std::vector<char> listed(lists.num_tiles);
  for (int64_t b = 0; b < (lists.rows_stride != 0 ? batch : 1); ++b) {
    listed.assign(lists.num_tiles, 0);
    for (int64_t i = 0; i < lists.num_tiles; ++i) {
      const int64_t tile = lists.tile_at(b, i);
      require(tile >= 0 && tile < lists.num_tiles && !listed[tile], "list every tile once in its order");
      listed[tile] = 1;
      const int32_t* row = lists.row(b, i);
      require(row[0] >= 0 && row[0] <= row[1] && row[1] <= row[2] && row[2] <= lists.num_pairs,
              "have ascending offsets inside its lists");
      for (const TilePair range : lists.full(b, i)) {
        require(range.first >= 0 && range.first < range.second && range.second <= whole,
                "have ranges of whole tiles that exist");
      }
      for (const TilePair other : lists.others(b, i)) {
        require(other.first >= 0 && other.first < other_tiles, "list tiles that exist");
        require(other.second >= -1 && other.second < bitmaps, "name bitmaps that exist");
      }
    }
  }
}

}  // namespace pdkernels::cpu
