// A step of the recurrent-depth sampler on CUDA, one launch per op. Values that change from step to step are read on
// the device; a value out of range there is clamped, and recurrence_advance_ leaves its sequence unchanged.
#include "common/philox.h"
#include "elements.h"
#include "launch.h"
#include "ops/recurrence.h"

namespace pdkernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerSm = 4;  // a hint to ptxas: enough registers not to spill
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kStagedBytes = 40 * 1024;  // shared memory for a row of sums; a longer row is read twice

struct Rounded {
  static __device__ float multiply(float a, float b) { return __fmul_rn(a, b); }
  static __device__ float square_root(float x) { return __fsqrt_rn(x); }
};

// 16 bytes of a row: one access if every row starts and ends at a multiple of 16 bytes, else element by element.
template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T value[kSize];
};

template <class T, bool kWide>
__device__ Pack<T> load(const T* from, int64_t count) {
  if constexpr (kWide) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack = {};
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    if (i < count) pack.value[i] = from[i];
  }
  return pack;
}

template <class T, bool kWide>
__device__ void store(const Pack<T>& pack, T* to, int64_t count) {
  if constexpr (kWide) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int i = 0; i < Pack<T>::kSize; ++i) {
      if (i < count) to[i] = pack.value[i];
    }
  }
}

// --- recurrence_inject: a thread makes one pack of the state and one of the embedding

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    recurrence_inject_kernel(const __grid_constant__ InjectArgs args) {
  constexpr int kSize = Pack<T>::kSize;
  const int64_t b = blockIdx.z, i = blockIdx.x;
  const int64_t at = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kSize;
  if (at >= args.size) return;
  const int64_t count = args.size - at;
  T* to_state = args.out.row<T>(b, i) + at;
  T* to_embedding = to_state + args.size;
  if (i >= args.wave(b)) {
    const Pack<T> zeros = {};
    store<T, kWide>(zeros, to_state, count);
    store<T, kWide>(zeros, to_embedding, count);
    return;
  }

  const bool old = args.old(b, i);
  const int64_t origin = old ? i : args.copied ? args.newest(b) : -1;
  NoiseMix mix{1.0f, 0.0f};
  if (args.noise != 0.0f) mix = noise_mix<Rounded>(args, args.recurrences.load(b, i));
  Pack<T> state = {};
  if (origin >= 0) state = load<T, kWide>(args.state.row<const T>(b, args.before(b, origin)) + at, count);
  const bool drawn = origin < 0, noisy = mix.share != 0.0f;
  if (drawn || noisy) {
    const uint32_t position = static_cast<uint32_t>(args.cursor.load(b) + i);
    const uint32_t step = noise_step(args.steps.load(b));
    const PhiloxKey key = args.seeds.key(b);
    const auto draw = [&](int quad, uint32_t stage, const auto& visit) {
      const PhiloxWords words =
          philox4x32(PhiloxWords{{static_cast<uint32_t>(at / 4) + quad, position, stage, kLatentNoise}}, key);
      for (int lane = 0; lane < 4; ++lane) {
        const float t = static_cast<float>(odd_number(static_cast<int32_t>(words.word[lane]))) * 0x1p-24f;
        visit(lane, Rounded::multiply(truncated_normal<Rounded>(t), args.init_std));
      }
    };
    for (int quad = 0; quad < kSize / 4; ++quad) {
      T* values = state.value + 4 * quad;
      float numbers[4];
      if (drawn) {
        draw(quad, kInitialState, [&](int lane, float init) { numbers[lane] = init; });
      } else {
        for (int lane = 0; lane < 4; ++lane) numbers[lane] = to_float(values[lane]);
      }
      if (noisy) {
        draw(quad, step,
             [&](int lane, float init) { numbers[lane] = blend<Rounded>(mix.keep, numbers[lane], mix.share, init); });
      }
      for (int lane = 0; lane < 4; ++lane) values[lane] = from_float<T>(numbers[lane]);
    }
  }
  store<T, kWide>(state, to_state, count);

  Pack<T> embedding = load<T, kWide>(args.embedding.row<const T>(b, i) + at, count);
  const float keep = 1.0f - args.momentum;
  const bool blended = old && args.previous.given();
  if (blended && args.momentum != 0.0f) {
    const Pack<T> previous = load<T, kWide>(args.previous.row<const T>(b, args.before(b, i)) + at, count);
    for (int j = 0; j < kSize; ++j) {
      embedding.value[j] =
          from_float<T>(blend<Rounded>(keep, to_float(embedding.value[j]), args.momentum, to_float(previous.value[j])));
    }
  } else if (!blended && args.damp_new) {
    for (int j = 0; j < kSize; ++j)
      embedding.value[j] = from_float<T>(Rounded::multiply(to_float(embedding.value[j]), keep));
  }
  store<T, kWide>(embedding, to_embedding, count);
}

