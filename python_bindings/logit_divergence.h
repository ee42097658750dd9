// The distance between two distributions: see pdkernels/ops/logit_divergence.py.
#pragma once

#include "device.h"
#include "ops/logit_divergence.h"
#include "unpack_rows.h"

#include <cmath>

namespace pdkernels::PDK_DEVICE::bindings {

inline std::tuple<Tensor, Tensor, Tensor, Tensor> logit_divergence(const Tensor& logits, const OptionalTensor& previous,
                                                                   double min_p) {
  const Launch launch(logits);
  const SameDevice device(logits);
  const FlatRows rows(logits);
  PDK_CHECK(rows.width > 0 && min_p >= 0 && min_p <= 1);
  LogitDivergenceArgs args;
  args.element = row_element(logits);
  args.logits = rows.view();
  const std::optional<FlatRows> other = rows_like(device, previous, logits);
  if (other) args.previous = other->view();
  args.rows = rows.count, args.width = rows.width;
  args.log_min_p = static_cast<float>(std::log(min_p));
  const std::vector<int64_t> shape = shape_of(logits, -1);
  const auto floats = [&] { return torch::stable::new_empty(logits, shape, ScalarType::Float); };
  Tensor argmax = torch::stable::new_empty(logits, shape, ScalarType::Long);
  Tensor entropy = floats(), kl = floats(), minp_kl = floats();
  args.argmax = data<int64_t>(argmax), args.entropy = data<float>(entropy);
  args.kl = data<float>(kl), args.minp_kl = data<float>(minp_kl);
#ifdef PDKERNELS_DEVICE_CUDA
  const int64_t partials = 0;
#else
  const int64_t partials = args.rows * args.chunks() * kDivergencePartials;  // results of the chunks
#endif
  Tensor partials_storage = torch::stable::new_empty(logits, {partials}, ScalarType::Double);
  args.partials = data<double>(partials_storage);
  if (args.rows > 0) launch(PDK_VECTOR(logit_divergence), args);
  return {argmax, entropy, kl, minp_kl};
}

PDK_IMPL("logit_divergence", logit_divergence)

}  // namespace pdkernels::PDK_DEVICE::bindings
