// Speculative attention: a work item is one query tile of one KV head over one split of the positions.
//
// A row gets the same bits whether the keys that it sees are cached or new, whatever lies between those, and however
// many other rows there are: lanes are independent, a key that a lane does not see adds an exact 0 to its sums, and
// chunks and splits are cut at positions that count what a row sees.
#include "ops/speculative_attention.h"
#include "forward.h"
#include "paths.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// 32 bits of a bitmap row from `column` on, which may be before the row.
PDK_INLINE uint32_t bits_from(const uint32_t* row, int64_t words, int64_t column) {
  const int64_t word = column >> 5, shift = column & 31;
  const auto at = [&](int64_t i) { return i >= 0 && i < words ? row[i] : 0; };
  return shift == 0 ? at(word) : at(word) >> shift | at(word + 1) << (32 - shift);
}

// The first new token after all those that a query tile sees.
inline int64_t tail_end(const SpeculativeArgs& args, int64_t batch, int64_t tile) {
  int64_t end = 0;
  for (const TilePair range : args.of_q.full(batch, tile)) end = larger(end, range.second);
  for (const TilePair other : args.of_q.others(batch, tile)) end = larger(end, other.first + 1);
  return smaller(end * args.block_k, args.kv_len);
}

// The first position that some row of a query tile sees, and that from which on none sees less than the plan shows.
struct Starts {
  int64_t min, max;
};

inline Starts starts_of(const SpeculativeArgs& args, int64_t batch, int64_t tile) {
  if (!args.starts.given()) return {0, 0};
  const int64_t first = tile * args.block_q, last = smaller(first + args.block_q, args.q_len);
  Starts found{args.start(batch, first), args.start(batch, first)};
  for (int64_t row = first + 1; row < last; ++row) {
    const int64_t start = args.start(batch, row);
    found.min = smaller(found.min, start), found.max = larger(found.max, start);
  }
  return found;
}

// What a query tile sees of a chunk whose first key is new token `column`, or a cached one where that is negative.
// If it is neither all nor nothing, `bitmap` gets kWords words for each row.
inline Visibility visibility_of(const SpeculativeArgs& args, int64_t batch, int64_t tile, int64_t column, int64_t count,
                                Starts starts, uint32_t* bitmap) {
  const int64_t end = column + count, block = args.block_k, words = args.bitmaps.words_per_row;
  const int64_t rows = smaller(args.block_q, args.q_len - tile * args.block_q);
  const int64_t origin = args.lengths.load(batch) + column, hidden = starts.min - origin;
  uint32_t same[kWords];  // visible to all rows
  bool any = hidden < smaller(count, -column);
  for (int64_t w = 0; w < kWords; ++w) same[w] = ones(0, -column - 32 * w);
  const auto add = [&](int64_t first, int64_t last) {
    any |= first < end && last > column;
    for (int64_t w = 0; w < kWords; ++w) same[w] |= ones(first - column - 32 * w, last - column - 32 * w);
  };
  for (const TilePair range : args.of_q.full(batch, tile)) add(range.first * block, range.second * block);
  for (const TilePair other : args.of_q.others(batch, tile)) {
    const int64_t first = other.first * block, last = smaller(first + block, args.kv_len);
    if (other.second < 0) {
      add(first, last);
    } else {
      any |= first < end && last > column;
    }
  }
  if (!any) return Visibility::kNone;
  bool all = starts.max <= origin;
  for (int64_t w = 0; w < kWords; ++w) all &= (~same[w] & ones(0, count - 32 * w)) == 0;
  if (all) return Visibility::kAll;
  for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(bitmap + r * kWords, same, sizeof(same));
  for (const TilePair other : args.of_q.others(batch, tile)) {
    const int64_t first = other.first * block;
    if (other.second < 0 || first >= end || first + block <= column) continue;
    const uint32_t* row = args.bitmaps.of(other.second);
    for (int64_t r = 0; r < rows; ++r, row += words) {
      for (int64_t w = 0; w < kWords; ++w) bitmap[r * kWords + w] |= bits_from(row, words, column + 32 * w - first);
    }
  }
  for (int64_t r = 0; starts.max > origin && r < rows; ++r) {
    const int64_t start = args.start(batch, tile * args.block_q + r) - origin;
    for (int64_t w = 0; w < kWords; ++w) bitmap[r * kWords + w] &= ones(start - 32 * w, 32);
  }
  // The only row of a sequence sees all of its keys, under the plan of longer ones too.
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t w = 0; w < kWords; ++w) {
      if ((~bitmap[r * kWords + w] & ones(0, count - 32 * w)) != 0) return Visibility::kSome;
    }
  }
  return Visibility::kAll;
}

