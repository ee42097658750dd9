// Greedy verification of a draft, shared by the CPU and the CUDA kernel.
//
// draft[0] is already verified; predictions[i] is the model's token after draft[i]. The accepted prefix ends before the
// first draft token that differs from the model's prediction.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// Tokens [batch][candidates][width], int32 or int64, any strides.
struct TokenView {
  void* data = nullptr;
  int64_t strides[3] = {0, 0, 0};  // in elements
  bool wide = true;

  PDK_HD int64_t load(int64_t b, int64_t c, int64_t i) const {
    const int64_t at = b * strides[0] + c * strides[1] + i * strides[2];
    return wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }
};

struct VerifyArgs {
  TokenView draft;
  TokenView predictions;
  IndexView draft_lengths;  // not given: width
  IndexView end_tokens;     // not given: none
  IndexView refill;         // not given: 0
  int64_t batch = 0;
  int64_t candidates = 0;
  int64_t width = 0;
  int64_t num_end_tokens = 0;
  // Outputs, contiguous.
  int64_t* accepted = nullptr;
  int64_t* next_token = nullptr;
  bool* ended = nullptr;
  int64_t* new_draft = nullptr;  // [batch][width]
  int64_t* candidate = nullptr;

  // Lengths outside [0, width] are clamped; on the CPU they have already been refused.
  PDK_HD int64_t length(int64_t b) const {
    const int64_t m = draft_lengths.given() ? draft_lengths.load(b) : width;
    return m < 0 ? 0 : (m > width ? width : m);
  }
  PDK_HD bool matches(int64_t b, int64_t c, int64_t i) const {
    return draft.load(b, c, i + 1) == predictions.load(b, c, i);
  }
  PDK_HD bool is_end(int64_t token) const {
    for (int64_t i = 0; i < num_end_tokens; ++i) {
      if (end_tokens.load(i) == token) return true;
    }
    return false;
  }
  PDK_HD int64_t new_draft_token(int64_t b, int64_t winner, int64_t accepted_count, int64_t length, int64_t j) const {
    const int64_t i = accepted_count - 1 + j;
    if (accepted_count > 0 && i < length) return predictions.load(b, winner, i);
    return refill.given() ? refill.load(b, j) : 0;
  }
  // Writes the verdict of a sequence. `first_end`: the index of the first end token in the accepted prefix, `count` if
  // there is none.
  PDK_HD void write_verdict(int64_t b, int64_t winner, int64_t count, int64_t first_end) const {
    const bool cut = first_end < count;
    const int64_t kept = cut ? first_end + 1 : count;
    const int64_t next = count == 0 ? -1
                         : cut      ? draft.load(b, winner, first_end)
                                    : predictions.load(b, winner, count - 1);
    accepted[b] = kept;
    next_token[b] = next;
    ended[b] = cut || (count > 0 && is_end(next));
    candidate[b] = winner;
  }
};

PDK_KERNEL(verify_draft, VerifyArgs)

}  // namespace pdkernels
