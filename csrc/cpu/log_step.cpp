// Keeping a step's entry on the CPU: a few hundred numbers, so one thread.
#include <algorithm>

#include "fault.h"
#include "ops/log_step.h"

namespace pdkernels::cpu {

void log_step(const LogStepArgs& args) {
  const int64_t at = *args.count;
  if (!args.has_room(at)) {
    fail("log_step_", "count must be in [0, " + std::to_string(args.steps - 1) + "], got " + std::to_string(at) +
                          ". It counts entries of the log; give the log room for one of every step.");
  }
  bool any = false;
  for (int64_t b = 0; b < args.batch; ++b) any |= args.active(b);
  std::copy_n(args.entry, args.size(), args.log + at * args.size());
  *args.count = at + 1;
  *args.more = args.continues(at, any);
}

}  // namespace pdkernels::cpu
