// Lookup drafts on the CPU: a scan of a few thousand tokens from the newest to the oldest, so one thread.
#include "ops/lookup_draft.h"
#include "fault.h"

namespace pdkernels::cpu {
namespace {

constexpr int64_t kBlock = 32;  // tokens tested at once

bool contains(const int64_t* tokens, int64_t token) {
  int64_t found = 0;  // as wide as a token, so that the loop becomes vector instructions
  for (int64_t i = 0; i < kBlock; ++i) found |= tokens[i] == token ? -1 : 0;
  return found != 0;
}

struct Match {
  int64_t length = 0;
  int64_t place = 0;
};

// Searches the places in (low, high), newest first, so that only longer matches replace an earlier one.
void search(const SearchedTokens& text, int64_t low, int64_t high, int64_t tail, Match& best) {
  for (int64_t place = high - 1; place > low && best.length < tail;) {
    const int64_t stop = place - low >= kBlock ? place - kBlock : low;
    if (place - stop == kBlock && !contains(text.tokens + stop, text.known)) {
      place = stop;
      continue;
    }
    for (; place > stop && best.length < tail; --place) {
      if (text.tokens[place - 1] != text.known) continue;
      const int64_t length = text.matched(place, tail);
      if (length > best.length) best = {length, place};
    }
  }
}

}  // namespace

void lookup_draft(const LookupDraftArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t length = args.draft_lengths.load(b);
    if (length < 0 || length > args.slots) {
      fail("lookup_draft_", b, "draft_lengths", "be in [0, " + std::to_string(args.slots) + "]", length,
           "A length counts tokens of the draft, the known one included; 0 marks an inactive sequence.");
    }
    if (length > 0 && !args.has_end(b)) {
      fail("lookup_draft_", b, "ends",
           "be in [" + std::to_string(args.start) + ", " + std::to_string(args.width - 1) + "]", args.ends.load(b),
           "The known token is written there, after the text; give tokens room for it.");
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    if (args.draft_lengths.load(b) == 0) continue;
    const SearchedTokens text = args.searched(b);
    const int64_t tail = text.tail(args.reach);
    Match best;
    search(text, text.start, text.end + 1, tail, best);
    search(text, 0, text.start, tail, best);
    const int64_t most = args.most(best.length);
    int64_t found = 0;
    for (int64_t i = 0; i < most; ++i, ++found) {
      const int64_t token = text.guess(best.place, i);
      if (token == -1) break;
      args.write_guess(b, i, token);
    }
    for (int64_t i = found; i < args.slots - 1; ++i) args.write_guess(b, i, 0);
    args.finish(b, found);
  }
}

}  // namespace pdkernels::cpu
