// The two matrix products of attention, in the one layout that all passes share.
//
// A *panel* is kPanel tokens side by side in the lanes of a few vectors; the loop runs down the other tokens. Scores
// are [tokens][kPanel], accumulators [head_dim][kPanel]: maxima, sums and rescaling go lane by lane, with no shuffles,
// and weights leave the first product in the layout that the second one reads. Queries are in panels for the forward
// pass and dQ, keys for dK and dV.
//
// Tokens that run down come in chunks of kChunk and inside these in blocks of up to kBlock, the width of a bitmap word.
#pragma once

#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

constexpr int kBlock = 32;
constexpr int kChunk = 128;
constexpr int kMostPieces = 16;

// Elements of a head that are summed separately before they are added: with short rows and few keys a single rounding
// shows.
PDK_INLINE int64_t piece_of(int64_t head_dim) { return head_dim <= 32 ? 8 : 32; }

// A number that code is generated for.
template <int kNumber>
struct Count {
  static constexpr int value = kNumber;
};

// A run of tokens of a chunk that a panel has to visit. Its scores are at kBlock times its index in the list of
// blocks.
struct Block {
  int32_t begin, count;
  const Ints* visible;  // [count][vectors of a panel], all bits or none; nullptr: all pairs are visible
};

// Hands out pieces of a thread's scratch memory, or, given nullptr, computes how much is needed.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = base_ ? base_ + used_ : nullptr;
    used_ += rounded_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Where the rows of the next chunk are if they follow these at the same distance, in bytes from these; 0 where no chunk
// follows.
template <class T>
PDK_INLINE int64_t bytes_to_next(const T* const* rows, int64_t count) {
  if (count < kChunk) return 0;
  const auto address = [&](int64_t i) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows[i])); };
  return kChunk * (address(kChunk - 1) - address(kChunk - 2));
}

// Into the second-level cache: some processors have twice as many such reads on their way as into the first level, and
// a chunk does not fit there.
template <class T>
PDK_INLINE void prefetch(const T* row, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Prefetches `count` elements that are `ahead` bytes from these, unless that is 0. A wrong guess costs a little
// bandwidth, as in a paged cache.
template <class T>
PDK_INLINE void prefetch_row(const T* row, int64_t count, int64_t ahead) {
  if (ahead != 0) prefetch(reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(row) + ahead), count);
}

// A packed chunk of tokens: rows for scores(), columns for accumulate().
template <class Packed>
struct Operand {
  Packed *rows, *columns;
};

// Products by fused multiply-adds: one element of a row, broadcast, times a panel's vectors. For any element type, as
// floats. A lane's sums are the same for any number of vectors.
// Heads have up to kLargestHead elements.
template <int kCount, int kLargestHead = 256>
struct VectorTilesOf {
  static constexpr int kVectors = kCount;
  static constexpr int kPanel = kVectors * kLanes;
  static constexpr int kTogether = 2;  // tokens from a multiple of it on are added up before they join a sum
  // Rows of one group of accumulators: as many as fit into 16 or 32 registers.
  static constexpr int kGroup = kLanes == 16 || kVectors == 1 ? 8 : 6;
  using Packed = float;

  // Room for the largest head, the same for all, so that row offsets are constants; and an odd number of cache lines,
  // so that a column of rows does not map to a few sets of the cache.
  static constexpr int64_t kRowStride = kLargestHead + 16;
  static int64_t panel_size(int64_t head_dim) { return head_dim * kPanel; }
  static int64_t sums_size(int64_t head_dim) { return head_dim * kPanel; }

  // Both products read rows, so columns are the rows.
  static Operand<float> take(Arena& arena, int64_t, bool, bool) {
    float* rows = arena.take<float>(kChunk * kRowStride);
    return {rows, rows};
  }

  template <class T>
  static PDK_APART void pack(const T* const* tokens, int64_t count, int64_t head_dim, Operand<float> to) {
    const int64_t ahead = bytes_to_next(tokens, count);
    for (int64_t i = 0; i < count; ++i) {
      prefetch_row(tokens[i], head_dim, ahead);
      to_floats(tokens[i], to.rows + i * kRowStride, head_dim);
    }
  }

