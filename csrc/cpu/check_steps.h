// Checks of values that an op of several kernels makes before the first of them writes.
#pragma once

#include "ops/recurrent_state.h"
#include "ops/speculative_attention.h"
#include "ops/transformer_ops.h"

namespace pdkernels::cpu {

// What the kernels of these arguments check, and throw.
void require_step(const StateStep& step);
void require_rows(const SpeculativeArgs& args);
void require_positions(const ApplyRopeArgs& args);

}  // namespace pdkernels::cpu
