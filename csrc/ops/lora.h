// What adapters of single sequences add to the products of a transformer's layers, for the CPU: see
// pdkernels/models/architectures/lora.py.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/linear.h"

namespace pdkernels {

// b a, for the outputs of a matrix from `first` on.
struct LoraPair {
  LinearArgs a, b;
  int64_t first;
};

// In the order of MATRICES in lora.py.
enum class LoraMatrix { kQkv, kOutput, kGateUp, kDown, kCount };

struct LoraLayer {
  std::vector<LoraPair> pairs[static_cast<int>(LoraMatrix::kCount)];

  const std::vector<LoraPair>& of(LoraMatrix matrix) const { return pairs[static_cast<int>(matrix)]; }
};

// The most that a row of any pair needs, in elements.
struct LoraSizes {
  int64_t width = 0, rank = 0, outputs = 0;

  void include(int64_t pair_width, int64_t pair_rank, int64_t pair_outputs) {
    width = std::max(width, pair_width), rank = std::max(rank, pair_rank), outputs = std::max(outputs, pair_outputs);
  }
  // Of a product with rows of this width, however they are stored.
  int64_t scratch_bytes(int64_t rows) const {
    LinearArgs args;
    args.element = args.weight_element = Element::kBfloat16, args.width = std::max(width, rank);
    return args.scratch_bytes(rows);
  }
};

// The rows of one adapter.
struct LoraGroup {
  const LoraLayer* layers;  // from the first that is computed
  const int64_t* rows;      // their numbers, ascending
  int64_t count;

  bool contiguous() const { return rows[count - 1] - rows[0] == count - 1; }
};

}  // namespace pdkernels
