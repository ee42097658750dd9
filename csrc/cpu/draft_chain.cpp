// A chain of drafted tokens on the CPU: the kernels of two other ops in turn.
#include "ops/draft_chain.h"

#include <algorithm>
#include <cstring>

namespace pdkernels::cpu {

void draft_chain(const DraftChainArgs& args) {
  MemoryParts parts(args.memory);
  const NextTokenMemory memory(args.choice, parts);
  const int64_t bytes = args.batch * args.layers.width * bytes_of(args.choice.element);
  TransformerLayersArgs head = args.layers;
  head.layer_count = 0, head.embedding = nullptr, head.paired = nullptr;
  transformer_layers(head);
  for (int64_t guess = 0;;) {
    token_statistics(memory.statistics);
    for (int64_t b = 0; b < args.batch; ++b) {
      const int64_t id = std::max<int64_t>(memory.statistics.ids[b], 0);
      args.found[b * args.guesses + guess] = args.tokens[b] = args.vocabulary[id];
    }
    if (++guess == args.guesses) return;
    transformer_layers(args.layers);
    std::memcpy(args.hidden, args.layers.out.data, bytes);
    for (int64_t b = 0; b < args.batch; ++b) args.lengths[b] += args.busy[b];
  }
}

}  // namespace pdkernels::cpu
