// Block-sparse attention, backward, in two passes that share nothing: no sums across threads, so results do not depend
// on them.
//
// dQ: a work item is a query tile of a KV head; queries are in the panels and keys run down, as in the forward pass.
// dK, dV: a work item is a key tile; keys are in the panels and the queries of all heads that share them run down.
//
// Float32 needs more than the saved results: the log-sum-exp is one rounding of a number around 5, so recomputed
// weights sum up to w, 1 within some 1e-7; and delta = rowsum(grad_out * out), from rounded products, does not cancel
// against the products of the scores' gradients as autograd's sum of weights * products does. So the dQ pass sums up
// for each row w, the missing part g = sum of weights * (products - delta), and weights * keys, one product more. With
// these its result is corrected at the end:
//
//   dQ = scale / w * (sum of weights * (products - delta) * keys - g / w * sum of weights * keys)
//
// and the other pass starts from delta + g / w and weights / w.
//
// In half precision rounding takes something noticeable from a large log-sum-exp only: such rows have their weights
// divided by w too.
#include "passes.h"
#include "tiles_amx.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

constexpr float kLargeLse = 4096;  // half of its last bit is as large as that of 16-bit results
PDK_INLINE bool is_large(float lse) {
  return (lse >= kLargeLse || lse <= -kLargeLse) && lse < kInfinity && lse > -kInfinity;
}

// What turns a score into a weight and a product into a gradient: for each lane if queries are in lanes, else for each
// token.
struct LaneStatistics {
  Vec lse[2], delta[2];
  Vec weights[2], gradients[2];  // per lane, summed over all tokens and the sink: w and g
  bool large;                    // the log-sum-exp of any lane is
  PDK_INLINE Vec lse_of(int, int v) const { return lse[v]; }
  PDK_INLINE Vec delta_of(int, int v) const { return delta[v]; }
  PDK_INLINE Vec normalized(Vec weights, int) const { return weights; }  // w is not known yet
  PDK_INLINE void add(int v, Vec weight_sum, Vec gradient_sum) {
    weights[v] += weight_sum;
    gradients[v] += gradient_sum;
  }
};
struct TokenStatistics {
  const float *lse, *delta, *inv_weight_sum;
  PDK_INLINE Vec lse_of(int token, int) const { return splat(lse[token]); }
  PDK_INLINE Vec delta_of(int token, int) const { return splat(delta[token]); }
  PDK_INLINE Vec normalized(Vec weights, int token) const { return weights * inv_weight_sum[token]; }
  PDK_INLINE void add(int, Vec, Vec) const {}
};

// After all rows' delta: 1 / w, where it is not 1.
PDK_INLINE float* inv_weight_sums(const AttentionGradArgs& args) {
  return args.delta + args.batch * args.q_heads * args.q_len;
}

PDK_INLINE int64_t row_of(const AttentionGradArgs& args, int64_t batch, int64_t head, int64_t token, const Lanes& lanes,
                          int lane) {
  int32_t in_group, in_tile;
  lanes.locate(lane, in_group, in_tile);
  return (batch * args.q_heads + head + in_group) * args.q_len + token + in_tile;
}

// A query that saw nothing has a log-sum-exp of -inf; +inf in its place makes its weights 0.
PDK_INLINE float usable(float lse) { return lse == -kInfinity ? kInfinity : lse; }