  // Lanes without a token are nullptr and become zeros.
  template <class T>
  static PDK_APART void pack_panel(const T* const* lanes, int64_t head_dim, float* panel) {
    for (int first = 0; first < kPanel; first += kLanes) {
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int64_t count = smaller(kLanes, head_dim - d);
        Ints square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const T* row = lanes[first + i];
          square[i] = Ints{};
          if (row == nullptr) continue;
          if (count == kLanes) {
            square[i] = reinterpret_cast<Ints>(load(row + d, Whole{}));
          } else {
            to_floats(row + d, reinterpret_cast<float*>(&square[i]), count);
          }
        }
        transpose(square);
        for (int64_t i = 0; i < count; ++i) *reinterpret_cast<Ints*>(panel + (d + i) * kPanel + first) = square[i];
      }
    }
  }

  // scores[token][lane] = rows[token] . panel[:, lane], summed in pieces for smaller rounding errors
  static PDK_APART void scores(const float* rows, const float* panel, int64_t head_dim, const Block* blocks,
                               int num_blocks, float* scores) {
    const auto from = [&](int64_t token, auto) {
      return [at = rows + token * kRowStride](int i) { return at + i * kRowStride; };
    };
    scores_from(from, panel, head_dim, blocks, num_blocks, scores);
  }

  // The same for rows that were not packed. Meanwhile those of `next` are prefetched.
  static PDK_APART void scores(const float* const* rows, const float* const* next, const float* panel, int64_t head_dim,
                               const Block* blocks, int num_blocks, float* scores) {
    const auto from = [&](int64_t token, auto group) {
      constexpr int kRows = decltype(group)::value;
      Rows<kRows> found;
      for (int i = 0; i < kRows; ++i) {
        found.at[i] = rows[token + i];
        prefetch(next[token + i], head_dim);
      }
      return found;
    };
    scores_from(from, panel, head_dim, blocks, num_blocks, scores);
  }

  // sums[d][lane] = sums[d][lane] * factor[lane] + sum over tokens of rows[token][d] * weights[token][lane]
  //
  // The tokens' part is summed by itself first: rounding errors then grow with the tokens of a chunk and with the
  // number of chunks, not with their product.
  static PDK_APART void accumulate(const float* rows, const float* weights, int64_t head_dim, const Block* blocks,
                                   int num_blocks, const Vec* factor, float* sums) {
    const auto from = [&](int64_t token, int64_t element) { return rows + token * kRowStride + element; };
    accumulate_from(from, weights, head_dim, blocks, num_blocks, factor, sums);
  }

  // The same for rows that were not packed. Meanwhile `ahead` bytes from those of `before` are prefetched.
  static PDK_APART void accumulate(const float* const* rows, const float* const* before, int64_t ahead,
                                   const float* weights, int64_t head_dim, const Block* blocks, int num_blocks,
                                   const Vec* factor, float* sums) {
    const auto from = [&](int64_t token, int64_t element) {
      if (element % (64 / sizeof(float)) == 0) prefetch_row(before[token] + element, 1, ahead);
      return rows[token] + element;
    };
    accumulate_from(from, weights, head_dim, blocks, num_blocks, factor, sums);
  }

  // Two tokens' weights into a block of them, which may be the block of scores they come from.
  static PDK_INLINE void put_weights(float* block, int token, int v, Vec even, Vec odd) {
    vectors(block + token * kPanel)[v] = even;
    vectors(block + (token + 1) * kPanel)[v] = odd;
  }
  static void pad_weights(float*, int) {}
  static PDK_INLINE Vec weight(const float* block, int token, int v) { return vectors(block + token * kPanel)[v]; }

  struct Session {};  // what a thread needs while it works

 private:
  // Cuts n into groups for which there is code; a remainder is spread so that no group is tiny if n is a multiple of 8.
  template <class Body>
  static PDK_INLINE void in_groups(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; n - i >= kGroup + 4 || n - i == kGroup; i += kGroup) body(Count<kGroup>{}, i);
    for (; n - i >= 4; i += 4) body(Count<4>{}, i);
    for (; i < n; ++i) body(Count<1>{}, i);
  }

  static PDK_INLINE Vec* vectors(float* p) { return reinterpret_cast<Vec*>(p); }
  static PDK_INLINE const Vec* vectors(const float* p) { return reinterpret_cast<const Vec*>(p); }

  template <int kRows>
  struct Rows {
    const float* at[kRows];
    PDK_INLINE const float* operator()(int i) const { return at[i]; }
  };

  template <class From>
  static PDK_INLINE void scores_from(const From& from, const float* panel, int64_t head_dim, const Block* blocks,
                                     int num_blocks, float* scores) {
    const int64_t size = piece_of(head_dim);
    for (int b = 0; b < num_blocks; ++b, scores += kBlock * kPanel) {
      in_groups(blocks[b].count, [&](auto group, int64_t first) {
        constexpr int kRows = decltype(group)::value;
        const auto rows = from(blocks[b].begin + first, group);
        for (int64_t piece = 0; piece < head_dim; piece += size) {
          Vec sums[kRows][kVectors] = {};
          const int64_t end = smaller(piece + size, head_dim);
          for (int64_t d = piece; d < end; ++d) {
            add_products(sums, [&](int i) { return rows(i)[d]; }, panel + d * kPanel);
          }
          for (int i = 0; i < kRows; ++i) {
            Vec* score = vectors(scores + (first + i) * kPanel);
            for (int v = 0; v < kVectors; ++v) score[v] = piece == 0 ? sums[i][v] : score[v] + sums[i][v];
          }
        }
      });
    }
  }

  template <class From>
  static PDK_INLINE void accumulate_from(const From& from, const float* weights, int64_t head_dim, const Block* blocks,
                                         int num_blocks, const Vec* factor, float* sums) {
    in_groups(head_dim, [&](auto group, int64_t first) {
      constexpr int kRows = decltype(group)::value;
      Vec held[kRows][kVectors] = {};
      for (int b = 0; b < num_blocks; ++b) {
        const float* weight = weights + b * kBlock * kPanel;
        for (int j = 0; j < blocks[b].count; ++j) {
          const float* row = from(blocks[b].begin + j, first);
          add_products(held, [&](int i) { return row[i]; }, weight + j * kPanel);
        }
      }
      for (int i = 0; i < kRows; ++i) {
        Vec* sum = vectors(sums + (first + i) * kPanel);
        for (int v = 0; v < kVectors; ++v) sum[v] = sum[v] * factor[v] + held[i][v];
      }
    });
  }

  template <int kRows, class Column>
  static PDK_INLINE void add_products(Vec (&sums)[kRows][kVectors], const Column& column, const float* panel) {
    Vec lanes[kVectors];
    for (int v = 0; v < kVectors; ++v) lanes[v] = vectors(panel)[v];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[i][v] += column(i) * lanes[v];
    }
  }
};

using VectorTiles = VectorTilesOf<2>;

// Heads above this have tiles of their own: the rows of all others stay close to each other.
constexpr int64_t kUsualHead = 256;
using WideTiles = VectorTilesOf<2, 512>;

}  // namespace pdkernels::cpu::PDK_ISA