// --- recurrence_exit: one block per row

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads) recurrence_exit_kernel(const __grid_constant__ ExitArgs args, bool staged) {
  constexpr int kSize = Pack<T>::kSize;
  PDK_DYNAMIC_SHARED(float, sums);  // [size]; a thread reads only what it wrote
  __shared__ float warp_sums[kWarps];
  const int64_t b = blockIdx.y, i = blockIdx.x;
  T* state = args.state.row<T>(b, i);
  const bool inside = args.in_wave(b, i);
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kSize;
  constexpr int64_t kStride = static_cast<int64_t>(kThreads) * kSize;
  if (!inside) {
    for (int64_t at = first; at < args.size; at += kStride) store<T, kWide>(Pack<T>{}, state + at, args.size - at);
    if (threadIdx.x == 0) args.write(b, i, INFINITY);
    return;
  }

  const auto total = [&](int64_t at, float* to) {
    const Pack<T> x = load<T, kWide>(args.x.row<const T>(b, i) + at, args.size - at);
    const Pack<T> residual = load<T, kWide>(args.residual.row<const T>(b, i) + at, args.size - at);
    for (int j = 0; j < kSize; ++j) to[j] = to_float(x.value[j]) + to_float(residual.value[j]);
  };
  float squares = 0.0f;
  for (int64_t at = first; at < args.size; at += kStride) {
    float row[kSize];
    total(at, row);
    for (int j = 0; j < kSize; ++j) {
      squares += row[j] * row[j];
      if (staged && at + j < args.size) sums[at + j] = row[j];
    }
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(squares, warp_sums) / static_cast<float>(args.size) + args.eps);

  const bool has_previous = args.has_previous(b, i);
  const T* before = has_previous ? args.previous.row<const T>(b, args.before(b, i)) : nullptr;
  const T* older = has_previous && args.older.given() ? args.older.row<const T>(b, args.older_row(b, i)) : nullptr;
  float of_state = 0.0f, of_change = 0.0f;
  for (int64_t at = first; at < args.size; at += kStride) {
    const int64_t count = args.size - at;
    float row[kSize];
    if (staged) {
      for (int j = 0; j < kSize; ++j) row[j] = j < count ? sums[at + j] : 0.0f;
    } else {
      total(at, row);
    }
    Pack<T> now = load<T, kWide>(static_cast<const T*>(args.weight) + at, count);
    for (int j = 0; j < kSize; ++j) {
      now.value[j] = from_float<T>(rounded<T>(row[j] * scale) * to_float(now.value[j]));
    }
    store<T, kWide>(now, state + at, count);
    if (!has_previous) continue;
    const Pack<T> last = load<T, kWide>(before + at, count);
    const Pack<T> earliest = older != nullptr ? load<T, kWide>(older + at, count) : Pack<T>{};
    for (int j = 0; j < kSize; ++j) {
      const float length = to_float(now.value[j]), once = to_float(last.value[j]);
      const float change = older != nullptr ? length - 2.0f * once + to_float(earliest.value[j]) : length - once;
      of_state += length * length;
      of_change += change * change;
    }
  }
  const float change = sqrtf(block_sum<kThreads>(of_change, warp_sums)),
              length = sqrtf(block_sum<kThreads>(of_state, warp_sums));
  if (threadIdx.x != 0) return;
  args.write(b, i, !has_previous ? INFINITY : change == 0.0f && length == 0.0f ? 0.0f : change / length);
}

// --- recurrence_advance_: one block per sequence

constexpr int kAdvanceThreads = 128;
constexpr int kAdvanceWarps = kAdvanceThreads / kWarp;

