// The masks of all rows of a draft at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace pdkernels {

struct DraftRow {
  int64_t row, budget;
  std::vector<int64_t> tokens;  // after the state that the draft begins in
};

// Writes, for each row, `mask` after its tokens into that row of `bits`; rows whose tokens lead nowhere are left alone.
// Rows follow what differs from the row before them, and those of one mask copy it.
template <typename Automaton>
void draft_masks(Automaton& automaton, int32_t start, const std::vector<DraftRow>& rows, int32_t* bits) {
  std::vector<int32_t> states{start};                           // after each of the last row's tokens
  std::vector<std::tuple<int32_t, int64_t, int32_t*>> written;  // state, budget, where
  const std::vector<int64_t>* before = nullptr;
  for (const DraftRow& row : rows) {
    size_t shared = 0;
    if (before != nullptr) {
      const size_t most = std::min(before->size(), row.tokens.size());
      shared = std::mismatch(before->begin(), before->begin() + most, row.tokens.begin()).first - before->begin();
    }
    states.resize(shared + 1);
    for (; shared < row.tokens.size(); ++shared) {
      const int32_t here = states.back();
      states.push_back(here < 0 ? here : automaton.next(here, row.tokens[shared]));
    }
    before = &row.tokens;
    const int32_t state = states.back();
    if (state < 0) continue;
    const int64_t budget = std::min(row.budget, automaton.horizon(state));
    int32_t* to = bits + row.row * automaton.words();
    const auto same = std::find_if(written.begin(), written.end(), [&](const auto& one) {
      return std::get<0>(one) == state && std::get<1>(one) == budget;
    });
    if (same != written.end()) {
      std::copy(std::get<2>(*same), std::get<2>(*same) + automaton.words(), to);
    } else {
      automaton.mask(state, budget, to);
      written.emplace_back(state, budget, to);
    }
  }
}

}  // namespace pdkernels
