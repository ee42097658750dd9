// Rows of x as codes of 8 bits, in the order in which the lanes of a warp multiply with them.
#pragma once

#include "elements.h"
#include "launch.h"
#include "ops/quantized_linear.h"

namespace pdkernels::cuda {

// A block of 32 columns of eight rows. Lane 4 r + t has columns 4 t .. 4 t + 3 of row r, and those 16 further on.
struct alignas(16) RowFragments {
  static constexpr int kRows = QuantizedRows::kGroup;

  uint2 codes[32];
  float scale[kRows], scaled_sum[kRows];
  int32_t negative_sum[kRows], negative_half[kRows];  // of the first 16 columns
};
static_assert(sizeof(RowFragments) == RowFragments::kRows * sizeof(QuantizedBlock), "they share their memory");

// The formula of reference/quantized_linear.py. A warp for each block of each row; rows up to the next multiple of
// eight and columns past the width are zeros.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(RowsView x, RowFragments* fragments, int64_t rows, int64_t width, int64_t blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = blockIdx.x * int64_t{kThreads / 32} + threadIdx.x / 32;
  const int64_t row = warp / blocks, block = warp % blocks;
  if (row >= (rows + RowFragments::kRows - 1) / RowFragments::kRows * RowFragments::kRows) return;
  const int64_t column = block * 32 + lane;
  const float value = row < rows && column < width ? to_float(x.row<T>(row)[column]) : 0.0f;
  int largest = __float_as_int(value) & 0x7fffffff;  // as integers: NaN is above infinity
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  const bool finite = largest < 0x7f800000, counted = finite && __int_as_float(largest) >= 0x1p-100f;
  const float most = counted ? __int_as_float(largest) : 1.0f;
  const float inverse = counted ? __fdiv_rn(127.0f, most) : 0.0f;
  const float scale = counted ? __fdiv_rn(most, 127.0f) : finite ? 0.0f : __int_as_float(0x7fffffff);
  const int code = counted ? __float2int_rn(__fmul_rn(value, inverse)) : 0;
  const int sum = warp_sum(code), half = warp_sum(lane < 16 ? code : 0);
  RowFragments& to = fragments[row / RowFragments::kRows * blocks + block];
  const int r = static_cast<int>(row % RowFragments::kRows);
  reinterpret_cast<int8_t*>(&to.codes[4 * r + lane % 16 / 4])[lane / 16 * 4 + lane % 4] = static_cast<int8_t>(code);
  if (lane == 0) {
    to.scale[r] = scale, to.scaled_sum[r] = __fmul_rn(__int2float_rn(sum), scale);
    to.negative_sum[r] = -sum, to.negative_half[r] = -half;
  }
}

}  // namespace pdkernels::cuda
