// The distance between two laws of the next token, on the CPU: no values to check, simd/logit_drift.cpp computes.
#include "kernels.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void logit_drift(const LogitDriftArgs& args) { PDK_DISPATCH(logit_drift, args) }

}  // namespace pdkernels::cpu
