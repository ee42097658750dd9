// Layers with a state in a model whose forward is one op, and what they compute between other kernels: see
// pdkernels/models/architectures/hybrid_step.py and mixer_ops.py there.
#pragma once

#include "recurrent_state.h"
#include "unpack_rows.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/transformer_layers.h"

namespace pdkernels::PDK_DEVICE::bindings {

// MixerArguments of pdkernels/models/architectures/whole_step.py.
struct MixerInputs {
  std::vector<int64_t> mixers;  // of each layer; empty: all have attention
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t rotary_dim;  // 0: all of a head is rotated
  bool gated, centred, tiled, plain_decay;
  double l2norm_eps;
  auto fields() const {
    return std::tie(mixers, key_heads, value_heads, key_dim, value_dim, rotary_dim, gated, centred, tiled, plain_decay,
                    l2norm_eps);
  }
};

// In the order of NAMES in hybrid_step.py.
enum class MixerKind : int64_t { kAttention, kConvolution, kDelta };

inline MixerKind mixer_of(const MixerInputs& in, int64_t layer) {
  if (in.mixers.empty()) return MixerKind::kAttention;
  const int64_t kind = in.mixers[layer];
  PDK_CHECK(kind >= 0 && kind <= static_cast<int64_t>(MixerKind::kDelta));
  return static_cast<MixerKind>(kind);
}

inline DeltaRule unpack_delta(const MixerInputs& in) {
  DeltaRule delta{};
  delta.key_heads = in.key_heads, delta.value_heads = in.value_heads;
  delta.key_dim = in.key_dim, delta.value_dim = in.value_dim;
  delta.tiled = in.tiled, delta.plain_decay = in.plain_decay, delta.eps = static_cast<float>(in.l2norm_eps);
  PDK_CHECK(in.key_heads > 0 && in.value_heads > 0 && in.value_heads % in.key_heads == 0 && in.l2norm_eps >= 0);
  PDK_CHECK(in.key_dim > 0 && in.value_dim > 0);
  return delta;
}

// StateStepArguments there: what a step does to all states.
struct StateStepInputs {
  OptionalTensor pending_index, parents, state_counts;
  std::optional<int64_t> keep;
  auto fields() const { return std::tie(pending_index, parents, state_counts, keep); }
};

// The states of a forward's layers.
class StatesReader {
 public:
  StatesReader(const SameDevice& device, ScalarType dtype, const Tensor& lengths, int64_t rows, const Tensors& states,
               const Tensors& pending, const OptionalTensor& state_lengths, const StateStepInputs& in)
      : device_(device), dtype_(dtype), states_(states), pending_(pending), state_lengths_(state_lengths) {
    batch_ = step_.batch = step_.cache_size = lengths.size(0), step_.rows = rows;
    step_.keep = in.keep.value_or(-1);
    PDK_CHECK(!pending.empty() && pending[0].dim() > 1 && state_lengths.has_value());
    most_ = step_.max_pending = pending[0].size(1);
    PDK_CHECK(!in.keep.has_value() || (*in.keep >= 0 && *in.keep <= most_));
    PDK_CHECK(in.keep.has_value() || in.state_counts.has_value() || rows <= most_);
    step_.lengths = index_view(device, lengths, 1, batch_);
    step_.counts = index_view(device, in.state_counts, 1, batch_);
    step_.pending_index = index_table(device, in.pending_index, batch_, most_);
    step_.parents = index_table(device, in.parents, batch_, rows);
    PDK_CHECK(state_lengths->dim() == 2 && state_lengths->size(0) == static_cast<int64_t>(states.size()));
    PDK_CHECK(state_lengths->size(1) == batch_);
    device.require(*state_lengths);
  }

  // Those of the next layer.
  MixerStates next(const StateMixer& mixer) {
    MixerStates found{};
    const int64_t channels = mixer.channels;
    static_cast<StateStep&>(found.conv) = step("short_conv_");
    found.conv.state = rows_of(next_state(dtype_, {batch_, mixer.conv_width - 1, channels}));
    found.conv.x = {{}, rows_of(next_pending(dtype_, {batch_, most_, channels})), 1, channels};
    if (!mixer.delta) return found;
    const DeltaRule& delta = *mixer.delta;
    StateScanArgs& scan = found.scan;
    static_cast<StateStep&>(scan) = step("gated_delta_");
    const Tensor state = next_state(ScalarType::Float, {batch_, delta.value_heads, delta.key_dim, delta.value_dim});
    scan.state = data<float>(state), scan.state_row_stride = state.stride(0);
    scan.state_head_stride = state.stride(1), scan.state_key_stride = state.stride(2);
    const auto kept = [&](ScalarType dtype, int64_t heads, int64_t width) -> StateInput {
      const Tensor rows = next_pending(dtype, {batch_, most_, heads, width});
      return {{}, {rows.data_ptr(), row_element(rows), rows.stride(0), rows.stride(1), rows.stride(2)}, heads, width};
    };
    scan.k = kept(dtype_, delta.read_heads(), delta.key_dim);
    scan.v = kept(ScalarType::Float, delta.value_heads, delta.value_dim);
    const Tensor gates = next_pending(dtype_, {batch_, most_, delta.value_heads});
    scan.gate = {{}, {gates.data_ptr(), row_element(gates), gates.stride(0), gates.stride(1), 1}, delta.value_heads, 1};
    return found;
  }
  bool done() const { return state_ == states_.size() && row_ == pending_.size(); }

