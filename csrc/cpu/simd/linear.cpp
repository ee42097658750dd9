// Products of few rows with a large matrix: their cost is reading the matrix, once for all rows.
//
// An element of the result is a sum over strips of the width, each added up in one vector of lanes in ascending order,
// and then over the lanes. Which rows and outputs are computed together, and on which thread, changes neither.
#include "fetching.h"
#include "kernels.h"
#include "linear_amx.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Rows that are multiplied at a time, and outputs for each number of rows: as many sums as there are registers for.
#ifdef __AVX512DQ__
constexpr int kRows = 8;
constexpr int kOutputs[kRows + 1] = {0, 8, 8, 6, 4, 4, 4, 3, 3};
#elif defined(PDK_NEON)
constexpr int kRows = 4;
constexpr int kOutputs[kRows + 1] = {0, 8, 8, 6, 6};
#else
constexpr int kRows = 4;
constexpr int kOutputs[kRows + 1] = {0, 8, 6, 4, 3};
#endif
// Outputs whose weights stay in the second-level cache while all rows are multiplied with them, a strip of the width at
// a time.
constexpr int64_t kBlock = 24, kLongest = 768;

// Weights of 16 bits are read as words of two, so that they become floats in half the instructions; x is stored in
// their order.
template <class W>
constexpr int64_t kStep = sizeof(W) == sizeof(float) ? kLanes : 2 * kLanes;

// Whether words of two bfloat16 are multiplied as they are.
#ifdef PDK_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

template <class W>
PDK_INLINE Vec lower(Words words) {
  return widened(words & 0xffffu, W{});
}
template <class W>
PDK_INLINE Vec upper(Words words) {
  return widened(words >> 16, W{});
}
template <>
PDK_INLINE Vec upper<Bfloat16>(Words words) {
  return reinterpret_cast<Vec>(words & 0xffff0000u);
}
#ifdef __AVX512DQ__
// The processor's own conversion, in half the instructions; the sums of a NaN are the same.
template <>
PDK_INLINE Vec lower<Half>(Words words) {
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words))));
}
template <>
PDK_INLINE Vec upper<Half>(Words words) {
  return lower<Half>(words >> 16);
}
#elif defined(PDK_NEON)
template <>
PDK_INLINE Vec lower<Half>(Words words) {
  return reinterpret_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(reinterpret_cast<uint32x4_t>(words)))));
}
template <>
PDK_INLINE Vec upper<Half>(Words words) {
  return lower<Half>(words >> 16);
}
#endif

// x as floats: whole steps in the order of the weights, then the rest of the row.
template <class T, class W>
void widen(const T* x, float* wide, int64_t width) {
  const int64_t whole = width / kStep<W> * kStep<W>;
  to_floats(x, wide, width);
  if constexpr (kStep<W> > kLanes) {
    for (int64_t at = 0; at < whole; at += kStep<W>) {
      float even[kLanes], odd[kLanes];
      for (int i = 0; i < kLanes; ++i) even[i] = wide[at + 2 * i], odd[i] = wide[at + 2 * i + 1];
      for (int i = 0; i < kLanes; ++i) wide[at + i] = even[i], wide[at + kLanes + i] = odd[i];
    }
  }
}

struct Sums {
  Vec at[kBlock][kRows];
};

template <int count>
struct Count {
  static constexpr int kCount = count;
};

// The words of [at, end), as many as fill a vector; zeros after the end.
PDK_INLINE Words pairs(const Bfloat16* from, int64_t at, int64_t end) {
  if (at + 2 * kLanes <= end) return *reinterpret_cast<const LooseWords*>(from + at);
  Words words{};
  __builtin_memcpy(&words, from + at, sizeof(Bfloat16) * (end - at));
  return words;
}