// scores -> weights (if wanted), products -> gradients of the scores, both in place. `kSums`: the sum of a row's
// weights counts.
template <class Tiles, bool kExact, bool kKeepWeights, bool kSums, class Statistics>
PDK_APART void gradient_step(const Block* blocks, int num_blocks, float scale, Statistics& statistics, float* scores,
                             float* products) {
  constexpr int kVectors = Tiles::kVectors;
  Vec weight_sums[kVectors] = {}, gradient_sums[kVectors] = {};
  for (int b = 0; b < num_blocks; ++b) {
    float* score_block = scores + b * kBlock * Tiles::kPanel;
    float* product_block = products + b * kBlock * Tiles::kPanel;
    const Block& block = blocks[b];
    for (int j = 0; j < block.count; j += 2) {
      for (int v = 0; v < kVectors; ++v) {
        Vec weights[2] = {}, gradients[2] = {};
        for (int k = 0; k < 2 && j + k < block.count; ++k) {
          const int token = block.begin + j + k;
          const Vec score = rounded(reinterpret_cast<const Vec*>(score_block)[(j + k) * kVectors + v] * scale);
          const Vec product = reinterpret_cast<const Vec*>(product_block)[(j + k) * kVectors + v];
          weights[k] = exponential<kExact>(score - statistics.lse_of(token, v));
          if constexpr (kSums) weights[k] = statistics.normalized(weights[k], token);
          gradients[k] = weights[k] * (product - statistics.delta_of(token, v));
          if (block.visible == nullptr) continue;
          const Ints visible = block.visible[(j + k) * kVectors + v];
          weights[k] = choose(visible, weights[k], Vec{});
          gradients[k] = choose(visible, gradients[k], Vec{});
        }
        weight_sums[v] += weights[0] + weights[1];
        gradient_sums[v] += gradients[0] + gradients[1];
        if constexpr (kKeepWeights) Tiles::put_weights(score_block, j, v, weights[0], weights[1]);
        Tiles::put_weights(product_block, j, v, gradients[0], gradients[1]);
      }
    }
    if constexpr (kKeepWeights) Tiles::pad_weights(score_block, block.count);
    Tiles::pad_weights(product_block, block.count);
  }
  for (int v = 0; kSums && v < kVectors; ++v) statistics.add(v, weight_sums[v], gradient_sums[v]);
}

// Two operands per panel: queries and their gradients for dQ, keys and values for dK and dV. And one sum or two:
// gradients of the scores times the chunk's first operand, and weights times values for dV, or times keys for dQ in
// float32.
template <class Tiles>
struct Panel {
  Lanes lanes;
  LaneStatistics statistics;
  typename Tiles::Packed* operands[2];
  float* sums[2];
};

template <class Tiles, int kSums>
struct Memory {
  Operand<typename Tiles::Packed> first, second;  // the chunk that runs down: keys and values, or queries and gradients
  float *scores, *products, *lse;
  Ints* visible;
  Panel<Tiles>* panels;
  int64_t bytes;

  Memory(char* base, int64_t head_dim) {
    Arena arena(base);
    first = Tiles::take(arena, head_dim, true, true);
    second = Tiles::take(arena, head_dim, true, kSums == 2);
    scores = arena.take<float>(kChunk * Tiles::kPanel);
    products = arena.take<float>(kChunk * Tiles::kPanel);
    lse = arena.take<float>(kChunk);
    visible = arena.take<Ints>(kChunk * Tiles::kVectors);
    const int64_t count = panels_at_once<Tiles>(head_dim);
    panels = arena.take<Panel<Tiles>>(count);
    for (int64_t i = 0; i < count; ++i) {
      Panel<Tiles> panel{};
      for (auto& operand : panel.operands) operand = arena.take<typename Tiles::Packed>(Tiles::panel_size(head_dim));
      for (int s = 0; s < kSums; ++s) panel.sums[s] = arena.take<float>(Tiles::sums_size(head_dim));
      if (base != nullptr) panels[i] = panel;
    }
    bytes = arena.used();
  }
};

template <class Tiles, class T>
PDK_APART void accumulate(bool plain, const T* const* tokens, const Operand<typename Tiles::Packed>& chunk,
                          const float* weights, int64_t head_dim, const Block* blocks, int num_blocks, float* sums) {
  Vec factor[Tiles::kVectors];
  for (Vec& one : factor) one = splat(1.0f);
  if (plain) {
    Tiles::accumulate(chunk.columns, weights, head_dim, blocks, num_blocks, factor, sums);
  } else {
    accumulate_visible<Tiles>(tokens, weights, head_dim, blocks, num_blocks, factor, sums);
  }
}

