// Arguments of log_step_: tensors -> pointers.
#pragma once

#include "pdkernels/log_step.h"
#include "unpack.h"

namespace pdkernels::bindings {

inline LogStepArgs log_step_args(const Tensor& log, const Tensor& count, const Tensor& more, const Tensor& entry) {
  const SameDevice device(entry);
  for (const Tensor* t : {&log, &count, &more, &entry}) {
    device.require(*t);
    STD_TORCH_CHECK(t->is_contiguous(), "pdkernels: log, count, more and entry must be contiguous");
    STD_TORCH_CHECK(t->scalar_type() == (t == &more ? ScalarType::Bool : ScalarType::Long),
                    "pdkernels: more must be bool, log, count and entry int64");
  }
  STD_TORCH_CHECK(entry.dim() == 2 && entry.size(1) > 0, "pdkernels: entry must have shape (batch, columns)");
  STD_TORCH_CHECK(log.dim() == 3 && log.size(1) == entry.size(0) && log.size(2) == entry.size(1),
                  "pdkernels: log must hold entries");
  STD_TORCH_CHECK(count.dim() == 1 && count.size(0) == 1 && more.dim() == 1 && more.size(0) == 1,
                  "pdkernels: count and more must have shape (1)");
  LogStepArgs args;
  args.entry = static_cast<const int64_t*>(entry.data_ptr());
  args.batch = entry.size(0);
  args.columns = entry.size(1);
  args.log = static_cast<int64_t*>(log.data_ptr());
  args.steps = log.size(0);
  args.count = static_cast<int64_t*>(count.data_ptr());
  args.more = static_cast<bool*>(more.data_ptr());
  return args;
}

}  // namespace pdkernels::bindings
