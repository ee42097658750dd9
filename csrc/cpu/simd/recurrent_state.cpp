// One step of a layer with a state. A work item is one head of a sequence, or a part of a convolution's channels.
//
// Lanes are columns of the state, which do not depend on each other, and every product is rounded before it is added.
// So a column takes the same operations in the same order at every level, in any tile, and however rows are split into
// steps.
#include "ops/recurrent_state.h"
#include "kernels.h"
#include "state_blocks.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Calls body with a Block for all columns.
template <class T, bool kDelta, class Body>
void for_blocks(const StateScanArgs& args, int64_t b, int64_t head, float* state, float* work, const Body& body) {
  int64_t at = 0;
  for (; at + kColumns * kLanes <= args.values; at += kColumns * kLanes) {
    Block<T, kDelta, kColumns, Whole> block(args, b, head, state, work, at, Whole{});
    body(block);
  }
  for_vectors(at, args.values, [&](int64_t column, auto lanes) {
    Block<T, kDelta, 1, decltype(lanes)> block(args, b, head, state, work, column, lanes);
    body(block);
  });
}

// Rows that become part of a state are prepared so many at a time.
constexpr int64_t kChunk = 32;

template <class T, bool kDelta>
void scan_head(const StateScanArgs& args, int64_t b, int64_t head) {
  const int64_t count = args.count(b), row = args.row(b);
  for (int64_t i = count; i < args.rows; ++i) {  // padding
    char* to = args.out.at(b, i, head);
    for (int64_t byte = 0; byte < args.values * static_cast<int64_t>(sizeof(T)); ++byte) to[byte] = 0;
  }
  if (count == 0) return;
  const bool is_zero = args.state_lengths.load(row) == 0;
  const int64_t accepted = args.accepted(row), settled = args.settled(count), folded = accepted + settled;
  const int64_t drafted = count - settled, most = drafted + smaller(folded, kChunk);
  const int64_t width = 2 * rounded_up(args.keys, kSums) + rounded_up(args.values, kSums);
  const int64_t tile = args.keys * kColumns * kLanes;
  const int64_t row_floats = rounded_up(most * static_cast<int64_t>(sizeof(Row)) / 4 + 1, kSums);
  char* memory = thread_scratch((tile + most * width + row_floats) * static_cast<int64_t>(sizeof(float)));
  float *work = reinterpret_cast<float*>(memory), *prepared = work + tile;
  Row *rows = reinterpret_cast<Row*>(prepared + most * width), *chunk_rows = rows + drafted;
  float* state = args.state + row * args.state_row_stride + head * args.state_head_stride;

  for (int64_t i = 0; i < drafted; ++i) {
    prepare<T>(args, {false, b, settled + i}, head, prepared + i * width, rows[i]);
  }
  for (int64_t first = 0; first < folded; first += kChunk) {
    const int64_t chunk = smaller(kChunk, folded - first), pending = smaller(chunk, larger(accepted - first, 0));
    for (int64_t i = 0; i < chunk; ++i) {
      const bool is_pending = i < pending;
      const Place at{is_pending, is_pending ? row : b, is_pending ? args.source(row, first + i) : first + i - accepted};
      prepare<T>(args, at, head, prepared + (drafted + i) * width, chunk_rows[i]);
    }
    for_blocks<T, kDelta>(args, b, head, state, work, [&](auto& block) {
      if (first == 0 && is_zero) block.clear_state();
      block.fold(chunk_rows, chunk, pending, larger(first - accepted, 0));
      if (first + chunk < folded || drafted == 0) {
        block.finish();
      } else {
        block.draft(rows, drafted, settled, false);
      }
    });
  }
  if (folded == 0) {
    for_blocks<T, kDelta>(args, b, head, state, work,
                          [&](auto& block) { block.draft(rows, drafted, settled, is_zero); });
  }
}

template <class T>
void scan_of(const StateScanArgs& args) {
  // As if half of the pending rows were accepted.
  const int64_t rows = args.rows + smaller(args.rows, args.max_pending) / 2;
  for_rows(args.batch * args.heads, rows * args.keys * args.values, [&](int64_t item) {
    const int64_t b = item / args.heads, head = item % args.heads;
    args.delta ? scan_head<T, true>(args, b, head) : scan_head<T, false>(args, b, head);
  });
}

// ------------------------------------------------------------------------------------------------------ convolution

