// Gradients of the norms and of the gate, on CUDA.
#include "launch.h"
#include "ops/transformer_ops_backward.h"
#include "packs.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;

// One block per part of the rows, which it processes one by one. Values of the forward are recomputed, and each thread
// sums its own columns over the rows of the part.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads)
    add_rms_norm_backward_kernel(const __grid_constant__ AddRmsNormBackwardArgs args) {
  using Elements = Pack<T, kSize>;
  __shared__ float warp_sums[kThreads / 32];
  const int64_t packs = args.width / kSize, count = rows_of_part(args.rows), first = blockIdx.x * count;
  const int64_t end = first + count < args.rows ? first + count : args.rows;
  const bool norms = args.weight != nullptr, nexts = args.grad_next.given();
  const float width = static_cast<float>(args.width);
  for (int64_t row = first; row < end; ++row) {
    const auto load = [&](const RowsView& rows, int64_t pack, float* to) {
      const Elements from = Elements::load(rows.template row<const T>(row), pack);
      for (int j = 0; j < kSize; ++j) to[j] = to_float(from.at[j]);
    };
    const auto times = [&](const void* weight, int64_t pack, float* x) {
      const Elements by = Elements::load(static_cast<const T*>(weight), pack);
      for (int j = 0; j < kSize; ++j) x[j] *= to_float(by.at[j]);
    };
    const auto total = [&](int64_t pack, float* to) {
      load(args.x, pack, to);
      if (!args.residual.given()) return;
      float other[kSize];
      load(args.residual, pack, other);
      for (int j = 0; j < kSize; ++j) to[j] += other[j];
    };
    const auto sum_of_packs = [&](const auto& term) {
      float sum = 0;
      for (int64_t pack = threadIdx.x; pack < packs; pack += kThreads) sum += term(pack);
      return block_sum<kThreads>(sum, warp_sums);
    };
    const auto dot = [](const float* a, const float* b) {
      float sum = 0;
      for (int j = 0; j < kSize; ++j) sum += a[j] * b[j];
      return sum;
    };
    const auto add = [&](float* part, int64_t pack, const float* d, const float* h) {
      float* to = part + static_cast<int64_t>(blockIdx.x) * args.width + pack * kSize;
      for (int j = 0; j < kSize; ++j) to[j] = d[j] * rounded<T>(h[j]) + (row == first ? 0.0f : to[j]);
    };
    float scale = 1, next_scale = 0, next_mean = 0;
    if (norms) {
      scale = 1.0f / sqrtf(sum_of_packs([&](int64_t pack) {
                             float x[kSize];
                             total(pack, x);
                             return dot(x, x);
                           }) / width +
                           args.eps);
    }
    const auto normed = [&](int64_t pack, float* y) {
      total(pack, y);
      if (norms) {
        for (int j = 0; j < kSize; ++j) y[j] = rounded<T>(y[j] * scale);
        times(args.weight, pack, y);
      }
      for (int j = 0; j < kSize; ++j) y[j] = rounded<T>(y[j]);
    };
    if (nexts) {
      next_scale = 1.0f / sqrtf(sum_of_packs([&](int64_t pack) {
                                  float y[kSize];
                                  normed(pack, y);
                                  return dot(y, y);
                                }) / width +
                                args.eps);
      next_mean = sum_of_packs([&](int64_t pack) {
                    float h[kSize], d[kSize];
                    normed(pack, h);
                    for (int j = 0; j < kSize; ++j) h[j] *= next_scale;
                    load(args.grad_next, pack, d);
                    add(args.parts_next, pack, d, h);
                    times(args.next_weight, pack, d);
                    return dot(d, h);
                  }) /
                  width;
    }
    // The gradient of y, direct and through the second norm.
    const auto gradient = [&](int64_t pack, float* to) {
      for (int j = 0; j < kSize; ++j) to[j] = 0;
      if (args.grad.given()) load(args.grad, pack, to);
      if (!nexts) return;
      float y[kSize], g[kSize];
      normed(pack, y);
      load(args.grad_next, pack, g);
      times(args.next_weight, pack, g);
      for (int j = 0; j < kSize; ++j) to[j] += next_scale * (g[j] - y[j] * next_scale * next_mean);
    };
    float mean = 0;
    if (norms) {
      mean = sum_of_packs([&](int64_t pack) {
               float h[kSize], d[kSize];
               total(pack, h);
               for (int j = 0; j < kSize; ++j) h[j] *= scale;
               gradient(pack, d);
               add(args.parts, pack, d, h);
               times(args.weight, pack, d);
               return dot(d, h);
             }) /
             width;
    }
    for (int64_t pack = threadIdx.x; pack < packs; pack += kThreads) {
      float d[kSize];
      gradient(pack, d);
      if (norms) {
        float x[kSize];
        total(pack, x);
        times(args.weight, pack, d);
        for (int j = 0; j < kSize; ++j) d[j] = scale * (d[j] - x[j] * scale * mean);
      }
      Elements to;
      for (int j = 0; j < kSize; ++j) to.at[j] = from_float<T>(d[j]);
      to.store(args.dx.row<T>(row), pack);
    }
  }
}

