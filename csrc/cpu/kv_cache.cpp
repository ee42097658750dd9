// KV cache append, commit and trim on the CPU.
//
// Everything is checked before the first byte is written. One work item is one buffer (a layer's K or V) of one
// sequence: items touch disjoint bytes, so they run on any thread in any order with the same result.
#include <cstring>
#include <vector>

#include "check_rows.h"
#include "ops/kv_cache.h"
#include "parallel.h"

namespace pdkernels::cpu {
namespace {

// Below this many bytes waking another thread costs more than it saves.
constexpr int64_t kBytesPerThread = 64 * 1024;

int64_t grain(int64_t bytes_per_item) { return 1 + kBytesPerThread / (bytes_per_item + 1); }

void copy_row(char* to, const RowLayout& to_row, const char* from, const RowLayout& from_row) {
  if (to_row.head_bytes == 0) return;  // no memory need be there
  for (int64_t head = 0; head < to_row.heads; ++head) {
    std::memcpy(to + head * to_row.head_stride, from + head * from_row.head_stride, to_row.head_bytes);
  }
}

struct Move {
  Slot from;
  Slot to;
};

// Rows of one sequence that actually move, in order, and whether that order alone keeps reads before writes: with
// ascending sources no row is overwritten before it has been read, since every later source is above every earlier
// target.
struct RowMoves {
  std::vector<Move> moves;
  bool ascending = true;
};

RowMoves find_moves(const CommitArgs& args, int64_t b, int64_t length, int64_t count) {
  const PageMap& pages = args.cache.pages;
  RowMoves rows;
  rows.moves.reserve(count);
  int64_t previous = -1;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t source = args.source_index.load(b, row);
    rows.ascending = rows.ascending && source > previous;
    previous = source;
    if (source != row) rows.moves.push_back({pages.locate(b, length + source), pages.locate(b, length + row)});
  }
  return rows;
}

void run_moves(const RowMoves& rows, char* base, const RowLayout& row) {
  if (rows.ascending) {
    for (const Move& move : rows.moves) {
      copy_row(base + row.row_offset(move.to.page, move.to.slot), row,
               base + row.row_offset(move.from.page, move.from.slot), row);
    }
    return;
  }
  // Any other pattern: read every row, then write every row.
  thread_local std::vector<char> staged;
  const RowLayout packed{0, 0, row.head_bytes, row.heads, row.head_bytes};
  staged.resize(rows.moves.size() * row.row_bytes());
  char* at = staged.data();
  for (const Move& move : rows.moves) {
    copy_row(at, packed, base + row.row_offset(move.from.page, move.from.slot), row);
    at += row.row_bytes();
  }
  at = staged.data();
  for (const Move& move : rows.moves) {
    copy_row(base + row.row_offset(move.to.page, move.to.slot), row, at, packed);
    at += row.row_bytes();
  }
}

}  // namespace

void kv_append(const AppendArgs& args) {
  const CacheView& cache = args.cache;
  int64_t max_count = 0;
  for (int64_t b = 0; b < cache.batch; ++b) {
    const int64_t length = args.lengths.load(b);
    const int64_t count = args.count(b);
    report("kv_append_", check_extent(cache.pages, length, count, args.max_rows), cache.pages, b, length, count,
           args.max_rows);
    require_pages("kv_append_", cache.pages, b, length, count);
    max_count = count > max_count ? count : max_count;
  }
  const int64_t buffers = 2 * static_cast<int64_t>(cache.layers);
  parallel_for(0, buffers * cache.batch, grain(max_count * cache.rows[0].row_bytes()), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t buffer = item / cache.batch;
      const int64_t b = item % cache.batch;
      const int side = cache.side(buffer);
      const RowLayout& row = cache.rows[side];
      const RowLayout& source_row = args.source_rows[side];
      const char* source = args.source.base[buffer] + b * args.source_batch_stride[side];
      const int64_t length = args.lengths.load(b);
      const int64_t count = args.count(b);
      for (int64_t i = 0; i < count; ++i) {
        const Slot at = cache.pages.locate(b, length + i);
        copy_row(cache.buffers.base[buffer] + row.row_offset(at.page, at.slot), row,
                 source + i * source_row.slot_stride, source_row);
      }
    }
  });
}

void kv_commit(const CommitArgs& args) {
  const CacheView& cache = args.cache;
  const PageMap& pages = cache.pages;
  const char* op = "kv_commit_";
  std::vector<RowMoves> all_moves;
  int64_t max_count = 0;
  for (int64_t b = 0; b < cache.batch; ++b) {
    const int64_t length = args.lengths.load(b);
    const int64_t count = args.counts.load(b);
    report(op, check_extent(pages, length, count, args.max_rows), pages, b, length, count, args.max_rows);
    if (!args.source_index.given()) continue;
    require_pages(op, pages, b, length, count);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t source = args.source_index.load(b, row);
      if (source < 0 || source >= pages.capacity() - length) {
        fail(op, b, "source_index", range(0, pages.capacity() - length - 1), source,
             "Sources are counted from the sequence's length.");
      }
      require_pages(op, pages, b, length + source, 1);
    }
    all_moves.push_back(find_moves(args, b, length, count));
    max_count = static_cast<int64_t>(all_moves.back().moves.size()) > max_count
                    ? static_cast<int64_t>(all_moves.back().moves.size())
                    : max_count;
  }
  if (max_count > 0) {
    const int64_t buffers = 2 * static_cast<int64_t>(cache.layers);
    parallel_for(
        0, buffers * cache.batch, grain(max_count * cache.rows[0].row_bytes()), [&](int64_t begin, int64_t end) {
          for (int64_t item = begin; item < end; ++item) {
            const int64_t buffer = item / cache.batch;
            run_moves(all_moves[item % cache.batch], cache.buffers.base[buffer], cache.rows[cache.side(buffer)]);
          }
        });
  }
  for (int64_t b = 0; args.advance && b < cache.batch; ++b) {
    args.lengths.store(args.lengths.load(b) + args.counts.load(b), b);
  }
}

void kv_trim(const TrimArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t new_length = args.new_lengths.load(b), length = args.lengths.load(b);
    if (new_length < 0 || new_length > length) {
      fail("kv_trim_", b, "new_lengths", range(0, length), new_length, "Trimming only ever shortens a sequence.");
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) args.lengths.store(args.new_lengths.load(b), b);
}

}  // namespace pdkernels::cpu
