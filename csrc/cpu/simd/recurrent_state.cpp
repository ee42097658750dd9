// One step of a layer with a state. A work item is one head of a sequence, or a part of a convolution's channels.
//
// Lanes are columns of the state, which do not depend on each other, and every product is rounded before it is added.
// So a column takes the same operations in the same order at every level, in any tile, and however rows are split into
// steps. Sums over a row's elements are 16 partial sums at every level.
//
// A row of the gated delta rule takes one pass over a tile of the state: the pass first adds the update of the row
// before, which could not be known before that row's pass had ended. Its output is that of the decayed state plus the
// update's part, (q . k) update.
#include "ops/recurrent_state.h"
#include "kernels.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

PDK_INLINE Vec mul(Vec a, Vec b) { return rounded(a * b); }

// ---------------------------------------------------------------------------------------------- functions of a number

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits

PDK_INLINE Vec power(Ints n) { return reinterpret_cast<Vec>((n + 127) << 23); }

// e^x, for any x.
PDK_INLINE Vec exp_of(Vec x) {
  const Ints overflows = x > 88.8f;
  x = choose(x < -110.0f, splat(-110.0f), choose(overflows, splat(88.8f), x));
  const Vec shifted = mul(x, splat(1.44269504f)) + kRounder, n = shifted - kRounder;
  const Vec r = (x - mul(n, splat(0.693359375f))) + mul(n, splat(2.12194440e-4f));
  Vec p = mul(r, splat(0.0013843657f)) + 0.008374157f;
  p = mul(p, r) + 0.041668f;
  p = mul(p, r) + 0.16666431f;
  p = mul(p, r) + 0.49999994f;
  p = mul(p, r) + 1.0f;
  p = mul(p, r) + 1.0f;
  // 2^n in two parts: either may be beyond a float's exponents.
  const Ints whole = reinterpret_cast<Ints>(shifted) - 0x4b400000, half = whole >> 1;
  return choose(overflows, splat(kInfinity), mul(mul(p, power(half)), power(whole - half)));
}

PDK_INLINE Vec minus_magnitude(Vec x) { return choose(x > 0, -x, x); }

PDK_INLINE Vec sigmoid_of(Vec x) {
  const Vec e = exp_of(minus_magnitude(x));
  return choose(x > 0, splat(1.0f), e) / (1.0f + e);
}

PDK_INLINE Vec silu_of(Vec x) {
  const Vec e = exp_of(minus_magnitude(x));
  return choose(x > 0, x, mul(x, e)) / (1.0f + e);
}

// log(1 + e^x); x itself above 20, as in torch. log(1 + t) = 2 atanh(t / (2 + t)), whose series ends where its terms
// are below the rounding for t <= 1.
PDK_INLINE Vec softplus_of(Vec x) {
  const Vec t = exp_of(minus_magnitude(x)), z = t / (2.0f + t), w = mul(z, z);
  Vec p = splat(1.0f / 17);
  for (int odd = 15; odd >= 1; odd -= 2) p = mul(p, w) + 1.0f / static_cast<float>(odd);
  const Vec soft = larger(x, Vec{}) + mul(z + z, p);
  return choose((x > 20.0f) | (x != x), x, soft);
}

PDK_INLINE float first(Vec x) { return x[0]; }

PDK_INLINE float number(const char* at, Element element) {
  switch (element) {
    case Element::kFloat: return *reinterpret_cast<const float*>(at);
    case Element::kHalf: return to_float(*reinterpret_cast<const Half*>(at));
    default: return to_float(*reinterpret_cast<const Bfloat16*>(at));
  }
}
PDK_INLINE float number(const InputView& view, int64_t b, int64_t row, int64_t head) {
  return number(view.at(b, row, head), view.element);
}

// ------------------------------------------------------------------------------------------------------------- rows

constexpr int64_t kSums = 16;

