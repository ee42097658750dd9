// CUDA implementations of the tensor ops, registered through torch's stable ABI. Schemas live in pdkernels/ops.
//
// The namespace and the dispatch key are macros because the tests build this very file against a CPU runtime for CUDA
// sources and register it beside the real ops.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "kernels.h"
#include "unpack.h"
#include "unpack_feature_cache.h"
#include "unpack_log_step.h"
#include "unpack_logit_divergence.h"
#include "unpack_recurrence.h"
#include "unpack_transformer_ops.h"
#include "unpack_unmask.h"

#include "unpack_token_statistics.h"

#ifndef PDKERNELS_OPS_NAMESPACE
#define PDKERNELS_OPS_NAMESPACE pdkernels
#define PDKERNELS_OPS_KEY CUDA
#endif

// Weak: a CPU build of torch lacks the symbol, and this library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using namespace pdkernels::bindings;
using Tensors = std::vector<Tensor>;

void check(cudaError_t status) {
  STD_TORCH_CHECK(status == cudaSuccess, "pdkernels: CUDA launch failed: ", cudaGetErrorString(status));
}

// Makes the tensor's device current and names its stream for as long as it lives.
class Launch {
 public:
#ifdef PDKERNELS_CUDASIM
  explicit Launch(const Tensor&) {}
#else
  explicit Launch(const Tensor& t) : guard_(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "pdkernels: this build of torch has no CUDA support");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    this->stream = static_cast<cudaStream_t>(stream);
  }
#endif
  cudaStream_t stream = nullptr;

#ifndef PDKERNELS_CUDASIM
 private:
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

void kv_append(Tensors k_cache, Tensors v_cache, Tensors k_new, Tensors v_new, Tensor lengths, OptionalTensor counts,
               OptionalTensor block_table) {
  const Launch launch(lengths);
  append(k_cache, v_cache, k_new, v_new, lengths, counts, block_table,
         [&](const pdkernels::AppendArgs& args) { check(pdkernels::cuda::kv_append(args, launch.stream)); });
}

void kv_commit(Tensors k_cache, Tensors v_cache, Tensor lengths, Tensor counts, OptionalTensor source_index,
               OptionalTensor block_table) {
  const Launch launch(lengths);
  commit(k_cache, v_cache, lengths, counts, source_index, block_table,
         [&](const pdkernels::CommitArgs& args) { check(pdkernels::cuda::kv_commit(args, launch.stream)); });
}

void kv_trim(Tensor lengths, Tensor new_lengths) {
  const Launch launch(lengths);
  trim(lengths, new_lengths, [&](const pdkernels::IndexView& old, const pdkernels::IndexView& wanted, int64_t batch) {
    check(pdkernels::cuda::kv_trim(old, wanted, batch, launch.stream));
  });
}

Verdict verify_draft(Tensor draft, Tensor predictions, OptionalTensor draft_lengths, OptionalTensor end_tokens,
                     OptionalTensor refill) {
  const Launch launch(draft);
  VerdictTensors out(draft);
  check(pdkernels::cuda::verify_draft(verify_args(draft, predictions, draft_lengths, end_tokens, refill, out),
                                      launch.stream));
  return out.tuple();
}

void log_step(Tensor log, Tensor count, Tensor more, Tensor entry, std::optional<int64_t> handle) {
  const Launch launch(entry);
  const uint64_t bits = static_cast<uint64_t>(handle.value_or(0));
  check(pdkernels::cuda::log_step(log_step_args(log, count, more, entry), handle.has_value() ? &bits : nullptr,
                                  launch.stream));
}

Tensor recurrence_inject(OptionalTensor state, Tensor embedding, OptionalTensor previous_embedding, Tensor recurrences,
                         Tensor cursor, Tensor width, Tensor advance, Tensor steps, int64_t seed, double noise,
                         std::string schedule, int64_t horizon, std::string mixer, double momentum, double init_std,
                         std::string new_state, bool damp_new) {
  const Launch launch(embedding);
  Tensor out = inject_result(embedding);
  check(pdkernels::cuda::recurrence_inject(
      inject_args(state, embedding, previous_embedding, recurrences, cursor, width, advance, steps, seed, noise,
                  schedule, horizon, mixer, momentum, init_std, new_state, damp_new, out),
      launch.stream));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> recurrence_exit(Tensor x, Tensor residual, Tensor weight, OptionalTensor previous,
                                                   Tensor recurrences, Tensor width, Tensor advance, double threshold,
                                                   OptionalTensor older, OptionalTensor older_advance,
                                                   int64_t min_recurrences, double eps) {
  const Launch launch(x);
  ExitTensors out(x);
  check(pdkernels::cuda::recurrence_exit(exit_args(x, residual, weight, previous, recurrences, width, advance,
                                                   threshold, older, older_advance, min_recurrences, eps, out),
                                         launch.stream));
  return out.tuple();
}

void recurrence_advance(Tensor tokens, Tensor predictions, Tensor recurrences, Tensor stable, Tensor width,
                        Tensor cursor, Tensor advance, Tensor steps, Tensor remaining, OptionalTensor settled,
                        int64_t inner_recurrence, int64_t max_wavefront, int64_t max_recurrences, int64_t stability,
                        std::string rule, int64_t headway, OptionalTensor filler, OptionalTensor end_tokens, bool guard,
                        bool keep_last) {
  const Launch launch(tokens);
  check(pdkernels::cuda::recurrence_advance(
      advance_args(tokens, predictions, recurrences, stable, width, cursor, advance, steps, remaining, settled,
                   inner_recurrence, max_wavefront, max_recurrences, stability, rule, headway, filler, end_tokens,
                   guard, keep_last),
      launch.stream));
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, OptionalTensor residual, OptionalTensor weight,
                                        OptionalTensor next_weight, double eps) {
  const Launch launch(x);
  return run_add_rms_norm(x, residual, weight, next_weight, eps, [&](const pdkernels::AddRmsNormArgs& args) {
    check(pdkernels::cuda::add_rms_norm(args, launch.stream));
  });
}

Tensor silu_and_mul(Tensor x) {
  const Launch launch(x);
  return run_silu_and_mul(
      x, [&](const pdkernels::SiluAndMulArgs& args) { check(pdkernels::cuda::silu_and_mul(args, launch.stream)); });
}

void apply_rope_append(Tensor qkv, OptionalTensor bias, Tensor cos, Tensor sin, Tensor k_cache, Tensor v_cache,
                       Tensor lengths, OptionalTensor counts, OptionalTensor block_table, bool interleaved,
                       OptionalTensor slots) {
  const Launch launch(qkv);
  run_apply_rope_append(qkv, bias, cos, sin, k_cache, v_cache, lengths, counts, block_table, interleaved, slots,
                        [&](const pdkernels::ApplyRopeAppendArgs& args) {
                          check(pdkernels::cuda::apply_rope_append(args, launch.stream));
                        });
}

void apply_rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) {
  const Launch launch(x);
  run_apply_rope(x, cos, sin, positions, interleaved, [&](const pdkernels::ApplyRopeArgs& args) {
    check(pdkernels::cuda::apply_rope(args, launch.stream));
  });
}