// Channels of a work item.
constexpr int64_t kPart = 256;

// The inputs of the rows of a sequence: those of the state, then the accepted ones, then new ones.
template <class T>
struct Inputs {
  const ShortConvArgs& args;
  int64_t b, row, accepted, settled;
  bool is_zero;

  // The i-th of the inputs before the new rows, of which there are width - 1 + accepted; nullptr: zeros.
  const T* old(int64_t i) const {
    if (i < args.width - 1) { return is_zero ? nullptr : reinterpret_cast<const T*>(args.state.at(row, i, 0)); }
    return reinterpret_cast<const T*>(args.x.pending.at(row, args.source(row, i - args.width + 1), 0));
  }
  const T* fresh(int64_t i) const { return reinterpret_cast<const T*>(args.x.fresh.at(b, i, 0)); }

  // The last `width` inputs of a new row.
  void find(int64_t i, const T** taps) const {
    int64_t at = i, before = args.width - 1 + accepted;
    for (int64_t tap = args.width - 1; tap >= 0; --tap) {
      taps[tap] = at >= 0 ? fresh(at) : old(--before);
      if (at >= 0) at = args.parent(b, at);
    }
  }
};

template <class T>
void conv_part(const ShortConvArgs& args, int64_t b, int64_t begin, int64_t end) {
  const int64_t count = args.count(b), row = args.row(b), width = args.width;
  for (int64_t i = count; i < args.rows; ++i) {  // padding
    T* to = reinterpret_cast<T*>(args.out.at(b, i, 0));
    for (int64_t c = begin; c < end; ++c) to[c] = from_float<T>(0.0f);
  }
  if (count == 0) return;
  const Inputs<T> inputs{args, b, row, args.accepted(row), args.settled(count), args.state_lengths.load(row) == 0};
  char* memory = thread_scratch((width + 1) * kPart * 4 + width * static_cast<int64_t>(sizeof(T*)));
  float *weights = reinterpret_cast<float*>(memory), *bias = weights + width * kPart;
  const T** taps = reinterpret_cast<const T**>(bias + kPart);
  for (int64_t c = begin; c < end; ++c) {
    const T* weight = reinterpret_cast<const T*>(args.weight.data) + c * args.weight_stride;
    for (int64_t tap = 0; tap < width; ++tap) weights[tap * kPart + c - begin] = to_float(weight[tap]);
    if (args.bias.given()) bias[c - begin] = to_float(reinterpret_cast<const T*>(args.bias.data)[c]);
  }
  for (int64_t i = 0; i < count; ++i) {
    inputs.find(i, taps);
    T* to = reinterpret_cast<T*>(args.out.at(b, i, 0));
    for_vectors(begin, end, [&](int64_t c, auto lanes) {
      Vec sum{};
      for (int64_t tap = 0; tap < width; ++tap) {
        const Vec x = taps[tap] != nullptr ? load(taps[tap] + c, lanes) : Vec{};
        sum += mul(load(weights + tap * kPart + c - begin, Whole{}), x);
      }
      if (args.bias.given()) sum += load(bias + c - begin, Whole{});
      store(to + c, args.silu ? silu_of(sum) : sum, lanes);
    });
  }
  // The window moves on: ascending, so that no input is overwritten before it has been read.
  const int64_t folded = inputs.accepted + inputs.settled, held = width - 1 + inputs.accepted;
  for (int64_t i = 0; folded > 0 && i < width - 1; ++i) {
    T* to = reinterpret_cast<T*>(args.state.at(row, i, 0));
    const int64_t at = folded + i;
    const T* from = at < held ? inputs.old(at) : inputs.fresh(at - held);
    for (int64_t c = begin; c < end; ++c) to[c] = from != nullptr ? from[c] : from_float<T>(0.0f);
  }
}

template <class T>
void conv_of(const ShortConvArgs& args) {
  const int64_t parts = (args.channels + kPart - 1) / kPart;
  for_rows(args.batch * parts, args.rows * args.width * smaller(kPart, args.channels), [&](int64_t item) {
    const int64_t begin = item % parts * kPart;
    conv_part<T>(args, item / parts, begin, smaller(begin + kPart, args.channels));
  });
}

}  // namespace

void state_scan(const StateScanArgs& args) { PDK_BY_ELEMENT(scan_of, args) }
void short_conv(const ShortConvArgs& args) { PDK_BY_ELEMENT(conv_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
