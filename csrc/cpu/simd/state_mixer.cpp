// What the mixers of a hybrid model compute between other kernels. Every product is rounded on its own, and rows are
// independent.
#include "kernels.h"
#include "ops/mixer_rows.h"
#include "rms_norm.h"
#include "state_rows.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class T>
PDK_INLINE T* row_of(const GroupsView& view, int64_t row, int64_t group) {
  return static_cast<T*>(view.data) + row * view.row_stride + group * view.group_stride;
}

template <class T, class Form>
PDK_INLINE void gate_with(const GatedRowsArgs& args, const Form& form) {
  for_rows(args.rows * args.groups, args.width, [&](int64_t item) {
    const int64_t row = item / args.groups, group = item % args.groups;
    const T *x = row_of<T>(args.x, row, group), *gate = row_of<T>(args.gate, row, group);
    T* out = row_of<T>(args.out, row, group);
    for_vectors(0, args.width, [&](int64_t at, auto lanes) {
      store(out + at, mul(load(x + at, lanes), form(load(gate + at, lanes))), lanes);
    });
  });
}

template <class T>
void gated_rows_of(const GatedRowsArgs& args) {
  switch (args.form) {
    case GateForm::kPlain: return gate_with<T>(args, [](Vec gate) { return gate; });
    case GateForm::kSigmoid: return gate_with<T>(args, [](Vec gate) { return sigmoid_of(gate); });
    case GateForm::kSilu: return gate_with<T>(args, [](Vec gate) { return silu_of(gate); });
  }
}

template <class T>
void decay_factors_of(const DecayFactorsArgs& args) {
  for_vectors(0, args.count, [&](int64_t at, auto lanes) {
    store(args.out + at, -exp_of(load(static_cast<const T*>(args.decay) + at, lanes)), lanes);
  });
}

template <class T>
void centred_rms_norm_of(const AddRmsNormArgs& args) {
  for_rows(args.rows, args.width, [&](int64_t i) {
    const int64_t floats = rounded_up(args.width, kLanes);  // so that it is read in whole vectors
    float* row = reinterpret_cast<float*>(thread_scratch(floats * static_cast<int64_t>(sizeof(float))));
    const bool adds = args.residual.given();
    const T* x = args.x.row<const T>(i);
    Vec squares = adds ? add_rows(x, args.residual.row<const T>(i), row, args.width) : widen_row(x, row, args.width);
    if (adds) squares = round_row(row, args.y.row<T>(i), args.width);
    const T* weight = static_cast<const T*>(adds ? args.next_weight : args.weight);
    T* to = (adds ? args.next : args.y).row<T>(i);
    const Vec scale = splat(scale_of(squares, args.width, args.eps));
    for_vectors(0, args.width, [&](int64_t at, auto lanes) {
      store(to + at, mul(mul(load(row + at, Whole{}), scale), 1.0f + load(weight + at, lanes)), lanes);
    });
  });
}

}  // namespace

void gated_rows(const GatedRowsArgs& args) { PDK_BY_ELEMENT(gated_rows_of, args) }
void decay_factors(const DecayFactorsArgs& args) { PDK_BY_ELEMENT(decay_factors_of, args) }
void centred_rms_norm(const AddRmsNormArgs& args) { PDK_BY_ELEMENT(centred_rms_norm_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
