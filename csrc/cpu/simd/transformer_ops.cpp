// The ops between a transformer's matrix products. Rows are independent work items; a row is too short to be split.
#include "kernels.h"
#include "ops/low_rank.h"
#include "ops/scaled_rows.h"
#include "ops/transformer_ops_backward.h"
#include "ops/weighted_rows.h"
#include "rms_norm.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class T>
void add_rms_norm_of(const AddRmsNormArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t i) {
    float* row = reinterpret_cast<float*>(thread_scratch(args.width * static_cast<int64_t>(sizeof(float))));
    const auto norm = [&](Vec squares, const void* weight, T* to) {
      return scale_row(row, scale_of(squares, args.width, args.eps), static_cast<const T*>(weight), to, args.width,
                       [&](int64_t at, auto lanes, Vec scaled) { store(row + at, scaled, lanes); });
    };
    const T *x = args.x.row<const T>(i), *weight = static_cast<const T*>(args.weight);
    T* y = args.y.row<T>(i);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (args.residual.given() && weight == nullptr && args.next_weight != nullptr) {  // the sum is y
        const float scale = scale_of(add_rows(x, args.residual.row<const T>(i), y, args.width), args.width, args.eps);
        scale_row(y, scale, static_cast<const T*>(args.next_weight), args.next.row<T>(i), args.width,
                  [](int64_t, auto, Vec) {});
        return;
      }
    }
    Vec squares = args.residual.given() ? add_rows(x, args.residual.row<const T>(i), row, args.width)
                                        : widen_row(x, row, args.width);
    squares = weight != nullptr ? norm(squares, weight, y) : round_row(row, y, args.width);
    if (args.next_weight != nullptr) norm(squares, args.next_weight, args.next.row<T>(i));
  });
}

// Every product and sum is rounded on its own.
template <class T>
void weighted_rows_of(const WeightedRowsArgs& args) {
  for_rows(args.rows, args.count * args.width, [&](int64_t i) {
    const int64_t* slots = args.slots + i * args.count;
    const float* weights = args.weights + i * args.count;
    T* out = args.out.row<T>(i);
    for_vectors(0, args.width, [&](int64_t at, auto lanes) {
      const auto term = [&](int64_t n) {
        const Vec weight = splat(weights[n]);
        return rounded(load(args.x.row<const T>(slots[n]) + at, lanes) *
                       (args.rounds_weights ? as<T>(weight) : weight));
      };
      Vec total = term(0);
      for (int64_t n = 1; n < args.count; ++n) total = total + term(n);
      if (args.plus.given()) total = as<T>(total) + load(args.plus.row<const T>(i) + at, lanes);
      store(out + at, total, lanes);
    });
  });
}

template <class T>
void scaled_rows_of(const ScaledRowsArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t i) {
    T* x = args.x.row<T>(i);
    const Vec factor = args.rounds_factor ? as<T>(splat(args.factor)) : splat(args.factor);
    for_vectors(0, args.width, [&](int64_t at, auto lanes) { store(x + at, load(x + at, lanes) * factor, lanes); });
  });
}

template <class T, class W>
void low_rank_with(const LowRankArgs& args) {
  const W* b = static_cast<const W*>(args.b);
  for_rows(args.rows, args.rank * args.outputs, [&](int64_t i) {
    const T* x = args.x.row<const T>(i);
    T* out = args.out.row<T>(args.numbers[i]);
    for_vectors(0, args.outputs, [&](int64_t at, auto lanes) {
      Vec sum{};
      for (int64_t k = 0; k < args.rank; ++k) sum += to_float(x[k]) * load(b + k * args.outputs + at, lanes);
      store(out + at, load(out + at, lanes) + as<T>(sum), lanes);
    });
  });
}

// A matrix of floats has 16 bits in place of 32, or the type of the rows.
template <class T>
void low_rank_of(const LowRankArgs& args) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (args.weight_element == Element::kHalf) return low_rank_with<T, Half>(args);
    if (args.weight_element == Element::kBfloat16) return low_rank_with<T, Bfloat16>(args);
  }
  low_rank_with<T, T>(args);
}