// Of arrays that are padded with zeros to a multiple of kSums.
PDK_INLINE float dot(const float* a, const float* b, int64_t n) {
  constexpr int kVectors = kSums / kLanes;
  Vec sums[kVectors] = {};
  for (int64_t at = 0; at < n; at += kSums) {
    for (int i = 0; i < kVectors; ++i) {
      const int64_t from = at + i * kLanes;
      sums[i] += mul(load(a + from, Whole{}), load(b + from, Whole{}));
    }
  }
  float lanes[kSums];
  for (int i = 0; i < kVectors; ++i) store(lanes + i * kLanes, sums[i], Whole{});
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class T>
PDK_INLINE void widen(const char* from, float* to, int64_t n, int64_t padded) {
  to_floats(reinterpret_cast<const T*>(from), to, n);
  for (int64_t i = n; i < padded; ++i) to[i] = 0;
}

PDK_INLINE void scale_by(float* x, float factor, int64_t n) {
  for (int64_t at = 0; at < n; at += kSums) {
    for (int64_t i = at; i < at + kSums; i += kLanes) store(x + i, mul(load(x + i, Whole{}), splat(factor)), Whole{});
  }
}

// A row of a head as the passes take it.
struct Row {
  float *k, *q, *v;  // q: only of new rows
  float decay, beta, qk;
};

// Where a row is: new, or pending.
struct Place {
  bool pending;
  int64_t b, row;
};

PDK_INLINE const InputView& view_of(const StateInput& input, const Place& at) {
  return at.pending ? input.pending : input.fresh;
}

template <class T>
PDK_INLINE void prepare_delta(const StateScanArgs& args, const Place& at, int64_t head, int64_t padded, Row& row) {
  const auto normalise = [&](float* x) {
    if (args.eps >= 0) scale_by(x, 1.0f / __builtin_sqrtf(dot(x, x, padded) + args.eps), padded);
  };
  normalise(row.k);
  if (!at.pending) {
    normalise(row.q);
    scale_by(row.q, args.scale, padded);
    row.qk = dot(row.q, row.k, padded);
  }
  float log_decay = number(view_of(args.gate, at), at.b, at.row, head);
  if (args.A.given()) {
    if (args.dt_bias.given()) log_decay += number(args.dt_bias, 0, 0, head);
    log_decay = first(mul(softplus_of(splat(log_decay)), splat(number(args.A, 0, 0, head))));
  }
  row.decay = first(exp_of(splat(log_decay)));
  row.beta = number(view_of(args.beta, at), at.b, at.row, head);
  if (args.sigmoid) row.beta = first(sigmoid_of(splat(row.beta)));
}

PDK_INLINE void prepare_selective(const StateScanArgs& args, const Place& at, int64_t head, int64_t padded, Row& row) {
  float log_decay = number(args.A, 0, 0, head);
  if (args.gate.fresh.given()) {
    float dt = number(view_of(args.gate, at), at.b, at.row, head);
    if (args.dt_bias.given()) dt += number(args.dt_bias, 0, 0, head);
    if (args.softplus) dt = first(softplus_of(splat(dt)));
    dt = dt < args.dt_min ? args.dt_min : dt;
    dt = dt > args.dt_max ? args.dt_max : dt;
    log_decay = first(mul(splat(dt), splat(log_decay)));
    scale_by(row.k, dt, padded);
  }
  row.decay = first(exp_of(splat(log_decay)));
}

template <class T>
void prepare(const StateScanArgs& args, const Place& at, int64_t head, float* memory, Row& row) {
  const int64_t padded = rounded_up(args.keys, kSums), key_head = head / (args.heads / args.key_heads);
  row.k = memory, row.q = memory + padded, row.v = memory + 2 * padded;
  widen<T>(view_of(args.k, at).at(at.b, at.row, key_head), row.k, args.keys, padded);
  widen<T>(view_of(args.v, at).at(at.b, at.row, head), row.v, args.values, rounded_up(args.values, kSums));
  if (!at.pending) widen<T>(args.q.at(at.b, at.row, key_head), row.q, args.keys, padded);
  if (args.delta) {
    prepare_delta<T>(args, at, head, padded, row);
  } else {
    prepare_selective(args, at, head, padded, row);
  }
}

// ----------------------------------------------------------------------------------------------------------- passes

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

// Gated delta: state + k before^T, if there is an update before, times the decay goes to `to`. The sums are those of k
// and, for a new row, of q with it.
template <int kVectors, bool kUpdated, bool kQueried, class From, class To>
PDK_INLINE void pass(int64_t keys, const Tile<From>& from, const Tile<To>& to, const float* before_k,
                     const Vectors<kVectors>& before, const Row& row, Vectors<kVectors>& remembered,
                     Vectors<kVectors>& read) {
  const Vec decay = splat(row.decay);
  Vec k_sums[kVectors] = {}, q_sums[kVectors] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const float* source = from.data + key * from.stride;
    const float k = row.k[key], q = kQueried ? row.q[key] : 0.0f;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Vec x = load(source + i * kLanes, from.lanes);
      if constexpr (kUpdated) x += mul(splat(before_k[key]), before.of[i]);
      x = mul(x, decay);
      store(to.data + key * to.stride + i * kLanes, x, to.lanes);
      k_sums[i] += mul(splat(k), x);
      if constexpr (kQueried) q_sums[i] += mul(splat(q), x);
    }
  }
  for (int i = 0; i < kVectors; ++i) remembered.of[i] = k_sums[i], read.of[i] = q_sums[i];
}

