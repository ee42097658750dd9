// What goes into a step of the recurrent-depth sampler and what comes out of it: a work item is a row.
#include "kernels.h"
#include "pdkernels/philox.h"
#include "pdkernels/recurrence.h"
#include "rms_norm.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

typedef uint64_t Longs __attribute__((vector_size(4 * PDK_LANES), may_alias));
constexpr int kLongs = kLanes / 2;

struct Rounded {
  PDK_INLINE static Vec multiply(Vec a, Vec b) { return rounded(a * b); }
  PDK_INLINE static Vec multiply(Vec a, float b) { return rounded(a * b); }
  PDK_INLINE static float multiply(float a, float b) { return rounded(splat(a * b))[0]; }
  PDK_INLINE static float square_root(float x) { return __builtin_sqrtf(x); }
};

// The product of the low words of each pair of lanes; their high words may hold anything. One instruction, which GCC does not find.
PDK_INLINE Longs product(Longs a, Longs b) {
#if defined(__AVX2__)
  Longs result;
  __asm__("vpmuludq %2, %1, %0" : "=v"(result) : "v"(a), "v"(b));
  return result;
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

PDK_INLINE Longs splat_long(uint64_t x) { return x + Longs{}; }

// a0 b0 a1 b1 ..
PDK_INLINE void interleave(Longs a, Longs b, Longs* result) {
  Longs low{}, high{};
  for (int lane = 0; lane < kLongs; ++lane) {
    low[lane] = lane / 2 + lane % 2 * kLongs;
    high[lane] = low[lane] + kLongs / 2;
  }
#ifdef __clang__
  for (int lane = 0; lane < kLongs; ++lane) {
    result[0][lane] = lane % 2 ? b[lane / 2] : a[lane / 2];
    result[1][lane] = lane % 2 ? b[(kLongs + lane) / 2] : a[(kLongs + lane) / 2];
  }
#else
  result[0] = __builtin_shuffle(a, b, low);
  result[1] = __builtin_shuffle(a, b, high);
#endif
}

// The numbers of one step and position. A lane computes a counter, its four words in the low halves of four vectors. Most of the
// first round is the same for all of a row.
class Latents {
 public:
  PDK_INLINE Latents(const InjectArgs& args, int64_t position, int64_t step) : std_(args.init_std) {
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * static_cast<uint32_t>(step);
    first_[0] = splat_long(product1 >> 32 ^ static_cast<uint32_t>(position) ^ args.key[0]);
    first_[1] = splat_long(product1);
    first_[2] = splat_long(kLatentNoise ^ args.key[1]);
    for (int round = 1; round < kPhiloxRounds; ++round) {
      keys_[round][0] = splat_long(args.key[0] + static_cast<uint32_t>(round) * kPhiloxKeyStep0);
      keys_[round][1] = splat_long(args.key[1] + static_cast<uint32_t>(round) * kPhiloxKeyStep1);
    }
  }

  // Components first .. first + count - 1 and what fills the last two vectors; first is a multiple of 4.
  PDK_INLINE void write(float* to, int64_t first, int64_t count) const {
    Longs quads = splat_long(static_cast<uint64_t>(first / 4));
    for (int lane = 0; lane < kLongs; ++lane) quads[lane] += static_cast<uint64_t>(lane);
    const Longs multiplier0 = splat_long(kPhiloxMultiplier0), multiplier1 = splat_long(kPhiloxMultiplier1);
    for (int64_t at = 0; at < count; at += 2 * kLanes, quads += kLongs) {
      Longs c0 = first_[0], c1 = first_[1], c3 = product(quads, multiplier0), c2 = c3 >> 32 ^ first_[2];
      for (int round = 1; round < kPhiloxRounds; ++round) {
        const Longs product0 = product(c0, multiplier0), product1 = product(c2, multiplier1);
        c0 = product1 >> 32 ^ c1 ^ keys_[round][0];
        c1 = product1;
        c2 = product0 >> 32 ^ c3 ^ keys_[round][1];
        c3 = product0;
      }
      interleave((c0 & 0xffffffffu) | c1 << 32, (c2 & 0xffffffffu) | c3 << 32, reinterpret_cast<Longs*>(to + at));
    }
    // A loop of its own, or the two chains of operations would not overlap with those of the next numbers.
    for (int64_t at = 0; at < count; at += kLanes) {
      const Vec t = __builtin_convertvector(odd_number(reinterpret_cast<const Ints&>(to[at])), Vec) * 0x1p-24f;
      reinterpret_cast<Vec&>(to[at]) = Rounded::multiply(truncated_normal<Rounded>(t), std_);
    }
  }

 private:
  Longs first_[3], keys_[kPhiloxRounds][2];
  float std_;
};

// to = keep from + share number, or the number itself where nothing is kept
template <class T>
PDK_INLINE void draw_row(const InjectArgs& args, const Latents& latents, const T* from, NoiseMix mix, T* to) {
  alignas(64) float drawn[kStrip];
  for_strips(0, args.size, [&](int64_t first, int64_t end) {
    latents.write(drawn, first, end - first);
    for_vectors(first, end, [&](int64_t at, auto lanes) {
      const Vec number = load(drawn + (at - first), lanes);
      store(to + at, from == nullptr ? number : blend<Rounded>(mix.keep, load(from + at, lanes), mix.share, number), lanes);
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
  __builtin_memcpy(to, from, static_cast<uint64_t>(size) * sizeof(T));
}

template <class T>
void inject_row(const InjectArgs& args, int64_t b, int64_t i) {
  const int64_t size = args.size;
  T* state = args.out.template row<T>(b, i);
  T* embedding = state + size;
  if (i >= args.wave(b)) {
    __builtin_memset(static_cast<void*>(state), 0, static_cast<uint64_t>(2 * size) * sizeof(T));
    return;
  }
  const bool old = args.old(b, i);
  const int64_t origin = old ? i : args.copied ? args.newest(b) : -1;
  const T* from = origin < 0 ? nullptr : args.state.template row<const T>(b, args.before(b, origin));
  NoiseMix mix{1, 0};
  if (old && args.noise != 0) mix = noise_mix<Rounded>(args, args.recurrences.load(b, i));
  if (from != nullptr && mix.share == 0) {
    copy_row(size, from, state);
  } else {
    draw_row(args, Latents(args, args.cursor.load(b) + i, old ? args.steps.load(b) : 0), from, mix, state);
  }

  const T* fresh = args.embedding.template row<const T>(b, i);
  const float keep = 1.0f - args.momentum;
  if (old && args.previous.given()) {
    if (args.momentum == 0) return copy_row(size, fresh, embedding);
    return blend_row(size, keep, fresh, args.momentum, args.previous.template row<const T>(b, args.before(b, i)), embedding);
  }
  if (args.damp_new) return multiply_row(size, keep, fresh, embedding);
  copy_row(size, fresh, embedding);
}

template <class T>
void exit_row(const ExitArgs& args, int64_t b, int64_t i) {
  const int64_t size = args.size;
  T* state = args.state.template row<T>(b, i);
  if (!args.in_wave(b, i)) {
    __builtin_memset(static_cast<void*>(state), 0, static_cast<uint64_t>(size) * sizeof(T));
    return args.write(b, i, kInfinity);
  }
  const T* x = args.x.template row<const T>(b, i);
  const T* residual = args.residual.template row<const T>(b, i);
  float* row = reinterpret_cast<float*>(thread_scratch(size * static_cast<int64_t>(sizeof(float))));
  const Vec squares = add_rows(x, residual, row, size);
  const Vec of_state = scale_row(row, scale_of(squares, size, args.eps), static_cast<const T*>(args.weight), state, size);
  if (!args.known(b, i)) return args.write(b, i, kInfinity);

  const T* before = args.previous.template row<const T>(b, args.before(b, i));
  const T* first = args.older.given() ? args.older.template row<const T>(b, args.long_before(b, i)) : nullptr;
  Vec of_change{};
  for_vectors(0, size, [&](int64_t at, auto lanes) {
    const Vec now = load(row + at, lanes), then = load(before + at, lanes);
    const Vec change = first == nullptr ? now - then : now - 2.0f * then + load(first + at, lanes);
    of_change += change * change;
  });
  const float moved = __builtin_sqrtf(sum_of(of_change)), length = __builtin_sqrtf(sum_of(of_state));
  args.write(b, i, moved == 0 && length == 0 ? 0.0f : moved / length);
}

template <class T>
void inject(const InjectArgs& args) {
  for_rows(args.batch * args.rows, args.size, [&](int64_t item) { inject_row<T>(args, item / args.rows, item % args.rows); });
}

template <class T>
void exit(const ExitArgs& args) {
  for_rows(args.batch * args.rows, args.size, [&](int64_t item) { exit_row<T>(args, item / args.rows, item % args.rows); });
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
