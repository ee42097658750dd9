// All layers of a transformer over new rows of a cache: see csrc/ops/transformer_layers.h.
#pragma once

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "quantized_linear.h"
#include "transformer_ops.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/transformer_layers.h"

namespace pdkernels::PDK_DEVICE::bindings {

// LayerParameters and LayersArguments of pdkernels/models/architectures/whole_step.py.
struct ParameterInputs {
  std::vector<OptionalTensor> tensors;    // of each layer, as ParameterReader reads them
  std::vector<int64_t> parts;             // of each matrix, 0 for one that is not quantised
  std::vector<int64_t> layouts, outputs;  // of each part
  std::vector<int64_t> mixtures;          // the layers with experts in place of an MLP
  auto fields() const { return std::tie(tensors, parts, layouts, outputs, mixtures); }
};

struct LayersInputs {
  Tensor x;  // (batch, rows, width)
  ParameterInputs parameters;
  Written k_cache, v_cache;  // all layers
  Tensor lengths;
  OptionalTensor counts, cu_seqlens, block_table;  // with cu_seqlens x is (1, rows, width), the rows of all sequences
  int64_t longest;                                 // most rows of a sequence, those of the plan
  int64_t heads;                                   // of q
  Tensor cos, sin, positions;
  bool interleaved;
  PlanInputs plan;
  double scale, eps;
  RoutingInputs routing;
  std::vector<OptionalTensor> starts;  // of each layer, or none at all
  auto fields() const {
    return std::tie(x, parameters, k_cache, v_cache, lengths, counts, cu_seqlens, block_table, longest, heads, cos, sin,
                    positions, interleaved, plan, scale, eps, routing, starts);
  }
};

// Reads parameters one after the other, in the order of NAMES, or EXPERT_NAMES, in whole_step.py.
class ParameterReader {
 public:
  ParameterReader(const ParameterInputs& in, const RoutingInputs& routing, const Tensor& x)
      : in_(in), routing_(routing), device_(x), dtype_(x.scalar_type()), width_(x.size(2)) {}

  LayerArgs layer(int64_t heads, int64_t kv_heads, int64_t head_dim, bool with_experts) {
    LayerArgs args;
    args.attention_norm = vector(width_);
    args.qkv = matrix(width_);
    args.q_norm = optional_vector(head_dim), args.k_norm = optional_vector(head_dim);
    args.output = matrix(heads * head_dim);
    args.mlp_norm = vector(width_);
    PDK_CHECK(args.qkv.outputs == (heads + 2 * kv_heads) * head_dim && args.output.outputs == width_);
    PDK_CHECK((args.q_norm == nullptr) == (args.k_norm == nullptr));
    if (with_experts) {
      args.mlp = mixture();
    } else {
      args.mlp = mlp(true);
    }
    return args;
  }
  bool done() const { return at_ == in_.tensors.size(); }

 private:
  // The next matrix's parts, none of one that is not quantised.
  struct Parts {
    Tensors weights;
    std::vector<int64_t> layouts, outputs;
  };

