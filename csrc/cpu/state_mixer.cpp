// The mixers of layers with a state on the CPU: the kernels of other ops compute.
#include "ops/state_mixer.h"

#include <cmath>
#include <cstring>

#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void run(const AddRmsNormArgs& args) { PDK_DISPATCH(add_rms_norm, args) }
void run(const GatedRowsArgs& args) { PDK_DISPATCH(gated_rows, args) }
void run(const DecayFactorsArgs& args) { PDK_DISPATCH(decay_factors, args) }

class Mixer {
 public:
  explicit Mixer(const StateMixerArgs& args)
      : args_(args), mixer_(*args.mixer), rows_(args.batch * args.rows), size_(bytes_of(args.element)) {}

  void compute() const { mixer_.delta ? scan(*mixer_.delta) : convolve_between_gates(); }

 private:
  // Heads of rows that begin so many elements apart.
  InputView view(void* data, int64_t row_stride, int64_t head_stride = 0) const {
    return {data, args_.element, args_.rows * row_stride, row_stride, head_stride};
  }
  static GroupsView whole(void* data, int64_t row_stride) { return {data, row_stride, 0}; }

  // out = x * form(gate), for rows of the width of the result.
  void gate(GateForm form, const GroupsView& x, const GroupsView& gate, char* out) const {
    const int64_t width = mixer_.outputs();
    run(GatedRowsArgs{args_.element, form, x, gate, whole(out, width), rows_, 1, width});
  }

  void convolve(char* x, int64_t row_stride, bool silu) const {
    ShortConvArgs conv = args_.states->conv;
    conv.element = args_.element, conv.channels = mixer_.channels, conv.width = mixer_.conv_width, conv.silu = silu;
    conv.weight = {mixer_.conv, args_.element}, conv.weight_stride = mixer_.conv_width, conv.bias = {};
    conv.x.fresh = view(x, row_stride), conv.out = view(args_.memory.convolved, mixer_.channels);
    short_conv(conv);
  }

  void convolve_between_gates() const {
    const int64_t channels = mixer_.channels, width = mixer_.inputs();
    char *opening = args_.product, *closing = opening + channels * size_, *x = closing + channels * size_;
    gate(GateForm::kPlain, whole(x, width), whole(opening, width), args_.memory.gated);
    convolve(args_.memory.gated, channels, false);
    gate(GateForm::kPlain, whole(args_.memory.convolved, channels), whole(closing, width), args_.out);
  }

  // q and k of every value head.
  void tile(const DeltaRule& delta) const {
    const int64_t bytes = delta.keys() * size_, from_row = mixer_.channels * size_;
    const int64_t times = delta.value_heads / delta.key_heads;
    char* to = args_.memory.tiled;
    for (int64_t row = 0; row < rows_; ++row) {
      const char* from = args_.memory.convolved + row * from_row;
      for (int64_t side = 0; side < 2; ++side) {
        for (int64_t i = 0; i < times; ++i, to += bytes) std::memcpy(to, from + side * bytes, bytes);
      }
    }
  }

  void scan(const DeltaRule& delta) const {
    const int64_t width = mixer_.inputs(), channels = mixer_.channels, values = delta.values();
    char *z = args_.product + channels * size_, *b = z + values * size_, *a = b + delta.value_heads * size_;
    convolve(args_.product, width, true);
    char *q = args_.memory.convolved, *v = q + 2 * delta.keys() * size_;
    int64_t row = channels, side = delta.keys();
    if (delta.tiled) {
      tile(delta);
      q = args_.memory.tiled, side = delta.read_heads() * delta.key_dim, row = 2 * side;
    }
    StateScanArgs scan = args_.states->scan;
    scan.delta = true, scan.element = args_.element, scan.sigmoid = true, scan.eps = delta.eps;
    scan.heads = delta.value_heads, scan.key_heads = delta.read_heads();
    scan.keys = delta.key_dim, scan.values = delta.value_dim;
    scan.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(delta.key_dim)));
    scan.q = view(q, row, delta.key_dim), scan.k.fresh = view(q + side * size_, row, delta.key_dim);
    scan.v.fresh = view(v, channels, delta.value_dim);
    scan.gate.fresh = view(a, width, 1), scan.beta = view(b, width, 1);
    scan.out = view(args_.memory.gated, values, delta.value_dim);
    scan.A = factors(delta), scan.dt_bias = {delta.decay_bias, args_.element, 0, 0, 1};
    state_scan(scan);
    norm_values(delta);
    gate(GateForm::kSilu, whole(args_.out, values), whole(z, width), args_.out);
  }

  InputView factors(const DeltaRule& delta) const {
    if (delta.plain_decay) return {delta.decay, args_.element, 0, 0, 1};
    float* found = args_.memory.factors;
    run(DecayFactorsArgs{args_.element, delta.decay, found, delta.value_heads});
    return {found, Element::kFloat, 0, 0, 1};
  }

  void norm_values(const DeltaRule& delta) const {
    AddRmsNormArgs args;
    args.element = args_.element, args.rows = rows_ * delta.value_heads, args.width = delta.value_dim;
    args.x = {args_.memory.gated, delta.value_dim}, args.y = {args_.out, delta.value_dim};
    args.weight = delta.value_norm, args.eps = args_.eps;
    args.residual = args.next = {}, args.next_weight = nullptr;
    run(args);
  }

  const StateMixerArgs& args_;
  const StateMixer& mixer_;
  int64_t rows_, size_;  // of an element
};

}  // namespace

void state_mixer(const StateMixerArgs& args) { Mixer(args).compute(); }

}  // namespace pdkernels::cpu
