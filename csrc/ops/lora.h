// What adapters of single sequences add to the products of a transformer's layers, for the CPU: see
// pdkernels/models/architectures/lora.py.
#pragma once

#include <algorithm>
#include <vector>

#include "common/memory_parts.h"
#include "ops/linear.h"
#include "ops/low_rank.h"

namespace pdkernels {

// b a, for the outputs of a matrix from `first` on.
struct LoraPair {
  LinearArgs a;
  const void* b;  // (rank, outputs)
  int64_t outputs, first;
};

// In the order of MATRICES in lora.py.
enum class LoraMatrix { kQkv, kOutput, kGateUp, kDown, kCount };

struct LoraLayer {
  std::vector<LoraPair> pairs[static_cast<int>(LoraMatrix::kCount)];
};

// The most that a row of any pair needs, in elements.
struct LoraSizes {
  int64_t width = 0, rank = 0;

  void include(const LoraSizes& other) { width = std::max(width, other.width), rank = std::max(rank, other.rank); }
};

// The rows of one adapter.
struct LoraGroup {
  const LoraLayer* layers;  // from the first that is computed
  const int64_t* rows;      // their numbers, ascending
  int64_t count;

  // Whether they are numbers below `all`, each above the one before.
  bool ascending(int64_t all) const {
    for (int64_t i = 1; i < count; ++i) {
      if (rows[i - 1] >= rows[i]) return false;
    }
    return rows[0] >= 0 && rows[count - 1] < all;
  }
  bool contiguous() const { return rows[count - 1] - rows[0] == count - 1; }
};

// The memory for all groups in turn.
struct LoraMemory {
  char *own = nullptr, *inner = nullptr, *scratch = nullptr;

  LoraMemory() = default;
  LoraMemory(const LoraSizes& sizes, Element element, int64_t rows, MemoryParts& memory) {
    LinearArgs widest;
    widest.element = widest.weight_element = Element::kBfloat16, widest.width = sizes.width;
    own = memory.take(rows * sizes.width * bytes_of(element));
    inner = memory.take(rows * sizes.rank * bytes_of(element)), scratch = memory.take(widest.scratch_bytes(rows));
  }
};

// out += b a x, for the rows of each group.
struct LoraAddArgs {
  Element element;
  const LoraGroup* groups;
  int64_t group_count, layer;
  LoraMatrix matrix;
  RowsView x, out;  // out contiguous
  int64_t width;    // of x
  LoraMemory memory;
};

// Throws std::runtime_error for a pair that does not fit, before anything is written for its group.
PDK_KERNEL(lora_add, LoraAddArgs)

}  // namespace pdkernels
