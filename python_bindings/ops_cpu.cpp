// CPU implementations of the tensor ops, registered through torch's stable ABI. Schemas live in pdkernels/ops.
//
// The namespace is a macro because the tests register another build of this file beside the real ops.
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <new>

#include "kernels.h"
#include "parallel.h"
#include "simd/kernels.h"
#include "unpack_attention.h"
#include "unpack_feature_cache.h"
#include "unpack_log_step.h"
#include "unpack_logit_divergence.h"
#include "unpack_recurrence.h"
#include "unpack_transformer_ops.h"
#include "unpack_unmask.h"

#include "unpack_token_statistics.h"

#ifndef PDKERNELS_OPS_NAMESPACE
#define PDKERNELS_OPS_NAMESPACE pdkernels
#endif

void pdkernels::cpu::run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, function, context));
}

char* pdkernels::cpu::thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    size = bytes;
  }
  return memory.get();
}

namespace {

using namespace pdkernels::bindings;
using Tensors = std::vector<Tensor>;

void kv_append(Tensors k_cache, Tensors v_cache, Tensors k_new, Tensors v_new, Tensor lengths, OptionalTensor counts,
               OptionalTensor block_table) {
  append(k_cache, v_cache, k_new, v_new, lengths, counts, block_table, pdkernels::cpu::kv_append);
}

void kv_commit(Tensors k_cache, Tensors v_cache, Tensor lengths, Tensor counts, OptionalTensor source_index,
               OptionalTensor block_table) {
  commit(k_cache, v_cache, lengths, counts, source_index, block_table, pdkernels::cpu::kv_commit);
}

void kv_trim(Tensor lengths, Tensor new_lengths) { trim(lengths, new_lengths, pdkernels::cpu::kv_trim); }

Verdict verify_draft(Tensor draft, Tensor predictions, OptionalTensor draft_lengths, OptionalTensor end_tokens,
                     OptionalTensor refill) {
  VerdictTensors out(draft);
  pdkernels::cpu::verify_draft(verify_args(draft, predictions, draft_lengths, end_tokens, refill, out));
  return out.tuple();
}

void log_step(Tensor log, Tensor count, Tensor more, Tensor entry, std::optional<int64_t> handle) {
  STD_TORCH_CHECK(!handle.has_value(), "pdkernels: a condition's handle is for CUDA");
  pdkernels::cpu::log_step(log_step_args(log, count, more, entry));
}

Tensor recurrence_inject(OptionalTensor state, Tensor embedding, OptionalTensor previous_embedding, Tensor recurrences,
                         Tensor cursor, Tensor width, Tensor advance, Tensor steps, int64_t seed, double noise,
                         std::string schedule, int64_t horizon, std::string mixer, double momentum, double init_std,
                         std::string new_state, bool damp_new) {
  Tensor out = inject_result(embedding);
  pdkernels::cpu::recurrence_inject(inject_args(state, embedding, previous_embedding, recurrences, cursor, width,
                                                advance, steps, seed, noise, schedule, horizon, mixer, momentum,
                                                init_std, new_state, damp_new, out));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> recurrence_exit(Tensor x, Tensor residual, Tensor weight, OptionalTensor previous,
                                                   Tensor recurrences, Tensor width, Tensor advance, double threshold,
                                                   OptionalTensor older, OptionalTensor older_advance,
                                                   int64_t min_recurrences, double eps) {
  ExitTensors out(x);
  pdkernels::cpu::recurrence_exit(exit_args(x, residual, weight, previous, recurrences, width, advance, threshold,
                                            older, older_advance, min_recurrences, eps, out));
  return out.tuple();
}

void recurrence_advance(Tensor tokens, Tensor predictions, Tensor recurrences, Tensor stable, Tensor width,
                        Tensor cursor, Tensor advance, Tensor steps, Tensor remaining, OptionalTensor settled,
                        int64_t inner_recurrence, int64_t max_wavefront, int64_t max_recurrences, int64_t stability,
                        std::string rule, int64_t headway, OptionalTensor filler, OptionalTensor end_tokens, bool guard,
                        bool keep_last) {
  pdkernels::cpu::recurrence_advance(advance_args(
      tokens, predictions, recurrences, stable, width, cursor, advance, steps, remaining, settled, inner_recurrence,
      max_wavefront, max_recurrences, stability, rule, headway, filler, end_tokens, guard, keep_last));
}

std::tuple<Tensor, Tensor> block_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor plan_rows, Tensor plan_lists,
                                                  Tensor bitmaps, int64_t block_q, int64_t block_k, double scale) {
  STD_TORCH_CHECK(q.dim() == 4, "pdkernels: q must have 4 dimensions");
  Tensor out = new_like(q);
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  pdkernels::AttentionArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, args);
  pdkernels::cpu::block_sparse_attention(args);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> block_sparse_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v,
                                                                   Tensor out, Tensor lse, Tensor plan_rows,
                                                                   Tensor plan_lists, Tensor bitmaps, int64_t block_q,
                                                                   int64_t block_k, double scale,
                                                                   OptionalTensor grad_lse) {
  pdkernels::AttentionGradArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, args);
  const SameDevice device(q);
  Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  // Two numbers a row that the first pass leaves for the second.
  Tensor delta = torch::stable::new_empty(lse, {2, args.batch * args.q_heads * args.q_len}, ScalarType::Float);
  const auto view = [&](const Tensor& t, int64_t tokens, int64_t heads) {
    return heads_view(device, t, q.scalar_type(), args.batch, tokens, heads, args.head_dim);
  };
  args.grad_out = view(grad_out, args.q_len, args.q_heads);
  args.dq = view(dq, args.q_len, args.q_heads);
  args.dk = view(dk, args.kv_len, args.kv_heads);
  args.dv = view(dv, args.kv_len, args.kv_heads);
  args.grad_lse = grad_lse.has_value() ? row_numbers(device, *grad_lse, args) : nullptr;
  args.delta = static_cast<float*>(delta.data_ptr());
  pdkernels::cpu::block_sparse_attention_backward(args);
  return {dq, dk, dv};
}

