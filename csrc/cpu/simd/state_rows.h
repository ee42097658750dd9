// The rows of a step of a layer with a state, as its passes take them. Every product is rounded before it is added, and
// sums over a row's elements are 16 partial sums at every level, so that all levels have the same bits.
#pragma once

#include "ops/recurrent_state.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

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

// A row of a head as the passes take it. The arrays are padded: k and q to kSums, the others to kTile.
struct Row {
  float* k;
  float* update;    // of a new row of the delta rule its v, until its update is known
  float *q, *read;  // only of new rows; read: the sum of q with the state
  float decay, beta, qk;
};

// Columns that a pass takes: as many vectors as leave registers for two sums and an update of each.
constexpr int kColumns = kLanes == 16 ? 4 : 2;
constexpr int64_t kTile = larger(kColumns * kLanes, kSums);

// Floats of a row's arrays.
PDK_INLINE int64_t floats_of_row(const StateScanArgs& args) {
  return 2 * rounded_up(args.keys, kSums) + 2 * rounded_up(args.values, kTile);
}

// Where a row is: new, or pending.
struct Place {
  bool pending;
  int64_t b, row;
};

PDK_INLINE const InputView& view_of(const StateInput& input, const Place& at) {
  return at.pending ? input.pending : input.fresh;
}

PDK_INLINE void prepare_delta(const StateScanArgs& args, const Place& at, int64_t head, int64_t padded, Row& row) {
  const auto normalise = [&](float* x) {
    if (args.eps >= 0) scale_by(x, 1.0f / __builtin_sqrtf(dot(x, x, padded) + args.eps), padded);
  };
  normalise(row.k);
  if (!at.pending) {
    normalise(row.q);
    scale_by(row.q, args.scale, padded);
    row.qk = dot(row.q, row.k, padded);
    row.beta = number(args.beta, at.b, at.row, head);
    if (args.sigmoid) row.beta = first(sigmoid_of(splat(row.beta)));
  }
  float log_decay = number(view_of(args.gate, at), at.b, at.row, head);
  if (args.A.given()) {
    if (args.dt_bias.given()) log_decay += number(args.dt_bias, 0, 0, head);
    log_decay = first(mul(softplus_of(splat(log_decay)), splat(number(args.A, 0, 0, head))));
  }
  row.decay = first(exp_of(splat(log_decay)));
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
  const int64_t padded = rounded_up(args.keys, kSums), values = rounded_up(args.values, kTile);
  const int64_t key_head = head / (args.heads / args.key_heads);
  row.k = memory, row.update = memory + padded, row.q = row.update + values, row.read = row.q + padded;
  widen<T>(view_of(args.k, at).at(at.b, at.row, key_head), row.k, args.keys, padded);
  const char* v = view_of(args.v, at).at(at.b, at.row, head);
  if (args.delta && at.pending) {
    widen<float>(v, row.update, args.values, values);
  } else {
    widen<T>(v, row.update, args.values, values);
  }
  if (!at.pending) {
    widen<T>(args.q.at(at.b, at.row, key_head), row.q, args.keys, padded);
    for (int64_t i = 0; i < values; ++i) row.read[i] = 0;
  }
  if (args.delta) {
    prepare_delta(args, at, head, padded, row);
  } else {
    prepare_selective(args, at, head, padded, row);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
