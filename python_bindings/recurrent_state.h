// Layers with a state: see pdkernels/ops/recurrent_state.py. On CUDA they are Triton's. The arguments of steps are
// structures (pdkernels/_recurrent_state.py has the same).
#pragma once

#include <cmath>

#include "device.h"
#include "ops/recurrent_state.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// What the steps of all layers share, but for state_lengths, which comes earlier in a schema.
struct StepInputs {
  Tensor lengths;
  OptionalTensor counts, cache_rows, pending_index, parents;
  std::optional<int64_t> keep;
  auto fields() const { return std::tie(lengths, counts, cache_rows, pending_index, parents, keep); }
};

struct DeltaInputs {
  Written state, state_lengths, pending_k, pending_update, pending_g;
  Tensor q, k, v, g, beta;
  StepInputs step;
  std::optional<double> scale, l2norm_eps;
  OptionalTensor A, dt_bias;
  bool sigmoid_beta;
  auto fields() const {
    return std::tie(state, state_lengths, pending_k, pending_update, pending_g, q, k, v, g, beta, step, scale,
                    l2norm_eps, A, dt_bias, sigmoid_beta);
  }
};

struct SelectiveInputs {
  Written state, state_lengths, pending_x, pending_B;
  OptionalWritten pending_dt;
  Tensor x, B, C;
  OptionalTensor dt;
  Tensor A;
  StepInputs step;
  OptionalTensor D, dt_bias;
  bool dt_softplus;
  double dt_min;
  std::optional<double> dt_max;
  auto fields() const {
    return std::tie(state, state_lengths, pending_x, pending_B, pending_dt, x, B, C, dt, A, step, D, dt_bias,
                    dt_softplus, dt_min, dt_max);
  }
};

struct ConvInputs {
  Written state, state_lengths, pending;
  Tensor x, weight;
  StepInputs step;
  OptionalTensor bias;
  std::string activation;
  auto fields() const { return std::tie(state, state_lengths, pending, x, weight, step, bias, activation); }
};

// `new_rows`: (batch, rows, ..); `pending`: (cache rows, max_pending, ..).
inline void unpack_step(StateStep& step, const char* op, const SameDevice& device, const Tensor& new_rows,
                        const Tensor& pending, const Tensor& state_lengths, const StepInputs& in) {
  const auto& [lengths, counts, cache_rows, pending_index, parents, keep] = in;
  PDK_CHECK(lengths.dim() == 1 && new_rows.dim() > 2 && pending.dim() > 2);
  step.op = op;
  step.batch = new_rows.size(0), step.rows = new_rows.size(1);
  step.cache_size = lengths.size(0), step.max_pending = pending.size(1);
  step.keep = keep.value_or(-1);
  PDK_CHECK(cache_rows.has_value() || step.batch == step.cache_size);
  PDK_CHECK(!keep.has_value() || (*keep >= 0 && *keep <= step.max_pending));
  PDK_CHECK(keep.has_value() || counts.has_value() || step.rows <= step.max_pending);
  step.lengths = index_view(device, lengths, 1, step.cache_size);
  step.state_lengths = index_view(device, state_lengths, 1, step.cache_size);
  step.counts = index_view(device, counts, 1, step.batch);
  step.cache_rows = index_view(device, cache_rows, 1, step.batch);
  step.pending_index = index_table(device, pending_index, step.cache_size, step.max_pending);
  step.parents = index_table(device, parents, step.batch, step.rows);
}

// (size0, size1, heads, width), or (size0, size1, heads) for a width of -1.
inline InputView input_view(const SameDevice& device, const Tensor& t, int64_t size0, int64_t size1, int64_t heads,
                            int64_t width) {
  device.require(t);
  PDK_CHECK(width < 0 ? has_shape(t, {size0, size1, heads}) : has_shape(t, {size0, size1, heads, width}));
  PDK_CHECK(width <= 1 || t.stride(3) == 1);
  return {t.data_ptr(), row_element(t), t.stride(0), t.stride(1), t.stride(2)};
}

// `kept`: whether it is what becomes the pending one, so of the same type.
inline StateInput state_input(const SameDevice& device, const StateStep& step, const Tensor& fresh,
                              const Tensor& pending, int64_t heads, int64_t width, bool kept = true) {
  PDK_CHECK(!kept || fresh.scalar_type() == pending.scalar_type());
  return {input_view(device, fresh, step.batch, step.rows, heads, width),
          input_view(device, pending, step.cache_size, step.max_pending, heads, width), heads, width < 0 ? 1 : width};
}

