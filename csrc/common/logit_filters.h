// What changes logits before a token is chosen: a bias, penalties by token counts, and tokens that are impossible. The
// kernels of vocabulary statistics filter logits as they read them; filter_logits stores them.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// Rows that several rows of logits share: row r of the logits has row r / span.
struct SharedRows {
  const void* data = nullptr;  // nullptr: the optional argument was not given
  int64_t stride = 0, span = 1;

  PDK_HD bool given() const { return data != nullptr; }
  template <class T>
  PDK_HD const T* row(int64_t r) const {
    return static_cast<const T*>(data) + r / span * stride;
  }
};

// Lists of ids, -1 for none.
struct SharedIds {
  IndexView ids;
  int64_t span = 1, count = 0;

  PDK_HD int64_t at(int64_t r, int64_t i) const { return ids.load(r / span, i); }
};

struct LogitFilters {
  SharedRows bias;     // float
  SharedRows counts;   // int32: how often a token was generated; -1: it is in the prompt alone
  SharedRows allowed;  // bit id % 32 of word id / 32
  SharedIds recent;    // tokens that `counts` does not have yet: id of a generated one, -2 - id of one of the prompt
  SharedIds banned;
  float repetition = 1, presence = 0, frequency = 0;

  PDK_HD bool any() const { return bias.given() || penalises() || allowed.given() || banned.count > 0; }
  PDK_HD bool penalises() const {
    return (counts.given() || recent.count > 0) && (repetition != 1 || presence != 0 || frequency != 0);
  }
  PDK_HD bool allows(int64_t r, int64_t id) const {
    return !allowed.given() || (allowed.row<uint32_t>(r)[id / 32] >> (id % 32) & 1) != 0;
  }
  PDK_HD int32_t count_of(int64_t r, int64_t id) const { return counts.given() ? counts.row<int32_t>(r)[id] : 0; }
  PDK_HD static int64_t id_of(int64_t entry) { return entry < -1 ? -2 - entry : entry; }
  // The count, as in `counts`, of the token of an entry of `recent`; 0 if an earlier entry has the token too.
  [[gnu::always_inline]] PDK_HD int32_t count_with_recent(int64_t r, int64_t i) const {
    const int64_t id = id_of(recent.at(r, i)), before = count_of(r, id);
    int64_t count = before > 0 ? before : 0;
    for (int64_t j = 0; j < recent.count; ++j) {
      const int64_t entry = recent.at(r, j);
      if (id_of(entry) != id) continue;
      if (j < i) return 0;
      count += entry >= 0;
    }
    return count == 0 ? -1 : count < INT32_MAX ? static_cast<int32_t>(count) : INT32_MAX;
  }
};

}  // namespace pdkernels
