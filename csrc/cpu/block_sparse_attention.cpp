// Block-sparse attention on the CPU: checks the plan, then calls the kernel that was compiled for this processor.
#include "pdkernels/block_sparse_attention.h"

#include <memory>
#include <new>
#include <vector>

#include "fault.h"
#include "kernels.h"
#include "pdkernels/cpu_isa.h"
#include "simd/kernels.h"

namespace pdkernels::cpu {

char* thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    size = bytes;
  }
  return memory.get();
}

namespace {

// A plan is trusted with addresses, so its numbers are looked at first: a few words for each visited tile.
void check_lists(const TileLists& lists, int64_t batch, int64_t other_tiles, int64_t bitmaps) {
  const auto require = [](bool fine, const char* what) {
    if (!fine) fail("block_sparse_attention", std::string("plan must ") + what + ". Make plans with SegmentMask.plan().");
  };
  const bool own_lists = lists.offsets_stride != 0 || lists.tiles_stride != 0 || lists.bitmap_ids_stride != 0 || lists.order_stride != 0;
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

void check_plan(const AttentionArgs& args) {
  check_lists(args.of_q, args.batch, args.of_k.num_tiles, args.bitmaps.count);
  check_lists(args.of_k, args.batch, args.of_q.num_tiles, args.bitmaps.count);
}

}  // namespace

#ifdef __x86_64__
#define PDK_DISPATCH(kernel, args)                        \
  switch (cpu_isa()) {                                    \
    case CpuIsa::portable: return portable::kernel(args); \
    case CpuIsa::avx2: return avx2::kernel(args);         \
    case CpuIsa::avx512: return avx512::kernel(args);     \
    case CpuIsa::amx: return amx::kernel(args);           \
  }
#else
#define PDK_DISPATCH(kernel, args) return portable::kernel(args);
#endif

void block_sparse_attention(const AttentionArgs& args) {
  check_plan(args);
  PDK_DISPATCH(block_sparse_attention, args)
}

void block_sparse_attention_backward(const AttentionGradArgs& args) {
  check_plan(args);
  PDK_DISPATCH(block_sparse_attention_backward, args)
}

}  // namespace pdkernels::cpu
