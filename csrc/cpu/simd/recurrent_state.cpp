// One step of a layer with a state. A work item is one head of a sequence, or a part of a convolution's channels.
//
// Lanes are columns of the state, which do not depend on each other, and every product is rounded before it is added.
// So a column takes the same operations in the same order at every level, in any tile, and however rows are split into
// steps.
#include "ops/recurrent_state.h"
#include "kernels.h"
#include "state_passes.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// Known rows, and rows that become part of a state, are prepared so many at a time.
constexpr int64_t kChunk = 32;

// A step of one head of a sequence.
template <class T, bool kDelta>
class Head {
 public:
  Head(const StateScanArgs& args, int64_t b, int64_t head)
      : args_(args),
        b_(b),
        head_(head),
        row_(args.row(b)),
        settled_(args.settled(args.count(b))),
        drafted_(args.count(b) - settled_) {
    float* state = args.state + row_ * args.state_row_stride + head * args.state_head_stride;
    state_ = {state, state + args.state_head_stride, args.state_key_stride, args.keys, args.values};
    const int64_t columns = rounded_up(args.values, kTile),
                  tiles = kDelta ? columns / kTile * tile_stride(args.keys) : 0;
    const int64_t rows = larger(drafted_, settled_ > 0 ? kChunk : 0), known = larger(drafted_, kChunk);
    const int64_t floats = tiles + columns + (rows + kChunk) * floats_of_row(args);
    char* memory = thread_scratch(floats * static_cast<int64_t>(sizeof(float)) +
                                  (rows + known) * static_cast<int64_t>(sizeof(Row)));
    work_ = reinterpret_cast<float*>(memory), remembered_ = work_ + tiles, of_rows_ = remembered_ + columns;
    of_known_ = of_rows_ + rows * floats_of_row(args);
    rows_ = reinterpret_cast<Row*>(of_known_ + kChunk * floats_of_row(args)), known_ = rows_ + rows;
  }

  void run() {
    const int64_t accepted = args_.accepted(row_);
    const bool is_zero = args_.state_lengths.load(row_) == 0;
    const bool is_written = accepted + settled_ > 0;
    from_zero_ = is_zero && !is_written;
    if (is_zero && is_written) clear_state();
    int64_t known = 0;
    for (int64_t first = 0; first < accepted; first += known) {
      if (known > 0) sweep(known, 0, Stored::kBehindKnown);
      known = smaller(kChunk, accepted - first);
      for (int64_t i = 0; i < known; ++i) {
        prepare<T>(args_, {true, row_, args_.source(row_, first + i)}, head_, of_known_ + i * floats_of_row(args_),
                   known_[i]);
      }
    }
    for (int64_t first = 0; first < settled_; first += kChunk, known = 0) {
      const int64_t count = smaller(kChunk, settled_ - first);
      prepare_rows(first, count);
      take(known, 0, count, first, Stored::kBehindAll);
    }
    if (drafted_ == 0) return;
    prepare_rows(settled_, drafted_);
    for (int64_t i = 0, end; i < drafted_; i = end) {
      for (end = i + 1; end < drafted_ && parent_of(end) == end - 1;) ++end;
      if (i > 0) known = find_ancestors(parent_of(i));
      take(known, i, end - i, settled_, i == 0 && known > 0 ? Stored::kBehindKnown : Stored::kNever);
    }
    if constexpr (kDelta) keep_updates();
  }

 private:
  void clear_state() const {
    for (int64_t key = 0; key < args_.keys; ++key) {
      __builtin_memset(state_.data + key * state_.stride, 0, args_.values * sizeof(float));
    }
  }

  void prepare_rows(int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      prepare<T>(args_, {false, b_, first + i}, head_, of_rows_ + i * floats_of_row(args_), rows_[i]);
    }
  }

  // Among the drafted rows; -1: none.
  int64_t parent_of(int64_t i) const { return larger(args_.parent(b_, settled_ + i) - settled_, -1); }

  // Makes `last` and its ancestors the known rows, in their order, and counts them.
  int64_t find_ancestors(int64_t last) {
    int64_t count = 0;
    for (int64_t up = last; up >= 0; up = parent_of(up)) known_[count++] = rows_[up];
    for (int64_t i = 0; i < count / 2; ++i) {
      const Row row = known_[i];
      known_[i] = known_[count - 1 - i], known_[count - 1 - i] = row;
    }
    return count;
  }

  void sweep(int64_t known, int64_t first, Stored stored, int64_t count = 0, bool goes_on = false) {
    float* work = goes_on ? work_ : nullptr;
    run_sweep<kDelta>({state_, from_zero_, work, remembered_, known_, rows_ + first, known, count, stored});
  }

  // `count` of the prepared rows, which follow one another, from the state and the known rows on. `number`: of the
  // first prepared row among the new ones.
  void take(int64_t known, int64_t first, int64_t count, int64_t number, Stored stored) {
    const Row* rows = rows_ + first;
    if constexpr (kDelta) {
      const int64_t columns = rounded_up(args_.values, kTile);
      for (int64_t i = 0; i < columns; ++i) remembered_[i] = 0;
      const bool stores = stored == Stored::kBehindAll, goes_on = stores || count > 1;
      sweep(known, first, stored, 1, goes_on);
      for (int64_t at = 0; at < columns; at += kLanes) find_update(*rows, at, load(remembered_ + at, Whole{}));
      if (goes_on) finish_path(state_, work_, rows, count, stores);
    } else {
      sweep(known, first, stored, count);
    }
    for (int64_t i = 0; i < count; ++i) write(rows[i], number + first + i);
  }

  void write(const Row& row, int64_t i) const {
    T* to = reinterpret_cast<T*>(args_.out.at(b_, i, head_));
    const bool adds = kDelta || args_.D.given();
    const Vec factor = splat(kDelta ? row.qk : adds ? number(args_.D, 0, 0, head_) : 0.0f);
    for_vectors(0, args_.values, [&](int64_t at, auto lanes) {
      Vec y = load(row.read + at, Whole{});
      if (adds) y += mul(factor, load(row.update + at, Whole{}));
      store(to + at, y, lanes);
    });
  }

  // Nobody reads this head's pending updates any more.
  void keep_updates() const {
    for (int64_t i = 0; i < drafted_; ++i) {
      __builtin_memcpy(args_.v.pending.at(row_, i, head_), rows_[i].update, args_.values * sizeof(float));
    }
  }

  const StateScanArgs& args_;
  const int64_t b_, head_, row_, settled_, drafted_;
  HeadState state_;
  float *work_, *remembered_, *of_rows_, *of_known_;
  Row *rows_, *known_;
  bool from_zero_ = false;
};

template <class T, bool kDelta>
void scan_head(const StateScanArgs& args, int64_t b, int64_t head) {
  const int64_t count = args.count(b);
  for (int64_t i = count; i < args.rows; ++i) {  // padding
    __builtin_memset(args.out.at(b, i, head), 0, args.values * sizeof(T));
  }
  if (count > 0) Head<T, kDelta>(args, b, head).run();
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
