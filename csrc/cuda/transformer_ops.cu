// The ops between a transformer's matrix products, on CUDA. They are bound by memory, so every byte moves once, in
// packs of 16. Second reads of a row hit L1.
#include "launch.h"
#include "ops/transformer_ops.h"
#include "packs.h"
#include "rows.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 256;

// One block per row. kAdds: there is a residual; kNorms: there is a first weight.
template <class T, int kSize, bool kAdds, bool kNorms>
__global__ void __launch_bounds__(kThreads) add_rms_norm_kernel(AddRmsNormArgs args) {
  using Elements = Pack<T, kSize>;
  __shared__ float warp_sums[kThreads / 32];
  const int64_t row = blockIdx.x, packs = args.width / kSize;
  const T *x = args.x.row<const T>(row), *residual = args.residual.row<const T>(row);
  const auto sum = [&](int64_t pack, float* sums) {
    const Elements a = Elements::load(x, pack);
    if constexpr (kAdds) {
      const Elements b = Elements::load(residual, pack);
      for (int j = 0; j < kSize; ++j) sums[j] = to_float(a.at[j]) + to_float(b.at[j]);
    } else {
      for (int j = 0; j < kSize; ++j) sums[j] = to_float(a.at[j]);
    }
  };
  const auto scale_of = [&](float squares) {
    return 1.0f / sqrtf(block_sum<kThreads>(squares, warp_sums) / static_cast<float>(args.width) + args.eps);
  };
  float squares = 0, scale = 1;
  if constexpr (kNorms) {
    for (int64_t pack = threadIdx.x; pack < packs; pack += kThreads) {
      float sums[kSize];
      sum(pack, sums);
      for (int j = 0; j < kSize; ++j) squares += sums[j] * sums[j];
    }
    scale = scale_of(squares);
  }
  // Recomputes the pack of y, which is cheaper than reading it back.
  const auto normed = [&](int64_t pack) {
    float sums[kSize];
    sum(pack, sums);
    Elements y;
    if constexpr (kNorms) {
      const Elements weights = Elements::load(static_cast<const T*>(args.weight), pack);
      for (int j = 0; j < kSize; ++j) y.at[j] = from_float<T>(rounded<T>(sums[j] * scale) * to_float(weights.at[j]));
    } else {
      for (int j = 0; j < kSize; ++j) y.at[j] = from_float<T>(sums[j]);
    }
    return y;
  };
  squares = 0;
  for (int64_t pack = threadIdx.x; pack < packs; pack += kThreads) {
    const Elements y = normed(pack);
    y.store(args.y.row<T>(row), pack);
    for (int j = 0; j < kSize; ++j) squares += to_float(y.at[j]) * to_float(y.at[j]);
  }
  if (args.next_weight == nullptr) return;
  const float next_scale = scale_of(squares);
  for (int64_t pack = threadIdx.x; pack < packs; pack += kThreads) {
    const Elements y = normed(pack), weights = Elements::load(static_cast<const T*>(args.next_weight), pack);
    Elements next;
    for (int j = 0; j < kSize; ++j)
      next.at[j] = from_float<T>(rounded<T>(to_float(y.at[j]) * next_scale) * to_float(weights.at[j]));
    next.store(args.next.row<T>(row), pack);
  }
}

// x times the sigmoid of z, which has the sign of x.
__device__ float opened(float x, float z) {
  const float e = expf(x > 0 ? -z : z);  // never grows
  return (x > 0 ? x : x * e) / (1.0f + e);
}

// One thread per pack.
template <class T, int kSize, class Activate>
__device__ void gate_pack(const GateArgs& args, const Activate& activate) {
  using Elements = Pack<T, kSize>;
  const int64_t packs = args.width / kSize, item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= args.rows * packs) return;
  const int64_t row = item / packs, pack = item % packs;
  const T* x = args.x.row<const T>(row);
  const Elements gate = Elements::load(x, pack), up = Elements::load(x + args.width, pack);
  Elements out;
  for (int j = 0; j < kSize; ++j) out.at[j] = from_float<T>(activate(to_float(gate.at[j])) * to_float(up.at[j]));
  out.store(args.out.row<T>(row), pack);
}

