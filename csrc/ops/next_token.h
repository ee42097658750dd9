// Arguments of the end of a decoding step with one known token a sequence, for the CPU: see
// pdkernels/decoding/steps/next_token.py.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

struct NextTokenArgs {
  Element element;  // of the logits
  RowsView logits;  // (batch, vocabulary): what the tokens were chosen from
  const int64_t *tokens, *ends;
  int64_t batch, vocabulary, end_count;
  // Of each sequence `columns` numbers: pending, accepted, and at `draft` the token of the next step.
  int64_t* entries;
  int64_t columns, draft;
  int64_t* remaining;
};

PDK_KERNEL(next_token, NextTokenArgs)

}  // namespace pdkernels