// `unpack_rows(args)` says which of the new tokens are stored.
template <class UnpackRows>
std::tuple<Tensor, Tensor> attend_to_prefix(const Tensor& q, const Tensor& k_new, const Tensor& v_new,
                                            const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                                            const PlanArguments& plan, double scale, const OptionalTensor& block_table,
                                            const UnpackRows& unpack_rows) {
  STD_TORCH_CHECK(q.dim() == 4, "pdkernels: q must have 4 dimensions");
  Tensor out = new_like(q);
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  pdkernels::SpeculativeArgs args;
  unpack_attention(q, k_new, v_new, out, lse, plan, scale, args);
  unpack_prefix(SameDevice(q), k_cache, v_cache, lengths, block_table, args);
  unpack_rows(args);
  // What the splits of the prefix leave for each other: sized by the capacity, so the same at every step.
  Tensor parts = torch::stable::new_empty(
      q, {args.splits > 1 ? args.splits : 0, q.size(0), q.size(1), q.size(2), q.size(3)}, ScalarType::Float);
  Tensor parts_lse = torch::stable::new_empty(q, {args.splits > 1 ? args.splits : 0, q.size(0), q.size(2), q.size(1)},
                                              ScalarType::Float);
  args.parts = static_cast<float*>(parts.data_ptr());
  args.parts_lse = static_cast<float*>(parts_lse.data_ptr());
  pdkernels::cpu::speculative_attention(args);
  return {out, lse};
}

