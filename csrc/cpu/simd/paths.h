// The new tokens that the rows of a query tile see where these are not the first ones of the tail, as in a tree.
//
// The j-th new token that a row sees takes the j-th position after the prefix, whatever lies between them: a row's sums
// then have the terms, the chunks and the pairs of a row that sees its tokens alone. Rows form a path if each sees the
// first tokens of the longest of them.
#pragma once

#include "ops/speculative_attention.h"
#include "tiles.h"

namespace pdkernels::cpu::PDK_ISA {

// Bits [first, last) of a word, clipped to it.
PDK_INLINE uint32_t ones(int64_t first, int64_t last) {
  first = larger(first, 0), last = smaller(last, 32);
  return first >= last ? 0 : ~0u >> (32 - (last - first)) << first;
}

// What a query tile sees of a chunk of keys.
enum class Visibility { kNone, kSome, kAll };

constexpr int64_t kWords = kChunk / 32;  // of a bitmap row over one chunk

// Whether every row of a query tile sees a run of new tokens that begins with the first one, as under a causal plan.
inline bool in_order(const SpeculativeArgs& args, int64_t batch, int64_t tile) {
  constexpr int64_t kRows = 1024;  // the largest tile
  const int64_t rows = smaller(args.block_q, args.q_len - tile * args.block_q), words = args.bitmaps.words_per_row;
  int64_t next = 0;  // the tile of keys up to which all are seen by some row
  for (const TilePair range : args.of_q.full(batch, tile)) {
    if (range.first != next) return false;
    next = range.second;
  }
  bool ended[kRows] = {};  // rows that do not see all tokens before `next`
  for (const TilePair other : args.of_q.others(batch, tile)) {
    if (other.first != next++) return false;
    const uint32_t* row = args.bitmaps.of(other.second);
    if (row == nullptr) continue;
    for (int64_t r = 0; r < rows; ++r, row += words) {
      for (int64_t w = 0; w < words; ++w) {
        const uint32_t all = ones(0, args.block_k - 32 * w), seen = row[w] & all;
        if ((seen & (seen + 1)) != 0 || (ended[r] && seen != 0)) return false;
        ended[r] |= seen != all;
      }
    }
  }
  return true;
}

class Paths {
 public:
  // Of tiles of so many rows and of so many new tokens; given nullptr, only `bytes` counts.
  Paths(char* base, int64_t block_q, int64_t new_tokens) : stride_((new_tokens + 31) / 32) {
    Arena arena(base);
    seen_ = arena.take<uint32_t>(block_q * stride_);
    list_ = arena.take<int32_t>(32 * stride_);
    path_ = arena.take<int32_t>(block_q);
    longest_ = arena.take<int32_t>(block_q);
    tokens_ = arena.take<int32_t>(block_q);
    bytes = arena.used();
  }

  int64_t bytes;

  // Sorts the rows of a query tile into paths, and returns how many there are.
  int64_t find(const SpeculativeArgs& args, int64_t batch, int64_t tile) {
    rows_ = smaller(args.block_q, args.q_len - tile * args.block_q);
    words_ = (args.kv_len + 31) / 32;
    read_rows(args, batch, tile);
    int32_t count = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      tokens_[r] = 0;
      for (int64_t w = 0; w < words_; ++w) tokens_[r] += __builtin_popcount(row(r)[w]);
      int32_t p = 0;
      for (; p < count; ++p) {
        if (begins(row(r), row(longest_[p]))) break;
        if (!begins(row(longest_[p]), row(r))) continue;
        longest_[p] = static_cast<int32_t>(r);
        break;
      }
      path_[r] = p;
      if (p == count) longest_[count++] = static_cast<int32_t>(r);
    }
    return count;
  }

  // The tokens of a path in their order, tokens_of(path) of them; they hold until the next call.
  const int32_t* list(int64_t path) {
    int32_t found = 0;
    for (int64_t w = 0; w < words_; ++w) {
      for (uint32_t left = row(longest_[path])[w]; left != 0; left &= left - 1) {
        list_[found++] = static_cast<int32_t>(32 * w + __builtin_ctz(left));
      }
    }
    return list_;
  }
  int64_t tokens_of(int64_t path) const { return tokens_[longest_[path]]; }