// A number of each head.
inline InputView per_head(const SameDevice& device, const OptionalTensor& t, int64_t heads) {
  if (!t.has_value()) return {};
  device.require(*t);
  PDK_CHECK(has_shape(*t, {heads}));
  return {t->data_ptr(), row_element(*t), 0, 0, t->stride(0)};
}

inline void unpack_state(StateScanArgs& args, const SameDevice& device, const Tensor& state) {
  PDK_CHECK(args.keys > 0 && args.values > 0 && args.key_heads > 0);
  PDK_CHECK(args.heads > 0 && args.heads % args.key_heads == 0);
  device.require(state, ScalarType::Float, {args.cache_size, args.heads, args.keys, args.values});
  PDK_CHECK(args.values <= 1 || state.stride(3) == 1);
  args.state = data<float>(state);
  args.state_row_stride = state.stride(0), args.state_head_stride = state.stride(1);
  args.state_key_stride = state.stride(2);
}

inline std::tuple<Tensor> run_scan(const Launch& launch, StateScanArgs& args, const Tensor& v) {
  Tensor out = torch::stable::new_empty(v, sizes_of(v), v.scalar_type());
  args.out = {out.data_ptr(), args.element, out.stride(0), out.stride(1), out.stride(2)};
  launch(PDK_DEVICE::state_scan, args);
  return {out};
}

inline std::tuple<Tensor> gated_delta(const DeltaInputs& in) {
  const Tensor &k = in.k, &v = in.v;
  const Launch launch(v);
  const SameDevice device(v);
  StateScanArgs args{};
  unpack_step(args, "gated_delta_", device, v, in.pending_update, in.state_lengths, in.step);
  PDK_CHECK(k.dim() == 4 && v.dim() == 4 && (in.A.has_value() || !in.dt_bias.has_value()));
  args.delta = true, args.element = row_element(v);
  args.key_heads = k.size(2), args.keys = k.size(3), args.heads = v.size(2), args.values = v.size(3);
  unpack_state(args, device, in.state);
  PDK_CHECK(in.q.scalar_type() == v.scalar_type() && k.scalar_type() == v.scalar_type());
  PDK_CHECK(in.pending_update.scalar_type() == ScalarType::Float);
  args.q = input_view(device, in.q, args.batch, args.rows, args.key_heads, args.keys);
  args.k = state_input(device, args, k, in.pending_k, args.key_heads, args.keys);
  args.v = state_input(device, args, v, in.pending_update, args.heads, args.values, false);
  args.gate = state_input(device, args, in.g, in.pending_g, args.heads, -1);
  args.beta = input_view(device, in.beta, args.batch, args.rows, args.heads, -1);
  args.A = per_head(device, in.A, args.heads), args.dt_bias = per_head(device, in.dt_bias, args.heads);
  PDK_CHECK(!in.l2norm_eps.has_value() || *in.l2norm_eps >= 0);
  args.scale = static_cast<float>(in.scale.value_or(1 / std::sqrt(static_cast<double>(args.keys))));
  args.eps = static_cast<float>(in.l2norm_eps.value_or(-1));
  args.sigmoid = in.sigmoid_beta;
  return run_scan(launch, args, v);
}

inline std::tuple<Tensor> selective_state(const SelectiveInputs& in) {
  const Tensor &x = in.x, &B = in.B;
  const OptionalTensor& dt = in.dt;
  const Launch launch(x);
  const SameDevice device(x);
  StateScanArgs args{};
  unpack_step(args, "selective_state_", device, x, in.pending_x, in.state_lengths, in.step);
  PDK_CHECK(x.dim() == 4 && B.dim() == 4 && dt.has_value() == in.pending_dt.has_value());
  PDK_CHECK(dt.has_value() || !(in.dt_bias.has_value() || in.dt_softplus));
  args.delta = false, args.element = row_element(x);
  args.key_heads = B.size(2), args.keys = B.size(3), args.heads = x.size(2), args.values = x.size(3);
  unpack_state(args, device, in.state);
  PDK_CHECK(B.scalar_type() == x.scalar_type() && in.C.scalar_type() == x.scalar_type());
  args.q = input_view(device, in.C, args.batch, args.rows, args.key_heads, args.keys);
  args.k = state_input(device, args, B, in.pending_B, args.key_heads, args.keys);
  args.v = state_input(device, args, x, in.pending_x, args.heads, args.values);
  if (dt.has_value()) args.gate = state_input(device, args, *dt, *in.pending_dt, args.heads, -1);
  args.A = per_head(device, in.A, args.heads), args.D = per_head(device, in.D, args.heads);
  args.dt_bias = per_head(device, in.dt_bias, args.heads);
  args.softplus = in.dt_softplus, args.eps = -1;
  args.dt_min = static_cast<float>(in.dt_min), args.dt_max = static_cast<float>(in.dt_max.value_or(HUGE_VAL));
  return run_scan(launch, args, x);
}