// Mamba 2: state times the decay, plus k update^T. The sums are those of q.
template <int kVectors, bool kQueried, class From, class To>
PDK_INLINE void pass(int64_t keys, const Tile<From>& from, const Tile<To>& to, const Row& row,
                     const Vectors<kVectors>& update, Vectors<kVectors>& read) {
  const Vec decay = splat(row.decay);
  Vec sums[kVectors] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const float* source = from.data + key * from.stride;
    const float k = row.k[key], q = kQueried ? row.q[key] : 0.0f;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Vec x = mul(load(source + i * kLanes, from.lanes), decay);
      x += mul(splat(k), update.of[i]);
      store(to.data + key * to.stride + i * kLanes, x, to.lanes);
      if constexpr (kQueried) sums[i] += mul(splat(q), x);
    }
  }
  for (int i = 0; i < kVectors; ++i) read.of[i] = sums[i];
}

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
        work_{work, kVectors * kLanes, {}} {}

  void clear_state() { clear(state_); }

  // Rows that become part of the state, which is written once. `first`: the number of the first that is new; outputs
  // are those of the new ones.
  void fold(const Row* rows, int64_t count, int64_t pending, int64_t first) {
    for (int64_t i = 0; i < count; ++i) {
      const bool queried = i >= pending;
      if constexpr (kDelta) {
        if (i == 0) {
          advance<false>(state_, rows[i], queried);
        } else {
          advance<true>(work_, rows[i], queried);
        }
      } else {
        queried ? plain<true>(state_, state_, rows[i]) : plain<false>(state_, state_, rows[i]);
      }
      if (queried) write(rows[i], first + i - pending);
    }
    if constexpr (kDelta) {
      if (count > 0) finish();
    }
  }

  // New rows that are not part of the state: rows[i] is row `settled` + i. `is_zero`: there is no state yet.
  void draft(const Row* rows, int64_t count, int64_t settled, bool is_zero) {
    int64_t done = -1;  // the row that the work tile is behind; -1: none
    for (int64_t i = 0; i < count; ++i) {
      const int64_t parent = larger(args_.parent(b_, settled + i) - settled, -1);
      if (parent < 0 || parent != done) replay(rows, parent, settled, is_zero);
      extend(rows[i], parent < 0, is_zero, true);
      write(rows[i], settled + i);
      done = i;
    }
  }

 private:
  template <class To>
  void clear(const Tile<To>& tile) {
    for (int64_t key = 0; key < args_.keys; ++key) {
      for (int i = 0; i < kVectors; ++i) store(tile.data + key * tile.stride + i * kLanes, Vec{}, tile.lanes);
    }
  }

  // Makes the work tile that behind row `last`, from the state on.
  void replay(const Row* rows, int64_t last, int64_t settled, bool is_zero) {
    // Ancestors are found upwards and taken downwards: each time, the last one that has not been taken.
    for (int64_t taken = -1; taken != last;) {
      int64_t next = last;
      for (int64_t up = last; up != taken; up = larger(args_.parent(b_, settled + up) - settled, -1)) next = up;
      extend(rows[next], taken < 0, is_zero, false);
      taken = next;
    }
  }

  // The work tile behind a row. `begins`: the row before it is in the state.
  void extend(const Row& row, bool begins, bool is_zero, bool queried) {
    if (begins && is_zero) clear(work_);
    if constexpr (kDelta) {
      if (!begins) {
        advance<true>(work_, row, queried);
      } else if (is_zero) {
        advance<false>(work_, row, queried);
      } else {
        advance<false>(state_, row, queried);
      }
    } else if (begins && !is_zero) {
      plain<true>(state_, work_, row);
    } else {
      plain<true>(work_, work_, row);
    }
  }

  template <bool kUpdated, class From>
  void advance(const Tile<From>& from, const Row& row, bool queried) {
    Vectors<kVectors> remembered;
    if (queried) {
      pass<kVectors, kUpdated, true>(args_.keys, from, work_, before_k_, update_, row, remembered, read_);
    } else {
      pass<kVectors, kUpdated, false>(args_.keys, from, work_, before_k_, update_, row, remembered, read_);
    }
    before_k_ = row.k;
    for (int i = 0; i < kVectors; ++i) {
      update_.of[i] = mul(load(row.v + column_ + i * kLanes, Whole{}) - remembered.of[i], splat(row.beta));
    }
  }

  template <bool kQueried, class From, class To>
  void plain(const Tile<From>& from, const Tile<To>& to, const Row& row) {
    for (int i = 0; i < kVectors; ++i) update_.of[i] = load(row.v + column_ + i * kLanes, Whole{});
    pass<kVectors, kQueried>(args_.keys, from, to, row, update_, read_);
  }

  void finish() {
    for (int64_t key = 0; key < args_.keys; ++key) {
      const Vec k = splat(before_k_[key]);
      for (int i = 0; i < kVectors; ++i) {
        const Vec x = load(work_.data + key * work_.stride + i * kLanes, Whole{}) + mul(k, update_.of[i]);
        store(state_.data + key * state_.stride + i * kLanes, x, state_.lanes);
      }
    }
  }

  void write(const Row& row, int64_t i) {
    T* to = reinterpret_cast<T*>(args_.out.at(b_, i, head_)) + column_;
    const bool skips = !kDelta && args_.D.given();
    const Vec factor = splat(kDelta ? row.qk : skips ? number(args_.D, 0, 0, head_) : 0.0f);
    for (int v = 0; v < kVectors; ++v) {
      Vec y = read_.of[v];
      if (kDelta || skips) y += mul(factor, update_.of[v]);
      store(to + v * kLanes, y, state_.lanes);
    }
  }

  const StateScanArgs& args_;
  const int64_t b_, head_, column_;
  const Tile<Lanes> state_;
  const Tile<Whole> work_;
  const float* before_k_ = nullptr;
  Vectors<kVectors> update_ = {}, read_ = {};
};