// One row of the backward pass. `total`, `y` and `d` are scratch rows of floats for x + residual, y and its gradient.
// The forward's roundings are differentiated as the identity. `fresh`: the row is the first of its part.
template <class T>
void add_rms_norm_backward_row(const AddRmsNormBackwardArgs& args, int64_t i, bool fresh, float* part, float* part_next,
                               float* total, float* y, float* d) {
  const int64_t width = args.width;
  const T *x = args.x.row<const T>(i), *weight = static_cast<const T*>(args.weight),
          *next_weight = static_cast<const T*>(args.next_weight);
  const Vec squares =
      args.residual.given() ? add_rows(x, args.residual.row<const T>(i), total, width) : widen_row(x, total, width);
  const float scale = weight == nullptr ? 1.0f : scale_of(squares, width, args.eps);
  const auto gradient = [&](int64_t at, auto lanes) {
    return args.grad.given() ? load(args.grad.row<const T>(i) + at, lanes) : Vec{};
  };
  const auto add = [&](float* to, int64_t at, auto lanes, Vec x) {
    store(to + at, fresh ? x : load(to + at, lanes) + x, lanes);
  };
  // d = the gradient of y, direct and through the second norm. For w h with h = s x it is s (g - h mean(g h)), where g
  // is w times the gradient of the norm.
  float next_scale = 0, next_mean = 0;
  if (args.grad_next.given()) {
    const T* grad_next = args.grad_next.row<const T>(i);
    Vec next_squares{}, dots{};
    for_vectors(0, width, [&](int64_t at, auto lanes) {
      Vec value = load(total + at, lanes);
      if (weight != nullptr) value = as<T>(value * scale) * load(weight + at, lanes);
      value = as<T>(value);
      store(y + at, value, lanes);
      next_squares += value * value;
    });
    next_scale = scale_of(next_squares, width, args.eps);
    for_vectors(0, width, [&](int64_t at, auto lanes) {
      const Vec h = load(y + at, lanes) * next_scale, dn = load(grad_next + at, lanes);
      add(part_next, at, lanes, dn * as<T>(h));
      dots += dn * load(next_weight + at, lanes) * h;
    });
    next_mean = sum_of(dots) / static_cast<float>(width);
  }
  const auto through = [&](int64_t at, auto lanes) {
    if (!args.grad_next.given()) return gradient(at, lanes);
    const Vec g = load(args.grad_next.row<const T>(i) + at, lanes) * load(next_weight + at, lanes);
    return gradient(at, lanes) + next_scale * (g - load(y + at, lanes) * next_scale * next_mean);
  };
  T* dx = args.dx.row<T>(i);
  if (weight == nullptr) {
    for_vectors(0, width, [&](int64_t at, auto lanes) { store(dx + at, through(at, lanes), lanes); });
    return;
  }
  Vec dots{};
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    const Vec h = load(total + at, lanes) * scale, dy = through(at, lanes), g = dy * load(weight + at, lanes);
    add(part, at, lanes, dy * as<T>(h));
    store(d + at, g, lanes);
    dots += g * h;
  });
  const float mean = sum_of(dots) / static_cast<float>(width);
  for_vectors(0, width, [&](int64_t at, auto lanes) {
    store(dx + at, scale * (load(d + at, lanes) - load(total + at, lanes) * scale * mean), lanes);
  });
}

// Sums the columns of `parts`.
template <class T>
void sum_parts(const float* parts, int64_t count, int64_t width, T* to) {
  constexpr int64_t kColumns = 64;
  for_rows((width + kColumns - 1) / kColumns, count * kColumns, [&](int64_t item) {
    const int64_t begin = item * kColumns, columns = smaller(kColumns, width - begin);
    double sums[kColumns] = {};
    for (int64_t part = 0; part < count; ++part) {
      for (int64_t j = 0; j < columns; ++j) sums[j] += static_cast<double>(parts[part * width + begin + j]);
    }
    for (int64_t j = 0; j < columns; ++j) to[begin + j] = from_float<T>(static_cast<float>(sums[j]));
  });
}

