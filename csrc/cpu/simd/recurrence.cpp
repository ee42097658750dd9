// Input and output of a step of the recurrent-depth sampler. A work item is a row.
#include "ops/recurrence.h"
#include "kernels.h"
#include "random_words.h"
#include "rms_norm.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

struct Rounded {
  PDK_INLINE static Vec multiply(Vec a, Vec b) { return rounded(a * b); }
  PDK_INLINE static Vec multiply(Vec a, float b) { return rounded(a * b); }
  PDK_INLINE static float multiply(float a, float b) { return rounded(splat(a * b))[0]; }
  PDK_INLINE static float square_root(float x) { return __builtin_sqrtf(x); }
};

// The random numbers of one step and position.
class Latents {
 public:
  PDK_INLINE Latents(const InjectArgs& args, int64_t b, int64_t position, uint32_t step)
      : words_(args.seeds.key(b), step, static_cast<uint32_t>(position), kLatentNoise), std_(args.init_std) {}

  // Writes components first .. first + count - 1, rounded up to two whole vectors; first is a multiple of 4.
  PDK_INLINE void write(float* to, int64_t first, int64_t count) const {
    words_.write(to, first, count);
    // A separate loop, so that the dependent operations of several vectors overlap.
    for (int64_t at = 0; at < count; at += kLanes) {
      const Vec t = __builtin_convertvector(odd_number(reinterpret_cast<const Ints&>(to[at])), Vec) * 0x1p-24f;
      reinterpret_cast<Vec&>(to[at]) = Rounded::multiply(truncated_normal<Rounded>(t), std_);
    }
  }

 private:
  RandomWords words_;
  float std_;
};

// to = keep state + share noise, where the state is `from` or, without it, the initial one of the position
template <class T>
PDK_INLINE void draw_row(const InjectArgs& args, int64_t b, int64_t position, const T* from, NoiseMix mix, T* to) {
  const Latents initial(args, b, position, kInitialState), noise(args, b, position, noise_step(args.steps.load(b)));
  alignas(64) float states[kStrip], noises[kStrip];
  for_strips(0, args.size, [&](int64_t first, int64_t end) {
    if (from == nullptr) initial.write(states, first, end - first);
    if (mix.share != 0) noise.write(noises, first, end - first);
    for_vectors(first, end, [&](int64_t at, auto lanes) {
      const Vec state = from == nullptr ? load(states + (at - first), lanes) : load(from + at, lanes);
      store(to + at,
            mix.share == 0 ? state : blend<Rounded>(mix.keep, state, mix.share, load(noises + (at - first), lanes)),
            lanes);
    });
  });
}

// to = keep x + share y
template <class T>
PDK_INLINE void blend_row(int64_t size, float keep, const T* x, float share, const T* y, T* to) {
  for_vectors(0, size, [&](int64_t at, auto lanes) {
    store(to + at, blend<Rounded>(keep, load(x + at, lanes), share, load(y + at, lanes)), lanes);
  });
}

template <class T>
PDK_INLINE void multiply_row(int64_t size, float factor, const T* x, T* to) {
  for_vectors(0, size, [&](int64_t at, auto lanes) { store(to + at, load(x + at, lanes) * factor, lanes); });
}

template <class T>
PDK_INLINE void copy_row(int64_t size, const T* from, T* to) {
  if (size == 0) return;  // no memory need be there
  __builtin_memcpy(to, from, static_cast<uint64_t>(size) * sizeof(T));
}

template <class T>
PDK_INLINE void zero_row(int64_t size, T* row) {
  if (size == 0) return;  // as above
  __builtin_memset(static_cast<void*>(row), 0, static_cast<uint64_t>(size) * sizeof(T));
}

template <class T>
void inject_row(const InjectArgs& args, int64_t b, int64_t i) {
  const int64_t size = args.size;
  T* state = args.out.template row<T>(b, i);
  T* embedding = state + size;
  if (i >= args.wave(b)) return zero_row(2 * size, state);
  const bool old = args.old(b, i);
  const int64_t origin = old ? i : args.copied ? args.newest(b) : -1;
  const T* from = origin < 0 ? nullptr : args.state.template row<const T>(b, args.before(b, origin));
  NoiseMix mix{1, 0};
  if (args.noise != 0) mix = noise_mix<Rounded>(args, args.recurrences.load(b, i));
  if (from != nullptr && mix.share == 0) {
    copy_row(size, from, state);
  } else {
    draw_row(args, b, args.cursor.load(b) + i, from, mix, state);
  }

  const T* fresh = args.embedding.template row<const T>(b, i);
  const float keep = 1.0f - args.momentum;
  if (old && args.previous.given()) {
    if (args.momentum == 0) return copy_row(size, fresh, embedding);
    return blend_row(size, keep, fresh, args.momentum, args.previous.template row<const T>(b, args.before(b, i)),
                     embedding);
  }
  if (args.damp_new) return multiply_row(size, keep, fresh, embedding);
  copy_row(size, fresh, embedding);
}

template <class T>
void exit_row(const ExitArgs& args, int64_t b, int64_t i) {
  const int64_t size = args.size;
  T* state = args.state.template row<T>(b, i);
  if (!args.in_wave(b, i)) {
    zero_row(size, state);
    return args.write(b, i, kInfinity);
  }
  const T* x = args.x.template row<const T>(b, i);
  const T* residual = args.residual.template row<const T>(b, i);
  float* row = reinterpret_cast<float*>(thread_scratch(size * static_cast<int64_t>(sizeof(float))));
  const float scale = scale_of(add_rows(x, residual, row, size), size, args.eps);
  // Written values are passed to `visit`.
  const auto finish = [&](const auto& visit) {
    return scale_row(row, scale, static_cast<const T*>(args.weight), state, size, visit);
  };
  if (!args.has_previous(b, i)) {
    finish([](int64_t, auto, Vec) {});
    return args.write(b, i, kInfinity);
  }

  const T* before = args.previous.template row<const T>(b, args.before(b, i));
  Vec of_state, of_change{};
  if (args.older.given()) {
    const T* first = args.older.template row<const T>(b, args.older_row(b, i));
    of_state = finish([&](int64_t at, auto lanes, Vec now) {
      const Vec change = now - 2.0f * load(before + at, lanes) + load(first + at, lanes);
      of_change += change * change;
    });
  } else {
    of_state = finish([&](int64_t at, auto lanes, Vec now) {
      const Vec change = now - load(before + at, lanes);
      of_change += change * change;
    });
  }
  const float moved = __builtin_sqrtf(sum_of(of_change)), length = __builtin_sqrtf(sum_of(of_state));
  args.write(b, i, moved == 0 && length == 0 ? 0.0f : moved / length);
}

template <class T>
void inject(const InjectArgs& args) {
  for_rows(args.batch * args.rows, args.size,
           [&](int64_t item) { inject_row<T>(args, item / args.rows, item % args.rows); });
}

template <class T>
void exit(const ExitArgs& args) {
  for_rows(args.batch * args.rows, args.size,
           [&](int64_t item) { exit_row<T>(args, item / args.rows, item % args.rows); });
}

}  // namespace

void recurrence_inject(const InjectArgs& args) {
  switch (args.element) {
    case Element::kFloat: return inject<float>(args);
    case Element::kHalf: return inject<Half>(args);
    case Element::kBfloat16: return inject<Bfloat16>(args);
  }
}

void recurrence_exit(const ExitArgs& args) {
  switch (args.element) {
    case Element::kFloat: return exit<float>(args);
    case Element::kHalf: return exit<Half>(args);
    case Element::kBfloat16: return exit<Bfloat16>(args);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
