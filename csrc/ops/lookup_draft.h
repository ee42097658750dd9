// Drafts from earlier occurrences of a text's last tokens, shared by the CPU and the CUDA kernel.
//
// A place is the index after a possible match. A match never crosses the start of the text, and -1 matches nothing.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// The searched tokens of one sequence. The known token is the last one; its place in memory may not have it yet.
struct SearchedTokens {
  const int64_t* tokens = nullptr;
  int64_t start = 0;  // of the text
  int64_t end = 0;    // index of the known token
  int64_t known = 0;

  PDK_HD int64_t at(int64_t i) const { return i == end ? known : tokens[i]; }
  // The number of last tokens to compare.
  PDK_HD int64_t tail(int64_t reach) const {
    int64_t n = 0;
    while (n < reach && end - n >= start && at(end - n) != -1) ++n;
    return n;
  }
  PDK_HD int64_t low(int64_t place) const { return place > start ? start : 0; }
  // The length of the match before `place`; 0 if no token follows it in the same text.
  PDK_HD int64_t matched(int64_t place, int64_t tail) const {
    if (place == start || at(place) == -1) return 0;
    const int64_t first = low(place);
    int64_t n = 0;
    while (n < tail && place - 1 - n >= first && tokens[place - 1 - n] == at(end - n)) ++n;
    return n;
  }
  // Guess i of the draft from `place`; -1 where there is none. The text continues with itself.
  PDK_HD int64_t guess(int64_t place, int64_t i) const {
    if (place > start) return at(place + i % (end + 1 - place));
    return i < start - place ? tokens[place + i] : -1;
  }
};

struct LookupDraftArgs {
  int64_t* draft = nullptr;  // [batch][slots], any strides
  int64_t draft_strides[2] = {0, 0};
  IndexView draft_lengths;
  int64_t* tokens = nullptr;  // [batch][width], contiguous rows
  int64_t tokens_stride = 0;
  IndexView ends;
  int64_t batch = 0;
  int64_t slots = 0;  // at least 1
  int64_t width = 0;
  int64_t start = 0;
  int64_t reach = 0;
  int64_t least = 0;
  int64_t growth = 0;

  PDK_HD bool has_end(int64_t b) const {
    const int64_t end = ends.load(b);
    return end >= start && end < width;
  }
  PDK_HD SearchedTokens searched(int64_t b) const {
    return {tokens + b * tokens_stride, start, ends.load(b), draft[b * draft_strides[0]]};
  }
  PDK_HD void write_guess(int64_t b, int64_t i, int64_t token) const {
    draft[b * draft_strides[0] + (i + 1) * draft_strides[1]] = token;
  }
  // The most guesses after a match of so many tokens.
  PDK_HD int64_t most(int64_t length) const {
    const int64_t guesses = slots - 1;
    if (length < least) return 0;
    return length == reach || growth > guesses / length ? guesses : growth * length;
  }
  // Shortens the draft to `found` guesses, and puts the known token into the text.
  PDK_HD void finish(int64_t b, int64_t found) const {
    if (draft_lengths.load(b) > found + 1) draft_lengths.store(found + 1, b);
    tokens[b * tokens_stride + ends.load(b)] = draft[b * draft_strides[0]];
  }
};

PDK_KERNEL(lookup_draft, LookupDraftArgs)

}  // namespace pdkernels
