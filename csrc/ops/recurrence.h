// The parts of a recurrent-depth sampler step that are not the model, shared by the CPU and the CUDA kernels: the row
// that a row was in the previous step, its noise, the truncated normal distribution, and the bookkeeping of frozen
// rows.
//
// The results of recurrence_inject are bitwise the same on all devices. The formulas are therefore templates over
// `Math`, whose `multiply` is never fused into a multiply-add; sums, quotients and roots are rounded separately
// anyway.
#pragma once

#include "common/element.h"
#include "common/index_view.h"
#include "common/philox.h"
#include "common/rows_view.h"

namespace pdkernels {

// --- the normal distribution truncated at +-3

// The fourth word of a counter. Sampled tokens have 0 there, so latent noise is independent of them.
constexpr uint32_t kLatentNoise = 1;
// The third word: initial states have 0 there, and noise 1 + the step, so that the two of a new row are independent.
constexpr uint32_t kInitialState = 0;
PDK_HD constexpr uint32_t noise_step(int64_t step) { return static_cast<uint32_t>(step + 1); }

// The upper 24 bits of a word as an odd number n: n 2^-24 is 2 u - 1, exact in a float. I is a signed word, or a vector
// of them.
template <class I>
PDK_HD I odd_number(I word) {
  return ((word ^ INT32_MIN) >> 8) * 2 + 1;
}

// Phi^-1(1/2 + t (Phi(3) - 1/2)) for t = n 2^-24: t P(y) / Q(y), y = 1 - t^2. A minimax fit of degree 6 over 6; the
// error is below 1e-6, including rounding. All coefficients are positive, so nothing cancels. y is computed from
// 1 - |t|, which is exact: at the ends the quantile function is so steep that an error of y would be multiplied by 56.
template <class Math, class F>
PDK_HD F truncated_normal(F t) {
  constexpr float kNumerator[] = {2.9999998f, 693.8183f, 43711.816f, 825518.44f, 4248849.0f, 4712873.5f, 526904.5f};
  constexpr float kDenominator[] = {1.0f, 249.5244f, 17557.633f, 389758.62f, 2551655.8f, 4191461.0f, 1136600.5f};
  const F size = t < 0.0f ? -t : t;
  const F y = Math::multiply(1.0f - size, 1.0f + size);
  F p = Math::multiply(y, kNumerator[6]) + kNumerator[5];
  F q = Math::multiply(y, kDenominator[6]) + kDenominator[5];
  for (int i = 4; i >= 0; --i) {
    p = Math::multiply(p, y) + kNumerator[i];
    q = Math::multiply(q, y) + kDenominator[i];
  }
  return Math::multiply(t, p / q);
}

// --- input of a step

enum class NoiseSchedule { kConstant, kLinear, kHarmonic, kRoot };

struct InjectArgs {
  Element element;
  BatchRowsView state, embedding, previous, out;  // (batch, rows, size); out: rows of 2 * size
  IndexView recurrences, cursor, width, advance, steps;
  int64_t batch = 0, rows = 0, size = 0;
  PhiloxSeeds seeds;
  float noise = 0, horizon = 1, momentum = 0, init_std = 0;
  NoiseSchedule schedule = NoiseSchedule::kLinear;
  bool sqrt_mixer = false, copied = false, damp_new = false;

  // A width outside [0, rows] is clamped; on the CPU it has already been refused.
  PDK_HD int64_t wave(int64_t b) const {
    const int64_t w = width.load(b);
    return w < 0 ? 0 : (w > rows ? rows : w);
  }
  // Index of row i in the previous step. An old row that does not exist counts as new; on the CPU it has already been
  // refused.
  PDK_HD int64_t before(int64_t b, int64_t i) const { return i + advance.load(b); }
  PDK_HD bool old(int64_t b, int64_t i) const {
    return state.given() && recurrences.load(b, i) > 0 && state.has(before(b, i));
  }
  // The last old row of a wave, or -1.
  PDK_HD int64_t newest(int64_t b) const {
    int64_t i = wave(b) - 1;
    while (i >= 0 && !old(b, i)) --i;
    return i;
  }
};

// z' = keep z + share init. A share of 0 leaves z unchanged.
struct NoiseMix {
  float keep, share;
};

template <class Math>
PDK_HD NoiseMix noise_mix(const InjectArgs& args, int64_t recurrences) {
  const float count = static_cast<float>(recurrences);
  float beta = args.noise;
  if (args.schedule == NoiseSchedule::kLinear) {
    const float left = 1.0f - count / args.horizon;
    beta = Math::multiply(beta, left < 0.0f ? 0.0f : left);
  } else if (args.schedule == NoiseSchedule::kHarmonic) {
    beta = beta / (1.0f + count);
  } else if (args.schedule == NoiseSchedule::kRoot) {
    beta = beta / Math::square_root(1.0f + count);
  }
  const float rest = 1.0f - beta;
  if (!args.sqrt_mixer) return {rest, beta};
  return {Math::square_root(rest < 0.0f ? 0.0f : rest), Math::square_root(beta)};
}

template <class Math, class F>
PDK_HD F blend(float keep, F x, float share, F y) {
  return Math::multiply(x, keep) + Math::multiply(y, share);
}

// --- output of a step

struct ExitArgs {
  Element element;
  BatchRowsView x, residual, previous, older, state;
  const void* weight = nullptr;
  IndexView recurrences, width, advance, older_advance;
  int64_t batch = 0, rows = 0, size = 0, min_recurrences = 1;
  double threshold = 0;
  float eps = 0;
  float* distance = nullptr;  // (batch, rows), like converged
  bool* converged = nullptr;

