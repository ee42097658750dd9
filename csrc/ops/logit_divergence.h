// Arguments of the kernels that compare two distributions of the next token, on the CPU and on CUDA.
#pragma once

#include "common/element.h"
#include "common/rows_view.h"

namespace pdkernels {

// Tokens of one work item on the CPU. The order of summation depends only on the width of a row, so a row gets the same
// bits in any batch and on any number of threads.
constexpr int64_t kDivergenceChunk = 8192;
// The number of doubles that a chunk stores.
constexpr int64_t kDivergencePartials = 8;

struct LogitDivergenceArgs {
  Element element;
  RowsView logits, previous;  // previous.data nullptr: a uniform distribution
  int64_t rows, width;
  float log_min_p;  // logits further than this below the largest one are flattened; -inf: none
  int64_t* argmax;
  float *entropy, *kl, *minp_kl;
  double* partials;  // (rows, chunks, kDivergencePartials), CPU only

  PDK_HD int64_t chunks() const { return (width + kDivergenceChunk - 1) / kDivergenceChunk; }
};

PDK_VECTOR_KERNEL(logit_divergence, LogitDivergenceArgs)

}  // namespace pdkernels