  MixtureMlp mixture() {
    MixtureMlp mixture;
    Experts& experts = mixture.experts;
    const Tensor weight = dense(next());
    OptionalTensor bias = next();
    if (bias.has_value()) bias = held(torch::stable::to(*bias, ScalarType::Float));
    experts.router = unpack_router(device_, dtype_, width_, routing_, weight, bias);
    experts.gate_up = experts_matrix(width_, experts.router.experts());
    experts.down = experts_matrix(experts.inner(), experts.router.experts());
    PDK_CHECK(experts.gate_up.outputs % 2 == 0 && experts.down.outputs == width_);
    if (peek().has_value()) {
      mixture.shared = mlp(false);
    } else {
      PDK_CHECK(!next().has_value() && !next().has_value());
      matrix_ += 2;
    }
    return mixture;
  }
  Mlp mlp(bool with_biases) {
    Mlp mlp;
    mlp.gate_up = matrix(width_, with_biases), mlp.down = matrix(mlp.inner(), with_biases);
    PDK_CHECK(mlp.gate_up.outputs % 2 == 0 && mlp.down.outputs == width_);
    return mlp;
  }
  // A matrix, and its bias if such matrices have one.
  LayerMatrix matrix(int64_t width, bool with_bias = true) {
    const Parts parts = next_parts();
    if (parts.weights.empty()) {
      const Tensor weight = dense(next());
      PDK_CHECK(weight.dim() == 2);
      LinearArgs args = unpack_matrix(device_, dtype_, width, weight, width);
      args.bias = with_bias ? bias(args.outputs) : nullptr;
      return {args, args.outputs};
    }
    QuantizedLinearArgs args = unpack_matrix(device_, dtype_, width, parts.weights, parts.layouts, parts.outputs);
    const int64_t outputs = args.outputs();
    args.bias = with_bias ? bias(outputs) : nullptr;
    return {args, outputs};
  }
  ExpertMatrix experts_matrix(int64_t width, int64_t experts) {
    const Parts parts = next_parts();
    if (!parts.weights.empty()) {
      return unpack_experts(device_, dtype_, width, parts.weights, parts.layouts, parts.outputs, experts);
    }
    const ExpertMatrix matrix = unpack_experts(device_, dtype_, width, dense(next()));
    PDK_CHECK(matrix.experts == experts);
    return matrix;
  }
  void* vector(int64_t size) {
    const Tensor values = dense(next());
    device_.require(values, dtype_, {size});
    return values.data_ptr();
  }
  void* optional_vector(int64_t size) { return peek().has_value() ? vector(size) : (next(), nullptr); }
  const void* bias(int64_t size) {
    const void* values;
    if (const OptionalTensor bias = unpack_bias(device_, dtype_, next(), {size}, values)) held(*bias);
    return values;
  }
  // Keeps the memory of a tensor that may be a copy.
  const Tensor& held(const Tensor& t) { return held_.emplace_back(packed(t)); }

  Parts next_parts() {
    const int64_t count = next_of(in_.parts, matrix_++);
    PDK_CHECK(count >= 0);
    Parts parts;
    for (int64_t i = 0; i < count; ++i, ++part_) {
      parts.weights.push_back(dense(next()));
      parts.layouts.push_back(next_of(in_.layouts, part_)), parts.outputs.push_back(next_of(in_.outputs, part_));
    }
    return parts;
  }
  const OptionalTensor& peek() const {
    PDK_CHECK(at_ < in_.tensors.size());
    return in_.tensors[at_];
  }
  const OptionalTensor& next() { return peek(), in_.tensors[at_++]; }
  // Copying parameters in every call would cost more than this op saves.
  static const Tensor& dense(const OptionalTensor& t) {
    PDK_CHECK(t.has_value() && t->is_contiguous());
    return *t;
  }
  static int64_t next_of(const std::vector<int64_t>& numbers, size_t at) {
    PDK_CHECK(at < numbers.size());
    return numbers[at];
  }

