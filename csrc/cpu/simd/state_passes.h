// Passes over the state of a head.
//
// A *sweep* goes through the whole state once, in the order of memory. It adds rows whose updates are known: replayed
// ones, ancestors of a branch, and those of Mamba 2 all. The update of a new row of the delta rule is known once its
// sums over all keys are, so a sweep only begins such a row, and leaves the decayed state in the work tiles. Each
// further row takes a *pass* over every tile: it adds the update of the row before, decays, and sums. Its output is
// that of the decayed state plus the update's part, (q . k) update.
#pragma once

#include "state_rows.h"

namespace pdkernels::cpu::PDK_ISA {

// Where a sweep, or what follows it, stores the state.
enum class Stored { kNever, kBehindKnown, kBehindAll };

// The state of a head, (keys, values) with a stride, and of the one that comes after it in memory.
struct HeadState {
  float* data;
  const float* next;
  int64_t stride, keys, values;
};

// Floats from one work tile to the next: not a power of two, so that a sweep, which stores into all of them in turn,
// finds them in different sets of the cache.
PDK_INLINE int64_t tile_stride(int64_t keys) { return (keys + 5) * kTile; }

struct Sweep {
  HeadState state;
  bool from_zero;     // whatever the memory of the state holds
  float* work;        // tiles of kTile columns, each (keys, kTile), for the decayed state of a delta row; or null
  float* remembered;  // (values,): the sums of k, for a delta row
  const Row *known, *rows;
  int64_t known_count, count;  // delta: at most one new row
  Stored stored;
};

// Keys that a sweep takes at a time: it loads what belongs to columns once for all of them. The processor's own
// prefetching does not see that order so well.
constexpr int kKeys = 4;
constexpr int64_t kAhead = 12;
constexpr int kLine = 16;

template <bool kDelta, int kRows, int kVectors, class Lanes>
PDK_INLINE void sweep_at(const Sweep& sweep, int64_t key, int64_t column, Lanes lanes) {
  const HeadState& state = sweep.state;
  const int64_t at = key * state.stride + column;
  Vec x[kRows][kVectors];
  const auto each = [&](const auto& body) {
#pragma GCC unroll 8
    for (int k = 0; k < kRows; ++k) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) body(k, i);
    }
  };
  const auto store_state = [&] {
    each([&](int k, int i) { store(state.data + at + k * state.stride + i * kLanes, x[k][i], lanes); });
  };
  const auto add = [&](const Row& row) {
    const Vec decay = splat(row.decay);
    Vec update[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) update[i] = load(row.update + column + i * kLanes, Whole{});
    each([&](int k, int i) { x[k][i] = mul(x[k][i], decay) + mul(splat(row.k[key + k]), update[i]); });
  };
  const auto sum = [&](const float* by, float* sums) {
    Vec total[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) total[i] = load(sums + column + i * kLanes, Whole{});
    each([&](int k, int i) { total[i] += mul(splat(by[key + k]), x[k][i]); });
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store(sums + column + i * kLanes, total[i], Whole{});
  };

#pragma GCC unroll 8
  for (int k = 0; k < kRows; ++k) {
    for (int i = 0; i < kVectors * kLanes; i += kLine)
      __builtin_prefetch(state.data + at + (k + kAhead) * state.stride + i);
  }
  each([&](int k, int i) {
    x[k][i] = sweep.from_zero ? Vec{} : load(state.data + at + k * state.stride + i * kLanes, lanes);
  });
  for (int64_t r = 0; r < sweep.known_count; ++r) add(sweep.known[r]);
  if (sweep.stored == Stored::kBehindKnown) store_state();
  if constexpr (kDelta) {
    if (sweep.count == 0) return;
    const Row& row = *sweep.rows;
    const Vec decay = splat(row.decay);
    each([&](int k, int i) { x[k][i] = mul(x[k][i], decay); });
    if (sweep.work != nullptr) {
      float* tile = sweep.work + column / kTile * tile_stride(state.keys) + key * kTile + column % kTile;
      each([&](int k, int i) { store(tile + k * kTile + i * kLanes, x[k][i], Whole{}); });
    }
    sum(row.k, sweep.remembered);
    sum(row.q, row.read);
  } else {
    for (int64_t r = 0; r < sweep.count; ++r) {
      add(sweep.rows[r]);
      sum(sweep.rows[r].q, sweep.rows[r].read);
    }
    if (sweep.stored == Stored::kBehindAll) store_state();
  }
}

