// Greedy draft verification on the CPU: a few hundred tokens at most, so one thread and plain loops.
#include "ops/verify_draft.h"
#include "fault.h"

namespace pdkernels::cpu {

void verify_draft(const VerifyArgs& args) {
  for (int64_t b = 0; args.draft_lengths.given() && b < args.batch; ++b) {
    const int64_t length = args.draft_lengths.load(b);
    if (length < 0 || length > args.width) {
      fail("verify_draft", b, "draft_lengths", "be in [0, " + std::to_string(args.width) + "]", length,
           "A length counts tokens of the draft; 0 marks an inactive sequence.");
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.length(b);
    int64_t winner = 0;
    int64_t count = 0;
    for (int64_t c = 0; c < args.candidates && length > 0; ++c) {
      int64_t matched = 1;
      while (matched < length && args.matches(b, c, matched - 1)) ++matched;
      if (matched > count) {
        count = matched;
        winner = c;
      }
    }
    int64_t first_end = 0;
    while (first_end < count && !args.is_end(args.draft.load(b, winner, first_end))) ++first_end;
    args.write_verdict(b, winner, count, first_end);
    for (int64_t j = 0; j < args.width; ++j) {
      args.new_draft[b * args.width + j] = args.new_draft_token(b, winner, args.accepted[b], length, j);
    }
  }
}

}  // namespace pdkernels::cpu