// The rows of up to kChunk keys and values of a sequence, cached or new.
template <class T>
class KeyRows {
 public:
  KeyRows(const SpeculativeArgs& args, int64_t batch, int64_t entry, int64_t kv_head)
      : args_(args), batch_(batch), entry_(entry), kv_head_(kv_head), length_(args.lengths.load(batch)) {}

  int64_t count = 0;
  const T *keys[kChunk], *values[kChunk];

  // The key at a position; after the prefix that of `token`.
  void add(int64_t position, int64_t token) {
    const bool cached = position < length_;
    const Slot at = cached ? args_.pages.locate(batch_, position) : Slot{entry_, token};
    keys[count] = (cached ? args_.k_cache : args_.k).row<const T>(at.page, at.slot, kv_head_);
    values[count++] = (cached ? args_.v_cache : args_.v).row<const T>(at.page, at.slot, kv_head_);
  }
  // The keys at positions [first, last), of which those after the prefix are the new tokens in their order. Consecutive
  // rows of a page are located together, because that takes a division.
  void add_range(int64_t first, int64_t last) {
    const int64_t cached = smaller(last, length_);
    for (int64_t position = first; position < cached;) {
      const Slot at = args_.pages.locate(batch_, position);
      const T* key = args_.k_cache.row<const T>(at.page, at.slot, kv_head_);
      const T* value = args_.v_cache.row<const T>(at.page, at.slot, kv_head_);
      const int64_t end = smaller(cached, position + args_.pages.page_size - at.slot);
      for (; position < end; ++position, key += args_.k_cache.token_stride, value += args_.v_cache.token_stride) {
        keys[count] = key, values[count++] = value;
      }
    }
    for (int64_t position = larger(first, length_); position < last; ++position) add(position, position - length_);
  }
  void repeat_last() {
    keys[count] = keys[count - 1], values[count] = values[count - 1];
    ++count;
  }

 private:
  const SpeculativeArgs& args_;
  int64_t batch_, entry_, kv_head_, length_;
};

// The keys of a sequence at positions [begin, end), cached or new. A chunk begins at a multiple of kChunk whatever part
// of the sequence is cached: which sums are added up first depends on positions alone.
template <class T, int kTogether>
void for_positions(const SpeculativeArgs& args, int64_t batch, int64_t entry, int64_t kv_head, int64_t tile,
                   int64_t begin, int64_t end, uint32_t* bitmap, Paths& paths, Chunks<T>& chunks) {
  const int64_t length = args.lengths.load(batch);
  const Starts starts = starts_of(args, batch, tile);
  const auto take = [&](const KeyRows<T>& rows, Visibility visibility) {
    if (visibility == Visibility::kNone) return;
    chunks.take(rows.keys, rows.values, rows.count, visibility == Visibility::kAll ? nullptr : bitmap, kWords, 0);
  };
  const bool ordered = in_order(args, batch, tile);
  const int64_t common = smaller(end, ordered ? length + tail_end(args, batch, tile) : length / kChunk * kChunk);
  for (int64_t first = larger(begin, starts.min / kChunk * kChunk); first < common; first += kChunk) {
    const int64_t count = smaller(kChunk, common - first);
    const Visibility visibility = first + count <= length && starts.max <= first
                                      ? Visibility::kAll
                                      : visibility_of(args, batch, tile, first - length, count, starts, bitmap);
    if (visibility == Visibility::kNone) continue;
    KeyRows<T> rows(args, batch, entry, kv_head);
    rows.add_range(first, first + count);
    take(rows, visibility);
  }
  if (ordered || end <= common) return;

  // Each path has positions of its own after the prefix. Where these begin inside a chunk, paths come one after the
  // other in it, as many as there is room for; so do the last cached keys that are added up together with them.
  const int64_t found = paths.find(args, batch, tile);
  int64_t longest = 0;
  for (int64_t path = 0; path < found; ++path) longest = larger(longest, paths.tokens_of(path));
  for (int64_t first = larger(begin, length / kChunk * kChunk); first < smaller(end, length + longest);
       first += kChunk) {
    const int64_t cut = larger(first, length / kTogether * kTogether);
    for (int64_t path = 0; path < found;) {
      KeyRows<T> rows(args, batch, entry, kv_head);
      rows.add_range(first, cut);
      __builtin_memset(bitmap, 0, smaller(args.block_q, args.q_len) * kWords * sizeof(uint32_t));
      const int64_t before = path;
      for (; path < found; ++path) {
        const int64_t last = smaller(first + kChunk, length + paths.tokens_of(path)), own = larger(last - cut, 0);
        if (path > before && rows.count + rounded_up(own, kTogether) > kChunk) break;
        const int32_t* tokens = paths.list(path);
        paths.show(args, batch, tile, path, first, cut - first, rows.count, cut, own, bitmap);
        for (int64_t position = cut; position < cut + own; ++position) {
          rows.add(position, position < length ? 0 : tokens[position - length]);
        }
        while (own > 0 && rows.count % kTogether != 0 && rows.count < kChunk) rows.repeat_last();
      }
      take(rows, paths.of(bitmap, rows.count));
    }
  }
}