template <bool kDelta, int kRows>
PDK_INLINE void sweep_keys(const Sweep& sweep, int64_t key) {
  int64_t column = 0;
  for (; column + 2 * kLanes <= sweep.state.values; column += 2 * kLanes) {
    sweep_at<kDelta, kRows, 2>(sweep, key, column, Whole{});
  }
  for_vectors(column, sweep.state.values,
              [&](int64_t at, auto lanes) { sweep_at<kDelta, kRows, 1>(sweep, key, at, lanes); });
}

template <bool kDelta>
__attribute__((noinline)) void run_sweep(const Sweep& sweep) {
  int64_t key = 0;
  for (; key + kKeys <= sweep.state.keys; key += kKeys) sweep_keys<kDelta, kKeys>(sweep, key);
  for (; key < sweep.state.keys; ++key) sweep_keys<kDelta, 1>(sweep, key);
}

constexpr int kOfTile = kTile / kLanes;
struct Vectors {
  Vec of[kOfTile];
};

// A pass of `row` over a tile behind row `before`. kFetches: the tile of the next head is fetched meanwhile.
template <bool kStores, bool kFetches>
__attribute__((noinline)) void run_pass(int64_t keys, float* work, const Row& before, const Row& row, int64_t column,
                                        Vectors& remembered, Vectors& read, const float* next, int64_t stride) {
  const Vec decay = splat(row.decay);
  const float *k = row.k, *q = row.q, *before_k = before.k;
  Vec update[kOfTile], k_sums[kOfTile] = {}, q_sums[kOfTile] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kOfTile; ++i) update[i] = load(before.update + column + i * kLanes, Whole{});
  for (int64_t key = 0; key < keys; ++key, work += kTile) {
    if constexpr (kFetches) {
      for (int at = 0; at < kTile; at += kLine) __builtin_prefetch(next + at, 0, 2);
      next += stride;
    }
    const Vec new_k = splat(k[key]), new_q = splat(q[key]), old_k = splat(before_k[key]);
#pragma GCC unroll 8
    for (int i = 0; i < kOfTile; ++i) {
      const Vec x = mul(load(work + i * kLanes, Whole{}) + mul(old_k, update[i]), decay);
      if constexpr (kStores) store(work + i * kLanes, x, Whole{});
      k_sums[i] += mul(new_k, x);
      q_sums[i] += mul(new_q, x);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kOfTile; ++i) remembered.of[i] = k_sums[i], read.of[i] = q_sums[i];
}

// The update of a row, in the place of its v.
PDK_INLINE void find_update(const Row& row, int64_t column, Vec remembered) {
  float* at = row.update + column;
  store(at, mul(load(at, Whole{}) - remembered, splat(row.beta)), Whole{});
}

// All passes of the rows of a path but the first, which a sweep has begun, and the state behind them.
inline void finish_path(const HeadState& state, float* work, const Row* rows, int64_t count, bool stores) {
  for (int64_t column = 0; column < state.values; column += kTile) {
    float* tile = work + column / kTile * tile_stride(state.keys);
    for (int64_t r = 1; r < count; ++r) {
      Vectors remembered, read;
      const auto pass = [&]<bool kStores, bool kFetches>() {
        run_pass<kStores, kFetches>(state.keys, tile, rows[r - 1], rows[r], column, remembered, read,
                                    state.next + column, state.stride);
      };
      const bool needed = stores || r + 1 < count;
      if (r > 1) {
        needed ? pass.template operator()<true, false>() : pass.template operator()<false, false>();
      } else {
        needed ? pass.template operator()<true, true>() : pass.template operator()<false, true>();
      }
      for (int i = 0; i < kOfTile; ++i) {
        find_update(rows[r], column + i * kLanes, remembered.of[i]);
        store(rows[r].read + column + i * kLanes, read.of[i], Whole{});
      }
    }
    if (!stores) continue;
    const Row& last = rows[count - 1];
    const int64_t end = smaller(column + kTile, state.values);
    for (int64_t key = 0; key < state.keys; ++key, tile += kTile) {
      const Vec k = splat(last.k[key]);
      float* to = state.data + key * state.stride;
      for_vectors(column, end, [&](int64_t at, auto lanes) {
        store(to + at, load(tile + at - column, Whole{}) + mul(k, load(last.update + at, Whole{})), lanes);
      });
    }
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
