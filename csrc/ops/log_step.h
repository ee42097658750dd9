// Appends the entry of a decoding step to a log, shared by the CPU and the CUDA kernel.
#pragma once

#include "common/platform.h"

namespace pdkernels {

struct LogStepArgs {
  const int64_t* entry = nullptr;  // [batch][columns]; the first column is the number of remaining tokens
  int64_t batch = 0;
  int64_t columns = 0;     // at least 1
  int64_t* log = nullptr;  // [steps][batch][columns]
  int64_t steps = 0;
  int64_t* count = nullptr;  // [1]: entries in the log
  bool* more = nullptr;      // [1]
  // CUDA: the conditional node of a graph. Its condition is set to `more`.
  bool conditional = false;
  uint64_t handle = 0;

  PDK_HD int64_t size() const { return batch * columns; }
  PDK_HD bool active(int64_t b) const { return entry[b * columns] > 0; }
  PDK_HD bool has_room(int64_t at) const { return at >= 0 && at < steps; }
  // Whether the loop continues after entry `at`. A full log ends it even if sequences are still active.
  PDK_HD bool continues(int64_t at, bool any_active) const { return any_active && has_room(at + 1); }
};

PDK_KERNEL(log_step, LogStepArgs)

}  // namespace pdkernels
