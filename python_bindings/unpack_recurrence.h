// Tensors -> the argument structs of the recurrence ops. As in unpack.h: geometry is checked here, in short words.
#pragma once

#include "pdkernels/recurrence.h"
#include "unpack_attention.h"

#include <string>

namespace pdkernels::bindings {

inline BatchedRows rows_view(const SameDevice& device, const Tensor& t, ScalarType dtype, int64_t batch, int64_t size) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == dtype, "pdkernels: rows must have one dtype");
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == batch && t.size(2) == size,
                  "pdkernels: a tensor of rows has the wrong shape");
  STD_TORCH_CHECK(size <= 1 || t.stride(2) == 1, "pdkernels: the last dimension must be contiguous");
  return {t.data_ptr(), t.stride(0), t.stride(1), t.size(1)};
}

inline BatchedRows rows_view(const SameDevice& device, const OptionalTensor& t, ScalarType dtype, int64_t batch,
                             int64_t size) {
  if (!t.has_value()) return {};
  BatchedRows view = rows_view(device, *t, dtype, batch, size);
  // Given, even if it has no bytes to point to.
  static char nothing;
  if (view.data == nullptr) view.data = &nothing;
  return view;
}

inline IndexView counts_view(const SameDevice& device, const Tensor& t, int64_t batch, int64_t rows) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) >= rows, "pdkernels: recurrences must have a column a row");
  return index_view(device, t, 2, batch);
}

inline NoiseSchedule schedule_of(const std::string& name) {
  if (name == "constant") return NoiseSchedule::kConstant;
  if (name == "linear") return NoiseSchedule::kLinear;
  if (name == "harmonic") return NoiseSchedule::kHarmonic;
  STD_TORCH_CHECK(name == "root", "pdkernels: unknown schedule");
  return NoiseSchedule::kRoot;
}

// Whether a name is the second of two.
inline bool is_second(const std::string& name, const char* first, const char* second) {
  STD_TORCH_CHECK(name == first || name == second, "pdkernels: unknown name of an option");
  return name == second;
}

inline InjectArgs inject_args(const OptionalTensor& state, const Tensor& embedding, const OptionalTensor& previous,
                              const Tensor& recurrences, const Tensor& cursor, const Tensor& width,
                              const Tensor& advance, const Tensor& steps, int64_t seed, double noise,
                              const std::string& schedule, int64_t horizon, const std::string& mixer, double momentum,
                              double init_std, const std::string& new_state, bool damp_new, const Tensor& out) {
  const SameDevice device(embedding);
  InjectArgs args;
  args.element = element_of(embedding);
  args.batch = embedding.size(0);
  args.rows = embedding.size(1);
  args.size = embedding.size(2);
  const ScalarType dtype = embedding.scalar_type();
  args.embedding = rows_view(device, embedding, dtype, args.batch, args.size);
  args.state = rows_view(device, state, dtype, args.batch, args.size);
  args.previous = rows_view(device, previous, dtype, args.batch, args.size);
  STD_TORCH_CHECK(!args.state.given() || !args.previous.given() || args.state.rows == args.previous.rows,
                  "pdkernels: previous_embedding must have the rows of state");
  args.out = rows_view(device, out, dtype, args.batch, 2 * args.size);
  args.recurrences = counts_view(device, recurrences, args.batch, args.rows);
  args.cursor = index_view(device, cursor, 1, args.batch);
  args.width = index_view(device, width, 1, args.batch);
  args.advance = index_view(device, advance, 1, args.batch);
  args.steps = index_view(device, steps, 1, args.batch);
  args.key[0] = static_cast<uint32_t>(seed);
  args.key[1] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  const auto finite = [](double x) { return x >= 0 && x <= 3.4e38; };
  STD_TORCH_CHECK(finite(noise) && finite(init_std) && momentum >= 0 && momentum <= 1 && horizon >= 1,
                  "pdkernels: an option is out of range");
  args.noise = static_cast<float>(noise);
  args.momentum = static_cast<float>(momentum);
  args.init_std = static_cast<float>(init_std);
  args.horizon = static_cast<float>(horizon);
  args.schedule = schedule_of(schedule);
  args.sqrt_mixer = is_second(mixer, "linear", "sqrt");
  args.copied = is_second(new_state, "fresh", "copied");
  args.damp_new = damp_new;
  return args;
}

inline Tensor inject_result(const Tensor& embedding) {
  STD_TORCH_CHECK(embedding.dim() == 3, "pdkernels: embedding must have 3 dimensions");
  return torch::stable::new_empty(embedding, {embedding.size(0), embedding.size(1), 2 * embedding.size(2)},
                                  embedding.scalar_type());
}

struct ExitTensors {
  Tensor state, distance, settled;

  explicit ExitTensors(const Tensor& x) {
    STD_TORCH_CHECK(x.dim() == 3, "pdkernels: x must have 3 dimensions");
    state = torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type());
    distance = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
    settled = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Bool);
  }
  std::tuple<Tensor, Tensor, Tensor> tuple() const { return {state, distance, settled}; }
};

