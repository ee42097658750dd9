// The end of a step with one known token a sequence on the CPU: but for the choice a few numbers, so one thread.
#include "ops/next_token.h"

#include <algorithm>

#include "check_rows.h"

namespace pdkernels::cpu {
namespace {

template <class Bits>
bool finite(const void* row, int64_t at, Bits exponent) {
  return (static_cast<const Bits*>(row)[at] & exponent) != exponent;
}

// Whether a token was chosen from a row that has a distribution.
bool is_choice(const NextTokenArgs& args, int64_t b, int64_t token) {
  if (token < 0) return false;
  if (token >= args.vocabulary) fail("next_token_", "token " + std::to_string(token) + " is not in the vocabulary");
  const void* row = static_cast<const char*>(args.logits.data) + b * args.logits.row_stride * bytes_of(args.element);
  switch (args.element) {
    case Element::kFloat: return finite<uint32_t>(row, token, 0x7f800000);
    case Element::kHalf: return finite<uint16_t>(row, token, 0x7c00);
    case Element::kBfloat16: return finite<uint16_t>(row, token, 0x7f80);
  }
  return false;
}

void check_room(const NextTokenArgs& args) {
  for (int64_t b = 0; args.lengths != nullptr && b < args.batch; ++b) {
    const int64_t length = args.lengths[b], room = args.capacity - args.entries[b * args.columns];
    if (length < 0 || length > room)
      fail("next_token_", b, "lengths", range(0, room), length, "Make the cache larger.");
  }
}

}  // namespace

void next_token(const NextTokenArgs& given) {
  NextTokenArgs args = given;
  check_room(args);
  if (args.tokens == nullptr) {
    MemoryParts parts(args.memory);
    const NextTokenMemory memory(args, parts);
    token_statistics(memory.statistics);
    args.tokens = memory.statistics.ids;
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    int64_t *entry = args.entries + b * args.columns, &pending = entry[0], &accepted = entry[1];
    const int64_t token = args.tokens[b];
    const bool failed = pending > 0 && !is_choice(args, b, token);
    const bool ended = std::find(args.ends, args.ends + args.end_count, token) != args.ends + args.end_count;
    int64_t& remaining = args.remaining[b];
    if (args.lengths != nullptr) args.lengths[b] += pending;
    accepted = failed ? -1 : 1;
    remaining = failed || ended ? 0 : remaining - pending;
    entry[args.draft] = std::max<int64_t>(token, 0);
    pending = std::min<int64_t>(remaining, 1);
  }
}

}  // namespace pdkernels::cpu