template <class T>
void add_rms_norm_backward_of(const AddRmsNormBackwardArgs& args) {
  const int64_t rows = rows_of_part(args.rows), parts = norm_parts(args.rows), width = args.width;
  for_rows(parts, rows * width, [&](int64_t item) {
    const int64_t stride = rounded_up(width, 16), end = smaller(args.rows, (item + 1) * rows);
    float* scratch = reinterpret_cast<float*>(thread_scratch(3 * stride * static_cast<int64_t>(sizeof(float))));
    for (int64_t i = item * rows; i < end; ++i) {
      add_rms_norm_backward_row<T>(args, i, i == item * rows, args.parts + item * width, args.parts_next + item * width,
                                   scratch, scratch + stride, scratch + 2 * stride);
    }
  });
  if (args.dweight != nullptr) sum_parts(args.parts, parts, width, static_cast<T*>(args.dweight));
  if (args.dnext != nullptr) sum_parts(args.parts_next, parts, width, static_cast<T*>(args.dnext));
}

// x times the sigmoid of z, which has the sign of x, with an exponent that never grows.
template <class T>
PDK_INLINE Vec opened(Vec x, Vec z) {
  const Vec e = exponential<sizeof(T) == 4>(choose(x > 0, -z, z));
  return choose(x > 0, x, x * e) / (1.0f + e);
}

template <class T, class Activate>
void gate_rows(const GateArgs& args, const Activate& activate) {
  // Rows are split into independent parts, so that a single row keeps several threads busy.
  constexpr int64_t kPart = 4096;
  const int64_t parts = (args.width + kPart - 1) / kPart;
  for_rows(args.rows * parts, smaller(kPart, args.width), [&](int64_t item) {
    const int64_t row = item / parts, begin = item % parts * kPart;
    const T* x = args.x.row<const T>(row);
    T* out = args.out.row<T>(row);
    for_vectors(begin, smaller(begin + kPart, args.width), [&](int64_t at, auto lanes) {
      store(out + at, activate(load(x + at, lanes)) * load(x + args.width + at, lanes), lanes);
    });
  });
}

template <class T>
void silu_and_mul_of(const SiluAndMulArgs& args) {
  gate_rows<T>(args, [](Vec x) __attribute__((always_inline)) { return opened<T>(x, x); });
}

template <class T>
void gelu_and_mul_of(const GeluAndMulArgs& args) {
  gate_rows<T>(args,
               [](Vec x) __attribute__((always_inline)) { return opened<T>(x, x * (x * x * kGeluCube + kGeluSlope)); });
}

template <class T>
void silu_and_mul_backward_of(const SiluAndMulBackwardArgs& args) {
  constexpr int64_t kPart = 4096;
  const int64_t parts = (args.width + kPart - 1) / kPart;
  for_rows(args.rows * parts, smaller(kPart, args.width), [&](int64_t item) {
    const int64_t row = item / parts, begin = item % parts * kPart;
    const T *x = args.x.row<const T>(row), *grad = args.grad.row<const T>(row);
    T* dx = args.dx.row<T>(row);
    for_vectors(begin, smaller(begin + kPart, args.width), [&](int64_t at, auto lanes) {
      const Vec gate = load(x + at, lanes), up = load(x + args.width + at, lanes), d = load(grad + at, lanes);
      const Vec e = exponential<sizeof(T) == 4>(choose(gate > 0, -gate, gate)), one = splat(1.0f);
      // The sigmoid and 1 minus the sigmoid, both without cancellation.
      const Vec open = choose(gate > 0, one, e) / (1.0f + e), closed = choose(gate > 0, e, one) / (1.0f + e);
      store(dx + at, d * up * open * (1.0f + gate * closed), lanes);
      store(dx + args.width + at, d * (gate * open), lanes);
    });
  });
}

typedef uint64_t Couples __attribute__((vector_size(4 * PDK_LANES), may_alias));

// Swaps adjacent elements.
PDK_INLINE Vec swapped(Vec x) {
  const Couples couples = reinterpret_cast<Couples>(x);
  return reinterpret_cast<Vec>(couples << 32 | couples >> 32);
}

