// Rows of K and V in a cache's form: codes of 8 bits, see kv_quantize of reference/kv_cache.py, whose every bit these
// are, or numbers of 16.
#include "ops/kv_cache.h"

#include "kernels.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

constexpr float kLargestFloat = 0x1.fffffep127f, kSmallestNormal = 0x1p-126f;

// amax / 127; 0 where that is subnormal, and NaN for a row that has a NaN or an infinity.
template <class T>
float scale_of_numbers(const T* x, int64_t n) {
  Vec top{};
  Ints finite = splat(-1);
  for_vectors(0, n, [&](int64_t at, auto lanes) {
    const Vec number = load(x + at, lanes),
              magnitude = reinterpret_cast<Vec>(reinterpret_cast<Ints>(number) & 0x7fffffff);
    finite &= magnitude <= splat(kLargestFloat);
    top = larger(magnitude, top);
  });
  float amax = 0;
  bool all = true;
  for (int i = 0; i < kLanes; ++i) amax = top[i] > amax ? top[i] : amax, all = all && finite[i] != 0;
  const float scale = amax / kLargestCode;
  return !all ? __builtin_nanf("") : scale < kSmallestNormal ? 0.0f : scale;
}

// x / scale, rounded to nearest even. The sum leaves the whole number in its low bits.
PDK_INLINE Ints codes_of(Vec x, float scale) {
  constexpr float kRounder = 12582912.0f;
  return reinterpret_cast<Ints>(x / splat(scale) + kRounder) - 0x4b400000;
}

template <class T>
void quantize_row(const T* x, int64_t n, int8_t* to) {
  const float scale = scale_of_numbers(x, n);
  __builtin_memcpy(to + n, &scale, sizeof(scale));
  if (!(scale > 0)) {
    __builtin_memset(to, 0, n);
    return;
  }
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    *reinterpret_cast<LooseBytes*>(to + at) =
        __builtin_convertvector(codes_of(load(x + at, Whole{}), scale), LooseBytes);
  }
  if (at < n) {
    const Ints codes = codes_of(load(x + at, Part{n - at}), scale);
    for (int64_t i = 0; at + i < n; ++i) to[at + i] = static_cast<int8_t>(codes[i]);
  }
}

// As torch rounds them: to nearest even, and to infinity beyond the largest.
template <class T>
void halve_row(const T* x, int64_t n, Half* to) {
  for_vectors(0, n, [&](int64_t at, auto lanes) { store(to + at, load(x + at, lanes), lanes); });
}

template <class T>
void quantize_of(const QuantizeArgs& args) {
  for_rows(args.count(), args.head_dim, [&](int64_t item) {
    const int64_t head = item % args.sizes[2], row = item / args.sizes[2];
    const int64_t token = row % args.sizes[1], b = row / args.sizes[1];
    const T* x = reinterpret_cast<const T*>(QuantizeArgs::at(args.x, args.x_strides, b, token, head));
    char* to = QuantizeArgs::at(args.rows, args.row_strides, b, token, head);
    if (args.form == CacheRows::kHalves) return halve_row(x, args.head_dim, reinterpret_cast<Half*>(to));
    quantize_row(x, args.head_dim, reinterpret_cast<int8_t*>(to));
  });
}

}  // namespace

void kv_quantize(const QuantizeArgs& args) { PDK_BY_ELEMENT(quantize_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
