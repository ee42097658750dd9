// Attention of one query tile by the online softmax: the rows of all query heads that share a KV head, cut into
// panels. For each chunk of keys every panel takes one step. The caller supplies the chunks.
#pragma once

#include "few_lanes.h"
#include "passes.h"
#include "tiles_amx.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class Tiles>
struct Panel {
  static constexpr int kVectors = Tiles::kVectors;
  Vec m_i[kVectors], l_i[kVectors];  // of each lane: the largest score so far, and the sum of e^(score - m_i)
  Lanes lanes;
  typename Tiles::Packed* queries;
  float* sums;  // [head_dim][kPanel]: the weighted sum of values, not yet divided by l_i
};

template <class Tiles>
struct Memory {
  Operand<typename Tiles::Packed> keys, values;
  float* scores;
  Ints* visible;
  Panel<Tiles>* panels;
  int64_t bytes;

  Memory(char* base, int64_t head_dim) {
    Arena arena(base);
    keys = Tiles::take(arena, head_dim, true, false);
    values = Tiles::take(arena, head_dim, false, true);
    scores = arena.take<float>(kChunk * Tiles::kPanel);
    visible = arena.take<Ints>(kChunk * Tiles::kVectors);
    const int64_t count = panels_at_once<Tiles>(head_dim);
    panels = arena.take<Panel<Tiles>>(count);
    for (int64_t i = 0; i < count; ++i) {
      auto* queries = arena.take<typename Tiles::Packed>(Tiles::panel_size(head_dim));
      float* sums = arena.take<float>(Tiles::sums_size(head_dim));
      if (base == nullptr) continue;
      panels[i].queries = queries;
      panels[i].sums = sums;
    }
    bytes = arena.used();
  }
};

// scores -> weights, in place; updates the lanes' statistics, and `alpha` is what older sums have to be multiplied
// with.
//
// Exact scores are rounded before the largest is subtracted: these are stored. The others are scaled again, with the
// subtraction fused in masked and unmasked blocks alike, so that a lane's result does not depend on the other lanes;
// not in lanes with far scores.
template <class Tiles, bool kExact>
PDK_APART void online_softmax(Panel<Tiles>& panel, const Block* blocks, int num_blocks, float scale, float* scores,
                              Vec* alpha) {
  constexpr int kVectors = Tiles::kVectors;
  Vec m_i[kVectors], sum[kVectors] = {};
  for (int v = 0; v < kVectors; ++v) m_i[v] = panel.m_i[v];
  for (int b = 0; b < num_blocks; ++b) {
    Vec* row = reinterpret_cast<Vec*>(scores + b * kBlock * Tiles::kPanel);
    const Ints* visible = blocks[b].visible;
    for (int j = 0; j < blocks[b].count; ++j) {
      for (int v = 0; v < kVectors; ++v, ++row) {
        Vec score = rounded(*row * scale);
        if (visible != nullptr) score = choose(visible[j * kVectors + v], score, splat(-kInfinity));
        if (kExact) *row = score;
        m_i[v] = larger(score, m_i[v]);
      }
    }
  }
  Vec origin[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    // A lane without a visible key so far has no largest score to subtract; any origin gives weights of 0.
    origin[v] = m_i[v] == -kInfinity ? Vec{} : m_i[v];
    alpha[v] = exponential<kExact>(panel.m_i[v] - origin[v]);
    panel.m_i[v] = m_i[v];
  }
  // Another value to the compiler: with a product that is used twice it would not fuse the near lanes' subtraction.
  const Vec scale_again = rounded(splat(scale));
  const auto write_weights = [&](auto any_far) {
    for (int b = 0; b < num_blocks; ++b) {
      float* block = scores + b * kBlock * Tiles::kPanel;
      const Vec* row = reinterpret_cast<const Vec*>(block);
      const int count = blocks[b].count;
      const Ints* visible = blocks[b].visible;
      const auto weight = [&](int j, int v) {
        const Vec score = row[j * kVectors + v];
        if constexpr (kExact) return exponential<true>(score - origin[v]);
        Vec below = score * scale - origin[v];
        if constexpr (decltype(any_far)::value) {
          below = choose(is_far(origin[v]), rounded(score * scale_again) - origin[v], below);
        }
        const Vec all = exponential<false>(below);
        return visible == nullptr ? all : choose(visible[j * kVectors + v], all, Vec{});
      };
      for (int j = 0; j < count; j += 2) {
        for (int v = 0; v < kVectors; ++v) {
          const Vec even = weight(j, v), odd = j + 1 < count ? weight(j + 1, v) : Vec{};
          sum[v] += even + odd;
          Tiles::put_weights(block, j, v, even, odd);
        }
      }
      Tiles::pad_weights(block, count);
    }
  };
  uint32_t far = 0;
  for (int v = 0; !kExact && v < kVectors; ++v) far |= bits_of(is_far(origin[v]));
  if (far != 0) {
    write_weights(Count<1>{});
  } else {
    write_weights(Count<0>{});
  }
  // As in accumulate(), a chunk's part is added when it is complete.
  for (int v = 0; v < kVectors; ++v) panel.l_i[v] = panel.l_i[v] * alpha[v] + sum[v];
}