// Calls body with a Block for all columns.
template <class T, bool kDelta, class Body>
void for_blocks(const StateScanArgs& args, int64_t b, int64_t head, float* state, float* work, const Body& body) {
  int64_t at = 0;
  for (; at + kColumns * kLanes <= args.values; at += kColumns * kLanes) {
    Block<T, kDelta, kColumns, Whole> block(args, b, head, state, work, at, Whole{});
    body(block);
  }
  for_vectors(at, args.values, [&](int64_t column, auto lanes) {
    Block<T, kDelta, 1, decltype(lanes)> block(args, b, head, state, work, column, lanes);
    body(block);
  });
}

// Rows that become part of a state are prepared so many at a time.
constexpr int64_t kChunk = 32;

template <class T, bool kDelta>
void scan_head(const StateScanArgs& args, int64_t b, int64_t head) {
  const int64_t count = args.count(b), row = args.row(b);
  for (int64_t i = count; i < args.rows; ++i) {  // padding
    char* to = args.out.at(b, i, head);
    for (int64_t byte = 0; byte < args.values * static_cast<int64_t>(sizeof(T)); ++byte) to[byte] = 0;
  }
  if (count == 0) return;
  const bool is_zero = args.state_lengths.load(row) == 0;
  const int64_t accepted = args.accepted(row), settled = args.settled(count), folded = accepted + settled;
  const int64_t drafted = count - settled, most = larger(drafted, smaller(folded, kChunk));
  const int64_t width = 2 * rounded_up(args.keys, kSums) + rounded_up(args.values, kSums);
  const int64_t tile = args.keys * kColumns * kLanes;
  const int64_t row_floats = rounded_up(most * static_cast<int64_t>(sizeof(Row)) / 4 + 1, kSums);
  char* memory = thread_scratch((tile + most * width + row_floats) * static_cast<int64_t>(sizeof(float)));
  float *work = reinterpret_cast<float*>(memory), *prepared = work + tile;
  Row* rows = reinterpret_cast<Row*>(prepared + most * width);
  float* state = args.state + row * args.state_row_stride + head * args.state_head_stride;

  for (int64_t first = 0; first < folded; first += kChunk) {
    const int64_t chunk = smaller(kChunk, folded - first), pending = smaller(chunk, larger(accepted - first, 0));
    for (int64_t i = 0; i < chunk; ++i) {
      const bool is_pending = i < pending;
      const Place at{is_pending, is_pending ? row : b, is_pending ? args.source(row, first + i) : first + i - accepted};
      prepare<T>(args, at, head, prepared + i * width, rows[i]);
    }
    for_blocks<T, kDelta>(args, b, head, state, work, [&](auto& block) {
      if (first == 0 && is_zero) block.clear_state();
      block.fold(rows, chunk, pending, larger(first - accepted, 0));
    });
  }
  for (int64_t i = 0; i < drafted; ++i) {
    prepare<T>(args, {false, b, settled + i}, head, prepared + i * width, rows[i]);
  }
  for_blocks<T, kDelta>(args, b, head, state, work,
                        [&](auto& block) { block.draft(rows, drafted, settled, is_zero && folded == 0); });
}