// In the order in which scores() sums: where a query sees a single key the difference to the product is then exactly 0.
template <class T>
float dot(const T* a, const T* b, int64_t n) {
  const int64_t size = piece_of(n);
  float pieces[kMostPieces] = {}, sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t d = i, piece = 0; d < n; d += size, ++piece) pieces[piece] += to_float(a[d]) * to_float(b[d]);
  }
  for (int64_t piece = 0; piece * size < n; ++piece) sum += pieces[piece];
  return sum;
}

template <class T, class Tiles>
void start_queries(const AttentionGradArgs& args, int64_t batch, int64_t head, int64_t token, Panel<Tiles>& panel) {
  const LanePointers<const T, Tiles::kPanel> queries(args.q, batch, token, head, panel.lanes);
  const LanePointers<const T, Tiles::kPanel> grads(args.grad_out, batch, token, head, panel.lanes);
  const LanePointers<const T, Tiles::kPanel> results(args.out, batch, token, head, panel.lanes);
  Tiles::pack_panel(queries.at, args.head_dim, panel.operands[0]);
  Tiles::pack_panel(grads.at, args.head_dim, panel.operands[1]);
  const int sums = sizeof(T) == 4 ? 2 : 1;
  for (int i = 0; i < sums; ++i) __builtin_memset(panel.sums[i], 0, Tiles::sums_size(args.head_dim) * sizeof(float));
  panel.statistics = {};
  for (int lane = 0; lane < Tiles::kPanel; ++lane) {
    float lse = kInfinity, delta = 0;
    if (lane < panel.lanes.count) {
      const int64_t row = row_of(args, batch, head, token, panel.lanes, lane);
      delta = dot(grads.at[lane], results.at[lane], args.head_dim);
      if (sizeof(T) < 4) {
        if (args.grad_lse != nullptr) delta -= args.grad_lse[row];
        args.delta[row] = delta;
      }
      lse = usable(args.lse[row]);
      panel.statistics.large |= is_large(lse);
    }
    const int v = lane / kLanes, i = lane % kLanes;
    if (args.sinks != nullptr && lane < panel.lanes.count) {
      // What the weights miss from 1, and what it adds to g: its value is 0.
      int32_t in_group, in_tile;
      panel.lanes.locate(lane, in_group, in_tile);
      const float weight = __builtin_expf(args.sink(head + in_group) - lse);
      panel.statistics.weights[v][i] = weight;
      panel.statistics.gradients[v][i] = -weight * delta;
    }
    panel.statistics.lse[v][i] = lse;
    panel.statistics.delta[v][i] = delta;
  }
}

// Half precision: divides the weights of rows with a large log-sum-exp by their sum, here and in the other pass.
template <class Tiles>
void normalize_queries(const AttentionGradArgs& args, int64_t batch, int64_t head, int64_t token, Panel<Tiles>& panel) {
  Vec factor[Tiles::kVectors];
  for (int lane = 0; lane < Tiles::kPanel; ++lane) {
    const int v = lane / kLanes, i = lane % kLanes;
    const float w = panel.statistics.weights[v][i];
    const float inv_w = is_large(panel.statistics.lse[v][i]) && w != 0 ? 1 / w : 1;
    if (lane < panel.lanes.count) inv_weight_sums(args)[row_of(args, batch, head, token, panel.lanes, lane)] = inv_w;
    factor[v][i] = args.scale * inv_w;
  }
  for (int64_t d = 0; d < args.head_dim; ++d) {
    for (int v = 0; v < Tiles::kVectors; ++v) reinterpret_cast<Vec*>(panel.sums[0] + d * Tiles::kPanel)[v] *= factor[v];
  }
}