template <class T, int kSize>
__global__ void __launch_bounds__(kThreads) silu_and_mul_kernel(SiluAndMulArgs args) {
  gate_pack<T, kSize>(args, [](float x) { return opened(x, x); });
}

template <class T, int kSize>
__global__ void __launch_bounds__(kThreads) gelu_and_mul_kernel(GeluAndMulArgs args) {
  gate_pack<T, kSize>(args, [](float x) { return opened(x, x * (x * x * kGeluCube + kGeluSlope)); });
}

// Rotates one of the two packs that hold kSize pairs, given as floats in `x`: each number times its cosine plus its
// partner times its sine, as an explicit fused operation, so that every kernel gets the same bits.
template <class T, int kSize>
__device__ Pack<T, kSize> turned(const float (&x)[2 * kSize], int side, const float* cos, const float* sin,
                                 bool interleaved) {
  constexpr int kFloats = kSize < 4 ? kSize : 4;
  Pack<T, kSize> out;
  for (int begin = 0; begin < kSize; begin += kFloats) {
    const auto cosines = Pack<float, kFloats>::load(cos + begin, 0), sines = Pack<float, kFloats>::load(sin + begin, 0);
    for (int j = 0; j < kFloats; ++j) {
      const int at = side * kSize + begin + j;
      const float partner = interleaved ? x[at ^ 1] : x[(at + kSize) % (2 * kSize)];
      out.at[begin + j] = from_float<T>(fmaf(x[at], cosines.at[j], partner * sines.at[j]));
    }
  }
  return out;
}

// A thread takes kSize pairs of one head, which no other thread reads or writes: adjacent packs if adjacent components
// form pairs, otherwise one pack of each half. A row whose position is not in the tables is left unchanged.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads) apply_rope_kernel(const __grid_constant__ ApplyRopeArgs args) {
  using Elements = Pack<T, kSize>;
  const unsigned rows = static_cast<unsigned>(args.rows), packs = static_cast<unsigned>(args.head_dim / (2 * kSize));
  const unsigned b = blockIdx.x / rows, row = blockIdx.x % rows;
  const unsigned item = blockIdx.y * blockDim.x + threadIdx.x, head = item / packs, pack = item % packs;
  const int64_t position = args.positions.load(b, row);
  if (head >= args.heads || !args.in_tables(position)) return;

  T* x = static_cast<T*>(args.x) + args.row_offset(b, row) + head * args.head_stride;
  const unsigned low = args.interleaved ? 2 * pack : pack, high = args.interleaved ? low + 1 : low + packs;
  const Elements first = Elements::load(x, low), second = Elements::load(x, high);
  float wide[2 * kSize];
  for (int j = 0; j < kSize; ++j) {
    wide[j] = to_float(first.at[j]);
    wide[kSize + j] = to_float(second.at[j]);
  }
  const float *cos = args.cos + position * args.head_dim, *sin = args.sin + position * args.head_dim;
  turned<T, kSize>(wide, 0, cos + low * kSize, sin + low * kSize, args.interleaved).store(x, low);
  turned<T, kSize>(wide, 1, cos + high * kSize, sin + high * kSize, args.interleaved).store(x, high);
}

// Threads of apply_rope_append_kernel. With packs a thread does more of a head.
template <int kSize>
constexpr int kHeadsPerBlock = kSize == 1 ? 8 : 32;
// The largest number of blocks that share the rows of a sequence. With two blocks of heads that is about as many as a
// large GPU runs at once; more blocks would only repeat the check of the sequence.
constexpr int64_t kRopeBlocks = 192;

