// The norm of a row plus its residual, in float32, as at the end of a sublayer and of a recurrence.
#pragma once

#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {

// row = x, as floats. Returns the sum of squares per lane.
template <class T>
PDK_INLINE Vec widen_row(const T* x, float* row, int64_t width) {
  Vec squares{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec wide = load(x + at, lanes);
    store(row + at, wide, lanes);
    squares += wide * wide;
  });
  return squares;
}

// row = x + residual, as floats. Returns the sum of squares per lane.
template <class T>
PDK_INLINE Vec add_rows(const T* x, const T* residual, float* row, int64_t width) {
  Vec squares{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec sum = load(x + at, lanes) + load(residual + at, lanes);
    store(row + at, sum, lanes);
    squares += sum * sum;
  });
  return squares;
}

// 1 / sqrt(sum / width + eps), with a correctly rounded root and quotient.
PDK_INLINE float scale_of(Vec squares, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of(squares) / static_cast<float>(width) + eps);
}

// Rounds row to T, writes it to `to` and back to `row` as floats. Returns the sum of squares.
template <class T>
PDK_INLINE Vec round_row(float* row, T* to, int64_t width) {
  Vec squares{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec y = store(to + at, load(row + at, lanes), lanes);
    store(row + at, y, lanes);
    squares += y * y;
  });
  return squares;
}

// Writes row * scale, rounded to T, times the weight in T to `to`, and passes it as floats to visit(at, lanes, y).
// Returns the sum of squares.
template <class T, class Visit>
PDK_INLINE Vec scale_row(const float* row, float scale, const T* weight, T* to, int64_t width, const Visit& visit) {
  Vec squares{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec y = store(to + at, as<T>(load(row + at, lanes) * scale) * load(weight + at, lanes), lanes);
    visit(at, lanes, y);
    squares += y * y;
  });
  return squares;
}

}  // namespace pdkernels::cpu::PDK_ISA
