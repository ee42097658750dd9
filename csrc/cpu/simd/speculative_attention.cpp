// Speculative attention: a work item is one query tile of one KV head over one split of the prefix; the first split has
// the tail.
#include "pdkernels/speculative_attention.h"
#include "forward.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The chunks of cached tokens [begin, end) of a sequence, as attend() wants them.
template <class T, class Consume>
void for_cached(const SpeculativeArgs& args, int64_t batch, int64_t kv_head, int64_t begin, int64_t end,
                const Consume& consume) {
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t count = smaller(kChunk, end - first);
    const T *keys[kChunk], *values[kChunk];
    for (int64_t i = 0; i < count; ++i) {
      const Slot at = args.pages.locate(batch, first + i);
      keys[i] = args.k_cache.row<const T>(at.page, at.slot, kv_head);
      values[i] = args.v_cache.row<const T>(at.page, at.slot, kv_head);
    }
    consume(keys, values, count, nullptr, 0);
  }
}

// Softmax over all splits: each has its own result and log-sum-exp, summed up in the order of the splits.
template <class T>
void merge_splits(const SpeculativeArgs& args) {
  const int64_t rows = args.batch * args.q_heads * args.q_len, dim = args.head_dim;
  parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / (args.q_heads * args.q_len), head = row / args.q_len % args.q_heads,
                    token = row % args.q_len;
      float largest = -kInfinity, total = 0, sums[256] = {};
      for (int64_t s = 0; s < args.splits; ++s) {
        const float lse = args.parts_lse[s * rows + row];
        largest = lse > largest ? lse : largest;
      }
      for (int64_t s = 0; s < args.splits; ++s) {
        const float lse = args.parts_lse[s * rows + row];
        if (lse == -kInfinity) continue;
        const float weight = __builtin_expf(lse - largest);
        const float* part = args.parts + (((s * args.batch + batch) * args.q_len + token) * args.q_heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) sums[d] += weight * part[d];
        total += weight;
      }
      for (int64_t d = 0; d < dim; ++d) sums[d] = total == 0 ? 0 : sums[d] / total;
      from_floats(sums, args.out.row<T>(batch, token, head), dim);
      args.lse[row] = total == 0 ? -kInfinity : largest + __builtin_logf(total);
    }
  });
}

// Stores a query tile's part of a sequence's appended rows: each row of a KV head has one writer.
template <class T>
void append_rows(const SpeculativeArgs& args, int64_t batch, int64_t kv_head, int64_t tile) {
  const int64_t length = args.lengths.load(batch), count = args.count(batch),
                bytes = args.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t i = tile; i < count; i += args.of_q.num_tiles) {
    const int64_t token = args.source(batch, i);
    const Slot at = args.pages.locate(batch, length + i);
    __builtin_memcpy(args.k_cache.row<T>(at.page, at.slot, kv_head), args.k.row<const T>(batch, token, kv_head), bytes);
    __builtin_memcpy(args.v_cache.row<T>(at.page, at.slot, kv_head), args.v.row<const T>(batch, token, kv_head), bytes);
  }
}

template <class T, class Tiles>
void attend_splits(const SpeculativeArgs& args) {
  const int64_t bytes = Memory<Tiles>(nullptr, args.head_dim).bytes;
  const int64_t heads = args.batch * args.kv_heads, split = split_tokens(args.pages.capacity());
  const int64_t rows = args.batch * args.q_heads * args.q_len;
  for_items<Tiles>(heads * args.of_q.num_tiles * args.splits, bytes, [&](int64_t item, char* base) {
    const int64_t batch = item % heads / args.kv_heads, kv_head = item % args.kv_heads;
    const int64_t tile = item / heads % args.of_q.num_tiles, s = item / heads / args.of_q.num_tiles;
    const int64_t end = smaller(args.lengths.load(batch), (s + 1) * split);
    if (s == 0) append_rows<T>(args, batch, kv_head, tile);
    Memory<Tiles> memory(base, args.head_dim);
    const auto chunks = [&](const auto& consume) {
      for_cached<T>(args, batch, kv_head, s * split, end, consume);
      if (s == 0) for_keys<T>(args, batch, kv_head, tile, consume);
    };
    if (args.splits == 1) {
      attend<T>(args, batch, kv_head, tile, memory, chunks, [&](int64_t head, int64_t token, Panel<Tiles>& panel) {
        finish<T>(args, args.out, args.lse, batch, head, token, panel);
      });
      return;
    }
    const int64_t row = args.q_heads * args.head_dim;
    const HeadsView part{args.parts + s * rows * args.head_dim, args.q_len * row, row, args.head_dim};
    attend<T>(args, batch, kv_head, tile, memory, chunks, [&](int64_t head, int64_t token, Panel<Tiles>& panel) {
      finish<float>(args, part, args.parts_lse + s * rows, batch, head, token, panel);
    });
  });
  if (args.splits > 1) merge_splits<T>(args);
}

}  // namespace

void speculative_attention(const SpeculativeArgs& args) {
  switch (args.element) {
    case Element::kFloat: return attend_splits<float, VectorTiles>(args);
    case Element::kHalf: return attend_splits<Half, VectorTiles>(args);
    case Element::kBfloat16: return attend_splits<Bfloat16, Bfloat16Tiles>(args);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
