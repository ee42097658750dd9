// Rotary embedding on the CPU: values are checked here, simd/transformer_ops.cpp computes.
#include "ops/transformer_ops.h"
#include "check_rows.h"
#include "check_steps.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

namespace {

void require_slots(const char* op, const ApplyRopeAppendArgs& args, int64_t b, int64_t length, int64_t count) {
  for (int64_t row = 0; row < args.rows; ++row) {
    if (args.row_fits(b, row, length, count)) continue;
    const int64_t slot = args.slot(b, row);
    if (slot < -1 || !args.in_cache(length, slot)) {
      const std::string argument = "slots[" + std::to_string(b) + ", " + std::to_string(row) + "]";
      fail(op, b, argument, range(-1, args.pages.capacity() - length - 1), slot,
           "A row is at lengths + slots, a slot of the cache; -1 is padding.");
    }
    if (!args.in_tables(length, slot + 1)) {
      fail(op, b, "lengths + slots", "be less than the " + std::to_string(args.positions) + " positions of the tables",
           length + slot, "Make longer tables.");
    }
    require_pages(op, args.pages, b, length + slot, 1);
  }
}

}  // namespace

void apply_rope_append(const ApplyRopeAppendArgs& args) {
  const char* op = "apply_rope_append_";
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.lengths.load(b), count = args.count(b);
    report(op, args.check_lengths(length, count), args.pages, b, length, count, args.rows);
    if (args.slots.given()) {
      require_slots(op, args, b, length, count);
      continue;
    }
    if (!args.in_tables(length, count)) {
      fail(op, b, "lengths + counts", "be at most the " + std::to_string(args.positions) + " positions of the tables",
           length + count, "Make longer tables.");
    }
    require_pages(op, args.pages, b, length, count);
  }
  PDK_DISPATCH(apply_rope_append, args)
}

void require_positions(const ApplyRopeArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t row = 0; row < args.rows; ++row) {
      const int64_t position = args.positions.load(b, row);
      if (args.in_tables(position)) continue;
      const std::string argument = "positions[" + std::to_string(b) + ", " + std::to_string(row) + "]";
      fail("apply_rope_", b, argument, range(0, args.table_rows - 1), position, "Make longer tables.");
    }
  }
}

void apply_rope(const ApplyRopeArgs& args) {
  require_positions(args);
  PDK_DISPATCH(apply_rope, args)
}

}  // namespace pdkernels::cpu
