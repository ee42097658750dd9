// The log of decoding steps: see pdkernels/ops/log_step.py.
#pragma once

#include "device.h"
#include "ops/log_step.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline void log_step(Tensor& log, Tensor& count, Tensor& more, const Tensor& entry, std::optional<int64_t> handle) {
  const Launch launch(entry);
  const SameDevice device(entry);
  device.require(entry, ScalarType::Long, {-1, -1});
  device.require(log, ScalarType::Long, {-1, entry.size(0), entry.size(1)});
  device.require(count, ScalarType::Long, {1});
  device.require(more, ScalarType::Bool, {1});
  for (const Tensor* t : std::initializer_list<const Tensor*>{&log, &count, &more, &entry})
    PDK_CHECK(t->is_contiguous());
  PDK_CHECK(entry.size(1) > 0);
#ifndef PDKERNELS_DEVICE_CUDA
  PDK_CHECK(!handle.has_value());
#endif
  LogStepArgs args;
  args.entry = data<int64_t>(entry), args.batch = entry.size(0), args.columns = entry.size(1);
  args.log = data<int64_t>(log), args.steps = log.size(0);
  args.count = data<int64_t>(count), args.more = data<bool>(more);
  args.conditional = handle.has_value(), args.handle = static_cast<uint64_t>(handle.value_or(0));
  launch(PDK_DEVICE::log_step, args);
}

PDK_IMPL("log_step_", log_step)

}  // namespace pdkernels::PDK_DEVICE::bindings