  // Marks in `bitmap`, kChunk / 32 words for each row of the tile, what the rows of a path see: of the columns before
  // `shared`, which are positions from `first` on, and of `own` columns from `column` on, positions from `cut` on.
  void show(const SpeculativeArgs& args, int64_t batch, int64_t tile, int64_t path, int64_t first, int64_t shared,
            int64_t column, int64_t cut, int64_t own, uint32_t* bitmap) const {
    const int64_t length = args.lengths.load(batch);
    for (int64_t r = 0; r < rows_; ++r) {
      if (path_[r] != path) continue;
      const int64_t begin = position(path, length, args.start(batch, tile * args.block_q + r));
      const int64_t end = smaller(own, length + tokens_[r] - cut);
      for (int64_t w = 0; w < kWords; ++w) {
        bitmap[r * kWords + w] |= ones(begin - first - 32 * w, shared - 32 * w) |
                                  ones(column + larger(begin - cut, 0) - 32 * w, column + end - 32 * w);
      }
    }
  }

  // What all rows together see of the first `count` columns.
  Visibility of(const uint32_t* bitmap, int64_t count) const {
    bool any = false, all = true;
    for (int64_t i = 0; i < rows_ * kWords; ++i) {
      any |= bitmap[i] != 0;
      all &= bitmap[i] == ones(0, count - 32 * (i % kWords));
    }
    return !any ? Visibility::kNone : all ? Visibility::kAll : Visibility::kSome;
  }

 private:
  uint32_t* row(int64_t r) const { return seen_ + r * stride_; }

  // Whether the tokens of `few` are the first ones of `many`, or all.
  bool begins(const uint32_t* few, const uint32_t* many) const {
    int64_t w = 0;
    while (w < words_ && few[w] == many[w]) ++w;
    if (w == words_) return true;
    const uint32_t differs = few[w] ^ many[w], from_there = ~((differs & -differs) - 1);
    if ((few[w] & from_there) != 0) return false;
    for (++w; w < words_; ++w) {
      if (few[w] != 0) return false;
    }
    return true;
  }

  // The position at which a row begins to see that starts at the new token `start - length`, or at a cached one.
  int64_t position(int64_t path, int64_t length, int64_t start) const {
    if (start <= length) return start;
    int64_t before = 0;
    for (int64_t w = 0; w < words_; ++w) {
      before += __builtin_popcount(row(longest_[path])[w] & ones(0, start - length - 32 * w));
    }
    return length + before;
  }

  void read_rows(const SpeculativeArgs& args, int64_t batch, int64_t tile) {
    __builtin_memset(seen_, 0, rows_ * stride_ * sizeof(uint32_t));
    const auto add = [&](int64_t first, int64_t last) {  // seen by all rows
      last = smaller(last, args.kv_len);
      for (int64_t w = first / 32; 32 * w < last; ++w) {
        for (int64_t r = 0; r < rows_; ++r) row(r)[w] |= ones(first - 32 * w, last - 32 * w);
      }
    };
    const int64_t block = args.block_k, words = args.bitmaps.words_per_row;
    for (const TilePair range : args.of_q.full(batch, tile)) add(range.first * block, range.second * block);
    for (const TilePair other : args.of_q.others(batch, tile)) {
      const int64_t column = other.first * block, shift = column % 32;
      const uint32_t* from = args.bitmaps.of(other.second);
      if (from == nullptr) {
        add(column, column + block);
        continue;
      }
      for (int64_t r = 0; r < rows_; ++r, from += words) {
        for (int64_t w = 0; w < words; ++w) {
          const int64_t at = column / 32 + w;
          const uint32_t seen = from[w] & ones(0, block - 32 * w);
          if (at < words_) row(r)[at] |= seen << shift & ones(0, args.kv_len - 32 * at);
          if (shift != 0 && at + 1 < words_)
            row(r)[at + 1] |= seen >> (32 - shift) & ones(0, args.kv_len - 32 * (at + 1));
        }
      }
    }
  }

  int64_t stride_, rows_ = 0, words_ = 0;
  uint32_t* seen_;  // [rows][stride_]: the new tokens that each row sees
  int32_t *list_, *path_, *longest_,
      *tokens_;  // a path's tokens; of each row its path; of each path a row; of each row
};

}  // namespace pdkernels::cpu::PDK_ISA
