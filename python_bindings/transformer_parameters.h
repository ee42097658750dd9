// The parameters of a transformer as its layers take them.
#pragma once

#include "experts.h"
#include "linear.h"
#include "quantized_linear.h"
#include "state_mixer.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/transformer_layers.h"

namespace pdkernels::PDK_DEVICE::bindings {

// TransformerParameters and BindArguments of pdkernels/models/architectures/whole_step.py.
struct ParameterInputs {
  std::vector<OptionalTensor> tensors;    // as ParameterReader reads them
  std::vector<int64_t> parts;             // of each matrix, 0 for one that is not quantised
  std::vector<int64_t> layouts, outputs;  // of each part
  std::vector<int64_t> mixtures;          // the layers with experts in place of an MLP
  auto fields() const { return std::tie(tensors, parts, layouts, outputs, mixtures); }
};

// PairedArguments there: how a drafter's layers begin.
struct PairedInputs {
  bool paired, x_first, normed_residual, normed_out;
  auto fields() const { return std::tie(paired, x_first, normed_residual, normed_out); }
};

// SettingsArguments there: what layers do beside their parameters.
struct SettingsInputs {
  double embedding_scale, query_factor, softcap;
  bool whole_qk_norm, gelu;
  std::vector<int64_t> windows, chunks;  // of each layer, 0: none; or empty
  auto fields() const { return std::tie(embedding_scale, query_factor, softcap, whole_qk_norm, gelu, windows, chunks); }
};

struct BindInputs {
  Tensor norm;  // before the head
  ParameterInputs parameters;
  int64_t layers, heads, kv_heads, head_dim;
  bool interleaved;
  double scale, eps;
  RoutingInputs routing;
  PairedInputs pairs;
  SettingsInputs settings;
  MixerInputs mixer;
  auto fields() const {
    return std::tie(norm, parameters, layers, heads, kv_heads, head_dim, interleaved, scale, eps, routing, pairs,
                    settings, mixer);
  }
};

// Reads parameters one after the other, in the order in which `TransformerParameters` in whole_step.py collects them.
class ParameterReader {
 public:
  ParameterReader(const ParameterInputs& in, const RoutingInputs& routing, const MixerInputs& mixers,
                  const Tensor& norm)
      : in_(in), routing_(routing), mixers_(mixers), device_(norm), dtype_(norm.scalar_type()), width_(norm.size(0)) {}

  std::optional<LayerMatrix> embedding() {
    const std::optional<LayerMatrix> table = optional_matrix(width_);
    if (!table) return table;
    const auto* numbers = std::get_if<LinearArgs>(&table->args);
    PDK_CHECK(numbers == nullptr || numbers->weight_element == numbers->element);
    return table;
  }
  std::optional<LayerMatrix> head() { return optional_matrix(width_); }
  PairedRows paired(const PairedInputs& in) {
    PairedRows pairs;
    pairs.embedding_norm = vector(width_), pairs.x_norm = vector(width_), pairs.merge = optional_matrix(2 * width_);
    PDK_CHECK(!pairs.merge || pairs.merge->outputs == width_);
    pairs.x_first = in.x_first, pairs.normed_residual = in.normed_residual;
    return pairs;
  }
  // Attention reads rows of `inputs` numbers.
  LayerArgs layer(int64_t heads, int64_t kv_heads, int64_t head_dim, bool with_experts, int64_t inputs, MixerKind mixer,
                  bool whole_qk_norm) {
    LayerArgs args;
    args.attention_norm = optional_vector(width_);
    args.qkv = matrix(inputs);
    args.q_norm = args.k_norm = nullptr;
    if (mixer == MixerKind::kAttention) {
      args.q_norm = optional_vector(whole_qk_norm ? heads * head_dim : head_dim);
      args.k_norm = optional_vector(whole_qk_norm ? kv_heads * head_dim : head_dim);
      const OptionalTensor sinks = floats(next());
      if (sinks.has_value()) {
        device_.require(*sinks, ScalarType::Float, {heads});
        args.sinks = data<float>(*sinks);
      }
      const int64_t queries = mixers_.gated ? 2 * heads : heads;
      PDK_CHECK(args.qkv.outputs == (queries + 2 * kv_heads) * head_dim);
      PDK_CHECK((args.q_norm == nullptr) == (args.k_norm == nullptr));
      PDK_CHECK(args.q_norm != nullptr || !mixers_.gated);
    } else {
      args.state = state_mixer(mixer);
      PDK_CHECK(args.qkv.outputs == args.state->inputs());
    }
    args.output = matrix(args.state ? args.state->outputs() : heads * head_dim);
    args.attention_out_norm = optional_vector(width_), args.mlp_norm = optional_vector(width_);
    args.mlp_out_norm = optional_vector(width_);
    PDK_CHECK(args.output.outputs == width_);
    if (with_experts) {
      args.mlp = mixture();
    } else {
      args.mlp = mlp(true);
    }
    return args;
  }
  bool done() const { return at_ == in_.tensors.size(); }
  // Copies of parameters, whose numbers are those of now.
  const Tensors& copies() const { return held_; }