Divergence logit_divergence(Tensor logits, OptionalTensor previous, double min_p) {
  const Launch launch(logits);
  return run_logit_divergence(logits, previous, min_p, false, [&](const pdkernels::LogitDivergenceArgs& args) {
    check(pdkernels::cuda::logit_divergence(args, launch.stream));
  });
}

Unmasked unmask(Tensor tokens, Tensor ids, OptionalTensor confidence, int64_t mask_token, OptionalTensor positions,
                OptionalTensor windows, int64_t quota, OptionalTensor quotas, std::optional<double> threshold,
                int64_t need, OptionalTensor needs, std::optional<double> factor, bool strict, int64_t seed,
                int64_t step, OptionalTensor steps) {
  const Launch launch(tokens);
  return run_unmask(tokens, ids, confidence, mask_token, positions, windows, quota, quotas, threshold, need, needs,
                    factor, strict, seed, step, steps,
                    [&](const pdkernels::UnmaskArgs& args) { check(pdkernels::cuda::unmask(args, launch.stream)); });
}

Tensor select_stale_rows(Tensor v, Tensor v_cache, Tensor starts, int64_t count, OptionalTensor wanted,
                         OptionalTensor counts, std::string update, OptionalTensor block_table) {
  const Launch launch(v);
  return run_select_stale_rows(
      v, v_cache, starts, count, wanted, counts, update, block_table,
      [&](const pdkernels::StaleRowsArgs& args) { check(pdkernels::cuda::select_stale_rows(args, launch.stream)); });
}

Tensor gather_rows(Tensor x, Tensor index) {
  const Launch launch(x);
  return run_gather_rows(x, index, [&](const pdkernels::GatherRowsArgs& args) {
    check(pdkernels::cuda::gather_rows(args, launch.stream));
  });
}

Tensor add_cached_rows(Tensor x, Tensor cached, OptionalTensor rows, OptionalTensor index) {
  const Launch launch(x);
  return run_add_cached_rows(x, cached, rows, index, [&](const pdkernels::AddCachedArgs& args) {
    check(pdkernels::cuda::add_cached_rows(args, launch.stream));
  });
}

Statistics token_statistics(Tensor logits, double temperature, int64_t seed, int64_t step, OptionalTensor steps,
                            OptionalTensor positions, OptionalTensor row_index, std::vector<int64_t> suppress,
                            int64_t top_k, double top_p, double min_p, std::string distribution) {
  const Launch launch(logits);
  return run_token_statistics(logits, temperature, seed, step, steps, positions, row_index, suppress, top_k, top_p,
                              min_p, distribution, [&](const pdkernels::TokenStatisticsArgs& args) {
                                check(pdkernels::cuda::token_statistics(args, launch.stream));
                              });
}

}  // namespace

// One more expansion, so that the namespace and key given as macros are replaced by their values first.
#define PDK_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

PDK_LIBRARY_IMPL(PDKERNELS_OPS_NAMESPACE, PDKERNELS_OPS_KEY, m) {
  m.impl("kv_append_", TORCH_BOX(&kv_append));
  m.impl("kv_commit_", TORCH_BOX(&kv_commit));
  m.impl("kv_trim_", TORCH_BOX(&kv_trim));
  m.impl("verify_draft", TORCH_BOX(&verify_draft));
  m.impl("log_step_", TORCH_BOX(&log_step));
  m.impl("recurrence_inject", TORCH_BOX(&recurrence_inject));
  m.impl("recurrence_exit", TORCH_BOX(&recurrence_exit));
  m.impl("recurrence_advance_", TORCH_BOX(&recurrence_advance));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("apply_rope_append_", TORCH_BOX(&apply_rope_append));
  m.impl("apply_rope_", TORCH_BOX(&apply_rope));
  m.impl("logit_divergence", TORCH_BOX(&logit_divergence));
  m.impl("unmask_", TORCH_BOX(&unmask));
  m.impl("select_stale_rows_", TORCH_BOX(&select_stale_rows));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("add_cached_rows_", TORCH_BOX(&add_cached_rows));
  m.impl("token_statistics", TORCH_BOX(&token_statistics));
}