inline std::tuple<Tensor> short_conv(const ConvInputs& in) {
  const Tensor &x = in.x, &weight = in.weight;
  const Launch launch(x);
  const SameDevice device(x);
  ShortConvArgs args{};
  unpack_step(args, "short_conv_", device, x, in.pending, in.state_lengths, in.step);
  args.channels = x.size(2), args.element = row_element(x), args.silu = is_second(in.activation, "none", "silu");
  device.require(weight, x.scalar_type(), {args.channels, -1});
  args.width = weight.size(1);
  PDK_CHECK(args.channels > 0 && args.width > 0 && (args.width == 1 || weight.stride(1) == 1));
  device.require(in.state, x.scalar_type(), {args.cache_size, args.width - 1, args.channels});
  device.require(in.pending, x.scalar_type(), {args.cache_size, args.max_pending, args.channels});
  device.require(x, x.scalar_type(), {args.batch, args.rows, args.channels});
  const auto rows = [&](const Tensor& t) -> InputView {
    PDK_CHECK(t.size(2) <= 1 || t.stride(2) == 1);
    return {t.data_ptr(), args.element, t.stride(0), t.stride(1), 0};
  };
  args.state = rows(in.state), args.x = {rows(x), rows(in.pending), 1, args.channels};
  args.weight = {weight.data_ptr(), args.element, 0, 0, 0}, args.weight_stride = weight.stride(0);
  OptionalTensor packed_bias;
  if (in.bias.has_value()) {
    device.require(*in.bias, x.scalar_type(), {args.channels});
    packed_bias = packed(*in.bias);
    args.bias = {packed_bias->data_ptr(), args.element, 0, 0, 0};
  }
  Tensor out = torch::stable::new_empty(x, sizes_of(x), x.scalar_type());
  args.out = rows(out);
  launch(PDK_DEVICE::short_conv, args);
  return {out};
}

// The state lengths of each layer: (layers, cache rows), or (cache rows,).
inline std::vector<IndexView> layer_lengths(const SameDevice& device, const Tensors& tensors, int64_t size) {
  std::vector<IndexView> layers;
  for (const Tensor& t : tensors) {
    device.require(t);
    PDK_CHECK((t.dim() == 1 || t.dim() == 2) && t.size(t.dim() - 1) == size);
    const int64_t bytes = static_cast<int64_t>(t.element_size());
    for (int64_t layer = 0; layer < (t.dim() == 2 ? t.size(0) : 1); ++layer) {
      const int64_t offset = t.dim() == 2 ? layer * t.stride(0) * bytes : 0;
      layers.push_back({::pdkernels::bindings::bytes(t) + offset, t.stride(t.dim() - 1), 0, is_wide(t)});
    }
  }
  PDK_CHECK(!layers.empty());
  return layers;
}

inline void state_commit(Tensor& lengths, Tensor& pending_index, const Tensors& state_lengths, const Tensor& counts,
                         const OptionalTensor& source_index, bool advance) {
  const Launch launch(lengths);
  const SameDevice device(lengths);
  PDK_CHECK(lengths.dim() == 1 && pending_index.dim() == 2);
  StateCommitArgs args{};
  args.batch = lengths.size(0), args.max_pending = pending_index.size(1), args.advance = advance;
  const std::vector<IndexView> layers = layer_lengths(device, state_lengths, args.batch);
  args.layers = {layers.data(), static_cast<int64_t>(layers.size())};
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.pending_index = index_view(device, pending_index, 2, args.batch);
  args.counts = index_view(device, counts, 1, args.batch);
  args.source_index = index_view(device, source_index, 2, args.batch);
  args.max_rows = source_index.has_value() ? source_index->size(1) : 0x7fffffff;
  launch(PDK_DEVICE::state_commit, args);
}

inline void state_trim(Tensor& lengths, const Tensor& new_lengths, const Tensors& state_lengths) {
  const Launch launch(lengths);
  const SameDevice device(lengths);
  PDK_CHECK(lengths.dim() == 1);
  StateTrimArgs args{};
  args.batch = lengths.size(0);
  const std::vector<IndexView> layers = layer_lengths(device, state_lengths, args.batch);
  args.layers = {layers.data(), static_cast<int64_t>(layers.size())};
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.new_lengths = index_view(device, new_lengths, 1, args.batch);
  launch(PDK_DEVICE::state_trim, args);
}

PDK_IMPL("gated_delta_", gated_delta)
PDK_IMPL("selective_state_", selective_state)
PDK_IMPL("short_conv_", short_conv)
PDK_IMPL("state_commit_", state_commit)
PDK_IMPL("state_trim_", state_trim)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
