// Steps of the recurrent-depth sampler: see pdkernels/ops/recurrence.py.
#pragma once

#include "device.h"
#include "ops/recurrence.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline IndexView counts_view(const SameDevice& device, const Tensor& t, int64_t batch, int64_t rows) {
  PDK_CHECK(t.dim() == 2 && t.size(1) >= rows);
  return index_view(device, t, 2, batch);
}

inline NoiseSchedule schedule_of(const std::string& name) {
  if (name == "constant") return NoiseSchedule::kConstant;
  if (name == "linear") return NoiseSchedule::kLinear;
  if (name == "harmonic") return NoiseSchedule::kHarmonic;
  PDK_CHECK(name == "root");
  return NoiseSchedule::kRoot;
}

inline Tensor recurrence_inject(const OptionalTensor& state, const Tensor& embedding, const OptionalTensor& previous,
                                const Tensor& recurrences, const Tensor& cursor, const Tensor& width,
                                const Tensor& advance, const Tensor& steps, int64_t seed, const OptionalTensor& seeds,
                                double noise, const std::string& schedule, int64_t horizon, const std::string& mixer,
                                double momentum, double init_std, const std::string& new_state, bool damp_new) {
  const Launch launch(embedding);
  const SameDevice device(embedding);
  PDK_CHECK(embedding.dim() == 3);
  InjectArgs args;
  args.element = row_element(embedding);
  args.batch = embedding.size(0);
  args.rows = embedding.size(1);
  args.size = embedding.size(2);
  const ScalarType dtype = embedding.scalar_type();
  args.embedding = rows_view(device, embedding, dtype, args.batch, args.size);
  args.state = rows_view(device, state, dtype, args.batch, args.size);
  args.previous = rows_view(device, previous, dtype, args.batch, args.size);
  PDK_CHECK(!args.state.given() || !args.previous.given() || args.state.rows == args.previous.rows);
  Tensor out = torch::stable::new_empty(embedding, {args.batch, args.rows, 2 * args.size}, dtype);
  args.out = rows_view(device, out, dtype, args.batch, 2 * args.size);
  args.recurrences = counts_view(device, recurrences, args.batch, args.rows);
  args.cursor = index_view(device, cursor, 1, args.batch);
  args.width = index_view(device, width, 1, args.batch);
  args.advance = index_view(device, advance, 1, args.batch);
  args.steps = index_view(device, steps, 1, args.batch);
  args.seeds = {index_view(device, seeds, 1, args.batch), seed};
  const auto finite = [](double x) { return x >= 0 && x <= 3.4e38; };
  PDK_CHECK(finite(noise) && finite(init_std) && momentum >= 0 && momentum <= 1 && horizon >= 1);
  args.noise = static_cast<float>(noise);
  args.momentum = static_cast<float>(momentum);
  args.init_std = static_cast<float>(init_std);
  args.horizon = static_cast<float>(horizon);
  args.schedule = schedule_of(schedule);
  args.sqrt_mixer = is_second(mixer, "linear", "sqrt");
  args.copied = is_second(new_state, "fresh", "copied");
  args.damp_new = damp_new;
  launch(PDK_DEVICE::recurrence_inject, args);
  return out;
}

inline std::tuple<Tensor, Tensor, Tensor> recurrence_exit(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                          const OptionalTensor& previous, const Tensor& recurrences,
                                                          const Tensor& width, const Tensor& advance, double threshold,
                                                          const OptionalTensor& older,
                                                          const OptionalTensor& older_advance, int64_t min_recurrences,
                                                          double eps) {
  const Launch launch(x);
  const SameDevice device(x);
  PDK_CHECK(x.dim() == 3);
  ExitArgs args;
  args.element = row_element(x);
  args.batch = x.size(0);
  args.rows = x.size(1);
  args.size = x.size(2);
  const ScalarType dtype = x.scalar_type();
  args.x = rows_view(device, x, dtype, args.batch, args.size);
  args.residual = rows_view(device, residual, dtype, args.batch, args.size);
  PDK_CHECK(args.residual.rows == args.rows);
  args.previous = rows_view(device, previous, dtype, args.batch, args.size);
  args.older = rows_view(device, older, dtype, args.batch, args.size);
  PDK_CHECK(older.has_value() == older_advance.has_value() && (previous.has_value() || !older.has_value()));
  Tensor state = torch::stable::new_empty(x, {args.batch, args.rows, args.size}, dtype);
  Tensor distance = torch::stable::new_empty(x, {args.batch, args.rows}, ScalarType::Float);
  Tensor converged = torch::stable::new_empty(x, {args.batch, args.rows}, ScalarType::Bool);
  args.state = rows_view(device, state, dtype, args.batch, args.size);
  device.require(weight, dtype, {args.size});
  PDK_CHECK(weight.is_contiguous());
  args.weight = weight.data_ptr();
  args.recurrences = counts_view(device, recurrences, args.batch, args.rows);
  args.width = index_view(device, width, 1, args.batch);
  args.advance = index_view(device, advance, 1, args.batch);
  args.older_advance = index_view(device, older_advance, 1, args.batch);
  PDK_CHECK(min_recurrences >= 1 && eps >= 0 && threshold == threshold);
  args.min_recurrences = min_recurrences;
  args.threshold = threshold;
  args.eps = static_cast<float>(eps);
  args.distance = data<float>(distance), args.converged = data<bool>(converged);
  launch(PDK_DEVICE::recurrence_exit, args);
  return {state, distance, converged};
}

