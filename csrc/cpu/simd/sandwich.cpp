// What lies between the matrix products of a sandwich block. Rows are independent, so threads share them freely; a single row is
// too short to be cut.
#include "kernels.h"
#include "rms_norm.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class T>
void add_rms_norm_of(const AddRmsNormArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t i) {
    float* row = reinterpret_cast<float*>(thread_scratch(args.width * static_cast<int64_t>(sizeof(float))));
    const auto norm = [&](Vec squares, const void* weight, T* to) {
      return scale_row(row, scale_of(squares, args.width, args.eps), static_cast<const T*>(weight), to, args.width);
    };
    const T *x = args.x.row<const T>(i), *weight = static_cast<const T*>(args.weight);
    T* y = args.y.row<T>(i);
    Vec squares = args.residual.given() ? add_rows(x, args.residual.row<const T>(i), row, args.width) : widen_row(x, row, args.width);
    squares = weight != nullptr ? norm(squares, weight, y) : round_row(row, y, args.width);
    if (args.next_weight != nullptr) norm(squares, args.next_weight, args.next.row<T>(i));
  });
}

// x / (1 + e^-x) with an exponent that never grows.
template <class T>
PDK_INLINE Vec silu(Vec x) {
  const Vec e = exponential<sizeof(T) == 4>(choose(x > 0, -x, x));
  return choose(x > 0, x, x * e) / (1.0f + e);
}

template <class T>
void silu_gate_of(const SiluGateArgs& args) {
  // A row is cut, so that a single one keeps more than one thread busy: its parts have nothing in common.
  constexpr int64_t kPart = 4096;
  const int64_t parts = (args.width + kPart - 1) / kPart;
  for_rows(args.rows * parts, smaller(kPart, args.width), [&](int64_t item) {
    const int64_t row = item / parts, begin = item % parts * kPart;
    const T* x = args.x.row<const T>(row);
    T* out = args.out.row<T>(row);
    for_vectors(begin, smaller(begin + kPart, args.width), [&](int64_t at, auto lanes) {
      store(out + at, silu<T>(load(x + at, lanes)) * load(x + args.width + at, lanes), lanes);
    });
  });
}

// Pairs (first[i], second[i]) with their tables, i apart by kStep: neighbours (2), or halves (1). All in floats.
template <int kStep>
PDK_INLINE void turn(float* first, float* second, const float* cos, const float* sin, int64_t offset, int64_t pairs) {
  for (int64_t i = 0; i < pairs * kStep; i += kStep) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] + b * sin[i];
    second[i] = b * cos[i + offset] + a * sin[i + offset];
  }
}

template <class T>
void rotate_append_of(const RotateAppendArgs& args) {
  const int64_t dim = args.head_dim, heads = args.all_heads(), bytes = dim * static_cast<int64_t>(sizeof(T));
  for_rows(args.batch * args.rows * heads, dim, [&](int64_t item) {
    const int64_t head = item % heads, i = item / heads % args.rows, b = item / heads / args.rows;
    const int64_t length = args.lengths.load(b), slot = args.slot(b, i);
    if (slot < 0) return;
    T* x = static_cast<T*>(args.qkv) + args.head_offset(b, i, head);
    if (head < args.turned_heads()) {
      float* wide = reinterpret_cast<float*>(thread_scratch(dim * static_cast<int64_t>(sizeof(float))));
      to_floats(x, wide, dim);
      if (args.bias != nullptr) {
        const T* bias = static_cast<const T*>(args.bias) + head * dim;
        for (int64_t d = 0; d < dim; ++d) wide[d] += to_float(bias[d]);
      }
      const int64_t at = args.table_row(length, slot);
      if (args.interleaved) {
        turn<2>(wide, wide + 1, args.cos + at, args.sin + at, 1, dim / 2);
      } else {
        turn<1>(wide, wide + dim / 2, args.cos + at, args.sin + at, dim / 2, dim / 2);
      }
      from_floats(wide, x, dim);
    }
    if (head >= args.heads && i < args.count(b)) __builtin_memcpy(args.target(b, length + slot, head), x, bytes);
  });
}

}  // namespace

void add_rms_norm(const AddRmsNormArgs& args) { PDK_BY_ELEMENT(add_rms_norm_of, args) }
void silu_gate(const SiluGateArgs& args) { PDK_BY_ELEMENT(silu_gate_of, args) }
void rotate_append(const RotateAppendArgs& args) { PDK_BY_ELEMENT(rotate_append_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