 private:
  // With the lengths of the state that is next.
  StateStep step(const char* op) const {
    StateStep found = step_;
    const Tensor& t = *state_lengths_;
    char* own = bytes(t) + static_cast<int64_t>(state_) * t.stride(0) * static_cast<int64_t>(t.element_size());
    found.op = op, found.state_lengths = {own, t.stride(1), 0, is_wide(t)};
    return found;
  }
  const Tensor& next_state(ScalarType dtype, std::initializer_list<int64_t> sizes) {
    PDK_CHECK(state_ < states_.size());
    return checked(states_[state_++], dtype, sizes);
  }
  const Tensor& next_pending(ScalarType dtype, std::initializer_list<int64_t> sizes) {
    PDK_CHECK(row_ < pending_.size());
    return checked(pending_[row_++], dtype, sizes);
  }
  const Tensor& checked(const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> sizes) const {
    device_.require(t, dtype, sizes);
    PDK_CHECK(t.is_contiguous());
    return t;
  }
  static InputView rows_of(const Tensor& t) { return {t.data_ptr(), row_element(t), t.stride(0), t.stride(1), 0}; }

  SameDevice device_;
  ScalarType dtype_;
  const Tensors &states_, &pending_;
  const OptionalTensor& state_lengths_;
  StateStep step_{};
  int64_t batch_, most_;
  size_t state_ = 0, row_ = 0;
};

// GateArguments of mixer_ops.py: rows of groups, (rows, groups, width).
struct GateInputs {
  Tensor x, gate;
  std::string form;
  auto fields() const { return std::tie(x, gate, form); }
};

inline std::tuple<Tensor> gated_rows(const GateInputs& in) {
  const Launch launch(in.x);
  const SameDevice device(in.x);
  GatedRowsArgs args;
  PDK_CHECK(in.x.dim() == 3);
  args.rows = in.x.size(0), args.groups = in.x.size(1), args.width = in.x.size(2);
  const auto view = [&](const Tensor& t) -> GroupsView {
    device.require(t, in.x.scalar_type(), {args.rows, args.groups, args.width});
    PDK_CHECK(args.width <= 1 || t.stride(2) == 1);
    return {t.data_ptr(), t.stride(0), t.stride(1)};
  };
  args.element = row_element(in.x), args.x = view(in.x), args.gate = view(in.gate);
  PDK_CHECK(in.form == "none" || in.form == "sigmoid" || in.form == "silu");
  args.form = in.form == "none" ? GateForm::kPlain : in.form == "sigmoid" ? GateForm::kSigmoid : GateForm::kSilu;
  Tensor out = torch::stable::new_empty(in.x, {args.rows, args.groups, args.width}, in.x.scalar_type());
  args.out = view(out);
  if (args.rows * args.groups * args.width > 0) launch(PDK_VECTOR(gated_rows), args);
  return {out};
}

struct DecayInputs {
  Tensor decay;
  auto fields() const { return std::tie(decay); }
};

inline std::tuple<Tensor> decay_factors(const DecayInputs& in) {
  const Launch launch(in.decay);
  PDK_CHECK(in.decay.dim() == 1 && in.decay.is_contiguous());
  Tensor out = torch::stable::new_empty(in.decay, sizes_of(in.decay), ScalarType::Float);
  launch(PDK_VECTOR(decay_factors),
         DecayFactorsArgs{row_element(in.decay), in.decay.data_ptr(), data<float>(out), in.decay.size(0)});
  return {out};
}

// NormArguments there.
struct CentredNormInputs {
  Tensor x, weight;
  double eps;
  auto fields() const { return std::tie(x, weight, eps); }
};

inline std::tuple<Tensor> centred_rms_norm(const CentredNormInputs& in) {
  const Launch launch(in.x);
  const FlatRows rows(in.x);
  SameDevice(in.x).require(in.weight, in.x.scalar_type(), {rows.width});
  PDK_CHECK(in.eps >= 0 && in.weight.is_contiguous());
  Tensor y = torch::stable::new_empty(in.x, shape_of(in.x, rows.width), in.x.scalar_type());
  AddRmsNormArgs args;
  args.element = row_element(in.x), args.x = rows.view(), args.y = {y.data_ptr(), rows.width};
  args.residual = args.next = {}, args.weight = in.weight.data_ptr(), args.next_weight = nullptr;
  args.rows = rows.count, args.width = rows.width, args.eps = static_cast<float>(in.eps);
  if (args.rows > 0 && args.width > 0) launch(PDK_VECTOR(centred_rms_norm), args);
  return {y};
}

PDK_IMPL("gated_rows", gated_rows)
PDK_IMPL("decay_factors", decay_factors)
PDK_IMPL("centred_rms_norm", centred_rms_norm)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
