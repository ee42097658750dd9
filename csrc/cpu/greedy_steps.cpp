// Steps of greedy decoding on the CPU: the kernels of two other ops in turn.
#include "ops/greedy_steps.h"

#include <algorithm>

namespace pdkernels::cpu {
namespace {

bool any_pending(const NextTokenArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    if (args.entries[b * args.columns] > 0) return true;
  }
  return false;
}

}  // namespace

void greedy_steps(const GreedyStepsArgs& args) {
  const int64_t size = args.next.batch * args.next.columns;
  int64_t& done = *args.done = 0;
  do {
    transformer_layers(args.layers);
    next_token(args.next);
    std::copy_n(args.next.entries, size, args.log + done * size);
  } while (++done < args.steps && any_pending(args.next));
}

}  // namespace pdkernels::cpu