template <class T, class Tiles>
PDK_APART void start(const AttentionArgs& args, int64_t batch, int64_t head, int64_t token, Panel<Tiles>& panel) {
  for (int v = 0; v < Tiles::kVectors; ++v) {
    panel.m_i[v] = splat(-kInfinity);
    panel.l_i[v] = Vec{};
  }
  for (int lane = 0; args.sinks != nullptr && lane < panel.lanes.count; ++lane) {
    int32_t in_group, in_tile;
    panel.lanes.locate(lane, in_group, in_tile);
    const float sink = args.sink(head + in_group);
    panel.m_i[lane / kLanes][lane % kLanes] = sink;
    panel.l_i[lane / kLanes][lane % kLanes] = sink == -kInfinity ? 0 : 1;
  }
  const LanePointers<const T, Tiles::kPanel> rows(args.q, batch, token, head, panel.lanes);
  Tiles::pack_panel(rows.at, args.head_dim, panel.queries);
  __builtin_memset(panel.sums, 0, Tiles::sums_size(args.head_dim) * sizeof(float));
}

// Writes a panel's rows of `out` and `lse`, which are args.out and args.lse, or those of a split.
template <class T, class Tiles>
PDK_APART void finish(const AttentionArgs& args, const HeadsView& out, float* all_lse, int64_t batch, int64_t head,
                      int64_t token, Panel<Tiles>& panel) {
  Vec inv_l_i[Tiles::kVectors];
  for (int v = 0; v < Tiles::kVectors; ++v) inv_l_i[v] = 1.0f / panel.l_i[v];
  for (int64_t d = 0; d < args.head_dim; ++d) {
    for (int v = 0; v < Tiles::kVectors; ++v) {
      Vec& sum = reinterpret_cast<Vec*>(panel.sums + d * Tiles::kPanel)[v];
      sum = panel.l_i[v] == 0.0f ? Vec{} : sum * inv_l_i[v];  // not times 0: masked values may be NaN or infinite
    }
  }
  const LanePointers<T, Tiles::kPanel> rows(out, batch, token, head, panel.lanes);
  store_lanes<T, Tiles::kPanel>(panel.sums, args.head_dim, rows.at);
  for (int lane = 0; lane < panel.lanes.count; ++lane) {
    int32_t in_group, in_tile;
    panel.lanes.locate(lane, in_group, in_tile);
    const float l_i = panel.l_i[lane / kLanes][lane % kLanes];
    const float lse = panel.m_i[lane / kLanes][lane % kLanes] + __builtin_logf(l_i);
    all_lse[(batch * args.q_heads + head + in_group) * args.lse_stride + token + in_tile] =
        l_i == 0.0f ? -kInfinity : lse;
  }
}

