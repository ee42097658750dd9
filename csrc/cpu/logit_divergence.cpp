// The distance between two distributions of the next token, on the CPU: no values to check, simd/logit_divergence.cpp
// computes.
#include "kernels.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void logit_divergence(const LogitDivergenceArgs& args) { PDK_DISPATCH(logit_divergence, args) }

}  // namespace pdkernels::cpu