// Whether the destinations of all rows of a sequence exist. Without slots only pages may be missing.
__device__ bool rows_fit(const ApplyRopeAppendArgs& args, int64_t b, int64_t length, int64_t count) {
  if (args.check_lengths(length, count) != Fault::kNone) return false;
  if (!args.slots.given()) return args.in_tables(length, count) && pages_exist(args.pages, b, length, count);
  return all_fine(args.rows, [&](int64_t i) { return args.row_fits(b, i, length, count); });
}

// A block has some heads of some rows; a thread takes kSize pairs of components at a time, which it alone reads and
// writes.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads) apply_rope_append_kernel(const __grid_constant__ ApplyRopeAppendArgs args) {
  using Elements = Pack<T, kSize>;
  constexpr int kHeads = kHeadsPerBlock<kSize>;
  const int64_t b = blockIdx.z, length = args.lengths.load(b), count = args.count(b);
  if (!rows_fit(args, b, length, count)) return;

  const unsigned packs = static_cast<unsigned>(args.head_dim / (2 * kSize));
  const int64_t first_head = static_cast<int64_t>(blockIdx.y) * kHeads, left = args.all_heads() - first_head;
  const unsigned items = static_cast<unsigned>(left < kHeads ? left : kHeads) * packs;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t slot = args.slot(b, row);
    if (slot < 0) continue;
    const float *cos = args.cos + args.table_row(length, slot), *sin = args.sin + args.table_row(length, slot);
    for (unsigned item = threadIdx.x; item < items; item += kThreads) {
      const int64_t head = first_head + item / packs;
      const unsigned pack = item % packs;
      const unsigned low = args.interleaved ? 2 * pack : pack, high = args.interleaved ? low + 1 : low + packs;
      T* x = static_cast<T*>(args.qkv) + args.head_offset(b, row, head);
      Elements first = Elements::load(x, low), second = Elements::load(x, high);
      if (head < args.turned_heads()) {
        float wide[2 * kSize];
        for (int j = 0; j < kSize; ++j) {
          wide[j] = to_float(first.at[j]);
          wide[kSize + j] = to_float(second.at[j]);
        }
        if (args.bias != nullptr) {
          const T* bias = static_cast<const T*>(args.bias) + head * args.head_dim;
          const Elements first_bias = Elements::load(bias, low), second_bias = Elements::load(bias, high);
          for (int j = 0; j < kSize; ++j) {
            wide[j] += to_float(first_bias.at[j]);
            wide[kSize + j] += to_float(second_bias.at[j]);
          }
        }
        first = turned<T, kSize>(wide, 0, cos + low * kSize, sin + low * kSize, args.interleaved);
        second = turned<T, kSize>(wide, 1, cos + high * kSize, sin + high * kSize, args.interleaved);
        first.store(x, low);
        second.store(x, high);
      }
      if (head >= args.heads && row < count) {
        T* to = reinterpret_cast<T*>(args.target(b, length + slot, head));
        first.store(to, low);
        second.store(to, high);
      }
    }
  }
}

// Calls launch(a pointer of the element type, a constant, blocks) with the numbers of a pack that fit the rows.
template <class Launch>
void with_packs(const GateArgs& args, const Launch& launch) {
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const auto blocks = [&](int64_t size) {
      return dim3(static_cast<unsigned>((args.rows * (args.width / size) + kThreads - 1) / kThreads));
    };
    if (args.width % kSize == 0 && in_packs<T>(args.x) && in_packs<T>(args.out)) {
      launch(element, std::integral_constant<int, kSize>{}, blocks(kSize));
    } else {
      launch(element, std::integral_constant<int, 1>{}, blocks(1));
    }
  });
}

}  // namespace

