// The distance between two distributions of the next token, on CUDA: one block per row and two passes over its logits,
// the second mostly from L2. The arithmetic is that of csrc/cpu/simd/logit_divergence.cpp.
#include "launch.h"
#include "ops/logit_divergence.h"
#include "packs.h"

namespace pdkernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 1;  // by default ptxas aims for more and spills

// The largest logit so far with its first index, and the sum of exponentials below it. A NaN is never the largest: it
// shows in the sum.
struct MaxSum {
  float largest, total;
  int64_t index;

  __device__ void take(float x, int64_t at) {
    if (x > largest) {
      total *= largest == -INFINITY ? 1.0f : expf(largest - x);
      largest = x;
      index = at;
    }
    total += expf(x - (largest == -INFINITY ? 0.0f : largest));
  }
  // On ties the lower index wins. A set of nothing but -inf has a total of 0 or NaN.
  __device__ void join(float other_largest, float other_total, int64_t other_index) {
    const float top = other_largest > largest ? other_largest : largest;
    const float mine = largest == top ? 1.0f : expf(largest - top),
                others = other_largest == top ? 1.0f : expf(other_largest - top);
    total = total * mine + other_total * others;
    if (other_largest > largest || (other_largest == largest && other_index < index)) index = other_index;
    largest = top;
  }
};

// A distribution as the second pass reads it: log p = logit - largest - log_total.
struct Distribution {
  float largest, log_total;
};

struct Scratch {
  float largest[kWarps], total[kWarps];
  int64_t index[kWarps];
  double sums[kWarps];
};

// Calls body(value, index) for this thread's part of a row.
template <class T, int kSize, class Body>
__device__ void for_share(const T* row, int64_t width, const Body& body) {
  for (int64_t pack = threadIdx.x; pack < width / kSize; pack += kThreads) {
    const Pack<T, kSize> values = Pack<T, kSize>::load(row, pack);
    for (int j = 0; j < kSize; ++j) body(to_float(values.at[j]), pack * kSize + j);
  }
}

template <class T, int kSize>
__device__ MaxSum max_sum_of(const T* row, int64_t width, Scratch& scratch) {
  MaxSum max_sum{-INFINITY, 0.0f, width};
  for_share<T, kSize>(row, width, [&](float x, int64_t at) { max_sum.take(x, at); });
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    max_sum.join(__shfl_xor_sync(0xffffffffu, max_sum.largest, lanes),
                 __shfl_xor_sync(0xffffffffu, max_sum.total, lanes),
                 __shfl_xor_sync(0xffffffffu, max_sum.index, lanes));
  }
  __syncthreads();  // an earlier call may still read the shared memory
  if (threadIdx.x % 32 == 0) {
    scratch.largest[threadIdx.x / 32] = max_sum.largest;
    scratch.total[threadIdx.x / 32] = max_sum.total;
    scratch.index[threadIdx.x / 32] = max_sum.index;
  }
  __syncthreads();
  max_sum = {scratch.largest[0], scratch.total[0], scratch.index[0]};
  for (int warp = 1; warp < kWarps; ++warp)
    max_sum.join(scratch.largest[warp], scratch.total[warp], scratch.index[warp]);
  return max_sum;
}

// A total of 0 means that there is no distribution: everything becomes NaN.
__device__ Distribution distribution_of(const MaxSum& max_sum) {
  return {max_sum.largest, max_sum.total == 0 ? NAN : logf(max_sum.total)};
}

// PyTorch's argmax: the first NaN, or else the first of the largest logits, which may be -inf.
template <class T, int kSize>
__device__ int64_t argmax_of(const MaxSum& max_sum, const T* row, int64_t width, Scratch& scratch) {
  if (max_sum.total == max_sum.total) return max_sum.index < width ? max_sum.index : 0;
  int64_t first = width;
  for_share<T, kSize>(row, width, [&](float x, int64_t at) { first = x != x && at < first ? at : first; });
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, first, lanes);
    first = other < first ? other : first;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.index[threadIdx.x / 32] = first;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) first = scratch.index[warp] < first ? scratch.index[warp] : first;
  return first < width ? first : max_sum.index;
}