// Softmax over all splits: each has its own result and log-sum-exp, summed up in the order of the splits. A single one
// that is not empty keeps its bits, as if it had been written at once.
template <class T>
void merge_splits(const SpeculativeArgs& args, int64_t splits) {
  const int64_t tokens = args.lse_stride, rows = args.rows() * args.q_heads, dim = args.head_dim;
  parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / (args.q_heads * tokens), head = row / tokens % args.q_heads, token = row % tokens;
      float m_i = -kInfinity, l_i = 0, sums[512] = {};
      for (int64_t s = 0; s < splits; ++s) {
        const float lse = args.parts_lse[s * rows + row];
        m_i = lse > m_i ? lse : m_i;
      }
      for (int64_t s = 0; s < splits; ++s) {
        const float lse = args.parts_lse[s * rows + row];
        if (lse == -kInfinity) continue;
        const float weight = __builtin_expf(lse - m_i);
        const float* part =
            args.parts + (((s * rows + batch * args.q_heads * tokens) + token * args.q_heads) + head) * dim;
        for (int64_t d = 0; d < dim; ++d) sums[d] += weight * part[d];
        l_i += weight;
      }
      for (int64_t d = 0; d < dim; ++d) sums[d] = l_i == 0 ? 0 : sums[d] / l_i;
      from_floats(sums, args.out.row<T>(batch, token, head), dim);
      args.lse[row] = l_i == 0 ? -kInfinity : m_i + __builtin_logf(l_i);
    }
  });
}

// Stores a query tile's part of a sequence's appended rows: each row of a KV head has one writer.
template <class S>
void append_rows(const SpeculativeArgs& args, int64_t batch, int64_t entry, int64_t kv_head, int64_t tile) {
  const int64_t length = args.lengths.load(batch), count = args.count(batch), bytes = row_bytes<S>(args.head_dim);
  for (int64_t i = tile; i < count; i += args.of_q.num_tiles) {
    const int64_t token = args.source(batch, i);
    const Slot at = args.pages.locate(batch, length + i);
    __builtin_memcpy(args.k_cache.row<S>(at.page, at.slot, kv_head), args.k.row<const S>(entry, token, kv_head), bytes);
    __builtin_memcpy(args.v_cache.row<S>(at.page, at.slot, kv_head), args.v.row<const S>(entry, token, kv_head), bytes);
  }
}

// Splits that any sequence reaches into. The others would add nothing.
inline int64_t used_splits(const SpeculativeArgs& args) {
  int64_t longest = 0;
  for (int64_t b = 0; b < args.batch; ++b) longest = larger(longest, args.lengths.load(b) + args.tokens(b));
  return count_splits(longest);
}

// New tokens of the longest sequence if a tile of any of them has paths; else 0, for no memory is needed.
inline int64_t tokens_in_paths(const SpeculativeArgs& args) {
  const int64_t plans = args.of_q.rows_stride == 0 ? 1 : args.batch;
  for (int64_t batch = 0; batch < plans; ++batch) {
    for (int64_t tile = 0; tile < args.of_q.num_tiles; ++tile) {
      if (!in_order(args, batch, tile)) return args.q_len;
    }
  }
  return 0;
}

