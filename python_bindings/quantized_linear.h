// Products with quantised matrices: see pdkernels/ops/quantized_linear.py. On CUDA the embedding is Triton's.
#pragma once

#include "device.h"
#include "ops/quantized_linear.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

// The parts of a matrix with rows of `width`, in `parts`, or of so many matrices. The number of its outputs.
inline int64_t unpack_parts(const SameDevice& device, const Tensors& weights, const std::vector<int64_t>& layouts,
                            const std::vector<int64_t>& outputs, int64_t width, QuantizedPart* parts,
                            int64_t matrices = 1) {
  PDK_CHECK(!weights.empty() && weights.size() <= QuantizedLinearArgs::kMaxParts);
  PDK_CHECK(weights.size() == layouts.size() && weights.size() == outputs.size());
  int64_t total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    QuantizedPart& part = parts[i];
    PDK_CHECK(QuantizedLayout::unpack(layouts[i], part.layout) && outputs[i] >= 0);
    const int64_t bytes = matrices * QuantizedLayout::tiles(outputs[i]) * part.layout.tile_bytes(width);
    device.require(weights[i], ScalarType::Byte, {bytes});
    PDK_CHECK(weights[i].is_contiguous());
    part.data = data<uint8_t>(weights[i]), part.outputs = outputs[i];
    total += outputs[i];
  }
  return total;
}

// A quantised matrix, or several of one shape, as products with rows of `dtype` take it; without a bias.
inline QuantizedLinearArgs unpack_matrix(const SameDevice& device, ScalarType dtype, int64_t width,
                                         const Tensors& weights, const std::vector<int64_t>& layouts,
                                         const std::vector<int64_t>& outputs, int64_t matrices = 1) {
  QuantizedLinearArgs args;
  args.element = row_element(dtype), args.width = width, args.part_count = static_cast<int64_t>(weights.size());
  unpack_parts(device, weights, layouts, outputs, width, args.parts, matrices);
  args.quantized.blocks = (width + QuantizedLayout::kBlock - 1) / QuantizedLayout::kBlock, args.bias = nullptr;
  return args;
}

inline Tensor quantized_linear(const Tensor& x, const Tensors& weights, const std::vector<int64_t>& layouts,
                               const std::vector<int64_t>& outputs, const OptionalTensor& bias) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  QuantizedLinearArgs args = unpack_matrix(device, x.scalar_type(), rows.width, weights, layouts, outputs);
  const int64_t total = args.outputs();
  const OptionalTensor held = unpack_bias(device, x.scalar_type(), bias, {total}, args.bias);
  Tensor out = torch::stable::new_empty(x, shape_of(x, total), x.scalar_type());
  int64_t bytes = args.scratch_bytes(rows.count);
#ifdef PDKERNELS_DEVICE_CUDA
  bytes += args.padded_bytes(rows.view(), rows.count);
#endif
  const Tensor scratch = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  args.set_rows(rows.view(), rows.count, out.data_ptr(), scratch.data_ptr());
  if (args.rows > 0 && total > 0) launch(PDK_VECTOR(quantized_linear), args);
  return out;
}

PDK_IMPL("quantized_linear", quantized_linear)

#ifndef PDKERNELS_DEVICE_CUDA

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

PDK_IMPL("quantized_embedding", quantized_embedding)

#endif

}  // namespace pdkernels::PDK_DEVICE::bindings
