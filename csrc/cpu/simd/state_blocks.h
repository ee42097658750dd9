// Passes over tiles of a state, and what they make of the rows of a step.
//
// A row of the gated delta rule takes one pass: the pass first adds the update of the row before, which could not be
// known before that row's pass had ended. Its output is that of the decayed state plus the update's part, (q . k)
// update. A pass of Mamba 2 takes several rows.
#pragma once

#include "state_rows.h"

namespace pdkernels::cpu::PDK_ISA {

// Columns of a tile: as many vectors as leave registers for two sums and an update of each.
constexpr int kColumns = kLanes == 16 ? 4 : 2;

// A tile of a state: `keys` rows of some columns, of which a state may have fewer than lanes.
template <class Lanes>
struct Tile {
  float* data;
  int64_t stride;
  Lanes lanes;
};

template <int kVectors>
struct Vectors {
  Vec of[kVectors];
};

// A row and the update that it makes.
template <int kVectors>
struct Updated {
  const Row* row;
  Vectors<kVectors> update;
};

// What a pass of the gated delta rule starts from: a state; a state and a row after it, which it decays by and adds;
// or the work tile, which is a state decayed already, and the row that decayed it.
enum class Source { kState, kStateAndRow, kWorkAndRow };

// Rows of a state are apart, which the processor's own prefetching does not see so well. A pass that computes on what
// is in the cache already prefetches for the next block instead.
constexpr int64_t kAhead = 12;
template <int kVectors>
PDK_INLINE void prefetch(const float* from) {
  constexpr int kLine = 16;
  for (int at = 0; at < kVectors * kLanes; at += kLine) __builtin_prefetch(from + at);
}

// The state at a place, behind the row before. `k`: of that row at the key.
template <Source kSource, class Lanes>
PDK_INLINE Vec state_at(const float* state, const float* work, Lanes lanes, Vec decay, Vec k, Vec update) {
  if constexpr (kSource == Source::kWorkAndRow) return load(work, Whole{}) + mul(k, update);
  const Vec x = load(state, lanes);
  if constexpr (kSource == Source::kState) return x;
  return mul(x, decay) + mul(k, update);
}

// A row of the gated delta rule. The sums are those of k and, if it is queried, of q with the decayed state. kSaves:
// the state before the row is written. kStores: the decayed one is stored in the work tile.
template <int kVectors, Source kSource, bool kQueried, bool kSaves, bool kStores, class Lanes>
__attribute__((noinline)) void pass(int64_t keys, const Tile<Lanes>& state_tile, const Tile<Whole>& work_tile,
                                    const Updated<kVectors>& before, const Row& row, Vectors<kVectors>& remembered,
                                    Vectors<kVectors>& read, const float* next) {
  // Local copies: what is stored might be any of these, as far as the compiler knows.
  const Lanes lanes = state_tile.lanes;
  const int64_t stride = state_tile.stride, work_stride = work_tile.stride;
  float *state = state_tile.data, *work = work_tile.data;
  const float *k = row.k, *q = row.q, *before_k = nullptr;
  const Vec decay = splat(row.decay);
  Vec before_decay{}, update[kVectors] = {}, k_sums[kVectors] = {}, q_sums[kVectors] = {};
  if constexpr (kSource != Source::kState) {
    before_k = before.row->k, before_decay = splat(before.row->decay);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) update[i] = before.update.of[i];
  }
  for (int64_t key = 0; key < keys; ++key, state += stride, work += work_stride) {
    if constexpr (kSource == Source::kState) prefetch<kVectors>(state + kAhead * stride);
    if constexpr (kSaves) prefetch<kVectors>(next + key * stride);
    const Vec new_k = splat(k[key]), new_q = splat(kQueried ? q[key] : 0.0f);
    const Vec old_k = splat(kSource != Source::kState ? before_k[key] : 0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Vec x = state_at<kSource>(state + i * kLanes, work + i * kLanes, lanes, before_decay, old_k, update[i]);
      if constexpr (kSaves) store(state + i * kLanes, x, lanes);
      x = mul(x, decay);
      if constexpr (kStores) store(work + i * kLanes, x, Whole{});
      k_sums[i] += mul(new_k, x);
      if constexpr (kQueried) q_sums[i] += mul(new_q, x);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) remembered.of[i] = k_sums[i], read.of[i] = q_sums[i];
}

// Some rows of Mamba 2, one after the other at each place of the state. The sums are those of q with the new states.
template <int kVectors, int kRows, bool kQueried, bool kStores, class From, class To>
__attribute__((noinline)) void pass(int64_t keys, const Tile<From>& from, const Tile<To>& to, const Row* rows,
                                    const Vectors<kVectors>* updates, Vectors<kVectors>* read, const float* next,
                                    int64_t state_stride) {
  const From from_lanes = from.lanes;
  const To to_lanes = to.lanes;
  const int64_t from_stride = from.stride, to_stride = to.stride;
  const float *source = from.data, *k[kRows], *q[kRows];
  float* target = to.data;
  Vec decay[kRows], update[kRows][kVectors], sums[kRows][kVectors];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    decay[r] = splat(rows[r].decay), k[r] = rows[r].k, q[r] = rows[r].q;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) update[r][i] = updates[r].of[i], sums[r][i] = Vec{};
  }
  for (int64_t key = 0; key < keys; ++key, source += from_stride, target += to_stride) {
    if constexpr (kQueried) {
      prefetch<kVectors>(next + key * state_stride);
    } else {
      prefetch<kVectors>(source + kAhead * from_stride);
    }
    Vec x[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) x[i] = load(source + i * kLanes, from_lanes);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const Vec new_k = splat(k[r][key]), new_q = splat(kQueried ? q[r][key] : 0.0f);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        x[i] = mul(x[i], decay[r]) + mul(new_k, update[r][i]);
        if constexpr (kQueried) sums[r][i] += mul(new_q, x[i]);
      }
    }
    if constexpr (kStores) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) store(target + i * kLanes, x[i], to_lanes);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) read[r].of[i] = sums[r][i];
  }
}

