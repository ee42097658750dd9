// A mixture of experts in place of the MLP of a layer, for the CPU: the kernels that
// pdkernels/models/architectures/experts.py calls, and PyTorch's own where it calls those, in the same order, so that
// results have the same bits. It is a part of transformer_layers_.
#pragma once

#include <variant>

#include "common/memory_parts.h"
#include "ops/grouped_linear.h"

namespace pdkernels {

// How the router's logits choose experts: the fields of ExpertsConfig in pdkernels/models/architectures/config.py.
struct Routing {
  int64_t per_token;
  bool normalized, by_sigmoid;
  int64_t groups, chosen_groups;
  float scale;

  bool fits(int64_t experts) const {
    if (per_token <= 0 || per_token > experts || groups <= 0 || chosen_groups <= 0 || chosen_groups > groups) {
      return false;
    }
    const int64_t size = experts / groups;
    return groups == 1 || (by_sigmoid && experts % groups == 0 && size >= 2 && chosen_groups * size >= per_token);
  }
};

// The functions of PyTorch that a router calls: their bits are PyTorch's, not ours to repeat, so the binding calls
// them. A result is valid until the next call of the same function.
class RouterFunctions {
 public:
  struct Largest {
    const float* values;  // (rows, count), the largest first
    const int64_t* ids;
  };

  virtual const float* to_float(const void* x, Element element, int64_t rows, int64_t width) = 0;
  virtual const float* softmax(const void* x, Element element, int64_t rows, int64_t width) = 0;
  virtual const float* sigmoid(const float* x, int64_t rows, int64_t width) = 0;
  virtual Largest topk(const float* x, int64_t rows, int64_t width, int64_t count) = 0;
  virtual const float* row_sums(const float* x, int64_t rows, int64_t width) = 0;

 protected:
  ~RouterFunctions() = default;
};

struct Router {
  LinearArgs matrix;  // of float32 rows where experts are chosen by the sigmoid of its results
  const float* bias;  // (experts,), added for the choice alone; or nullptr
  Routing routing;

  int64_t experts() const { return matrix.outputs; }
};

// The matrices of all experts.
struct ExpertMatrix {
  std::variant<GroupedLinearArgs, QuantizedGroupedLinearArgs> args;
  int64_t experts, outputs;

  int64_t scratch_bytes(int64_t rows) const {
    return std::visit([&](const auto& product) { return product.scratch_bytes(rows); }, args);
  }
};

struct Experts {
  Router router;
  ExpertMatrix gate_up, down;

  int64_t inner() const { return gate_up.outputs / 2; }
};

// The memory of a mixture for so many rows of x, in which each has `each` experts.
struct ExpertsMemory {
  char *logits, *sorted, *gate_up, *gated, *scratch;
  float *scores, *chosen_scores, *group_sums, *weights;
  int64_t *slots, *sizes;  // where a row is among the sorted ones; of each expert, its rows
  bool* in_chosen_group;
  RowGroup* used;

  ExpertsMemory(const Experts& experts, Element element, int64_t rows, int64_t width, MemoryParts& parts) {
    const Routing& routing = experts.router.routing;
    const int64_t count = experts.router.experts(), chosen = rows * routing.per_token, size = bytes_of(element);
    logits = parts.take(rows * count * static_cast<int64_t>(sizeof(float)));
    sorted = parts.take(chosen * width * size);
    gate_up = parts.take(chosen * 2 * experts.inner() * size), gated = parts.take(chosen * experts.inner() * size);
    int64_t scratch_bytes = experts.router.matrix.scratch_bytes(rows);
    for (const ExpertMatrix* matrix : {&experts.gate_up, &experts.down}) {
      const int64_t needed = matrix->scratch_bytes(chosen);
      if (needed > scratch_bytes) scratch_bytes = needed;
    }
    scratch = parts.take(scratch_bytes);
    weights = parts.take<float>(chosen), slots = parts.take<int64_t>(chosen), sizes = parts.take<int64_t>(count);
    used = parts.take<RowGroup>(chosen < count ? chosen : count);
    if (!routing.by_sigmoid) return;
    scores = parts.take<float>(rows * count), chosen_scores = parts.take<float>(chosen);
    group_sums = parts.take<float>(rows * routing.groups), in_chosen_group = parts.take<bool>(rows * routing.groups);
  }
};

// out[r] = the sum of the experts of x[r] with their weights, and `plus` added to it if given.
struct ExpertsArgs {
  const Experts* experts;
  Element element;
  RowsView x, plus, out;  // contiguous
  int64_t rows, width;
  RouterFunctions* functions;
  char* memory;

  static int64_t memory_bytes(const Experts& experts, Element element, int64_t rows, int64_t width) {
    MemoryParts parts;
    ExpertsMemory(experts, element, rows, width, parts);
    return parts.used();
  }
};

PDK_KERNEL(experts, ExpertsArgs)

}  // namespace pdkernels
