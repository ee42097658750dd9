// Lengths of drafts on the CPU: a few dozen numbers a sequence, so one thread and plain loops.
#include "ops/draft_lengths.h"

#include <vector>

#include "fault.h"

namespace pdkernels::cpu {

void draft_lengths(const DraftLengthsArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), accepted = args.accepted.load(b);
    if (length < 0 || length > args.slots) {
      fail("draft_lengths_", b, "lengths", "be in [0, " + std::to_string(args.slots) + "]", length,
           "It is the length of the last draft, 0 if there was none.");
    }
    if (accepted < 0 || accepted > length) {
      fail("draft_lengths_", b, "accepted", "be in [0, " + std::to_string(length) + "]", accepted,
           "No more tokens can be accepted than were drafted.");
    }
  }
  std::vector<double> memory(args.memory_bytes() / sizeof(double));
  for (int64_t b = 0; b < args.batch; ++b) args.count(b);
  args.choose(args.memory(memory.data()));
}

}  // namespace pdkernels::cpu