std::tuple<Tensor, Tensor> speculative_attention(Tensor q, Tensor k_new, Tensor v_new, Tensor k_cache, Tensor v_cache,
                                                 Tensor lengths, Tensor plan_rows, Tensor plan_lists, Tensor bitmaps,
                                                 int64_t block_q, int64_t block_k, double scale,
                                                 OptionalTensor block_table) {
  return attend_to_prefix(q, k_new, v_new, k_cache, v_cache, lengths,
                          {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, block_table,
                          [](pdkernels::SpeculativeArgs&) {});
}

std::tuple<Tensor, Tensor> speculative_attention_append(Tensor q, Tensor k_new, Tensor v_new, Tensor k_cache,
                                                        Tensor v_cache, Tensor lengths, Tensor plan_rows,
                                                        Tensor plan_lists, Tensor bitmaps, int64_t block_q,
                                                        int64_t block_k, double scale, OptionalTensor block_table,
                                                        OptionalTensor counts, OptionalTensor source_index) {
  return attend_to_prefix(
      q, k_new, v_new, k_cache, v_cache, lengths, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale,
      block_table, [&](pdkernels::SpeculativeArgs& args) { unpack_append(SameDevice(q), counts, source_index, args); });
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, OptionalTensor residual, OptionalTensor weight,
                                        OptionalTensor next_weight, double eps) {
  return run_add_rms_norm(x, residual, weight, next_weight, eps, pdkernels::cpu::add_rms_norm);
}

Tensor silu_and_mul(Tensor x) { return run_silu_and_mul(x, pdkernels::cpu::silu_and_mul); }

void apply_rope_append(Tensor qkv, OptionalTensor bias, Tensor cos, Tensor sin, Tensor k_cache, Tensor v_cache,
                       Tensor lengths, OptionalTensor counts, OptionalTensor block_table, bool interleaved,
                       OptionalTensor slots) {
  run_apply_rope_append(qkv, bias, cos, sin, k_cache, v_cache, lengths, counts, block_table, interleaved, slots,
                        pdkernels::cpu::apply_rope_append);
}

void apply_rope(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) {
  run_apply_rope(x, cos, sin, positions, interleaved, pdkernels::cpu::apply_rope);
}

Divergence logit_divergence(Tensor logits, OptionalTensor previous, double min_p) {
  return run_logit_divergence(logits, previous, min_p, true, pdkernels::cpu::logit_divergence);
}

Unmasked unmask(Tensor tokens, Tensor ids, OptionalTensor confidence, int64_t mask_token, OptionalTensor positions,
                OptionalTensor windows, int64_t quota, OptionalTensor quotas, std::optional<double> threshold,
                int64_t need, OptionalTensor needs, std::optional<double> factor, bool strict, int64_t seed,
                int64_t step, OptionalTensor steps) {
  return run_unmask(tokens, ids, confidence, mask_token, positions, windows, quota, quotas, threshold, need, needs,
                    factor, strict, seed, step, steps, pdkernels::cpu::unmask);
}

Tensor select_stale_rows(Tensor v, Tensor v_cache, Tensor starts, int64_t count, OptionalTensor wanted,
                         OptionalTensor counts, std::string update, OptionalTensor block_table) {
  return run_select_stale_rows(v, v_cache, starts, count, wanted, counts, update, block_table,
                               pdkernels::cpu::select_stale_rows);
}

Tensor gather_rows(Tensor x, Tensor index) { return run_gather_rows(x, index, pdkernels::cpu::gather_rows); }

Tensor add_cached_rows(Tensor x, Tensor cached, OptionalTensor rows, OptionalTensor index) {
  return run_add_cached_rows(x, cached, rows, index, pdkernels::cpu::add_cached_rows);
}

Statistics token_statistics(Tensor logits, double temperature, int64_t seed, int64_t step, OptionalTensor steps,
                            OptionalTensor positions, OptionalTensor row_index, std::vector<int64_t> suppress,
                            int64_t top_k, double top_p, double min_p, std::string distribution) {
  return run_token_statistics(logits, temperature, seed, step, steps, positions, row_index, suppress, top_k, top_p,
                              min_p, distribution, pdkernels::cpu::token_statistics);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(PDKERNELS_OPS_NAMESPACE, CPU, m) {
  m.impl("kv_append_", TORCH_BOX(&kv_append));
  m.impl("kv_commit_", TORCH_BOX(&kv_commit));
  m.impl("kv_trim_", TORCH_BOX(&kv_trim));
  m.impl("verify_draft", TORCH_BOX(&verify_draft));
  m.impl("log_step_", TORCH_BOX(&log_step));
  m.impl("recurrence_inject", TORCH_BOX(&recurrence_inject));
  m.impl("recurrence_exit", TORCH_BOX(&recurrence_exit));
  m.impl("recurrence_advance_", TORCH_BOX(&recurrence_advance));
  m.impl("block_sparse_attention", TORCH_BOX(&block_sparse_attention));
  m.impl("block_sparse_attention_backward", TORCH_BOX(&block_sparse_attention_backward));
  m.impl("speculative_attention", TORCH_BOX(&speculative_attention));
  m.impl("speculative_attention_append_", TORCH_BOX(&speculative_attention_append));
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
