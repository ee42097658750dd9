// Products of rows sorted by group, each group with a matrix of its own: see pdkernels/ops/grouped_linear.py. On CUDA
// they are Triton's.
#pragma once

#include "linear.h"
#include "ops/grouped_linear.h"
#include "quantized_linear.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// Which rows belong to which of `groups` matrices, and memory for what the kernels note about them.
struct SortedRows {
  Tensor used;
  RowGroups groups;

  SortedRows(const SameDevice& device, const Tensor& ends, int64_t rows)
      : used(torch::stable::new_empty(
            ends, {std::min(size_of(ends), rows) * static_cast<int64_t>(sizeof(RowGroup) / sizeof(int64_t))},
            ScalarType::Long)) {
    groups.ends = index_view(device, ends, 1, size_of(ends));
    groups.groups = size_of(ends);
    groups.used = static_cast<RowGroup*>(used.data_ptr());
    groups.count = 0;
  }

 private:
  static int64_t size_of(const Tensor& ends) {
    PDK_CHECK(ends.dim() == 1);
    return ends.size(0);
  }
};

inline Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& ends, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  PDK_CHECK(x.dim() == 2 && weight.dim() == 3 && weight.size(2) == x.size(1));
  const FlatRows rows(x), matrices(weight);
  const SortedRows sorted(device, ends, rows.count);
  const int64_t groups = weight.size(0), outputs = weight.size(1);
  PDK_CHECK(sorted.groups.groups == groups);
  GroupedLinearArgs args;
  args.all = unpack_matrix(device, x.scalar_type(), rows.width, matrices.held, matrices.stride);
  args.groups = sorted.groups, args.matrix_stride = outputs * matrices.stride;
  const OptionalTensor held = unpack_bias(device, x.scalar_type(), bias, {groups, outputs}, args.all.bias);
  Tensor out = torch::stable::new_empty(x, {rows.count, outputs}, x.scalar_type());
  const Tensor scratch = torch::stable::new_empty(x, {args.scratch_bytes(rows.count)}, ScalarType::Byte);
  args.all.set_rows(rows.view(), rows.count, out.data_ptr(), scratch.data_ptr());
  launch(PDK_DEVICE::grouped_linear, args);
  return out;
}

inline Tensor quantized_grouped_linear(const Tensor& x, const Tensors& weights, const std::vector<int64_t>& layouts,
                                       const std::vector<int64_t>& outputs, const Tensor& ends,
                                       const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  PDK_CHECK(x.dim() == 2);
  const FlatRows rows(x);
  const SortedRows sorted(device, ends, rows.count);
  const int64_t groups = sorted.groups.groups;
  QuantizedGroupedLinearArgs args;
  args.groups = sorted.groups;
  args.all = unpack_matrix(device, x.scalar_type(), rows.width, weights, layouts, outputs, groups);
  args.outputs = args.all.outputs();
  const OptionalTensor held = unpack_bias(device, x.scalar_type(), bias, {groups, args.outputs}, args.all.bias);
  Tensor out = torch::stable::new_empty(x, {rows.count, args.outputs}, x.scalar_type());
  const Tensor scratch = torch::stable::new_empty(x, {args.scratch_bytes(rows.count)}, ScalarType::Byte);
  args.all.set_rows(rows.view(), rows.count, out.data_ptr(), scratch.data_ptr());
  launch(PDK_DEVICE::quantized_grouped_linear, args);
  return out;
}

PDK_IMPL("grouped_linear", grouped_linear)
PDK_IMPL("quantized_grouped_linear", quantized_grouped_linear)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