// Multiplies the values [key][lane] of blocks by the scales of the keys' codes.
template <class Tiles>
void scale_blocks(const Code* const* keys, int64_t head_dim, const Block* blocks, int num_blocks, float* values) {
  for (int b = 0; b < num_blocks; ++b, values += kBlock * Tiles::kPanel) {
    Vec* row = reinterpret_cast<Vec*>(values);
    for (int j = 0; j < blocks[b].count; ++j, row += Tiles::kVectors) {
      const float scale = scale_of_codes(keys[blocks[b].begin + j], head_dim);
      for (int v = 0; v < Tiles::kVectors; ++v) row[v] = rounded(row[v] * scale);
    }
  }
}

// The steps of a panel with few lanes. Between them its sums have the head elements of a lane side by side; in any
// other step they are those of the panel.
template <bool kExact, class T, class Tiles>
class FewLanes {
 public:
  FewLanes(Memory<Tiles>& memory, int64_t head_dim, bool one_panel) {
    if constexpr (kTaken) {
      transposed_ = memory.keys.rows, scores_ = memory.scores, panel_ = memory.panels;
      rows_ = transposed_ + kSpan * kChunk, head_dim_ = head_dim;
      suits_ = one_panel && panel_->lanes.count <= kFewLanes;
      if (suits_) enter();
    }
  }

  // Whether the step was taken, for a chunk of keys that every lane sees.
  bool step(const T* const* keys, const T* const* values, int64_t count, Scoring scoring) {
    if constexpr (kTaken) {
      if (!suits_) return false;
      if (!entered_) {
        entered_ = true;
        sums_to_rows<T, Tiles::kPanel>(panel_->sums, kFewLanes, head_dim_, rows_);
      }
      few_lanes_step<kExact>(keys, values, count, head_dim_, scoring, transposed_, scores_, rows_,
                             FewRows{panel_->queries, panel_->m_i, panel_->l_i, panel_->lanes.count});
      return true;
    }
    return false;
  }

  void leave() {
    if constexpr (kTaken) {
      if (entered_) rows_to_sums<T, Tiles::kPanel>(rows_, kFewLanes, head_dim_, panel_->sums);
      entered_ = false;
    }
  }

 private:
  static constexpr bool kTaken = Tiles::kVectors == 1;

  void enter() {  // the panel's sums are zeros
    entered_ = true;
    __builtin_memset(rows_, 0, kFewLanes * kSumStride * sizeof(float));
  }

  float *transposed_, *scores_, *rows_;
  Panel<Tiles>* panel_;
  int64_t head_dim_;
  bool suits_ = false, entered_ = false;
};

// What the chunks of a query tile are handed to, one after the other. Virtual, so that what walks along the keys is
// compiled once for each type of them.
template <class S>
struct Chunks {
  // Up to kChunk keys and values, and what is visible of them: the words of each row's bitmap, which begin at `column`;
  // all, if there is no bitmap.
  virtual void take(const S* const* keys, const S* const* values, int64_t count, const uint32_t* bitmap,
                    int64_t words_per_row, int64_t column) = 0;

 protected:
  ~Chunks() = default;
};

// The chunks of keys in a query tile's list.
template <class T>
void for_keys(const AttentionArgs& args, int64_t batch, int64_t kv_head, int64_t tile, Chunks<T>& chunks) {
  for_chunks(args, args.of_q, args.block_k, args.kv_len, batch, tile,
             [&](int64_t key, int64_t count, const uint32_t* bitmap, int64_t column) {
               const TokenPointers<const T> keys(args.k, batch, key, kv_head, count),
                   values(args.v, batch, key, kv_head, count);
               chunks.take(keys.at, values.at, count, bitmap, args.bitmaps.words_per_row, column);
             });
}

// A step of a query tile: all its panels meet a chunk of keys. Keys and values are of type S. A sum of codes is
// multiplied by its key's scale when it is complete, and a weight by its value's before it meets the codes: that is
// once for a pair, not for each element.
template <bool kExact, class S, class Tiles>
struct ChunkSteps final : Chunks<S> {
  // Whether the products can read rows where they are: a copy pays only where many panels read it.
  static constexpr bool kInPlace = sizeof(S) == sizeof(float) && sizeof(typename Tiles::Packed) == sizeof(float);

  const AttentionArgs& args;
  Memory<Tiles>& memory;
  int64_t panels;
  FewLanes<kExact, S, Tiles> few;

