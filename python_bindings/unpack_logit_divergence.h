// Tensors -> the argument struct of the logit-drift kernels.
#pragma once

#include "pdkernels/logit_divergence.h"
#include "unpack_transformer_ops.h"

#include <cmath>

namespace pdkernels::bindings {

using Divergence = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// `chunked`: the kernel wants room for what chunks leave to each other.
template <class Run>
Divergence run_logit_divergence(const Tensor& logits, const OptionalTensor& previous, double min_p, bool chunked,
                                const Run& run) {
  const SameDevice device(logits);
  const Rows rows(logits);
  STD_TORCH_CHECK(rows.width > 0, "pdkernels: logits must have at least one token");
  STD_TORCH_CHECK(min_p >= 0 && min_p <= 1, "pdkernels: min_p must be in [0, 1]");
  LogitDivergenceArgs args;
  args.element = row_element(logits);
  args.logits = rows.view();
  std::optional<Rows> other;
  if (previous.has_value()) {
    require_like(device, *previous, logits);
    require_shape(*previous, logits);
    other.emplace(*previous);
    args.previous = other->view();
  }
  args.rows = rows.count, args.width = rows.width;
  args.log_min_p = static_cast<float>(std::log(min_p));
  const std::vector<int64_t> shape = shape_of(logits, -1);
  Tensor argmax = torch::stable::new_empty(logits, shape, ScalarType::Long);
  Tensor entropy = torch::stable::new_empty(logits, shape, ScalarType::Float);
  Tensor kl = torch::stable::new_empty(logits, shape, ScalarType::Float);
  Tensor minp_kl = torch::stable::new_empty(logits, shape, ScalarType::Float);
  args.argmax = static_cast<int64_t*>(argmax.data_ptr());
  args.entropy = static_cast<float*>(entropy.data_ptr());
  args.kl = static_cast<float*>(kl.data_ptr());
  args.minp_kl = static_cast<float*>(minp_kl.data_ptr());
  const int64_t partials = chunked ? args.rows * args.chunks() * kDivergencePartials : 0;
  Tensor room = torch::stable::new_empty(logits, {partials}, ScalarType::Double);
  args.partials = static_cast<double*>(room.data_ptr());
  if (args.rows > 0) run(args);
  return {argmax, entropy, kl, minp_kl};
}

}  // namespace pdkernels::bindings
