// Products with few rows: see pdkernels/ops/linear.py. On CUDA they are Triton's.
#pragma once

#include "device.h"
#include "ops/linear.h"
#include "unpack_rows.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// A matrix (outputs, width), or the first of several, as products with rows of `dtype` take it; without a bias.
inline LinearArgs unpack_matrix(const SameDevice& device, ScalarType dtype, int64_t width, const Tensor& weight,
                                int64_t stride) {
  device.require(weight);
  PDK_CHECK(weight.size(weight.dim() - 1) == width);
  PDK_CHECK(weight.scalar_type() == dtype || dtype == ScalarType::Float);
  LinearArgs args;
  args.element = row_element(dtype), args.weight_element = row_element(weight);
  args.width = width, args.outputs = weight.size(weight.dim() - 2);
  args.weight = weight.data_ptr(), args.weight_stride = stride, args.bias = nullptr;
  return args;
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x), matrix(weight);
  PDK_CHECK(weight.dim() == 2);
  LinearArgs args = unpack_matrix(device, x.scalar_type(), rows.width, matrix.held, matrix.stride);
  const OptionalTensor held = unpack_bias(device, x.scalar_type(), bias, {args.outputs}, args.bias);
  Tensor out = torch::stable::new_empty(x, shape_of(x, args.outputs), x.scalar_type());
  const Tensor scratch = torch::stable::new_empty(x, {args.scratch_bytes(rows.count)}, ScalarType::Byte);
  args.set_rows(rows.view(), rows.count, out.data_ptr(), scratch.data_ptr());
  if (args.rows > 0 && args.outputs > 0) launch(PDK_VECTOR(linear), args);
  return out;
}

PDK_IMPL("linear", linear)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
