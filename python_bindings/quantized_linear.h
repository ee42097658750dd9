// Products with quantised matrices: see pdkernels/ops/quantized_linear.py. On CUDA they are Triton's.
#pragma once

#include "device.h"
#include "ops/quantized_linear.h"
#include "unpack_rows.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// The parts of a matrix with rows of `width`, in `parts`. The number of its outputs.
inline int64_t unpack_parts(const SameDevice& device, const Tensors& weights, const std::vector<int64_t>& layouts,
                            const std::vector<int64_t>& outputs, int64_t width, QuantizedPart* parts) {
  PDK_CHECK(!weights.empty() && weights.size() <= QuantizedLinearArgs::kMaxParts);
  PDK_CHECK(weights.size() == layouts.size() && weights.size() == outputs.size());
  int64_t total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    QuantizedPart& part = parts[i];
    PDK_CHECK(QuantizedLayout::unpack(layouts[i], part.layout) && outputs[i] >= 0);
    const int64_t bytes = QuantizedLayout::tiles(outputs[i]) * part.layout.tile_bytes(width);
    device.require(weights[i], ScalarType::Byte, {bytes});
    PDK_CHECK(weights[i].is_contiguous());
    part.data = data<uint8_t>(weights[i]), part.outputs = outputs[i];
    total += outputs[i];
  }
  return total;
}

inline Tensor quantized_linear(const Tensor& x, const Tensors& weights, const std::vector<int64_t>& layouts,
                               const std::vector<int64_t>& outputs, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  QuantizedLinearArgs args;
  args.element = row_element(x), args.rows = rows.count, args.width = rows.width;
  args.part_count = static_cast<int64_t>(weights.size());
  const int64_t total = unpack_parts(device, weights, layouts, outputs, rows.width, args.parts);
  if (bias.has_value()) device.require(*bias, x.scalar_type(), {total});
  const OptionalTensor added = bias.has_value() ? OptionalTensor(packed(*bias)) : OptionalTensor();
  Tensor out = torch::stable::new_empty(x, shape_of(x, total), x.scalar_type());
  args.quantized.blocks = (rows.width + QuantizedLayout::kBlock - 1) / QuantizedLayout::kBlock;
  Tensor quantized = torch::stable::new_empty(x, {args.quantized.bytes(args.rows)}, ScalarType::Byte);
  args.quantized.data = data<QuantizedBlock>(quantized);
  args.x = rows.view(), args.out = {out.data_ptr(), total};
  args.bias = added ? added->data_ptr() : nullptr;
  if (args.rows > 0 && total > 0) launch(PDK_VECTOR(quantized_linear), args);
  return out;
}

inline Tensor quantized_embedding(const Tensor& ids, const Tensors& weights, const std::vector<int64_t>& layouts,
                                  const std::vector<int64_t>& outputs, int64_t width, ScalarType dtype) {
  const Launch launch(ids);
  const SameDevice device(ids);
  QuantizedEmbeddingArgs args;
  const Tensor flat = packed(ids);
  args.width = width, args.part_count = static_cast<int64_t>(weights.size());
  PDK_CHECK(width >= 0);
  unpack_parts(device, weights, layouts, outputs, width, args.parts);
  args.ids = {flat.data_ptr(), 1, 0, is_wide(flat)};
  std::vector<int64_t> shape = sizes_of(ids);
  args.rows = 1;
  for (const int64_t size : shape) args.rows *= size;
  shape.push_back(width);
  Tensor out = torch::stable::new_empty(ids, shape, dtype);
  args.element = row_element(out), args.out = {out.data_ptr(), width};
  if (args.rows > 0) launch(PDK_DEVICE::quantized_embedding, args);
  return out;
}

PDK_IMPL("quantized_linear", quantized_linear)
PDK_IMPL("quantized_embedding", quantized_embedding)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