template <class T>
void scan_of(const StateScanArgs& args) {
  // As if half of the pending rows were accepted.
  const int64_t rows = args.rows + smaller(args.rows, args.max_pending) / 2;
  for_rows(args.batch * args.heads, rows * args.keys * args.values, [&](int64_t item) {
    const int64_t b = item / args.heads, head = item % args.heads;
    args.delta ? scan_head<T, true>(args, b, head) : scan_head<T, false>(args, b, head);
  });
}

// ------------------------------------------------------------------------------------------------------ convolution

// Channels of a work item.
constexpr int64_t kPart = 256;

// The inputs of the rows of a sequence: those of the state, then the accepted ones, then new ones.
template <class T>
struct Inputs {
  const ShortConvArgs& args;
  int64_t b, row, accepted, settled;
  bool is_zero;

  // The i-th of the inputs before the new rows, of which there are width - 1 + accepted; nullptr: zeros.
  const T* old(int64_t i) const {
    if (i < args.width - 1) { return is_zero ? nullptr : reinterpret_cast<const T*>(args.state.at(row, i, 0)); }
    return reinterpret_cast<const T*>(args.x.pending.at(row, args.source(row, i - args.width + 1), 0));
  }
  const T* fresh(int64_t i) const { return reinterpret_cast<const T*>(args.x.fresh.at(b, i, 0)); }

