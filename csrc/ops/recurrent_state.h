// Layers whose memory is a state, for the CPU: one step of a recurrence or of a convolution, and edits of the lengths.
//
// A cache row remembers its state after state_lengths positions and what `max_pending` rows after these add to it. The
// rows between state_lengths and lengths are accepted: a step replays them into the state, which it writes once.
#pragma once

#include "common/element.h"
#include "common/index_view.h"

namespace pdkernels {

// What a step does to each sequence. Always inlined: the linker keeps one copy of an inline function, which must not be
// that of a vector level.
struct StateStep {
  const char* op;
  IndexView state_lengths, lengths;  // of the cache rows
  IndexView counts;                  // not given: rows
  IndexView cache_rows;              // not given: sequence b is row b
  IndexView pending_index;           // (cache rows, max_pending); not given: the accepted rows are a prefix
  IndexView parents;                 // (batch, rows); not given: the row before
  int64_t batch, rows, max_pending, cache_size;
  int64_t keep;  // how many rows stay pending; negative: all

  [[gnu::always_inline]] PDK_HD int64_t row(int64_t b) const { return cache_rows.given() ? cache_rows.load(b) : b; }
  [[gnu::always_inline]] PDK_HD int64_t count(int64_t b) const { return counts.given() ? counts.load(b) : rows; }
  [[gnu::always_inline]] PDK_HD int64_t accepted(int64_t row) const {
    return lengths.load(row) - state_lengths.load(row);
  }
  [[gnu::always_inline]] PDK_HD int64_t source(int64_t row, int64_t i) const {
    return pending_index.given() ? pending_index.load(row, i) : i;
  }
  [[gnu::always_inline]] PDK_HD int64_t parent(int64_t b, int64_t i) const {
    return parents.given() ? parents.load(b, i) : i - 1;
  }
  // New rows that become part of the state at once.
  [[gnu::always_inline]] PDK_HD int64_t settled(int64_t count) const {
    return keep >= 0 && count > keep ? count - keep : 0;
  }
};

// (batch, rows, heads, width), or without the width; strides in elements. The width is contiguous.
struct InputView {
  void* data = nullptr;  // nullptr: not given
  Element element = Element::kFloat;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;

  [[gnu::always_inline]] bool given() const { return data != nullptr; }
  [[gnu::always_inline]] int64_t bytes() const { return element == Element::kFloat ? 4 : 2; }
  [[gnu::always_inline]] char* at(int64_t b, int64_t row, int64_t head) const {
    return static_cast<char*>(data) + (b * batch_stride + row * row_stride + head * head_stride) * bytes();
  }
};

// An input of a layer: of new rows, and where those of pending ones are kept.
struct StateInput {
  InputView fresh, pending;
  int64_t heads = 0, width = 0;
};

// S = decay S + k update^T and out = S^T q, per head. Gated delta: update = beta (v - (decay S)^T k), which is what the
// pending v holds, as floats. Mamba 2: the update is v, its x; k is dt B, q is C.
struct StateScanArgs : StateStep {
  bool delta;
  Element element;  // of q, k, v and out
  float* state;     // (cache rows, heads, keys, values)
  int64_t state_row_stride, state_head_stride, state_key_stride;
  int64_t heads, key_heads, keys, values;
  StateInput k, v;
  StateInput gate;  // log of the decay, or the step size dt; may be absent
  InputView beta;   // delta only
  InputView q, out;
  InputView A, dt_bias, D;  // (heads,)
  float scale;
  float eps;             // added to the squared norm of q and k; negative: they are not normalised
  bool sigmoid;          // of beta
  bool softplus;         // of the gate
  float dt_min, dt_max;  // Mamba 2
};

struct ShortConvArgs : StateStep {
  Element element;
  InputView state;              // (cache rows, width - 1, channels); a row has one head
  StateInput x;                 // channels are its width
  InputView out, weight, bias;  // (channels, width), (channels,)
  int64_t channels, width;
  int64_t weight_stride;  // between channels
  bool silu;
};

struct StateLayers {
  const IndexView* lengths;  // of each layer
  int64_t count;
};

struct StateCommitArgs {
  IndexView lengths, pending_index, counts, source_index;
  StateLayers layers;
  int64_t batch, max_pending, max_rows;  // columns of source_index
  bool advance;
};

struct StateTrimArgs {
  IndexView lengths, new_lengths;
  StateLayers layers;
  int64_t batch;
};

PDK_KERNEL(state_scan, StateScanArgs)
PDK_VECTOR_KERNEL(state_scan, StateScanArgs)
PDK_KERNEL(short_conv, ShortConvArgs)
PDK_VECTOR_KERNEL(short_conv, ShortConvArgs)
PDK_KERNEL(state_commit, StateCommitArgs)
PDK_KERNEL(state_trim, StateTrimArgs)

}  // namespace pdkernels
