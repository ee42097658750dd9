// Arguments of what the mixers of a hybrid model compute between other kernels, for the CPU: gates, decays, and norms
// that multiply by 1 plus their weight. They are parts of transformer_layers_, and what the layers call one by one.
#pragma once

#include "ops/transformer_ops.h"

namespace pdkernels {

// (rows, groups, width); strides in elements. The width is contiguous.
struct GroupsView {
  void* data = nullptr;
  int64_t row_stride = 0, group_stride = 0;
};

enum class GateForm { kPlain, kSigmoid, kSilu };

// out = x * form(gate), in float32 and rounded once. It may be x.
struct GatedRowsArgs {
  Element element;
  GateForm form;
  GroupsView x, gate, out;
  int64_t rows, groups, width;
};

// out = -e^decay.
struct DecayFactorsArgs {
  Element element;
  void* decay;
  float* out;
  int64_t count;
};

PDK_VECTOR_KERNEL(gated_rows, GatedRowsArgs)
PDK_VECTOR_KERNEL(decay_factors, DecayFactorsArgs)
// y = rms_norm(x) * (1 + weight), or with a residual the sum in y and rms_norm(y) * (1 + next_weight) in next. In
// float32, rounded once.
PDK_VECTOR_KERNEL(centred_rms_norm, AddRmsNormArgs)

}  // namespace pdkernels