  // The last `width` inputs of a new row.
  void find(int64_t i, const T** taps) const {
    int64_t at = i, before = args.width - 1 + accepted;
    for (int64_t tap = args.width - 1; tap >= 0; --tap) {
      taps[tap] = at >= 0 ? fresh(at) : old(--before);
      if (at >= 0) at = args.parent(b, at);
    }
  }
};

template <class T>
void conv_part(const ShortConvArgs& args, int64_t b, int64_t begin, int64_t end) {
  const int64_t count = args.count(b), row = args.row(b), width = args.width;
  for (int64_t i = count; i < args.rows; ++i) {  // padding
    T* to = reinterpret_cast<T*>(args.out.at(b, i, 0));
    for (int64_t c = begin; c < end; ++c) to[c] = from_float<T>(0.0f);
  }
  if (count == 0) return;
  const Inputs<T> inputs{args, b, row, args.accepted(row), args.settled(count), args.state_lengths.load(row) == 0};
  char* memory = thread_scratch((width + 1) * kPart * 4 + width * static_cast<int64_t>(sizeof(T*)));
  float *weights = reinterpret_cast<float*>(memory), *bias = weights + width * kPart;
  const T** taps = reinterpret_cast<const T**>(bias + kPart);
  for (int64_t c = begin; c < end; ++c) {
    const T* weight = reinterpret_cast<const T*>(args.weight.data) + c * args.weight_stride;
    for (int64_t tap = 0; tap < width; ++tap) weights[tap * kPart + c - begin] = to_float(weight[tap]);
    if (args.bias.given()) bias[c - begin] = to_float(reinterpret_cast<const T*>(args.bias.data)[c]);
  }
  for (int64_t i = 0; i < count; ++i) {
    inputs.find(i, taps);
    T* to = reinterpret_cast<T*>(args.out.at(b, i, 0));
    for_vectors(begin, end, [&](int64_t c, auto lanes) {
      Vec sum{};
      for (int64_t tap = 0; tap < width; ++tap) {
        const Vec x = taps[tap] != nullptr ? load(taps[tap] + c, lanes) : Vec{};
        sum += mul(load(weights + tap * kPart + c - begin, Whole{}), x);
      }
      if (args.bias.given()) sum += load(bias + c - begin, Whole{});
      store(to + c, args.silu ? silu_of(sum) : sum, lanes);
    });
  }
  // The window moves on: ascending, so that no input is overwritten before it has been read.
  const int64_t folded = inputs.accepted + inputs.settled, held = width - 1 + inputs.accepted;
  for (int64_t i = 0; folded > 0 && i < width - 1; ++i) {
    T* to = reinterpret_cast<T*>(args.state.at(row, i, 0));
    const int64_t at = folded + i;
    const T* from = at < held ? inputs.old(at) : inputs.fresh(at - held);
    for (int64_t c = begin; c < end; ++c) to[c] = from != nullptr ? from[c] : from_float<T>(0.0f);
  }
}

template <class T>
void conv_of(const ShortConvArgs& args) {
  const int64_t parts = (args.channels + kPart - 1) / kPart;
  for_rows(args.batch * parts, args.rows * args.width * smaller(kPart, args.channels), [&](int64_t item) {
    const int64_t begin = item % parts * kPart;
    conv_part<T>(args, item / parts, begin, smaller(begin + kPart, args.channels));
  });
}

}  // namespace

void state_scan(const StateScanArgs& args) { PDK_BY_ELEMENT(scan_of, args) }
void short_conv(const ShortConvArgs& args) { PDK_BY_ELEMENT(conv_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
