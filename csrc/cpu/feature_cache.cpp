// Steps that recompute only some rows, on the CPU: values are checked here, and rows gathered; simd/feature_cache.cpp
// computes.
#include <cstring>

#include "check_rows.h"
#include "ops/feature_cache.h"
#include "parallel.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

std::string entry(int64_t b, int64_t j) { return "index[" + std::to_string(b) + ", " + std::to_string(j) + "]"; }

}  // namespace

void select_stale_rows(const StaleRowsArgs& args) {
  const char* op = "select_stale_rows_";
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t start = args.starts.load(b), count = args.count(b);
    report(op, check_extent(args.pages, start, count, args.rows), args.pages, b, start, count, args.rows, "starts");
    require_pages(op, args.pages, b, start, count);
    if (args.quota_of(b) < 0) fail(op, b, "quota", "be at least 0", args.quota_of(b), "0 chooses nothing.");
  }
  PDK_DISPATCH(select_stale_rows, args)
}

void gather_rows(const GatherRowsArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t j = 0; j < args.picked; ++j) {
      const int64_t at = args.index.load(b, j);
      if (!args.fits(at)) fail("gather_rows", b, entry(b, j), range(-1, args.rows - 1), at, "-1 gives a row of zeros.");
    }
  }
  if (args.row_bytes == 0) return;                // no memory need be there
  constexpr int64_t kBytesPerThread = 64 * 1024;  // with less, waking another thread costs more than it saves
  parallel_for(0, args.batch * args.picked, 1 + kBytesPerThread / (args.row_bytes + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t b = item / args.picked, at = args.index.load(b, item % args.picked);
                   char* to = args.out + item * args.row_bytes;
                   if (at < 0) {
                     std::memset(to, 0, args.row_bytes);
                   } else {
                     std::memcpy(to, args.x.row<char>(b, at), args.row_bytes);
                   }
                 }
               });
}

void add_cached_rows(const AddCachedArgs& args) {
  const char* op = "add_cached_rows_";
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t j = 0; j < args.replaced; ++j) {
      const int64_t at = args.index.load(b, j);
      if (!args.in_range(at)) fail(op, b, entry(b, j), range(-1, args.rows - 1), at, "-1 replaces nothing.");
      if (!args.in_order(b, j)) {
        fail(op, b, entry(b, j), "be larger than the one before it, or -1 at the end", at,
             "Sort the rows of each sequence.");
      }
    }
  }
  if (args.width == 0) return;  // as above
  PDK_DISPATCH(add_cached_rows, args)
}

}  // namespace pdkernels::cpu
