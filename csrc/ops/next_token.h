// Arguments of the end of a decoding step with one known token a sequence, for the CPU: see
// pdkernels/generation/next_token.py.
#pragma once

#include "common/memory_parts.h"
#include "ops/token_statistics.h"

namespace pdkernels {

struct NextTokenArgs {
  Element element;        // of the logits
  RowsView logits;        // (batch, vocabulary)
  const int64_t* tokens;  // chosen from them; nullptr: the most probable ones but for those of `suppress`
  const int64_t *ends, *suppress;
  int64_t batch, vocabulary, end_count, suppress_count;
  // Of each sequence `columns` numbers: pending, accepted, and at `draft` the token of the next step.
  int64_t* entries;
  int64_t columns, draft;
  int64_t* remaining;
  int64_t *lengths, capacity;  // of the cache, to which what is pending is added; nullptr: not here
  char* memory;                // memory_bytes()

  int64_t memory_bytes() const;
};

// What a choice of the most probable tokens needs.
struct NextTokenMemory {
  TokenStatisticsArgs statistics = {};

  NextTokenMemory(const NextTokenArgs& args, MemoryParts& memory) {
    const int64_t rows = args.batch;
    statistics.element = args.element, statistics.logits = args.logits;
    statistics.rows = statistics.source_rows = rows, statistics.width = args.vocabulary;
    statistics.top_p = statistics.typical_p = 1, statistics.top_k = 1;
    for (int64_t i = 0; i < args.suppress_count; ++i) {
      statistics.suppress[statistics.num_suppressed++] = args.suppress[i];
    }
    statistics.ids = memory.take<int64_t>(rows), statistics.top_ids = memory.take<int64_t>(rows);
    statistics.probs = memory.take<float>(rows), statistics.top_probs = memory.take<float>(rows);
    statistics.margin = memory.take<float>(rows), statistics.entropy = memory.take<float>(rows);
    statistics.logsumexp = memory.take<float>(rows);
    statistics.parts = memory.take<TokenPart>(rows * statistics.num_parts());
  }
};

inline int64_t NextTokenArgs::memory_bytes() const {
  if (tokens != nullptr) return 0;
  MemoryParts parts;
  NextTokenMemory(*this, parts);
  return parts.used();
}

PDK_KERNEL(next_token, NextTokenArgs)

}  // namespace pdkernels
