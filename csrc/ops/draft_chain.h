// Arguments of a chain of drafted tokens, for the CPU: see pdkernels/models/drafters/chain.py.
#pragma once

#include "ops/next_token.h"
#include "ops/transformer_layers.h"

namespace pdkernels {

struct DraftChainArgs {
  TransformerLayersArgs layers;      // over one row a sequence: `tokens` as ids, `hidden` as x, with logits
  NextTokenArgs choice;              // of the logits of the layers
  const int64_t *vocabulary, *busy;  // the target's ids of drafted tokens; (batch,) 1 where rows are stored, or 0
  int64_t batch, guesses;
  int64_t* found;             // (batch, guesses)
  int64_t *tokens, *lengths;  // (batch,): of the last guess; cached rows, to which the chain's are added
  char *hidden, *memory;      // (batch, width), at first the rows that the first guess is made from; memory_bytes()

  int64_t memory_bytes() const {
    MemoryParts parts;
    NextTokenMemory(choice, parts);
    return parts.used();
  }
};

PDK_KERNEL(draft_chain, DraftChainArgs)

}  // namespace pdkernels
