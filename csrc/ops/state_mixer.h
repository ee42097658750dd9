// Arguments of the mixer of a layer with a state, for the CPU: what lies between the product of its input and that of
// its output. It is a convolution between two gates (LFM2), or the gated delta rule after a convolution (Qwen3.5), and
// calls the kernels that pdkernels/models/architectures/hybrid.py calls, in the same order.
#pragma once

#include <algorithm>
#include <optional>

#include "common/memory_parts.h"
#include "ops/mixer_rows.h"
#include "ops/recurrent_state.h"

namespace pdkernels {

struct DeltaRule {
  int64_t key_heads, value_heads, key_dim, value_dim;
  bool tiled;        // value head h reads key head h % key_heads; otherwise those of a key head are side by side
  bool plain_decay;  // `decay` is the factor of the softplus; otherwise the logarithm of its negative
  float eps;         // of the norms of q and k
  void *decay, *decay_bias, *value_norm;  // (value_heads,) twice, (value_dim,)

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  // Key heads as the scan takes them.
  int64_t read_heads() const { return tiled ? value_heads : key_heads; }
};

struct StateMixer {
  void* conv;  // (channels, conv_width)
  int64_t channels, conv_width;
  std::optional<DeltaRule> delta;  // nullopt: the convolution between two gates

  // Numbers of a row of the product of the input: gate, gate of the output, x; or q, k and v, z, b, a.
  int64_t inputs() const { return delta ? channels + delta->values() + 2 * delta->value_heads : 3 * channels; }
  int64_t outputs() const { return delta ? delta->values() : channels; }
};

// The states of a layer, and the step that they take; what they are computed from is the layer's.
struct MixerStates {
  ShortConvArgs conv;
  StateScanArgs scan;  // of the delta rule
};

// The largest numbers of a row of several mixers.
struct MixerSizes {
  int64_t inputs = 0, outputs = 0, channels = 0, tiled = 0, factors = 0;

  void include(const StateMixer& mixer) {
    inputs = std::max(inputs, mixer.inputs()), outputs = std::max(outputs, mixer.outputs());
    channels = std::max(channels, mixer.channels);
    if (!mixer.delta) return;
    const DeltaRule& delta = *mixer.delta;
    factors = std::max(factors, delta.value_heads);
    if (delta.tiled) tiled = std::max(tiled, 2 * delta.read_heads() * delta.key_dim);
  }
};

struct MixerMemory {
  char *gated, *convolved, *tiled;
  float* factors;

  MixerMemory(const MixerSizes& sizes, Element element, int64_t rows, MemoryParts& memory)
      : gated(memory.take(rows * sizes.outputs * bytes_of(element))),
        convolved(memory.take(rows * sizes.channels * bytes_of(element))),
        tiled(memory.take(rows * sizes.tiled * bytes_of(element))),
        factors(memory.take<float>(sizes.factors)) {}
};

struct StateMixerArgs {
  Element element;
  const StateMixer* mixer;
  const MixerStates* states;
  char *product, *out;  // (batch, rows, inputs), (batch, rows, outputs)
  int64_t batch, rows;
  float eps;  // of the norm of values
  MixerMemory memory;
};

PDK_KERNEL(state_mixer, StateMixerArgs)

}  // namespace pdkernels