// sum[i] + a[2 i + 1] b[2 i + 1] + a[2 i] b[2 i], added in that order. The instruction treats subnormal numbers as
// zero. That of arm64 adds the products first, and rounds whatever is not exact to an odd last bit. The latter keeps
// sums unbiased, but each step may be off by a unit in the last place of float, where others are by half of one. A row
// has the same bits with any other rows all the same.
PDK_INLINE Vec add_pairs(Vec sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return reinterpret_cast<Vec>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<bfloat16x8_t>(a),
                                           reinterpret_cast<bfloat16x8_t>(b)));
#else
  const auto flushed = [](Vec x) { return x < 0x1p-126f && x > -0x1p-126f ? Vec{} : x; };
  const auto product = [&](Words x, Words y) {
    return flushed(reinterpret_cast<Vec>(x)) * flushed(reinterpret_cast<Vec>(y));
  };
  sum = flushed(flushed(sum) + product(a & 0xffff0000u, b & 0xffff0000u));
  return flushed(sum + product(a << 16, b << 16));
#endif
}

// The weights that are read next, which are fetched while these are multiplied.
struct Ahead {
  const char *at, *end;

  // As much as a step over so many outputs reads: a vector of each.
  template <int outputs>
  PDK_INLINE void fetch() {
    constexpr int bytes = outputs * static_cast<int>(sizeof(Vec));
    if (at >= end) return;
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += bytes;
  }
};

// The weights that a stream comes to next: the same place of later outputs. What one row reads is in order of
// addresses, and the processor fetches it by itself, up to the end of a page: so pages are begun. Otherwise lines are
// asked for, into the second-level cache, since on their way into the first one they would keep what is read there from
// coming.
template <bool in_order>
struct Later {
  const char* at;
  int64_t stride;

  // A vector of each of so many outputs, a line of memory once.
  template <int outputs>
  PDK_INLINE void fetch() {
    constexpr uintptr_t kLine = 64, kPage = 4096, kBytes = sizeof(Vec) < kLine ? sizeof(Vec) : kLine;
    const auto place = reinterpret_cast<uintptr_t>(at);
    if constexpr (in_order) {
      if (place % kPage < kBytes) {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + kLine, 0, 2);
      }
    } else if (kBytes == kLine || place % kLine < kBytes) {
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) __builtin_prefetch(at + o * stride, 0, 2);
    }
    at += sizeof(Vec);
  }
};

// Adds the products of `rows` rows and `outputs` outputs over [begin, end) of the width, which are of one strip.
template <int rows, int outputs, class Ahead>
PDK_INLINE void multiply_strip(const Bfloat16* x, int64_t x_stride, const Bfloat16* weight, int64_t weight_stride,
                               int64_t begin, int64_t end, Vec (*sums)[kRows], Ahead& ahead) {
  Vec total[outputs][rows] = {};
  const auto add = [&](int64_t at, int64_t to) {
    Words w[outputs];
#pragma GCC unroll 8
    for (int o = 0; o < outputs; ++o) w[o] = pairs(weight + o * weight_stride, at, to);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Words own = pairs(x + r * x_stride, at, to);
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) total[o][r] = add_pairs(total[o][r], own, w[o]);
    }
  };
  int64_t at = begin;
  for (; at + 2 * kLanes <= end; at += 2 * kLanes) {
    ahead.template fetch<outputs>();
    add(at, at + 2 * kLanes);
  }
  if (at < end) add(at, end);
  for (int o = 0; o < outputs; ++o) {
    for (int r = 0; r < rows; ++r) sums[o][r] += total[o][r];
  }
}