template <class Tiles>
void scale_sums(float* sums, int64_t head_dim, float scale) {
  for (int64_t i = 0; i < head_dim * Tiles::kPanel; ++i) sums[i] *= scale;
}

// Float32: corrects a panel's dQ, and what the other pass reads. The gradient of the log-sum-exp is added only here:
// inside g, which is nearly 0, it would be rounded off again.
template <class Tiles>
void complete_queries(const AttentionGradArgs& args, int64_t batch, int64_t head, int64_t token, Panel<Tiles>& panel) {
  Vec factor[Tiles::kVectors], missing[Tiles::kVectors];
  for (int lane = 0; lane < Tiles::kPanel; ++lane) {
    const int v = lane / kLanes, i = lane % kLanes;
    const float w = panel.statistics.weights[v][i], inv_w = w == 0 ? 0 : 1 / w;
    float correction = -panel.statistics.gradients[v][i] * inv_w;
    if (lane < panel.lanes.count) {
      const int64_t row = row_of(args, batch, head, token, panel.lanes, lane);
      // Gradients from outside may be NaN where a row saw nothing, and must not be multiplied with its sums of 0.
      if (args.grad_lse != nullptr && w != 0) correction += args.grad_lse[row];
      args.delta[row] = panel.statistics.delta[v][i] - correction;
      inv_weight_sums(args)[row] = inv_w;
    }
    factor[v][i] = args.scale * inv_w;
    missing[v][i] = correction;
  }
  for (int64_t d = 0; d < args.head_dim; ++d) {
    for (int v = 0; v < Tiles::kVectors; ++v) {
      Vec& sum = reinterpret_cast<Vec*>(panel.sums[0] + d * Tiles::kPanel)[v];
      sum = (sum + missing[v] * reinterpret_cast<const Vec*>(panel.sums[1] + d * Tiles::kPanel)[v]) * factor[v];
    }
  }
}

template <class T, class Tiles>
void queries_tile(const AttentionGradArgs& args, int64_t batch, int64_t kv_head, int64_t tile,
                  Memory<Tiles, sizeof(T) == 4 ? 2 : 1>& memory) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t group = args.q_heads / args.kv_heads, head = kv_head * group, token = tile * args.block_q;
  const int64_t tokens = smaller(args.block_q, args.q_len - token);
  const int64_t at_once = panels_at_once<Tiles>(args.head_dim) * Tiles::kPanel;
  for (int64_t begin = 0; begin < tokens * group; begin += at_once) {
    const int64_t lanes = smaller(at_once, tokens * group - begin);
    const int64_t panels = rounded_up(lanes, Tiles::kPanel) / Tiles::kPanel;
    for (int64_t i = 0; i < panels; ++i) {
      memory.panels[i].lanes =
          Lanes::from(begin + i * Tiles::kPanel, smaller(Tiles::kPanel, lanes - i * Tiles::kPanel), tokens);
      start_queries<T>(args, batch, head, token, memory.panels[i]);
    }
    for_chunks(
        args, args.of_q, args.block_k, args.kv_len, batch, tile,
        [&](int64_t key, int64_t count, const uint32_t* bitmap, int64_t column) {
          const TokenPointers<const T> keys(args.k, batch, key, kv_head, count);
          const bool plain = adds_nothing_hidden(keys.at, count, args.head_dim, bitmap);
          Tiles::pack(keys.at, count, args.head_dim, memory.first);
          Tiles::pack(TokenPointers<const T>(args.v, batch, key, kv_head, count).at, count, args.head_dim,
                      memory.second);
          for (int64_t i = 0; i < panels; ++i) {
            Panel<Tiles>& panel = memory.panels[i];
            Block blocks[kChunk / kBlock];
            const int n = blocks_of_rows<Tiles>(bitmap, args.bitmaps.words_per_row, panel.lanes, column, count, blocks,
                                                memory.visible);
            if (n == 0) continue;
            Tiles::scores(memory.first.rows, panel.operands[0], args.head_dim, blocks, n, memory.scores);
            Tiles::scores(memory.second.rows, panel.operands[1], args.head_dim, blocks, n, memory.products);
            if (kExact || panel.statistics.large) {
              gradient_step<Tiles, kExact, kExact, true>(blocks, n, args.scale, panel.statistics, memory.scores,
                                                         memory.products);
            } else {
              gradient_step<Tiles, kExact, kExact, false>(blocks, n, args.scale, panel.statistics, memory.scores,
                                                          memory.products);
            }
            accumulate<Tiles>(plain, keys.at, memory.first, memory.products, args.head_dim, blocks, n, panel.sums[0]);
            if constexpr (kExact)
              accumulate<Tiles>(plain, keys.at, memory.first, memory.scores, args.head_dim, blocks, n, panel.sums[1]);
          }
        });
    for (int64_t i = 0; i < panels; ++i) {
      Panel<Tiles>& panel = memory.panels[i];
      if constexpr (kExact) {
        complete_queries(args, batch, head, token, panel);
      } else {
        normalize_queries(args, batch, head, token, panel);
      }
      const LanePointers<T, Tiles::kPanel> rows(args.dq, batch, token, head, panel.lanes);
      store_lanes<T, Tiles::kPanel>(panel.sums[0], args.head_dim, rows.at);
    }
  }
}

