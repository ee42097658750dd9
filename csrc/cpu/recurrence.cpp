// The step of the recurrent-depth sampler on the CPU: checks values, then calls the kernel compiled for this processor.
// The bookkeeping is a few integers per sequence, so it runs on one thread.
#include "ops/recurrence.h"

#include "fault.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void check_width(const char* op, const IndexView& width, int64_t b, int64_t max_width) {
  const int64_t w = width.load(b);
  if (w < 0 || w > max_width) {
    fail(op, b, "width", "be in [0, " + std::to_string(max_width) + "]", w,
         "It counts the rows of a wave; 0 marks a finished sequence.");
  }
}

void check_sign(const char* op, const char* name, const IndexView& numbers, int64_t b) {
  if (numbers.load(b) < 0)
    fail(op, b, name, "not be negative", numbers.load(b), "Pass what recurrence_advance_ left there.");
}

}  // namespace

void recurrence_inject(const InjectArgs& args) {
  const char* op = "recurrence_inject";
  for (int64_t b = 0; b < args.batch; ++b) {
    check_width(op, args.width, b, args.rows);
    check_sign(op, "cursor", args.cursor, b);
    check_sign(op, "advance", args.advance, b);
    for (int64_t i = 0; args.state.given() && i < args.width.load(b); ++i) {
      if (args.recurrences.load(b, i) <= 0 || args.state.has(args.before(b, i))) continue;
      fail(op, "state must have the rows that recurrences counts, got " + std::to_string(args.state.rows) +
                   " rows, and row " + std::to_string(i) + " of sequence " + std::to_string(b) + " was row " +
                   std::to_string(args.before(b, i)) + ".");
    }
  }
  PDK_DISPATCH(recurrence_inject, args)
}

void recurrence_exit(const ExitArgs& args) {
  const char* op = "recurrence_exit";
  for (int64_t b = 0; b < args.batch; ++b) {
    check_width(op, args.width, b, args.rows);
    check_sign(op, "advance", args.advance, b);
    if (args.older.given()) check_sign(op, "older_advance", args.older_advance, b);
  }
  PDK_DISPATCH(recurrence_exit, args)
}

void recurrence_advance(const AdvanceArgs& args) {
  const char* op = "recurrence_advance_";
  for (int64_t b = 0; b < args.batch; ++b) {
    check_width(op, args.width, b, args.widest());
    check_sign(op, "cursor", args.cursor, b);
    check_sign(op, "remaining", args.remaining, b);
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t w = args.width.load(b);
    args.advance.store(0, b);
    if (w == 0) continue;
    int64_t leading = w, last = 0, first_changed = w, first_end = w;
    for (int64_t i = w - 1; i >= 0; --i) {
      if (!args.count_row(b, i)) leading = i;
      else if (last == 0) last = i + 1;
      if (i > 0 && args.input_changed(b, i)) first_changed = i;
      if (args.is_end(args.predictions.load(b, i))) first_end = i;
    }
    const Advance next(args, b, w, args.last ? last : leading, first_changed, first_end);
    next.write(args, b);
    if (next.wave == 0) continue;
    // In ascending order and in place: new_token reads tokens[0] only for entry 0, and predictions otherwise.
    for (int64_t j = 0; j < next.tokens; ++j) args.tokens.store(args.new_token(b, w, next.frozen, j), b, j);
    for (int64_t i = 0; i < args.capacity; ++i) {
      for (const IndexView& counts : {args.recurrences, args.unchanged_steps}) {
        counts.store(i < next.kept ? counts.load(b, i + next.frozen) : 0, b, i);
      }
    }
  }
}

}  // namespace pdkernels::cpu
