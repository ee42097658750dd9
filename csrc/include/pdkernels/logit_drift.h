// What the kernels that compare two laws of the next token are given, on the CPU and on CUDA.
#pragma once

#include "pdkernels/sandwich.h"

namespace pdkernels {

// Tokens of a row that are one piece of work on the CPU. What is summed together follows from the width of a row alone,
// so a row gets the same bits in any batch and on any number of threads.
constexpr int64_t kDriftChunk = 8192;
// Doubles that a chunk leaves behind.
constexpr int64_t kDriftPartials = 8;

struct LogitDriftArgs {
  Element element;
  RowsView logits, previous;  // previous.data nullptr: a uniform law
  int64_t rows, width;
  float log_min_p;  // tokens whose logit lies further below the largest are levelled; -inf: none
  int64_t* argmax;
  float *entropy, *kl, *minp_kl;
  double* partials;  // (rows, chunks, kDriftPartials), CPU only

  PDK_HD int64_t chunks() const { return (width + kDriftChunk - 1) / kDriftChunk; }
};

}  // namespace pdkernels
