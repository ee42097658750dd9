// A plan is trusted with addresses, so its numbers are looked at before a kernel runs: a few words for each visited
// tile.
#pragma once

#include <vector>

#include "fault.h"
#include "pdkernels/block_sparse_attention.h"

namespace pdkernels::cpu {

inline void check_lists(const char* op, const TileLists& lists, int64_t batch, int64_t other_tiles, int64_t bitmaps) {
  const auto require = [op](bool fine, const char* what) {
    if (!fine) fail(op, std::string("plan must ") + what + ". Make plans with SegmentMask.plan().");
  };
  const bool own_lists =
      lists.offsets_stride != 0 || lists.tiles_stride != 0 || lists.bitmap_ids_stride != 0 || lists.order_stride != 0;
  std::vector<char> seen(lists.num_tiles);
  for (int64_t b = 0; b < (own_lists ? batch : 1); ++b) {
    seen.assign(lists.num_tiles, 0);
    for (int64_t i = 0; i < lists.num_tiles; ++i) {
      const int64_t tile = lists.tile_at(b, i);
      require(tile >= 0 && tile < lists.num_tiles && !seen[tile], "list every tile once in its order");
      seen[tile] = 1;
      require(lists.begin(b, i) >= 0 && lists.begin(b, i) <= lists.end(b, i) && lists.end(b, i) <= lists.visits,
              "have ascending offsets inside its lists");
      for (int64_t visit = lists.begin(b, i); visit < lists.end(b, i); ++visit) {
        require(lists.other(b, visit) >= 0 && lists.other(b, visit) < other_tiles, "list tiles that exist");
        require(lists.bitmap_id(b, visit) >= -1 && lists.bitmap_id(b, visit) < bitmaps, "name bitmaps that exist");
      }
    }
  }
}

}  // namespace pdkernels::cpu