// The arguments of a packed sequence: its own rows are those of the only batch entry.
template <class T, class S>
SpeculativeArgs of_sequence(const SpeculativeArgs& args, int64_t batch) {
  SpeculativeArgs own = args;
  if (!args.packed()) return own;
  const int64_t first = args.row_begins.load(batch);
  own.q.data = own.q.row<T>(0, first, 0), own.out.data = own.out.row<T>(0, first, 0);
  own.k.data = own.k.row<S>(0, first, 0), own.v.data = own.v.row<S>(0, first, 0);
  own.q_len = own.kv_len = args.tokens(batch);
  own.lse += first;
  return own;
}

template <class T, class S, class Tiles>
void attend_splits(const SpeculativeArgs& args) {
  const int64_t scratch = Memory<Tiles>(nullptr, args.head_dim).bytes;
  const int64_t heads = args.batch * args.kv_heads, splits = used_splits(args);
  const int64_t rows = args.rows() * args.q_heads, width = args.q_heads * args.head_dim;
  const int64_t of_bitmap = rounded_up(args.block_q * kWords * static_cast<int64_t>(sizeof(uint32_t)), 64);
  const int64_t path_tokens = tokens_in_paths(args);
  const int64_t bytes = scratch + of_bitmap + Paths(nullptr, args.block_q, path_tokens).bytes;
  for_items<Tiles>(heads * args.of_q.num_tiles * splits, bytes, [&](int64_t item, char* base) {
    const int64_t batch = item % heads / args.kv_heads, kv_head = item % args.kv_heads;
    const int64_t tile = item / heads % args.of_q.num_tiles, s = item / heads / args.of_q.num_tiles;
    SpeculativeArgs own = of_sequence<T, S>(args, batch);
    if (s > 0) own.sinks = nullptr;  // it counts once
    const int64_t entry = args.packed() ? 0 : batch;
    if (s == 0) append_rows<S>(own, batch, entry, kv_head, tile);
    if (tile * args.block_q >= own.q_len) return;
    Memory<Tiles> memory(base, args.head_dim);
    auto* bitmap = reinterpret_cast<uint32_t*>(base + scratch);
    Paths paths(base + scratch + of_bitmap, args.block_q, path_tokens);
    const auto walk = [&](Chunks<S>& chunks) {
      for_positions<S, Tiles::kTogether>(own, batch, entry, kv_head, tile, split_begin(s), split_begin(s + 1), bitmap,
                                         paths, chunks);
    };
    attend<T, S>(own, entry, kv_head, tile, memory, walk, [&](int64_t head, int64_t token, Panel<Tiles>& panel) {
      if (splits == 1) return finish<T>(own, own.out, own.lse, entry, head, token, panel);
      const int64_t first = args.packed() ? args.row_begins.load(batch) : 0;
      const HeadsView part{args.parts + s * rows * args.head_dim + first * width, args.q_len * width, width,
                           args.head_dim};
      finish<float>(own, part, args.parts_lse + s * rows + first, entry, head, token, panel);
    });
  });
  if (splits > 1) merge_splits<T>(args, splits);
}

// A few lanes, as for one new token, need only one vector.
template <class T, class S = T>
void attend_narrow_or_wide(const SpeculativeArgs& args) {
  const int64_t lanes = smaller(args.block_q, args.q_len) * (args.q_heads / args.kv_heads);
  if (args.head_dim > kUsualHead) {
    return lanes <= kLanes ? attend_splits<T, S, VectorTilesOf<1, 512>>(args) : attend_splits<T, S, WideTiles>(args);
  }
  return lanes <= kLanes ? attend_splits<T, S, VectorTilesOf<1>>(args) : attend_splits<T, S, VectorTiles>(args);
}

template <class T>
void attend_to_codes(const SpeculativeArgs& args) {
  attend_narrow_or_wide<T, Code>(args);
}

}  // namespace

#ifdef PDK_AMX
void speculative_attention(const SpeculativeArgs& args) {
  if (args.form != CacheRows::kSame || args.element != Element::kBfloat16)
    return PDK_BELOW::speculative_attention(args);
  attend_splits<Bfloat16, Bfloat16, AmxTiles>(args);  // for any number of rows: these products round differently
}
#else
void speculative_attention(const SpeculativeArgs& args) {
  if (args.form == CacheRows::kHalves) return attend_narrow_or_wide<float, Half>(args);
  if (args.form == CacheRows::kCodes) PDK_BY_ELEMENT(attend_to_codes, args)
  PDK_BY_ELEMENT(attend_narrow_or_wide, args)
}
#endif

}  // namespace pdkernels::cpu::PDK_ISA