  const ParameterInputs& in_;
  const RoutingInputs& routing_;
  SameDevice device_;
  ScalarType dtype_;
  int64_t width_;
  size_t at_ = 0, matrix_ = 0, part_ = 0;
  Tensors held_;
};

// What attention takes in all layers, with the caches of the first.
inline void unpack_attention(const LayersInputs& in, TransformerLayersArgs& args) {
  const SameDevice device(in.x);
  SpeculativeArgs& attention = args.attention;
  const ScalarType dtype = in.x.scalar_type();
  attention.codes = in.k_cache.scalar_type() == ScalarType::Char;
  attention.element = row_element(dtype), attention.batch = in.lengths.size(0);
  attention.q_len = attention.kv_len = in.longest, attention.lse_stride = in.x.size(1);
  if (in.cu_seqlens.has_value()) {
    PDK_CHECK(in.x.size(0) == 1);
    attention.row_begins = index_view(device, in.cu_seqlens, 1, attention.batch + 1);
  } else {
    PDK_CHECK(in.x.size(0) == attention.batch && in.longest == in.x.size(1));
  }
  attention.q_heads = in.heads, attention.kv_heads = in.k_cache.size(3);
  attention.head_dim = in.k_cache.size(4) - (attention.codes ? static_cast<int64_t>(sizeof(float)) : 0);
  attention.block_q = in.plan.block_q, attention.block_k = in.plan.block_k;
  attention.scale = static_cast<float>(in.scale), attention.sinks = nullptr, attention.sinks_stride = 0;
  require_sizes(attention);
  unpack_plan(device, in.plan, attention);
  unpack_prefix(device, dtype, torch::stable::select(in.k_cache, 0, 0), torch::stable::select(in.v_cache, 0, 0),
                in.lengths, in.block_table, attention);
  attention.op = "speculative_attention_append_", attention.append_rows = attention.q_len;
  attention.counts = index_view(device, in.counts, 1, attention.batch);
  args.k_cache_stride = in.k_cache.stride(0) * static_cast<int64_t>(in.k_cache.element_size());
  args.v_cache_stride = in.v_cache.stride(0) * static_cast<int64_t>(in.v_cache.element_size());
  args.rope.batch = args.entries(), args.rope.rows = args.entry_rows(), args.rope.head_dim = attention.head_dim;
  unpack_rotation(device, in.cos, in.sin, in.positions, in.interleaved, args.rope);
}

// The residual, and what the last layer adds to it.
inline std::tuple<Tensor, Tensor> transformer_layers(const LayersInputs& in) {
  PDK_CHECK(in.x.dim() == 3 && in.x.is_contiguous() && in.x.numel() > 0 && in.eps >= 0);
  PDK_CHECK(in.k_cache.dim() == 5 && in.v_cache.dim() == 5 && in.lengths.dim() == 1);
  const Launch launch(in.x);
  TransformerLayersArgs args;
  const int64_t layers = in.k_cache.size(0);
  PDK_CHECK(layers > 0 && in.v_cache.size(0) == layers);
  unpack_attention(in, args);
  args.width = in.x.size(2), args.eps = static_cast<float>(in.eps);
  std::vector<bool> with_experts(layers);
  for (const int64_t layer : in.parameters.mixtures) {
    PDK_CHECK(layer >= 0 && layer < layers);
    with_experts[layer] = true;
  }
  ParameterReader reader(in.parameters, in.routing, in.x);
  args.layers.reserve(layers);
  for (int64_t i = 0; i < layers; ++i) {
    args.layers.push_back(reader.layer(in.heads, args.attention.kv_heads, args.attention.head_dim, with_experts[i]));
    PDK_CHECK((args.layers[i].q_norm == nullptr) == (args.layers[0].q_norm == nullptr));
  }
  PDK_CHECK(reader.done());
  PDK_CHECK(in.starts.empty() || static_cast<int64_t>(in.starts.size()) == layers);
  for (size_t i = 0; i < in.starts.size(); ++i) {
    SpeculativeArgs layer = args.attention;
    unpack_starts(SameDevice(in.x), in.starts[i], layer);
    args.layers[i].starts = layer.starts;
  }
  TorchRouterFunctions functions(in.x);
  args.router_functions = &functions;
  Tensor residual = torch::stable::empty_like(in.x), added = torch::stable::empty_like(in.x);
  args.x = {in.x.data_ptr(), args.width};
  args.residual = {residual.data_ptr(), args.width}, args.added = {added.data_ptr(), args.width};
  const Tensor memory = torch::stable::new_empty(in.x, {args.memory_bytes()}, ScalarType::Byte);
  args.memory = bytes(memory);
  launch(PDK_DEVICE::transformer_layers, args);
  return {residual, added};
}

PDK_IMPL("transformer_layers_", transformer_layers)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