inline void recurrence_advance(Tensor& tokens, const Tensor& predictions, Tensor& recurrences, Tensor& unchanged_steps,
                               Tensor& width, Tensor& cursor, Tensor& advance, Tensor& steps, Tensor& remaining,
                               const OptionalTensor& converged, int64_t inner_recurrence, int64_t max_wavefront,
                               int64_t max_recurrences, int64_t stability, const std::string& rule, int64_t headway,
                               const OptionalTensor& filler, const OptionalTensor& end_tokens, bool keep_changed,
                               bool keep_last) {
  const Launch launch(tokens);
  PDK_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && predictions.dim() == 2);
  const SameDevice device(tokens);
  AdvanceArgs args;
  args.batch = tokens.size(0);
  args.capacity = tokens.size(1) - 1;
  args.rows = predictions.size(1);
  PDK_CHECK(args.rows <= args.capacity);
  const auto table = [&](const Tensor& t, int64_t columns) {
    PDK_CHECK(has_shape(t, {args.batch, columns}));
    return index_view(device, t, 2, args.batch);
  };
  args.tokens = table(tokens, args.capacity + 1);
  args.predictions = index_view(device, predictions, 2, args.batch);
  args.recurrences = table(recurrences, args.capacity);
  args.unchanged_steps = table(unchanged_steps, args.capacity);
  args.width = index_view(device, width, 1, args.batch);
  args.cursor = index_view(device, cursor, 1, args.batch);
  args.advance = index_view(device, advance, 1, args.batch);
  args.steps = index_view(device, steps, 1, args.batch);
  args.remaining = index_view(device, remaining, 1, args.batch);
  if (converged.has_value()) {
    device.require(*converged, ScalarType::Bool, {args.batch, args.rows});
    args.converged = data<bool>(*converged);
    args.converged_stride0 = converged->stride(0);
    args.converged_stride1 = converged->stride(1);
  }
  PDK_CHECK(inner_recurrence >= 1 && inner_recurrence <= 0x7FFFFFFF && headway >= 1 && max_recurrences >= 0 &&
            stability >= 0);
  PDK_CHECK(max_wavefront >= 0 && max_wavefront <= args.capacity);
  args.inner_recurrence = inner_recurrence;
  args.max_wavefront = max_wavefront > 0 ? max_wavefront : args.capacity;
  args.max_recurrences = max_recurrences;
  args.stability = stability;
  args.headway =
      headway <= args.capacity ? headway : args.capacity + 1;  // no wave is wider than that, and sums stay small
  args.last = is_second(rule, "prefix", "last");
  args.keep_changed = keep_changed;
  args.keep_last = keep_last;
  args.filler = index_table(device, filler, args.batch, headway - 1);
  args.num_end_tokens = end_tokens.has_value() ? end_tokens->size(0) : 0;
  args.end_tokens = index_view(device, end_tokens, 1, args.num_end_tokens);
  launch(PDK_DEVICE::recurrence_advance, args);
}

PDK_IMPL("recurrence_inject", recurrence_inject)
PDK_IMPL("recurrence_exit", recurrence_exit)
PDK_IMPL("recurrence_advance_", recurrence_advance)

}  // namespace pdkernels::PDK_DEVICE::bindings