  PDK_HD bool in_wave(int64_t b, int64_t i) const { return i < width.load(b); }
  PDK_HD int64_t before(int64_t b, int64_t i) const { return i + advance.load(b); }
  PDK_HD int64_t older_row(int64_t b, int64_t i) const { return before(b, i) + older_advance.load(b); }
  // Whether row i has a previous state to be compared with.
  PDK_HD bool has_previous(int64_t b, int64_t i) const {
    return previous.given() && recurrences.load(b, i) >= min_recurrences && previous.has(before(b, i)) &&
           (!older.given() || older.has(older_row(b, i)));
  }
  PDK_HD void write(int64_t b, int64_t i, float result) const {
    distance[b * rows + i] = result;
    converged[b * rows + i] = static_cast<double>(result) < threshold;
  }
};

// --- which rows freeze

struct AdvanceArgs {
  IndexView tokens, predictions, recurrences,
      unchanged_steps;  // (batch, capacity + 1), (batch, rows), twice (batch, capacity)
  IndexView width, cursor, advance, steps, remaining;
  const bool* converged = nullptr;
  int64_t converged_stride0 = 0, converged_stride1 = 0;
  IndexView filler, end_tokens;
  int64_t batch = 0, rows = 0, capacity = 0, num_end_tokens = 0;
  int64_t inner_recurrence = 1, max_wavefront = 0, max_recurrences = 0, stability = 0, headway = 1;
  bool last = false, keep_changed = true, keep_last = false;

  PDK_HD int64_t widest() const { return rows < max_wavefront ? rows : max_wavefront; }
  PDK_HD bool fits(int64_t b) const {
    const int64_t w = width.load(b);
    return w >= 0 && w <= widest() && cursor.load(b) >= 0 && remaining.load(b) >= 0;
  }
  PDK_HD bool is_end(int64_t token) const {
    for (int64_t i = 0; i < num_end_tokens; ++i) {
      if (end_tokens.load(i) == token) return true;
    }
    return false;
  }
  PDK_HD bool input_changed(int64_t b, int64_t i) const { return predictions.load(b, i - 1) != tokens.load(b, i); }

  // Adds the step to the counters of row i and returns whether the row is ready to freeze.
  PDK_HD bool count_row(int64_t b, int64_t i) const {
    const int64_t before = recurrences.load(b, i), count = before + inner_recurrence;
    const int64_t same =
        before > 0 && predictions.load(b, i) == tokens.load(b, i + 1) ? unchanged_steps.load(b, i) + 1 : 0;
    recurrences.store(count, b, i);
    unchanged_steps.store(same, b, i);
    return (converged != nullptr && converged[b * converged_stride0 + i * converged_stride1]) ||
           (max_recurrences > 0 && count >= max_recurrences) || (stability > 0 && same >= stability);
  }

  // The token of row j of a wave of w rows after n of them froze.
  PDK_HD int64_t new_token(int64_t b, int64_t w, int64_t n, int64_t j) const {
    if (j <= w - n) return n + j == 0 ? tokens.load(b, 0) : predictions.load(b, n + j - 1);
    return filler.given() ? filler.load(b, j - (w - n) - 1) : 0;
  }
};

// The update of a sequence of w rows. `ready`: the number of rows that may freeze. `first_changed`, `first_end`: the
// first row whose input changed and the first end token, w if there is none.
struct Advance {
  int64_t frozen, wave, kept, tokens;  // numbers of rows; tokens: entries to write

  PDK_HD Advance(const AdvanceArgs& args, int64_t b, int64_t w, int64_t ready, int64_t first_changed,
                 int64_t first_end) {
    const int64_t budget = args.remaining.load(b);
    int64_t n = args.keep_changed && first_changed < ready ? first_changed : ready;
    if (args.keep_last && n > 0) --n;
    if (n > budget) n = budget;
    const bool ended = first_end < n;
    frozen = ended ? first_end + 1 : n;
    left_ = budget - frozen;
    wave = w - frozen + args.headway;
    if (wave > args.max_wavefront) wave = args.max_wavefront;
    if (wave > left_) wave = left_;
    if (ended) wave = 0;
    kept = w - frozen < wave ? w - frozen : wave;
    tokens = wave == 0 ? 0 : w - frozen + 1 > wave ? w - frozen + 1 : wave;
  }

  PDK_HD void write(const AdvanceArgs& args, int64_t b) const {
    args.width.store(wave, b);
    args.cursor.store(args.cursor.load(b) + frozen, b);
    args.advance.store(frozen, b);
    args.steps.store(args.steps.load(b) + 1, b);
    args.remaining.store(left_, b);
  }

 private:
  int64_t left_;
};

PDK_KERNEL(recurrence_inject, InjectArgs)
PDK_VECTOR_KERNEL(recurrence_inject, InjectArgs)
PDK_KERNEL(recurrence_exit, ExitArgs)
PDK_VECTOR_KERNEL(recurrence_exit, ExitArgs)
PDK_KERNEL(recurrence_advance, AdvanceArgs)

}  // namespace pdkernels