 private:
  // The next matrix's parts, none of one that is not quantised.
  struct Parts {
    Tensors weights;
    std::vector<int64_t> layouts, outputs;
  };

  StateMixer state_mixer(MixerKind kind) {
    StateMixer mixer{};
    const Tensor conv = dense(next());
    device_.require(conv, dtype_, {-1, -1});
    mixer.conv = conv.data_ptr(), mixer.channels = conv.size(0), mixer.conv_width = conv.size(1);
    PDK_CHECK(mixer.channels > 0 && mixer.conv_width > 1);
    if (kind == MixerKind::kDelta) {
      DeltaRule delta = unpack_delta(mixers_);
      PDK_CHECK(delta.channels() == mixer.channels);
      delta.decay = vector(delta.value_heads), delta.decay_bias = vector(delta.value_heads);
      delta.value_norm = vector(delta.value_dim), mixer.delta = delta;
    }
    return mixer;
  }
  MixtureMlp mixture() {
    MixtureMlp mixture;
    Experts& experts = mixture.experts;
    const Tensor weight = dense(next());
    experts.router = unpack_router(device_, dtype_, width_, routing_, weight, floats(next()));
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
  // A matrix without a bias, or nothing in its place.
  std::optional<LayerMatrix> optional_matrix(int64_t width) {
    if (next_of(in_.parts, matrix_) > 0 || peek().has_value()) return matrix(width, false);
    next(), ++matrix_;
    return std::nullopt;
  }
  // A matrix, and its bias if such matrices have one.
  LayerMatrix matrix(int64_t width, bool with_bias = true) {
    const Parts parts = next_parts();
    if (parts.weights.empty()) {
      const Tensor weight = dense(next());
      PDK_CHECK(weight.dim() == 2);
      LinearArgs args = unpack_matrix(device_, dtype_, width, weight, width);
      args.bias = with_bias ? optional_vector(args.outputs) : nullptr;
      return {args, args.outputs};
    }
    QuantizedLinearArgs args = unpack_matrix(device_, dtype_, width, parts.weights, parts.layouts, parts.outputs);
    const int64_t outputs = args.outputs();
    args.bias = with_bias ? optional_vector(outputs) : nullptr;
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
  // In float32.
  OptionalTensor floats(const OptionalTensor& t) {
    if (!t.has_value() || (t->scalar_type() == ScalarType::Float && t->is_contiguous())) return t;
    return held_.emplace_back(packed(torch::stable::to(*t, ScalarType::Float)));
  }
  void* optional_vector(int64_t size) { return peek().has_value() ? vector(size) : (next(), nullptr); }

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
  const MixerInputs& mixers_;
  SameDevice device_;
  ScalarType dtype_;
  int64_t width_;
  size_t at_ = 0, matrix_ = 0, part_ = 0;
  Tensors held_;
};

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