inline ExitArgs exit_args(const Tensor& x, const Tensor& residual, const Tensor& weight, const OptionalTensor& previous,
                          const Tensor& recurrences, const Tensor& width, const Tensor& advance, double threshold,
                          const OptionalTensor& older, const OptionalTensor& older_advance, int64_t min_recurrences,
                          double eps, const ExitTensors& out) {
  const SameDevice device(x);
  ExitArgs args;
  args.element = element_of(x);
  args.batch = x.size(0);
  args.rows = x.size(1);
  args.size = x.size(2);
  const ScalarType dtype = x.scalar_type();
  args.x = rows_view(device, x, dtype, args.batch, args.size);
  args.residual = rows_view(device, residual, dtype, args.batch, args.size);
  STD_TORCH_CHECK(args.residual.rows == args.rows, "pdkernels: residual must have the shape of x");
  args.previous = rows_view(device, previous, dtype, args.batch, args.size);
  args.older = rows_view(device, older, dtype, args.batch, args.size);
  STD_TORCH_CHECK(older.has_value() == older_advance.has_value() && (previous.has_value() || !older.has_value()),
                  "pdkernels: older must come with older_advance and previous");
  args.state = rows_view(device, out.state, dtype, args.batch, args.size);
  device.require(weight);
  STD_TORCH_CHECK(
      weight.scalar_type() == dtype && weight.dim() == 1 && weight.size(0) == args.size && weight.is_contiguous(),
      "pdkernels: weight must be a contiguous vector of the size and dtype of x");
  args.weight = weight.data_ptr();
  args.recurrences = counts_view(device, recurrences, args.batch, args.rows);
  args.width = index_view(device, width, 1, args.batch);
  args.advance = index_view(device, advance, 1, args.batch);
  args.older_advance = index_view(device, older_advance, 1, args.batch);
  STD_TORCH_CHECK(min_recurrences >= 1 && eps >= 0 && threshold == threshold, "pdkernels: an option is out of range");
  args.min_recurrences = min_recurrences;
  args.threshold = threshold;
  args.eps = static_cast<float>(eps);
  args.distance = static_cast<float*>(out.distance.data_ptr());
  args.settled = static_cast<bool*>(out.settled.data_ptr());
  return args;
}

inline AdvanceArgs advance_args(const Tensor& tokens, const Tensor& predictions, const Tensor& recurrences,
                                const Tensor& stable, const Tensor& width, const Tensor& cursor, const Tensor& advance,
                                const Tensor& steps, const Tensor& remaining, const OptionalTensor& settled,
                                int64_t inner_recurrence, int64_t max_wavefront, int64_t max_recurrences,
                                int64_t stability, const std::string& rule, int64_t headway,
                                const OptionalTensor& filler, const OptionalTensor& end_tokens, bool guard,
                                bool keep_last) {
  STD_TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && predictions.dim() == 2,
                  "pdkernels: tokens must have 2 dimensions");
  const SameDevice device(tokens);
  AdvanceArgs args;
  args.batch = tokens.size(0);
  args.room = tokens.size(1) - 1;
  args.rows = predictions.size(1);
  STD_TORCH_CHECK(args.rows <= args.room, "pdkernels: predictions must have at most a column a row");
  const auto table = [&](const Tensor& t, int64_t columns) {
    const IndexView view = written_view(device, t, 2, args.batch);
    STD_TORCH_CHECK(t.size(1) == columns, "pdkernels: recurrences and stable must have one column less than tokens");
    return view;
  };
  args.tokens = table(tokens, args.room + 1);
  args.predictions = index_view(device, predictions, 2, args.batch);
  args.recurrences = table(recurrences, args.room);
  args.stable = table(stable, args.room);
  args.width = written_view(device, width, 1, args.batch);
  args.cursor = written_view(device, cursor, 1, args.batch);
  args.advance = written_view(device, advance, 1, args.batch);
  args.steps = written_view(device, steps, 1, args.batch);
  args.remaining = written_view(device, remaining, 1, args.batch);
  if (settled.has_value()) {
    device.require(*settled);
    STD_TORCH_CHECK(settled->scalar_type() == ScalarType::Bool && settled->dim() == 2 &&
                        settled->size(0) == args.batch && settled->size(1) == args.rows,
                    "pdkernels: settled must be a bool tensor of the shape of predictions");
    args.settled = static_cast<const bool*>(settled->data_ptr());
    args.settled_stride0 = settled->stride(0);
    args.settled_stride1 = settled->stride(1);
  }
  STD_TORCH_CHECK(inner_recurrence >= 1 && headway >= 1 && max_recurrences >= 0 && stability >= 0 &&
                      max_wavefront >= 0 && max_wavefront <= args.room,
                  "pdkernels: an option is out of range");
  args.inner_recurrence = inner_recurrence;
  args.max_wavefront = max_wavefront > 0 ? max_wavefront : args.room;
  args.max_recurrences = max_recurrences;
  args.stability = stability;
  args.headway = headway;
  args.last = is_second(rule, "prefix", "last");
  args.guard = guard;
  args.keep_last = keep_last;
  args.filler = index_view(device, filler, 2, args.batch);
  STD_TORCH_CHECK(!filler.has_value() || filler->size(1) == headway - 1,
                  "pdkernels: filler must have headway - 1 columns");
  args.num_end_tokens = end_tokens.has_value() ? end_tokens->size(0) : 0;
  args.end_tokens = index_view(device, end_tokens, 1, args.num_end_tokens);
  return args;
}

}  // namespace pdkernels::bindings
