// What the passes of block-sparse attention have in common: panels of tokens, the loop over a tile's list, the threads.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

// Panels are kept in groups, so that a packed chunk serves many of them while the accumulators stay in the second-level
// cache.
template <class Tiles>
int64_t panels_at_once(int64_t head_dim) {
  constexpr int64_t kFloats = 65536;
  const int64_t panels = kFloats / Tiles::sums_size(head_dim);
  return panels > 1 ? panels : 1;
}

// The tokens of one tile that share a KV head, as they are laid out in a panel's lanes.
template <class T, int kPanel>
struct LanePointers {
  T* at[kPanel];

  LanePointers(const HeadsView& view, int64_t batch, int64_t first_token, int64_t first_head, const Lanes& lanes) {
    for (int lane = 0; lane < kPanel; ++lane) {
      int32_t head, token;
      lanes.locate(lane, head, token);
      at[lane] = lane < lanes.count ? view.row<T>(batch, first_token + token, first_head + head) : nullptr;
    }
  }
};

// The tokens of a chunk, of one head.
template <class T>
struct TokenPointers {
  T* at[kChunk];

  TokenPointers(const HeadsView& view, int64_t batch, int64_t first_token, int64_t head, int64_t count) {
    for (int64_t i = 0; i < count; ++i) at[i] = view.row<T>(batch, first_token + i, head);
  }
};

constexpr uint16_t infinity_bits(Half) { return 0x7c00; }
constexpr uint16_t infinity_bits(Bfloat16) { return 0x7f80; }

// Bytes of a row of a head. The codes of an 8-bit cache are followed by their scale.
template <class T>
PDK_INLINE int64_t row_bytes(int64_t head_dim) {
  return head_dim * static_cast<int64_t>(sizeof(T)) + (kIsCode<T> ? static_cast<int64_t>(sizeof(float)) : 0);
}
PDK_INLINE float scale_of_codes(const Code* row, int64_t head_dim) {
  float scale;
  __builtin_memcpy(&scale, row + head_dim, sizeof(scale));
  return scale;
}

template <class T>
PDK_INLINE bool is_finite(const T* row, int64_t n) {
  if constexpr (kIsCode<T>) {
    return scale_of_codes(row, n) - scale_of_codes(row, n) == 0.0f;
  } else if constexpr (sizeof(T) == sizeof(float)) {
    Vec zero{};  // or NaN
    for_vectors(0, n, [&](int64_t at, auto lanes) {
      const Vec x = load(row + at, lanes);
      zero += x - x;
    });
    return bits_of(zero != 0.0f) == 0;
  } else {
    constexpr uint16_t kInfinite = infinity_bits(T{});
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t magnitude = row[i].bits & 0x7fffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest < kInfinite;
  }
}

// Whether a product with any of the tokens may be added where its weight is 0: where all pairs are visible, or where 0
// times a number is 0.
template <class T>
bool adds_nothing_hidden(const T* const* tokens, int64_t count, int64_t head_dim, const uint32_t* bitmap) {
  bool finite = true;
  for (int64_t i = 0; bitmap != nullptr && finite && i < count; ++i) finite = is_finite(tokens[i], head_dim);
  return finite;
}

// Tiles::accumulate() of visible pairs alone, for tokens that are not finite: 0 times infinity is NaN.
template <class Tiles, class T>
PDK_APART void accumulate_visible(const T* const* tokens, const float* weights, int64_t head_dim, const Block* blocks,
                                  int num_blocks, const Vec* factor, float* sums) {
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int v = 0; v < Tiles::kVectors; ++v) {
      Vec held{};
      for (int b = 0; b < num_blocks; ++b) {
        const Block& block = blocks[b];
        for (int j = 0; j < block.count; ++j) {
          const Vec sum =
              held + to_float(tokens[block.begin + j][d]) * Tiles::weight(weights + b * kBlock * Tiles::kPanel, j, v);
          held = block.visible == nullptr ? sum : choose(block.visible[j * Tiles::kVectors + v], sum, held);
        }
      }
      Vec& all = reinterpret_cast<Vec*>(sums + d * Tiles::kPanel)[v];
      all = all * factor[v] + held;
    }
  }
}

// sums[d][lane] -> one row for each lane in use
template <class T, int kPanel>
PDK_APART void store_lanes(const float* sums, int64_t head_dim, T* const* lanes) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t count = smaller(kLanes, head_dim - d);
    for (int first = 0; first < kPanel && lanes[first] != nullptr; first += kLanes) {
      Ints rows[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) rows[i] = *reinterpret_cast<const Ints*>(sums + (d + i) * kPanel + first);
      transpose(rows);
      for (int lane = 0; lane < kLanes && lanes[first + lane] != nullptr; ++lane) {
        for_vectors(0, count, [&](int64_t, auto part) {
          store(lanes[first + lane] + d, reinterpret_cast<const Vec&>(rows[lane]), part);
        });
      }
    }
  }
}

// Calls body(item, memory) for all items, each on whichever thread is free. An item's result does not depend on its
// thread.
template <class Tiles, class Body>
void for_items(int64_t items, int64_t scratch_bytes, const Body& body) {
  int64_t next = 0;
  parallel_for(0, items, 1, [&](int64_t, int64_t) {
    char* memory = thread_scratch(scratch_bytes);
    [[maybe_unused]] const typename Tiles::Session session;
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) body(item, memory);
  });
}

// Calls body(batch, kv_head, tile, memory) for all of them, the longest lists first.
template <class Tiles, class Body>
void for_tiles(const AttentionArgs& args, const TileLists& lists, int64_t scratch_bytes, const Body& body) {
  const int64_t heads = args.batch * args.kv_heads;
  for_items<Tiles>(heads * lists.num_tiles, scratch_bytes, [&](int64_t item, char* memory) {
    const int64_t batch = item % heads / args.kv_heads;
    body(batch, item % args.kv_heads, lists.tile_at(batch, item / heads), memory);
  });
}

// Calls body(first token, tokens, bitmap, first token inside the other tile) for each chunk of the tiles that a tile
// meets, the full ones first.
template <class Body>
void for_chunks(const AttentionArgs& args, const TileLists& lists, int64_t other_block, int64_t other_len,
                int64_t batch, int64_t tile, const Body& body) {
  for (const TilePair range : lists.full(batch, tile)) {
    for (int64_t begin = range.first * other_block; begin < range.second * other_block; begin += other_block) {
      for (int64_t inside = 0; inside < other_block; inside += kChunk) {
        body(begin + inside, smaller(kChunk, other_block - inside), nullptr, inside);
      }
    }
  }
  for (const TilePair other : lists.others(batch, tile)) {
    const int64_t begin = other.first * other_block, tokens = smaller(other_block, other_len - begin);
    const uint32_t* bitmap = args.bitmaps.of(other.second);
    for (int64_t inside = 0; inside < tokens; inside += kChunk) {
      body(begin + inside, smaller(kChunk, tokens - inside), bitmap, inside);
    }
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