template <class T, class Tiles>
void keys_tile(const AttentionGradArgs& args, int64_t batch, int64_t kv_head, int64_t tile, Memory<Tiles, 2>& memory) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t group = args.q_heads / args.kv_heads, head = kv_head * group, key = tile * args.block_k;
  const int64_t keys = smaller(args.block_k, args.kv_len - key);
  const int64_t at_once = panels_at_once<Tiles>(args.head_dim) * Tiles::kPanel;
  for (int64_t begin = 0; begin < keys; begin += at_once) {
    const int64_t lanes = smaller(at_once, keys - begin);
    const int64_t panels = rounded_up(lanes, Tiles::kPanel) / Tiles::kPanel;
    for (int64_t i = 0; i < panels; ++i) {
      Panel<Tiles>& panel = memory.panels[i];
      panel.lanes = Lanes::from(begin + i * Tiles::kPanel, smaller(Tiles::kPanel, lanes - i * Tiles::kPanel), keys);
      const LanePointers<const T, Tiles::kPanel> k(args.k, batch, key, kv_head, panel.lanes);
      const LanePointers<const T, Tiles::kPanel> v(args.v, batch, key, kv_head, panel.lanes);
      Tiles::pack_panel(k.at, args.head_dim, panel.operands[0]);
      Tiles::pack_panel(v.at, args.head_dim, panel.operands[1]);
      for (float* sums : panel.sums) __builtin_memset(sums, 0, Tiles::sums_size(args.head_dim) * sizeof(float));
    }
    for_chunks(args, args.of_k, args.block_q, args.q_len, batch, tile,
               [&](int64_t token, int64_t count, const uint32_t* bitmap, int64_t row) {
                 for (int64_t in_group = 0; in_group < group; ++in_group) {
                   const int64_t first_row = (batch * args.q_heads + head + in_group) * args.q_len + token;
                   bool large = false;
                   for (int64_t j = 0; j < count; ++j) {
                     memory.lse[j] = usable(args.lse[first_row + j]);
                     large |= is_large(memory.lse[j]);
                   }
                   TokenStatistics statistics{memory.lse, args.delta + first_row, inv_weight_sums(args) + first_row};
                   const TokenPointers<const T> queries(args.q, batch, token, head + in_group, count);
                   const TokenPointers<const T> grads(args.grad_out, batch, token, head + in_group, count);
                   Tiles::pack(queries.at, count, args.head_dim, memory.first);
                   Tiles::pack(grads.at, count, args.head_dim, memory.second);
                   const bool plain_queries = adds_nothing_hidden(queries.at, count, args.head_dim, bitmap);
                   const bool plain_grads = adds_nothing_hidden(grads.at, count, args.head_dim, bitmap);
                   for (int64_t i = 0; i < panels; ++i) {
                     Panel<Tiles>& panel = memory.panels[i];
                     Block blocks[kChunk / kBlock];
                     const int n =
                         blocks_of_columns<Tiles>(bitmap, args.bitmaps.words_per_row, begin + i * Tiles::kPanel,
                                                  panel.lanes.count, row, count, blocks, memory.visible);
                     if (n == 0) continue;
                     Tiles::scores(memory.first.rows, panel.operands[0], args.head_dim, blocks, n, memory.scores);
                     Tiles::scores(memory.second.rows, panel.operands[1], args.head_dim, blocks, n, memory.products);
                     if (kExact || large) {
                       gradient_step<Tiles, kExact, true, true>(blocks, n, args.scale, statistics, memory.scores,
                                                                memory.products);
                     } else {
                       gradient_step<Tiles, kExact, true, false>(blocks, n, args.scale, statistics, memory.scores,
                                                                 memory.products);
                     }
                     accumulate<Tiles>(plain_queries, queries.at, memory.first, memory.products, args.head_dim, blocks,
                                       n, panel.sums[0]);
                     accumulate<Tiles>(plain_grads, grads.at, memory.second, memory.scores, args.head_dim, blocks, n,
                                       panel.sums[1]);
                   }
                 }
               });
    for (int64_t i = 0; i < panels; ++i) {
      Panel<Tiles>& panel = memory.panels[i];
      scale_sums<Tiles>(panel.sums[0], args.head_dim, args.scale);
      const LanePointers<T, Tiles::kPanel> dk(args.dk, batch, key, kv_head, panel.lanes);
      const LanePointers<T, Tiles::kPanel> dv(args.dv, batch, key, kv_head, panel.lanes);
      store_lanes<T, Tiles::kPanel>(panel.sums[0], args.head_dim, dk.at);
      store_lanes<T, Tiles::kPanel>(panel.sums[1], args.head_dim, dv.at);
    }
  }
}