// Rows of Mamba 2 that a pass takes.
constexpr int kGroup = 2;

// Some columns of a head of a sequence, with all their rows.
template <class T, bool kDelta, int kVectors, class Lanes>
class Block {
 public:
  Block(const StateScanArgs& args, int64_t b, int64_t head, float* state, float* work, int64_t column, Lanes lanes)
      : args_(args),
        b_(b),
        head_(head),
        column_(column),
        state_{state + column, args.state_key_stride, lanes},
        work_{work, kVectors * kLanes, {}},
        next_(state +
              (column + kVectors * kLanes < args.values ? column + kVectors * kLanes : args.state_head_stride)) {}

  void clear_state() { clear(state_); }

  // Rows that become part of the state, pending ones first. `first`: the number of the first that is new; outputs are
  // those of the new ones. Gated delta: the state is written by what follows, `draft` or `finish`.
  void fold(const Row* rows, int64_t count, int64_t pending, int64_t first) {
    if constexpr (kDelta) {
      for (int64_t i = 0; i < count; ++i) {
        advance(rows[i], i >= pending, false, true);
        if (i >= pending) write(rows[i], first + i - pending, before_.update, read_);
      }
    } else {
      for (int64_t i = 0, most; i < count; i += most) {
        most = smaller((i < pending ? pending : count) - i, kGroup);
        if (i < pending) {
          group<false, true>(state_, state_, rows + i, most);
        } else {
          group<true, true>(state_, state_, rows + i, most);
          write_group(rows + i, most, first + i - pending);
        }
      }
    }
  }

  // Writes the state behind the rows of `fold`.
  void finish() {
    if constexpr (kDelta) {
      if (depth_ == 1) save<Source::kStateAndRow>();
      if (depth_ > 1) save<Source::kWorkAndRow>();
      depth_ = 0;
    }
  }

  // New rows that are not part of the state: rows[i] is row `settled` + i. `is_zero`: there is no state yet.
  void draft(const Row* rows, int64_t count, int64_t settled, bool is_zero) {
    bool unsaved = kDelta && depth_ > 0;
    for (int64_t i = 0, most; i < count; i += most) {
      const int64_t parent = parent_of(i, settled);
      if (!unsaved && (parent < 0 || parent != i - 1)) replay(rows, parent, settled, is_zero);
      // So many rows are a path, of which the last may go on.
      int64_t path = 1;
      while (i + path < count && path <= kGroup && parent_of(i + path, settled) == i + path - 1) ++path;
      if constexpr (kDelta) {
        most = 1;
        advance(rows[i], true, unsaved, path > 1);
        unsaved = false;
        write(rows[i], settled + i, before_.update, read_);
      } else {
        most = smaller(path, kGroup);
        extend(rows + i, most, path > most, true);
        write_group(rows + i, most, settled + i);
      }
    }
  }

 private:
  int64_t parent_of(int64_t i, int64_t settled) const { return larger(args_.parent(b_, settled + i) - settled, -1); }

  template <class To>
  void clear(const Tile<To>& tile) {
    for (int64_t key = 0; key < args_.keys; ++key) {
      for (int i = 0; i < kVectors; ++i) store(tile.data + key * tile.stride + i * kLanes, Vec{}, tile.lanes);
    }
  }

  // Makes the work tile that behind row `last`, from the state on.
  void replay(const Row* rows, int64_t last, int64_t settled, bool is_zero) {
    depth_ = 0;
    if (is_zero) clear(work_), depth_ = 2, before_ = {rows, {}};
    // Ancestors are found upwards and taken downwards: each time, the last one that has not been taken.
    for (int64_t taken = -1; taken != last;) {
      int64_t next = last;
      for (int64_t up = last; up != taken; up = parent_of(up, settled)) next = up;
      if constexpr (kDelta) {
        advance(rows[next], false, false, true);
      } else {
        extend(rows + next, 1, true, false);
      }
      taken = next;
    }
  }

