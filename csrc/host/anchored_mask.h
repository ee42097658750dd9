// The mask of a drafter's training step: blocks attached to anchors in packed documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "host/segment_mask.h"

namespace pdkernels {

struct AnchoredRules {
  Inside inside;     // attention inside a block
  int64_t window;    // the number of base tokens before the anchor that a block attends to
  bool inclusive;    // whether a block also attends to its anchor
  bool causal_base;  // whether base rows attend to their document causally, or to nothing
};

// Base tokens, then a block of sizes[j] rows for each anchor. `documents` has the document of each base token, -1 for
// padding. Writes the position of every row: base tokens count from the start of their document, blocks continue from
// their anchor. The base is cut wherever a document, or the range that a block sees, begins or ends: at most documents
// + 2 * blocks segments.
inline SegmentMask anchored_mask(std::span<const int64_t> documents, std::span<const int64_t> anchors,
                                 std::span<const int64_t> sizes, const AnchoredRules& rules,
                                 std::span<int64_t> positions) {
  const auto base = static_cast<int32_t>(documents.size());
  const auto refuse = [](const std::string& argument, const std::string& expectation, int64_t got, size_t index) {
    fail_mask("anchored: " + argument + " must " + expectation + ", got " + std::to_string(got) + " at index " +
              std::to_string(index) + ".");
  };
  std::vector<int32_t> start(base);  // of each base token's document
  std::vector<uint8_t> cut(static_cast<size_t>(base) + 1, 0);
  std::unordered_set<int64_t> met;
  for (int32_t i = 0, begin = 0; i < base; ++i) {
    const int64_t document = documents[i];
    if (i == 0 || document != documents[i - 1]) {
      if (document < -1) refuse("documents", "be numbers of documents, or -1", document, i);
      if (document >= 0 && !met.insert(document).second) refuse("documents", "be in one piece each", document, i);
      begin = i, cut[i] = 1;
    }
    start[i] = begin;
    positions[i] = document < 0 ? 0 : i - begin;
  }

  std::vector<KeySpan> spans(anchors.size());
  int64_t row = base;
  for (size_t j = 0; j < anchors.size(); ++j) {
    const int64_t anchor = anchors[j];
    if (anchor < 0 || anchor >= base) refuse("anchors", "lie in [0, " + std::to_string(base) + ")", anchor, j);
    if (sizes[j] < 0) refuse("block", "be 0 or more", sizes[j], j);
    for (int64_t t = 0; t < sizes[j]; ++t) positions[row++] = positions[anchor] + t;
    if (documents[anchor] < 0) continue;
    const auto begin = static_cast<int32_t>(std::max<int64_t>(start[anchor], anchor - rules.window));
    spans[j] = {begin, static_cast<int32_t>(anchor) + rules.inclusive};
    cut[spans[j].begin] = cut[spans[j].end] = 1;
  }

  std::vector<int32_t> number(static_cast<size_t>(base) + 1);  // of the segment that begins at a cut
  int32_t segments = 0;
  for (int32_t i = 0; i < base; ++i) {
    if (cut[i]) number[i] = segments++;
  }
  number[base] = segments;

  SegmentMask mask;
  std::vector<SegmentRange> sees;
  const auto add = [&](int64_t length, Inside inside, int32_t first, int32_t last) {
    sees.clear();
    if (first < last) sees.push_back({first, last, 1});
    mask.add(length, inside, sees);
  };
  cut[base] = 1;
  for (int32_t i = 0, end = 0; i < base; i = end) {
    for (end = i + 1; !cut[end];) ++end;
    const bool sees_itself = rules.causal_base && documents[i] >= 0;
    const int32_t first = sees_itself ? number[start[i]] : number[i];
    add(end - i, sees_itself ? Inside::kCausal : Inside::kNone, first, number[i]);
  }
  for (size_t j = 0; j < anchors.size(); ++j) {
    add(sizes[j], rules.inside, number[spans[j].begin], number[spans[j].end]);
  }
  mask.finish(0, mask.tokens(), 0, mask.tokens());
  return mask;
}

}  // namespace pdkernels