template <class T, class Tiles>
void backward(const AttentionGradArgs& args) {
  constexpr int kSums = sizeof(T) == 4 ? 2 : 1;
  for_tiles<Tiles>(args, args.of_q, Memory<Tiles, kSums>(nullptr, args.head_dim).bytes,
                   [&](int64_t batch, int64_t kv_head, int64_t tile, char* base) {
                     Memory<Tiles, kSums> memory(base, args.head_dim);
                     queries_tile<T>(args, batch, kv_head, tile, memory);
                   });
  for_tiles<Tiles>(args, args.of_k, Memory<Tiles, 2>(nullptr, args.head_dim).bytes,
                   [&](int64_t batch, int64_t kv_head, int64_t tile, char* base) {
                     Memory<Tiles, 2> memory(base, args.head_dim);
                     keys_tile<T>(args, batch, kv_head, tile, memory);
                   });
}

template <class T>
void backward_usual_or_wide(const AttentionGradArgs& args) {
  return args.head_dim <= kUsualHead ? backward<T, VectorTiles>(args) : backward<T, WideTiles>(args);
}

}  // namespace

#ifdef PDK_AMX
void block_sparse_attention_backward(const AttentionGradArgs& args) {
  if (args.element != Element::kBfloat16) return PDK_BELOW::block_sparse_attention_backward(args);
  backward<Bfloat16, AmxTiles>(args);
}
#else
void block_sparse_attention_backward(const AttentionGradArgs& args) { PDK_BY_ELEMENT(backward_usual_or_wide, args) }
#endif

}  // namespace pdkernels::cpu::PDK_ISA