__device__ float divergence(float p, float log_then, float log_now) {
  if (log_then == -INFINITY) return 0.0f;
  return log_now == -INFINITY ? INFINITY : p * (log_then - log_now);
}

// The contribution of a token to the sums of its row; see csrc/cpu/simd/logit_divergence.cpp.
struct Sums {
  float entropy = 0, kl = 0, now = 0, then = 0, minp_kl = 0, kept_now = 0, kept_then = 0;
  int low_now = 0, low_then = 0;
};

template <class T, int kSize>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) logit_divergence_kernel(LogitDivergenceArgs args) {
  __shared__ Scratch scratch;
  const int64_t row = blockIdx.x, width = args.width;
  const T* logits = args.logits.row<const T>(row);
  const bool uniform = args.previous.data == nullptr;
  const T* previous = uniform ? logits : args.previous.row<const T>(row);
  const MaxSum max_sum = max_sum_of<T, kSize>(logits, width, scratch);
  const int64_t argmax = argmax_of<T, kSize>(max_sum, logits, width, scratch);
  const Distribution now = distribution_of(max_sum);
  const Distribution then =
      uniform ? Distribution{0.0f, 0.0f} : distribution_of(max_sum_of<T, kSize>(previous, width, scratch));

  const float level = 1.0f / static_cast<float>(width), log_level = -logf(static_cast<float>(width));
  Sums sums;
  for (int64_t pack = threadIdx.x; pack < width / kSize; pack += kThreads) {
    const Pack<T, kSize> x = Pack<T, kSize>::load(logits, pack);
    const Pack<T, kSize> y = uniform ? x : Pack<T, kSize>::load(previous, pack);
    for (int j = 0; j < kSize; ++j) {
      const float below_now = to_float(x.at[j]) - now.largest, log_now = below_now - now.log_total,
                  p_now = expf(log_now);
      const bool low_now = below_now < args.log_min_p;
      sums.entropy -= p_now * logf(p_now + 1e-10f);
      sums.now += p_now;
      sums.kept_now += low_now ? 0.0f : p_now;
      sums.low_now += low_now;
      const float below_then = to_float(y.at[j]) - then.largest;
      const float log_then = uniform ? log_level : below_then - then.log_total,
                  p_then = uniform ? level : expf(log_then);
      const bool low_then = !uniform && below_then < args.log_min_p;
      sums.kl += divergence(p_then, log_then, log_now);
      sums.then += p_then;
      sums.kept_then += low_then ? 0.0f : p_then;
      sums.low_then += low_then;
      sums.minp_kl +=
          divergence(low_then ? level : p_then, low_then ? log_level : log_then, low_now ? log_level : log_now);
    }
  }
  const auto total = [&](auto x) { return block_sum<kThreads>(static_cast<double>(x), scratch.sums); };
  const auto levelled = [&](float kept, int low) { return total(kept) + total(low) / static_cast<double>(width); };
  const double entropy = total(sums.entropy) / total(sums.now);
  const double kl = total(sums.kl) / (uniform ? 1.0 : total(sums.then));
  const double levelled_now = levelled(sums.kept_now, sums.low_now),
               levelled_then = uniform ? 1.0 : levelled(sums.kept_then, sums.low_then);
  const double minp_kl = total(sums.minp_kl) / levelled_then + log(levelled_now / levelled_then);
  if (threadIdx.x != 0) return;
  args.argmax[row] = argmax;
  args.entropy[row] = static_cast<float>(entropy);
  args.kl[row] = static_cast<float>(kl);
  args.minp_kl[row] = static_cast<float>(minp_kl);
}

}  // namespace

cudaError_t logit_divergence(const LogitDivergenceArgs& args, cudaStream_t stream) {
  with_element(args.element, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kSize = 16 / sizeof(T);
    const dim3 grid(static_cast<unsigned>(args.rows));
    if (args.width % kSize == 0 && in_packs<T>(args.logits) && in_packs<T>(args.previous)) {
      PDK_LAUNCH((logit_divergence_kernel<T, kSize>), grid, dim3(kThreads), 0, stream, args);
    } else {
      PDK_LAUNCH((logit_divergence_kernel<T, 1>), grid, dim3(kThreads), 0, stream, args);
    }
  });
  return cudaGetLastError();
}

}  // namespace pdkernels::cuda