template <int rows, int outputs, class W, class Ahead>
PDK_INLINE void multiply_strip(const float* x, int64_t x_stride, const W* weight, int64_t weight_stride, int64_t begin,
                               int64_t end, Vec (*sums)[kRows], Ahead& ahead) {
  Vec total[outputs][rows] = {};
  const auto add = [&](const Vec(&w)[outputs], int64_t at) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const Vec own = load(x + r * x_stride + at, Whole{});
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) total[o][r] += own * w[o];
    }
  };
  int64_t at = begin;
  for (; at + kStep<W> <= end; at += kStep<W>) {
    ahead.template fetch<outputs>();
    Vec w[outputs];
    if constexpr (kStep<W> == kLanes) {
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) w[o] = load(weight + o * weight_stride + at, Whole{});
      add(w, at);
    } else {
      Words words[outputs];
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) {
        words[o] = *reinterpret_cast<const LooseWords*>(weight + o * weight_stride + at);
        w[o] = lower<W>(words[o]);
      }
      add(w, at);
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) w[o] = upper<W>(words[o]);
      add(w, at + kLanes);
    }
  }
  for (; at < end; at += kLanes) {
    Vec w[outputs];
    for (int o = 0; o < outputs; ++o) w[o] = load(weight + o * weight_stride + at, Part{smaller(kLanes, end - at)});
    add(w, at);
  }
  for (int o = 0; o < outputs; ++o) {
    for (int r = 0; r < rows; ++r) sums[o][r] += total[o][r];
  }
}

// The same for any number of outputs.
template <int rows, class X, class W>
void multiply_block(const X* x, int64_t x_stride, const W* weight, int64_t weight_stride, int64_t outputs,
                    int64_t begin, int64_t end, Vec (*sums)[kRows], Ahead& ahead) {
  constexpr int group = kOutputs[rows];
  int64_t o = 0;
  for (; o + group <= outputs; o += group) {
    multiply_strip<rows, group>(x, x_stride, weight + o * weight_stride, weight_stride, begin, end, sums + o, ahead);
  }
  for (; o < outputs; ++o) {
    multiply_strip<rows, 1>(x, x_stride, weight + o * weight_stride, weight_stride, begin, end, sums + o, ahead);
  }
}

template <int rows = kRows, class X, class W>
void multiply_rows(int64_t count, const X* x, int64_t x_stride, const W* weight, int64_t weight_stride, int64_t outputs,
                   int64_t begin, int64_t end, Vec (*sums)[kRows], Ahead& ahead) {
  if constexpr (rows > 1) {
    if (count < rows) {
      return multiply_rows<rows - 1>(count, x, x_stride, weight, weight_stride, outputs, begin, end, sums, ahead);
    }
  }
  multiply_block<rows>(x, x_stride, weight, weight_stride, outputs, begin, end, sums, ahead);
}

// x[i] becomes the sum of x[i] and x[i + kDistance] over pairs of lanes that far apart, the first one's in the lanes
// without kDistance and the second one's in those with it, for i below kDistance; and so on down to a distance of 1.
template <int kDistance>
PDK_INLINE void add_lanes(Ints (&x)[kLanes]) {
  if constexpr (kDistance > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kDistance; ++i) {
      exchange<kDistance>(x[i], x[i + kDistance]);
      x[i] = reinterpret_cast<Ints>(reinterpret_cast<Vec>(x[i]) + reinterpret_cast<Vec>(x[i + kDistance]));
    }
    add_lanes<kDistance / 2>(x);
  }
}

// The sums of the lanes of kLanes outputs, or the first `count` of them, one in each lane: each adds its halves, then
// their halves.
template <class Lanes>
PDK_INLINE Vec sums_of(const Vec (*sums)[kRows], int64_t row, Lanes lanes) {
  Ints x[kLanes];
  if constexpr (__is_same(Lanes, Whole)) {
#pragma GCC unroll 16
    for (int o = 0; o < kLanes; ++o) x[o] = reinterpret_cast<const Ints&>(sums[o][row]);
  } else {
    for (int o = 0; o < kLanes; ++o) x[o] = o < lanes.count ? reinterpret_cast<const Ints&>(sums[o][row]) : Ints{};
  }
  add_lanes<kLanes / 2>(x);
  return reinterpret_cast<Vec>(x[0]);
}

