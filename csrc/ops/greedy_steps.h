// Arguments of steps of greedy decoding with one known token a sequence, for the CPU: see
// pdkernels/models/architectures/greedy_steps.py.
#pragma once

#include "ops/next_token.h"
#include "ops/transformer_layers.h"

namespace pdkernels {

struct GreedyStepsArgs {
  TransformerLayersArgs layers;
  NextTokenArgs next;  // of the logits of the layers
  int64_t steps;       // at most, at least 1
  int64_t* log;        // (steps, batch, columns): the entries after each
  int64_t* done;       // steps that ran; it ends when nothing is pending
};

PDK_KERNEL(greedy_steps, GreedyStepsArgs)

}  // namespace pdkernels