// One thread per column of the weights' gradients.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const float* parts, int64_t count, int64_t width, T* to) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= width) return;
  double sum = 0;
  for (int64_t part = 0; part < count; ++part) sum += parts[part * width + column];
  to[column] = from_float<T>(static_cast<float>(sum));
}

// One thread per pack.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads) silu_and_mul_backward_kernel(SiluAndMulBackwardArgs args) {
  using Elements = Pack<T, kSize>;
  const int64_t packs = args.width / kSize, item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.rows * packs) return;
  const int64_t row = item / packs, pack = item % packs;
  const T* x = args.x.row<const T>(row);
  const Elements gate = Elements::load(x, pack), up = Elements::load(x + args.width, pack),
                 grad = Elements::load(args.grad.row<const T>(row), pack);
  Elements dgate, dup;
  for (int j = 0; j < kSize; ++j) {
    const float value = to_float(gate.at[j]), d = to_float(grad.at[j]);
    const float e = expf(value > 0 ? -value : value);  // never grows
    const float open = (value > 0 ? 1.0f : e) / (1.0f + e), closed = (value > 0 ? e : 1.0f) / (1.0f + e);
    dgate.at[j] = from_float<T>(d * to_float(up.at[j]) * open * (1.0f + value * closed));
    dup.at[j] = from_float<T>(d * (value * open));
  }
  dgate.store(args.dx.row<T>(row), pack);
  dup.store(args.dx.row<T>(row) + args.width, pack);
}

}  // namespace

cudaError_t add_rms_norm_backward(const AddRmsNormBackwardArgs& args, cudaStream_t stream) {
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const int64_t parts = norm_parts(args.rows);
    bool packs = args.width % kSize == 0;
    const RowsView views[7] = {args.grad,        args.grad_next,       args.x, args.residual, args.dx,
                               {args.weight, 0}, {args.next_weight, 0}};
    for (const RowsView& view : views) packs = packs && in_packs<T>(view);
    const dim3 grid(static_cast<unsigned>(parts)), block(kThreads);
    if (parts > 0 && packs) {
      PDK_LAUNCH((add_rms_norm_backward_kernel<T, kSize>), grid, block, 0, stream, args);
    } else if (parts > 0) {
      PDK_LAUNCH((add_rms_norm_backward_kernel<T, 1>), grid, block, 0, stream, args);
    }
    const auto sum = [&](void* to, const float* from) {
      const dim3 columns(static_cast<unsigned>((args.width + kThreads - 1) / kThreads));
      if (to != nullptr)
        PDK_LAUNCH((sum_parts_kernel<T>), columns, block, 0, stream, from, parts, args.width, static_cast<T*>(to));
    };
    sum(args.dweight, args.parts);
    sum(args.dnext, args.parts_next);
  });
  return cudaGetLastError();
}

cudaError_t silu_and_mul_backward(const SiluAndMulBackwardArgs& args, cudaStream_t stream) {
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const auto blocks = [&](int64_t size) {
      return dim3(static_cast<unsigned>((args.rows * (args.width / size) + kThreads - 1) / kThreads));
    };
    if (args.width % kSize == 0 && in_packs<T>(args.grad) && in_packs<T>(args.x) && in_packs<T>(args.dx)) {
      PDK_LAUNCH((silu_and_mul_backward_kernel<T, kSize>), blocks(kSize), dim3(kThreads), 0, stream, args);
    } else {
      PDK_LAUNCH((silu_and_mul_backward_kernel<T, 1>), blocks(1), dim3(kThreads), 0, stream, args);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