cudaError_t add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream) {
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const RowsView weights[2] = {{args.weight, 0}, {args.next_weight, 0}};
    const bool packs = args.width % kSize == 0 && in_packs<T>(args.x) && in_packs<T>(args.residual) &&
                       in_packs<T>(args.y) && in_packs<T>(args.next) && in_packs<T>(weights[0]) &&
                       in_packs<T>(weights[1]);
    const auto launch = [&](auto adds, auto norms) {
      const dim3 grid(static_cast<unsigned>(args.rows));
      if (packs) {
        PDK_LAUNCH((add_rms_norm_kernel<T, kSize, adds.value, norms.value>), grid, dim3(kThreads), 0, stream, args);
      } else {
        PDK_LAUNCH((add_rms_norm_kernel<T, 1, adds.value, norms.value>), grid, dim3(kThreads), 0, stream, args);
      }
    };
    if (!args.residual.given()) {
      launch(std::false_type{}, std::true_type{});
    } else if (args.weight != nullptr) {
      launch(std::true_type{}, std::true_type{});
    } else {
      launch(std::true_type{}, std::false_type{});
    }
  });
  return cudaGetLastError();
}

cudaError_t silu_and_mul(const SiluAndMulArgs& args, cudaStream_t stream) {
  with_packs(args, [&](auto* element, auto size, dim3 blocks) {
    using T = std::remove_pointer_t<decltype(element)>;
    PDK_LAUNCH((silu_and_mul_kernel<T, size.value>), blocks, dim3(kThreads), 0, stream, args);
  });
  return cudaGetLastError();
}

cudaError_t gelu_and_mul(const GeluAndMulArgs& args, cudaStream_t stream) {
  with_packs(args, [&](auto* element, auto size, dim3 blocks) {
    using T = std::remove_pointer_t<decltype(element)>;
    PDK_LAUNCH((gelu_and_mul_kernel<T, size.value>), blocks, dim3(kThreads), 0, stream, args);
  });
  return cudaGetLastError();
}

cudaError_t apply_rope_append(const ApplyRopeAppendArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.rows == 0) return cudaSuccess;
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const auto bits = [](const void* address) { return reinterpret_cast<int64_t>(address); };
    int64_t bytes = bits(args.qkv) | bits(args.bias) | bits(args.cos) | bits(args.sin);
    for (const int64_t stride : {args.batch_stride, args.row_stride, args.head_stride})
      bytes |= stride * static_cast<int64_t>(sizeof(T));
    for (int side = 0; side < 2; ++side) {
      const RowLayout& rows = args.cache_rows[side];
      bytes |= bits(args.cache[side]) | rows.page_stride | rows.slot_stride | rows.head_stride;
    }
    const auto launch = [&](auto size) {
      constexpr int kHeads = kHeadsPerBlock<size.value>;
      const dim3 grid(row_blocks(args.rows, kRopeBlocks),
                      static_cast<unsigned>((args.all_heads() + kHeads - 1) / kHeads),
                      static_cast<unsigned>(args.batch));
      PDK_LAUNCH((apply_rope_append_kernel<T, size.value>), grid, dim3(kThreads), 0, stream, args);
    };
    if (args.head_dim % (2 * kSize) == 0 && bytes % 16 == 0) {
      launch(std::integral_constant<int, kSize>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  return cudaGetLastError();
}

cudaError_t apply_rope(const ApplyRopeArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.rows == 0 || args.heads == 0) return cudaSuccess;
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const RowsView views[5] = {{args.x, args.batch_stride},
                               {args.x, args.row_stride},
                               {args.x, args.head_stride},
                               {const_cast<float*>(args.cos), 0},
                               {const_cast<float*>(args.sin), 0}};
    bool packs = args.head_dim % (2 * kSize) == 0;
    for (const RowsView& view : views) packs = packs && in_packs<T>(view);
    const int64_t items = args.heads * (args.head_dim / (packs ? 2 * kSize : 2));
    const unsigned threads = static_cast<unsigned>(items < kThreads ? (items + 31) / 32 * 32 : kThreads);
    const dim3 grid(static_cast<unsigned>(args.batch * args.rows),
                    static_cast<unsigned>((items + threads - 1) / threads));
    if (packs) {
      PDK_LAUNCH((apply_rope_kernel<T, kSize>), grid, dim3(threads), 0, stream, args);
    } else {
      PDK_LAUNCH((apply_rope_kernel<T, 1>), grid, dim3(threads), 0, stream, args);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