  ChunkSteps(const AttentionArgs& args, Memory<Tiles>& memory, int64_t panels)
      : args(args), memory(memory), panels(panels), few(memory, args.head_dim, panels == 1) {}

  void take(const S* const* keys, const S* const* values, int64_t count, const uint32_t* bitmap, int64_t words_per_row,
            int64_t column) override {
    const Scoring scoring{args.scale, args.softcap};
    if (bitmap == nullptr && few.step(keys, values, count, scoring)) return;
    few.leave();
    const bool packed = !kInPlace || panels > 1;
    if (packed) {
      Tiles::pack(keys, count, args.head_dim, memory.keys);
      Tiles::pack(values, count, args.head_dim, memory.values);
    }
    const bool plain = adds_nothing_hidden(values, count, args.head_dim, bitmap);
    for (int64_t i = 0; i < panels; ++i) {
      Panel<Tiles>& panel = memory.panels[i];
      Block blocks[kChunk / kBlock];
      Vec alpha[Tiles::kVectors];
      const int n = blocks_of_rows<Tiles>(bitmap, words_per_row, panel.lanes, column, count, blocks, memory.visible);
      if (n == 0) continue;
      if (packed) {
        Tiles::scores(memory.keys.rows, panel.queries, args.head_dim, blocks, n, memory.scores);
      } else if constexpr (kInPlace) {
        Tiles::scores(keys, values, panel.queries, args.head_dim, blocks, n, memory.scores);
      }
      if constexpr (kIsCode<S>) scale_blocks<Tiles>(keys, args.head_dim, blocks, n, memory.scores);
      for (int b = 0; b < n; ++b) {
        cap(memory.scores + b * kBlock * Tiles::kPanel, blocks[b].count * int64_t{Tiles::kPanel}, scoring);
      }
      online_softmax<Tiles, kExact>(panel, blocks, n, scoring.scale_left(), memory.scores, alpha);
      if constexpr (kIsCode<S>) scale_blocks<Tiles>(values, args.head_dim, blocks, n, memory.scores);
      if (!plain) {
        accumulate_visible<Tiles>(values, memory.scores, args.head_dim, blocks, n, alpha, panel.sums);
      } else if (packed) {
        Tiles::accumulate(memory.values.columns, memory.scores, args.head_dim, blocks, n, alpha, panel.sums);
      } else if constexpr (kInPlace) {
        Tiles::accumulate(values, keys, bytes_to_next(keys, count), memory.scores, args.head_dim, blocks, n, alpha,
                          panel.sums);
      }
    }
  }
};

// One query tile of one KV head. `walk` hands its argument all chunks visible to the tile; `done` gets each panel after
// the last one. Queries are of type T, keys and values of type S.
template <class T, class S = T, class Tiles, class Walk, class Done>
void attend(const AttentionArgs& args, int64_t batch, int64_t kv_head, int64_t tile, Memory<Tiles>& memory,
            const Walk& walk, const Done& done) {
  constexpr bool kExact = sizeof(T) == 4 || kIsCode<S>;
  const int64_t group = args.q_heads / args.kv_heads, head = kv_head * group, token = tile * args.block_q;
  const int64_t tokens = smaller(args.block_q, args.q_len - token);
  const int64_t at_once = panels_at_once<Tiles>(args.head_dim) * Tiles::kPanel;
  for (int64_t first = 0; first < tokens * group; first += at_once) {
    const int64_t lanes = smaller(at_once, tokens * group - first);
    const int64_t panels = rounded_up(lanes, Tiles::kPanel) / Tiles::kPanel;
    for (int64_t i = 0; i < panels; ++i) {
      memory.panels[i].lanes =
          Lanes::from(first + i * Tiles::kPanel, smaller(Tiles::kPanel, lanes - i * Tiles::kPanel), tokens);
      start<T>(args, batch, head, token, memory.panels[i]);
    }
    ChunkSteps<kExact, S, Tiles> steps(args, memory, panels);
    walk(steps);
    steps.few.leave();
    for (int64_t i = 0; i < panels; ++i) done(head, token, memory.panels[i]);
  }
}

}  // namespace
}  // namespace pdkernels::cpu::PDK_ISA