template <class T>
void finish(const LinearArgs& args, int64_t row, int64_t count, int64_t first, int64_t outputs, Vec (*sums)[kRows]) {
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t r = 0; r < count; ++r) {
    T* out = args.out.row<T>(row + r);
    for_vectors(first, first + outputs, [&](int64_t at, auto lanes) {
      const Vec sum = sums_of(sums + (at - first), r, lanes);
      store(out + at, bias == nullptr ? sum : sum + load(bias + at, lanes), lanes);
    });
  }
}

// All rows with one output after the other, or `group` of them, over `reach` of the width before the next `reach`.
template <int rows, int group, class T, class X, class W>
void stream_outputs(const LinearArgs& args, const X* x, int64_t x_stride, const W* weight, int64_t depth,
                    int64_t reach) {
  constexpr int64_t kAhead = 8 * 1024;  // bytes: the time that memory takes to answer, at the speed of a plain read
  const int64_t blocks = (args.outputs + kBlock - 1) / kBlock, stride = args.weight_stride;
  const int64_t bytes = group * smaller(reach, args.width) * static_cast<int64_t>(sizeof(W));
  const int64_t further = group * ((kAhead + bytes - 1) / (bytes > 0 ? bytes : 1));
  for_ranges(blocks, kBlock * args.width, [&](int64_t from, int64_t to) {
    auto& sums = *reinterpret_cast<Sums*>(thread_scratch(sizeof(Sums)));
    for (int64_t block = from; block < to; ++block) {
      const int64_t first = block * kBlock, outputs = smaller(kBlock, args.outputs - first);
      const W* own = weight + first * stride;
      for (int64_t o = 0; o < outputs; ++o) {
        for (int r = 0; r < rows; ++r) sums.at[o][r] = Vec{};
      }
      for (int64_t begin = 0, end; begin < args.width; begin = end) {
        end = smaller(begin + reach, args.width);
        const auto add = [&](int64_t o, auto count) {
          const bool turns = o + further >= outputs && end < args.width;
          const W* next = turns ? own + (o + further - outputs) * stride + end : own + (o + further) * stride + begin;
          Later<kFetchesInOrder && rows == 1 && group == 1> later{reinterpret_cast<const char*>(next),
                                                                  stride * static_cast<int64_t>(sizeof(W))};
          for (int64_t at = begin; at < end; at += depth) {
            multiply_strip<rows, count.kCount>(x, x_stride, own + o * stride, stride, at, smaller(at + depth, end),
                                               sums.at + o, later);
          }
        };
        int64_t o = 0;
        for (; o + group <= outputs; o += group) add(o, Count<group>{});
        for (; o < outputs; ++o) add(o, Count<1>{});
      }
      finish<T>(args, 0, rows, first, outputs, sums.at);
    }
  });
}

// Up to how many rows outputs are streamed, at most a panel. With more, arithmetic takes as long as memory, and blocks
// of more outputs need fewer instructions.
template <class X, class W>
constexpr int kStreamed = 3;
template <>
inline constexpr int kStreamed<Bfloat16, Bfloat16> = kRows;
template <>
inline constexpr int kStreamed<float, float> = kRows < 6 ? kRows : 6;
// Bytes of weights that the second-level cache may hold. Narrow vectors add up a single output slower than it is read
// from there.
#ifdef __AVX512DQ__
constexpr int64_t kInCache = 0;
#else
constexpr int64_t kInCache = int64_t{1} << 20;
template <>
inline constexpr int kStreamed<float, Half> = 0;  // arithmetic takes longer for one row already
#endif

// They cost little more than reading the weights. Outputs are read one after the other, as they lie in memory, if few
// rows of x stay in the first-level cache meanwhile; otherwise a strip of several at a time.
template <int rows, class T, class X, class W>
void stream(const LinearArgs& args, const X* x, int64_t x_stride, const W* weight, int64_t depth) {
  if constexpr (rows > 1) {
    if (args.rows < rows) return stream<rows - 1, T>(args, x, x_stride, weight, depth);
  }
  if constexpr (rows <= 4) {
    constexpr int64_t kNear = 12 * 1024;
    if (rows * args.width * static_cast<int64_t>(sizeof(X)) <= kNear) {
      return stream_outputs<rows, 1, T>(args, x, x_stride, weight, depth, args.width);
    }
  }
  stream_outputs<rows, 3, T>(args, x, x_stride, weight, depth, depth);
}

