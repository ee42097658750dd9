// Products with few rows: see pdkernels/ops/linear.py. On CUDA they are Triton's.
#pragma once

#include "device.h"
#include "ops/linear.h"
#include "unpack_rows.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

inline Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  device.require(weight);
  PDK_CHECK(weight.dim() == 2 && weight.size(1) == rows.width);
  PDK_CHECK(weight.scalar_type() == x.scalar_type() || x.scalar_type() == ScalarType::Float);
  const FlatRows weights(weight);
  LinearArgs args;
  args.element = row_element(x), args.weight_element = row_element(weight);
  args.rows = rows.count, args.width = rows.width, args.outputs = weight.size(0);
  if (bias.has_value()) device.require(*bias, x.scalar_type(), {args.outputs});
  const OptionalTensor added = bias.has_value() ? OptionalTensor(packed(*bias)) : OptionalTensor();
  Tensor out = torch::stable::new_empty(x, shape_of(x, args.outputs), x.scalar_type());
  // Rows are read directly if they consist of whole vectors of floats in the order of the weights.
  const bool ready = x.scalar_type() == ScalarType::Float && weight.scalar_type() == ScalarType::Float &&
                     args.width % LinearArgs::kPadding == 0;
  Tensor wide = torch::stable::new_empty(x, {ready ? 0 : args.rows * args.padded_width()}, ScalarType::Float);
  args.x = rows.view(), args.out = {out.data_ptr(), args.outputs};
  args.weight = weights.held.data_ptr(), args.weight_stride = weights.stride;
  args.bias = added ? added->data_ptr() : nullptr;
  args.wide = ready ? nullptr : data<float>(wide);
  if (args.rows > 0 && args.outputs > 0) launch(PDK_VECTOR(linear), args);
  return out;
}

PDK_IMPL("linear", linear)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
