// The tensor ops of one device, registered through torch's stable ABI: this file is compiled for the CPU and, with
// PDKERNELS_DEVICE_CUDA, for CUDA. A family's bindings are in the header of its name; schemas live in pdkernels/ops.
#include "feature_cache.h"
#include "kv_cache.h"
#include "linear.h"
#include "log_step.h"
#include "logit_divergence.h"
#include "recurrence.h"
#include "token_statistics.h"
#include "transformer_ops.h"
#include "unmask.h"
#include "verify_draft.h"

#ifndef PDKERNELS_DEVICE_CUDA  // what follows is the CPU's: its threads, and attention, which is Triton's on CUDA

#include <memory>
#include <new>

#include "parallel.h"
#include "simd/kernels.h"
#include "unpack_attention.h"

int64_t pdkernels::cpu::max_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// A thread keeps what its last call took, or up to kKept: one call with very long rows must not hold memory for good.
char* pdkernels::cpu::thread_scratch(int64_t bytes) {
  constexpr int64_t kKept = int64_t{1} << 22;
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes || (size > kKept && size / 4 > bytes)) {
    memory.reset();
    memory.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
    size = bytes;
  }
  return memory.get();
}

namespace pdkernels::cpu::bindings {
namespace {

std::tuple<Tensor, Tensor> block_sparse_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& plan_rows, const Tensor& plan_lists,
                                                  const Tensor& bitmaps, int64_t block_q, int64_t block_k,
                                                  double scale) {
  STD_TORCH_CHECK(q.dim() == 4, "pdkernels: q must have 4 dimensions");
  Tensor out = new_like(q);
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  pdkernels::AttentionArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, false, args);
  pdkernels::cpu::block_sparse_attention(args);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> block_sparse_attention_backward(const Tensor& grad_out, const Tensor& q,
                                                                   const Tensor& k, const Tensor& v, const Tensor& out,
                                                                   const Tensor& lse, const Tensor& plan_rows,
                                                                   const Tensor& plan_lists, const Tensor& bitmaps,
                                                                   int64_t block_q, int64_t block_k, double scale,
                                                                   const OptionalTensor& grad_lse) {
  pdkernels::AttentionGradArgs args;
  unpack_attention(q, k, v, out, lse, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, false, args);
  const SameDevice device(q);
  Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  // Two numbers per row that the first pass leaves for the second.
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

// Packed tensors, (rows, heads, head_dim), as the only entry of a batch.
Tensor as_entry(const Tensor& t, bool packed) {
  STD_TORCH_CHECK(t.dim() == (packed ? 3 : 4), "pdkernels: q, k_new and v_new must have a batch, or cu_seqlens none");
  return packed ? torch::stable::unsqueeze(t, 0) : t;
}

// `unpack_rows(args)` says which of the new tokens are stored.
template <class UnpackRows>
std::tuple<Tensor, Tensor> attend_to_prefix(const Tensor& q, const Tensor& k_new, const Tensor& v_new,
                                            const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                                            const PlanArguments& plan, double scale, const OptionalTensor& block_table,
                                            const OptionalTensor& starts, const OptionalTensor& cu_seqlens,
                                            int64_t max_new, const UnpackRows& unpack_rows) {
  const bool packed = cu_seqlens.has_value();
  const Tensor rows = as_entry(q, packed);
  Tensor out = torch::stable::new_empty(q, sizes_of(q), q.scalar_type());
  std::vector<int64_t> of_lse{rows.size(2), rows.size(1)};
  if (!packed) of_lse.insert(of_lse.begin(), rows.size(0));
  Tensor lse = torch::stable::new_empty(q, of_lse, ScalarType::Float);
  pdkernels::SpeculativeArgs args;
  const SameDevice device(q);
  unpack_attention(rows, as_entry(k_new, packed), as_entry(v_new, packed), as_entry(out, packed), lse, plan, scale,
                   packed, args);
  if (packed) unpack_packed(device, *cu_seqlens, max_new, plan, args);
  unpack_prefix(device, k_cache, v_cache, lengths, block_table, args);
  unpack_starts(device, starts, args);
  unpack_rows(args);
  // Results of the splits of the prefix: sized by the capacity, so the same at every step.
  OptionalTensor parts, parts_lse;
  args.parts = args.parts_lse = nullptr;
  if (args.splits > 1) {
    const int64_t batch = rows.size(0), tokens = rows.size(1), heads = rows.size(2);
    parts = torch::stable::new_empty(q, {args.splits, batch, tokens, heads, rows.size(3)}, ScalarType::Float);
    parts_lse = torch::stable::new_empty(q, {args.splits, batch, heads, tokens}, ScalarType::Float);
    args.parts = data<float>(*parts), args.parts_lse = data<float>(*parts_lse);
  }
  pdkernels::cpu::speculative_attention(args);
  return {out, lse};
}

std::tuple<Tensor, Tensor> speculative_attention(const Tensor& q, const Tensor& k_new, const Tensor& v_new,
                                                 const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                                                 const Tensor& plan_rows, const Tensor& plan_lists,
                                                 const Tensor& bitmaps, int64_t block_q, int64_t block_k, double scale,
                                                 const OptionalTensor& block_table, const OptionalTensor& starts,
                                                 const OptionalTensor& cu_seqlens, int64_t max_new) {
  return attend_to_prefix(q, k_new, v_new, k_cache, v_cache, lengths,
                          {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale, block_table, starts, cu_seqlens,
                          max_new, [](pdkernels::SpeculativeArgs&) {});
}

std::tuple<Tensor, Tensor> speculative_attention_append(
    const Tensor& q, const Tensor& k_new, const Tensor& v_new, Tensor& k_cache, Tensor& v_cache, const Tensor& lengths,
    const Tensor& plan_rows, const Tensor& plan_lists, const Tensor& bitmaps, int64_t block_q, int64_t block_k,
    double scale, const OptionalTensor& block_table, const OptionalTensor& starts, const OptionalTensor& cu_seqlens,
    int64_t max_new, const OptionalTensor& counts, const OptionalTensor& source_index) {
  return attend_to_prefix(
      q, k_new, v_new, k_cache, v_cache, lengths, {plan_rows, plan_lists, bitmaps, block_q, block_k}, scale,
      block_table, starts, cu_seqlens, max_new,
      [&](pdkernels::SpeculativeArgs& args) { unpack_append(SameDevice(q), counts, source_index, args); });
}

}  // namespace

PDK_IMPL("block_sparse_attention", block_sparse_attention)
PDK_IMPL("block_sparse_attention_backward", block_sparse_attention_backward)
PDK_IMPL("speculative_attention", speculative_attention)
PDK_IMPL("speculative_attention_append_", speculative_attention_append)

}  // namespace pdkernels::cpu::bindings

#endif