template <class T, class X, class W>
void multiply(const LinearArgs& args, const X* x, int64_t x_stride, const W* weight) {
  const int64_t panels = (args.rows + kRows - 1) / kRows, blocks = (args.outputs + kBlock - 1) / kBlock;
  // Strips of one length, in whole steps, short enough for sums within the error budget.
  const int64_t strips = args.width > kLongest ? (args.width + kLongest - 1) / kLongest : 1;
  const int64_t depth = rounded_up((args.width + strips - 1) / strips, 2 * kLanes);
  if constexpr (constexpr int streamed = kStreamed<X, W>; streamed > 0) {
    const int64_t bytes = args.outputs * args.width * static_cast<int64_t>(sizeof(W));
    if (args.rows <= streamed && bytes >= kInCache) return stream<streamed, T>(args, x, x_stride, weight, depth);
  }
  // Panels whose rows and sums stay in the second-level cache while all blocks are multiplied with them.
  constexpr int64_t kPanels = 16;
  for_ranges(blocks, kBlock * args.width * smaller(panels, 4), [&](int64_t from, int64_t to) {
    auto* sums = reinterpret_cast<Sums*>(thread_scratch(smaller(panels, kPanels) * static_cast<int64_t>(sizeof(Sums))));
    for (int64_t group = 0; group < panels; group += kPanels) {
      const int64_t last = smaller(group + kPanels, panels);
      for (int64_t block = from; block < to; ++block) {
        const int64_t first = block * kBlock, outputs = smaller(kBlock, args.outputs - first);
        const W* own = weight + first * args.weight_stride;
        const char* next = reinterpret_cast<const char*>(own + kBlock * args.weight_stride);
        const int64_t more = smaller(kBlock, args.outputs - first - kBlock) * args.weight_stride;
        const int64_t share = more > 0 ? more * static_cast<int64_t>(sizeof(W)) / (strips * (last - group)) : 0;
        Ahead ahead{next, next};
        const auto add = [&](int64_t p, int64_t begin, Sums& to) {
          ahead.end += share;
          multiply_rows(smaller(kRows, args.rows - p * kRows), x + p * kRows * x_stride, x_stride, own,
                        args.weight_stride, outputs, begin, smaller(begin + depth, args.width), to.at, ahead);
        };
        const auto end = [&](int64_t p, Sums& of) {
          finish<T>(args, p * kRows, smaller(kRows, args.rows - p * kRows), first, outputs, of.at);
        };
        if (strips == 1) {
          for (int64_t p = group; p < last; ++p) {
            sums[0] = Sums{};
            add(p, 0, sums[0]);
            end(p, sums[0]);
          }
          continue;
        }
        for (int64_t p = group; p < last; ++p) sums[p - group] = Sums{};
        for (int64_t begin = 0; begin < args.width; begin += depth) {
          for (int64_t p = group; p < last; ++p) add(p, begin, sums[p - group]);
        }
        for (int64_t p = group; p < last; ++p) end(p, sums[p - group]);
      }
    }
  });
}

// Whether rows of x are multiplied as they are, in 16 bits.
template <class T, class W>
constexpr bool kAsStored = kPairs && __is_same(T, Bfloat16) && __is_same(W, Bfloat16);

// x in `args.wide`, if the products read it there.
template <class T, class W>
void widen_rows(const LinearArgs& args) {
  if (kAsStored<T, W> || args.wide == nullptr) return;
  const int64_t stride = args.padded_width();
  for_rows(args.rows, args.width, [&](int64_t r) {
    float* to = args.wide + r * stride;
    widen<T, W>(args.x.row<const T>(r), to, args.width);
    for (int64_t i = args.width; i < stride; ++i) to[i] = 0;
  });
}

