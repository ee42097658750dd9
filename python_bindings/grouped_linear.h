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
  device.require(weight);
  PDK_CHECK(sorted.groups.groups == groups);
  PDK_CHECK(weight.scalar_type() == x.scalar_type() || x.scalar_type() == ScalarType::Float);
  OptionalTensor added;
  if (bias.has_value()) {
    device.require(*bias, x.scalar_type(), {groups, outputs});
    added = packed(*bias);
  }
  GroupedLinearArgs args;
  args.groups = sorted.groups, args.matrix_stride = outputs * matrices.stride;
  args.all.element = row_element(x), args.all.weight_element = row_element(weight);
  args.all.x = rows.view(), args.all.rows = rows.count, args.all.width = rows.width, args.all.outputs = outputs;
  args.all.weight = matrices.held.data_ptr(), args.all.weight_stride = matrices.stride;
  args.all.bias = added ? added->data_ptr() : nullptr;
  Tensor out = torch::stable::new_empty(x, {rows.count, outputs}, x.scalar_type());
  args.all.out = {out.data_ptr(), outputs};
  const int64_t bytes = scratch_bytes(args.all, rows.count);
  const Tensor scratch = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  args.all.wide = bytes == 0 ? nullptr : data<float>(scratch);
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
  args.all.element = row_element(x), args.all.x = rows.view(), args.all.rows = rows.count, args.all.width = rows.width;
  args.all.part_count = static_cast<int64_t>(weights.size());
  args.outputs = unpack_parts(device, weights, layouts, outputs, rows.width, args.all.parts, groups);
  OptionalTensor added;
  if (bias.has_value()) {
    device.require(*bias, x.scalar_type(), {groups, args.outputs});
    added = packed(*bias);
  }
  args.all.bias = added ? added->data_ptr() : nullptr;
  Tensor out = torch::stable::new_empty(x, {rows.count, args.outputs}, x.scalar_type());
  args.all.out = {out.data_ptr(), args.outputs};
  args.all.quantized.blocks = (rows.width + QuantizedLayout::kBlock - 1) / QuantizedLayout::kBlock;
  const int64_t bytes = args.all.quantized.bytes(QuantizedGroupedLinearArgs::slots(rows.count, groups));
  const Tensor scratch = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  args.all.quantized.data = static_cast<QuantizedBlock*>(scratch.data_ptr());
  launch(PDK_DEVICE::quantized_grouped_linear, args);
  return out;
}

PDK_IMPL("grouped_linear", grouped_linear)
PDK_IMPL("quantized_grouped_linear", quantized_grouped_linear)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