// Rotates a head in place, in floats: (x + bias) times its cosine plus its partner times its sine; bias may be nullptr.
// Only one of the two products may be fused with the sum, so that the bits do not depend on the loop.
template <class T>
PDK_INLINE void turn(T* x, const T* bias, const float* cos, const float* sin, int64_t dim, bool interleaved) {
  const auto wide = [&](int64_t at, auto lanes) {
    return bias == nullptr ? load(x + at, lanes) : load(x + at, lanes) + load(bias + at, lanes);
  };
  const auto put = [&](int64_t at, Vec own, Vec partner, auto lanes) {
    store(x + at, own * load(cos + at, lanes) + rounded(partner * load(sin + at, lanes)), lanes);
  };
  const int64_t half = dim / 2;
  if (interleaved) {
    for_vectors(0, dim, [&](int64_t at, auto lanes) {
      const Vec own = wide(at, lanes);
      put(at, own, swapped(own), lanes);
    });
  } else {
    for_vectors(0, half, [&](int64_t at, auto lanes) {
      const Vec first = wide(at, lanes), second = wide(half + at, lanes);
      put(at, first, second, lanes);
      put(half + at, second, first, lanes);
    });
  }
}

template <class T>
void apply_rope_append_of(const ApplyRopeAppendArgs& args) {
  const int64_t dim = args.head_dim, heads = args.all_heads(), bytes = dim * static_cast<int64_t>(sizeof(T));
  for_rows(args.batch * args.rows * heads, dim, [&](int64_t item) {
    const int64_t head = item % heads, i = item / heads % args.rows, b = item / heads / args.rows;
    const int64_t length = args.lengths.load(b), slot = args.slot(b, i);
    if (slot < 0) return;
    T* x = static_cast<T*>(args.qkv) + args.head_offset(b, i, head);
    if (head < args.turned_heads()) {
      const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + head * dim;
      const int64_t at = args.table_row(length, slot);
      turn(x, bias, args.cos + at, args.sin + at, dim, args.interleaved);
    }
    if (head >= args.heads && i < args.count(b)) __builtin_memcpy(args.target(b, length + slot, head), x, bytes);
  });
}

template <class T>
void apply_rope_of(const ApplyRopeArgs& args) {
  for_rows(args.batch * args.rows, args.heads * args.head_dim, [&](int64_t item) {
    const int64_t b = item / args.rows, row = item % args.rows, at = args.positions.load(b, row) * args.head_dim;
    T* x = static_cast<T*>(args.x) + args.row_offset(b, row);
    for (int64_t head = 0; head < args.heads; ++head) {
      turn<T>(x + head * args.head_stride, nullptr, args.cos + at, args.sin + at, args.head_dim, args.interleaved);
    }
  });
}

}  // namespace

void add_rms_norm(const AddRmsNormArgs& args) { PDK_BY_ELEMENT(add_rms_norm_of, args) }
void add_rms_norm_backward(const AddRmsNormBackwardArgs& args) { PDK_BY_ELEMENT(add_rms_norm_backward_of, args) }
void silu_and_mul_backward(const SiluAndMulBackwardArgs& args) { PDK_BY_ELEMENT(silu_and_mul_backward_of, args) }
void silu_and_mul(const SiluAndMulArgs& args) { PDK_BY_ELEMENT(silu_and_mul_of, args) }
void gelu_and_mul(const GeluAndMulArgs& args) { PDK_BY_ELEMENT(gelu_and_mul_of, args) }
void scaled_rows(const ScaledRowsArgs& args) { PDK_BY_ELEMENT(scaled_rows_of, args) }
void weighted_rows(const WeightedRowsArgs& args) { PDK_BY_ELEMENT(weighted_rows_of, args) }
void low_rank(const LowRankArgs& args) { PDK_BY_ELEMENT(low_rank_of, args) }
void apply_rope_append(const ApplyRopeAppendArgs& args) { PDK_BY_ELEMENT(apply_rope_append_of, args) }
void apply_rope(const ApplyRopeArgs& args) { PDK_BY_ELEMENT(apply_rope_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
