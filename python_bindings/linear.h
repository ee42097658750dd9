// Products with few rows: see pdkernels/ops/linear.py. On CUDA they are Triton's.
#pragma once

#include "device.h"
#include "ops/linear.h"
#include "unpack_rows.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// Rows are read directly if they consist of whole vectors of floats in the order of the weights.
inline bool reads_rows(const LinearArgs& args) {
  return args.element == Element::kFloat && args.weight_element == Element::kFloat &&
         args.width % LinearArgs::kPadding == 0;
}
// Bytes of scratch memory for the product of so many rows.
inline int64_t scratch_bytes(const LinearArgs& args, int64_t rows) {
  return reads_rows(args) ? 0 : rows * args.padded_width() * static_cast<int64_t>(sizeof(float));
}

// A matrix and its bias as products take them.
struct Matrix {
  FlatRows weight;
  OptionalTensor bias;
  LinearArgs args;

  // `like`: a tensor of the rows that will be multiplied, `width` numbers each.
  Matrix(const SameDevice& device, const Tensor& like, int64_t width, const Tensor& given, const OptionalTensor& added)
      : weight(given) {
    device.require(given);
    PDK_CHECK(given.dim() == 2 && given.size(1) == width);
    PDK_CHECK(given.scalar_type() == like.scalar_type() || like.scalar_type() == ScalarType::Float);
    args.element = row_element(like), args.weight_element = row_element(given);
    args.width = width, args.outputs = given.size(0);
    if (added.has_value()) {
      device.require(*added, like.scalar_type(), {args.outputs});
      bias = packed(*added);
    }
    args.weight = weight.held.data_ptr(), args.weight_stride = weight.stride;
    args.bias = bias ? bias->data_ptr() : nullptr;
  }

  int64_t width() const { return args.width; }
  int64_t outputs() const { return args.outputs; }
  int64_t scratch_bytes(int64_t rows) const { return bindings::scratch_bytes(args, rows); }

  void multiply(const Launch& launch, const RowsView& x, int64_t rows, void* out, void* scratch) {
    args.x = x, args.rows = rows, args.out = {out, args.outputs};
    args.wide = reads_rows(args) ? nullptr : static_cast<float*>(scratch);
    if (rows > 0 && args.outputs > 0) launch(PDK_VECTOR(linear), args);
  }
};

inline Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  Matrix matrix(device, x, rows.width, weight, bias);
  Tensor out = torch::stable::new_empty(x, shape_of(x, matrix.outputs()), x.scalar_type());
  const Tensor scratch = torch::stable::new_empty(x, {matrix.scratch_bytes(rows.count)}, ScalarType::Byte);
  matrix.multiply(launch, rows.view(), rows.count, out.data_ptr(), scratch.data_ptr());
  return out;
}

PDK_IMPL("linear", linear)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