template <class T, class W>
void multiply_widened(const LinearArgs& args) {
  const W* weight = static_cast<const W*>(args.weight);
#ifdef PDK_AMX
  if constexpr (kAsStored<T, W>) return AmxLinear(args).run();
#endif
  if constexpr (kAsStored<T, W>) {
    multiply<T>(args, args.x.row<const T>(0), args.x.row_stride, weight);
  } else if (args.wide == nullptr) {
    multiply<T>(args, args.x.row<const float>(0), args.x.row_stride, weight);
  } else {
    multiply<T>(args, args.wide, args.padded_width(), weight);
  }
}

// The product of a group's rows with `outputs` outputs of its matrix, from `first` on.
template <class T, class W>
LinearArgs product_of(const GroupedLinearArgs& args, const RowGroup& group, int64_t first, int64_t outputs) {
  LinearArgs own = args.all;
  own.rows = group.count, own.outputs = outputs;
  own.x.data = args.all.x.row<T>(group.first);
  own.out.data = args.all.out.row<T>(group.first) + first;
  if (own.wide != nullptr) own.wide += group.first * own.padded_width();
  own.weight = static_cast<const W*>(own.weight) + group.matrix * args.matrix_stride + first * args.all.weight_stride;
  if (own.bias != nullptr) own.bias = static_cast<const T*>(own.bias) + group.matrix * args.all.outputs + first;
  return own;
}

template <class T, class W>
void product(const LinearArgs& args) {
  widen_rows<T, W>(args);
  multiply_widened<T, W>(args);
}

// Groups one after the other, several at a time on different threads; fewer groups than threads are divided.
template <class T, class W>
void product(const GroupedLinearArgs& args) {
  constexpr int64_t kShare = 8 * kBlock;  // outputs, at least
  const int64_t outputs = args.all.outputs, threads = max_threads(), used = args.groups.count;
  const int64_t wanted = used < 4 * threads ? (4 * threads + used - 1) / used : 1;
  const int64_t share = larger(rounded_up((outputs + wanted - 1) / wanted, kShare), kShare);
  const int64_t shares = threads > 1 ? (outputs + share - 1) / share : 1;
  widen_rows<T, W>(args.all);
  for_rows(used * shares, outputs / shares * args.all.width, [&](int64_t item) {
    const int64_t first = item % shares * share, count = shares > 1 ? smaller(share, outputs - first) : outputs;
    multiply_widened<T, W>(product_of<T, W>(args, args.groups.used[item / shares], first, count));
  });
}

template <class T, class Args>
void product_with(const Args& args, Element weight) {
  switch (weight) {
    case Element::kFloat: return product<T, float>(args);
    case Element::kHalf: return product<T, Half>(args);
    case Element::kBfloat16: return product<T, Bfloat16>(args);
  }
}
template <class Args>
void product_of_elements(const Args& args, const LinearArgs& all) {
  switch (all.element) {
    case Element::kFloat: return product_with<float>(args, all.weight_element);
    case Element::kHalf: return product_with<Half>(args, all.weight_element);
    case Element::kBfloat16: return product_with<Bfloat16>(args, all.weight_element);
  }
}

#ifdef PDK_BELOW
bool both_bfloat16(const LinearArgs& all) {
  return all.element == Element::kBfloat16 && all.weight_element == Element::kBfloat16;
}
#endif

}  // namespace

#ifdef PDK_BELOW
void linear(const LinearArgs& args) {
  both_bfloat16(args) ? product<Bfloat16, Bfloat16>(args) : PDK_BELOW::linear(args);
}
void grouped_linear(const GroupedLinearArgs& args) {
  both_bfloat16(args.all) ? product<Bfloat16, Bfloat16>(args) : PDK_BELOW::grouped_linear(args);
}
#else
void linear(const LinearArgs& args) { product_of_elements(args, args); }
void grouped_linear(const GroupedLinearArgs& args) { product_of_elements(args, args.all); }
#endif

}  // namespace pdkernels::cpu::PDK_ISA