__global__ void __launch_bounds__(kAdvanceThreads) recurrence_advance_kernel(const __grid_constant__ AdvanceArgs args) {
  __shared__ int found[4][kAdvanceWarps];
  const int64_t b = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  if (!args.fits(b)) return;
  const int w = static_cast<int>(args.width.load(b));
  if (w == 0) {
    if (thread == 0) args.advance.store(0, b);
    return;
  }
  int leading = w, last = 0, first_changed = w, first_end = w;
  for (int i = thread; i < w; i += kAdvanceThreads) {
    if (args.count_row(b, i)) last = i + 1;
    else if (i < leading) leading = i;
    if (i > 0 && i < first_changed && args.input_changed(b, i)) first_changed = i;
    if (i < first_end && args.is_end(args.predictions.load(b, i))) first_end = i;
  }
  const int warp = thread / kWarp;
  leading = __reduce_min_sync(kAllLanes, leading);
  last = __reduce_max_sync(kAllLanes, last);
  first_changed = __reduce_min_sync(kAllLanes, first_changed);
  first_end = __reduce_min_sync(kAllLanes, first_end);
  if (thread % kWarp == 0) {
    found[0][warp] = leading;
    found[1][warp] = last;
    found[2][warp] = first_changed;
    found[3][warp] = first_end;
  }
  __syncthreads();
  for (int other = 0; other < kAdvanceWarps; ++other) {
    leading = min(leading, found[0][other]);
    last = max(last, found[1][other]);
    first_changed = min(first_changed, found[2][other]);
    first_end = min(first_end, found[3][other]);
  }
  const Advance next(args, b, w, args.last ? last : leading, first_changed, first_end);
  __syncthreads();  // every thread has read what the next lines write
  if (thread == 0) next.write(args, b);
  if (next.wave == 0) return;
  // In place: new_token reads tokens[0] only for entry 0, and predictions otherwise.
  for (int64_t j = thread; j < next.tokens; j += kAdvanceThreads)
    args.tokens.store(args.new_token(b, w, next.frozen, j), b, j);
  // Rows move towards the front in runs of the block size. A run is read entirely before any of it is written.
  for (int64_t start = 0; start < args.capacity; start += kAdvanceThreads) {
    const int64_t i = start + thread;
    const bool kept = i < next.kept;
    const int64_t count = kept ? args.recurrences.load(b, i + next.frozen) : 0;
    const int64_t same = kept ? args.unchanged_steps.load(b, i + next.frozen) : 0;
    __syncthreads();
    if (i >= args.capacity) continue;
    args.recurrences.store(count, b, i);
    args.unchanged_steps.store(same, b, i);
  }
}

// --- launches

// Whether all of a view's rows start at multiples of 16 bytes.
bool aligned(const BatchRowsView& view, int64_t element_bytes) {
  if (!view.given()) return true;
  const int64_t bits =
      reinterpret_cast<int64_t>(view.data) | view.batch_stride * element_bytes | view.row_stride * element_bytes;
  return bits % 16 == 0;
}

template <class T>
void launch_inject(const InjectArgs& args, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(T), kTile = static_cast<int64_t>(kThreads) * Pack<T>::kSize;
  // Rows are the x dimension, because the other dimensions of a grid are limited to 65,535.
  const dim3 grid(static_cast<unsigned>(args.rows), static_cast<unsigned>((args.size + kTile - 1) / kTile),
                  static_cast<unsigned>(args.batch));
  const bool wide = args.size * kBytes % 16 == 0 && aligned(args.state, kBytes) && aligned(args.embedding, kBytes) &&
                    aligned(args.previous, kBytes) && aligned(args.out, kBytes);
  if (wide) PDK_LAUNCH((recurrence_inject_kernel<T, true>), grid, dim3(kThreads), 0, stream, args);
  else PDK_LAUNCH((recurrence_inject_kernel<T, false>), grid, dim3(kThreads), 0, stream, args);
}

template <class T>
void launch_exit(const ExitArgs& args, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(T);
  const dim3 grid(static_cast<unsigned>(args.rows), static_cast<unsigned>(args.batch));
  const bool wide = args.size * kBytes % 16 == 0 && reinterpret_cast<int64_t>(args.weight) % 16 == 0 &&
                    aligned(args.x, kBytes) && aligned(args.residual, kBytes) && aligned(args.previous, kBytes) &&
                    aligned(args.older, kBytes) && aligned(args.state, kBytes);
  const int64_t bytes = args.size * static_cast<int64_t>(sizeof(float));
  const bool staged = bytes <= kStagedBytes;
  const size_t shared_bytes = staged ? static_cast<size_t>(bytes) : 0;
  if (wide) PDK_LAUNCH((recurrence_exit_kernel<T, true>), grid, dim3(kThreads), shared_bytes, stream, args, staged);
  else PDK_LAUNCH((recurrence_exit_kernel<T, false>), grid, dim3(kThreads), shared_bytes, stream, args, staged);
}

}  // namespace

cudaError_t recurrence_inject(const InjectArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.rows == 0 || args.size == 0) return cudaSuccess;
  with_element(args.element,
               [&](auto* element) { launch_inject<std::remove_pointer_t<decltype(element)>>(args, stream); });
  return cudaGetLastError();
}

cudaError_t recurrence_exit(const ExitArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.rows == 0) return cudaSuccess;
  with_element(args.element,
               [&](auto* element) { launch_exit<std::remove_pointer_t<decltype(element)>>(args, stream); });
  return cudaGetLastError();
}

cudaError_t recurrence_advance(const AdvanceArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  PDK_LAUNCH(recurrence_advance_kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kAdvanceThreads), 0, stream,
             args);
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