  // Gated delta: one more row. `depth_` counts those since the state that is in memory. The decayed state is stored for
  // rows that follow only from the second one on: the first is as quickly made again.
  void advance(const Row& row, bool queried, bool saves, bool stores) {
    stores = stores && depth_ > 0 && !saves;
    if (depth_ == 0) {
      queried ? run<Source::kState, true, false, false>(row) : run<Source::kState, false, false, false>(row);
    } else if (saves) {
      depth_ == 1 ? run<Source::kStateAndRow, true, true, false>(row)
                  : run<Source::kWorkAndRow, true, true, false>(row);
      depth_ = 0;
    } else if (depth_ == 1) {
      advance_from<Source::kStateAndRow>(row, queried, stores);
    } else {
      advance_from<Source::kWorkAndRow>(row, queried, stores);
    }
    ++depth_;
  }

  template <Source kSource>
  void advance_from(const Row& row, bool queried, bool stores) {
    if (queried) {
      stores ? run<kSource, true, false, true>(row) : run<kSource, true, false, false>(row);
    } else {
      run<kSource, false, false, true>(row);
    }
  }

  template <Source kSource, bool kQueried, bool kSaves, bool kStores>
  void run(const Row& row) {
    Vectors<kVectors> remembered;
    pass<kVectors, kSource, kQueried, kSaves, kStores>(args_.keys, state_, work_, before_, row, remembered, read_,
                                                       next_);
    before_.row = &row;
    for (int i = 0; i < kVectors; ++i) {
      const Vec v = load(row.v + column_ + i * kLanes, Whole{});
      before_.update.of[i] = mul(v - remembered.of[i], splat(row.beta));
    }
  }

  template <Source kSource>
  void save() {
    for (int64_t key = 0; key < args_.keys; ++key) {
      const Vec k = splat(before_.row->k[key]), decay = splat(before_.row->decay);
      for (int i = 0; i < kVectors; ++i) {
        float* state = state_.data + key * state_.stride + i * kLanes;
        const float* work = work_.data + key * work_.stride + i * kLanes;
        store(state, state_at<kSource>(state, work, state_.lanes, decay, k, before_.update.of[i]), state_.lanes);
      }
    }
  }

  // Mamba 2: up to kGroup more rows, from the state or the work tile to the work tile.
  void extend(const Row* rows, int64_t count, bool stores, bool queried) {
    if (depth_ == 0) {
      extend_from(state_, rows, count, stores, queried);
    } else {
      extend_from(work_, rows, count, stores, queried);
    }
    depth_ = 2;
  }

  template <class From>
  void extend_from(const Tile<From>& from, const Row* rows, int64_t count, bool stores, bool queried) {
    if (!queried) {
      group<false, true>(from, work_, rows, count);
    } else {
      stores ? group<true, true>(from, work_, rows, count) : group<true, false>(from, work_, rows, count);
    }
  }

  template <bool kQueried, bool kStores, class From, class To>
  void group(const Tile<From>& from, const Tile<To>& to, const Row* rows, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      for (int i = 0; i < kVectors; ++i) group_[r].of[i] = load(rows[r].v + column_ + i * kLanes, Whole{});
    }
    const int64_t keys = args_.keys;
    if (count == 1) {
      pass<kVectors, 1, kQueried, kStores>(keys, from, to, rows, group_, group_read_, next_, state_.stride);
    } else {
      pass<kVectors, 2, kQueried, kStores>(keys, from, to, rows, group_, group_read_, next_, state_.stride);
    }
  }

  void write_group(const Row* rows, int64_t count, int64_t first) {
    for (int64_t r = 0; r < count; ++r) write(rows[r], first + r, group_[r], group_read_[r]);
  }

  void write(const Row& row, int64_t i, const Vectors<kVectors>& update, const Vectors<kVectors>& read) {
    T* to = reinterpret_cast<T*>(args_.out.at(b_, i, head_)) + column_;
    const bool skips = !kDelta && args_.D.given();
    const Vec factor = splat(kDelta ? row.qk : skips ? number(args_.D, 0, 0, head_) : 0.0f);
    for (int v = 0; v < kVectors; ++v) {
      Vec y = read.of[v];
      if (kDelta || skips) y += mul(factor, update.of[v]);
      store(to + v * kLanes, y, state_.lanes);
    }
  }

  const StateScanArgs& args_;
  const int64_t b_, head_, column_;
  const Tile<Lanes> state_;
  const Tile<Whole> work_;
  const float* const next_;  // the columns, or the head, that come after this block
  int64_t depth_ = 0;
  Updated<kVectors> before_ = {};
  Vectors<kVectors> read_ = {}, group_[kGroup] = {}, group_read_[kGroup] = {};
};

}  // namespace pdkernels::cpu::PDK_ISA
