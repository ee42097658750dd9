// A mixture of experts on the CPU: rows are sorted by expert here, and the kernels of other ops compute.
#include "ops/experts.h"

#include <cstring>
#include <limits>

#include "ops/transformer_ops.h"
#include "ops/weighted_rows.h"
#include "parallel.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void run(const LinearArgs& args) { PDK_DISPATCH(linear, args) }
void run(const GroupedLinearArgs& args) { PDK_DISPATCH(grouped_linear, args) }
void run(const QuantizedGroupedLinearArgs& args) { PDK_DISPATCH(quantized_grouped_linear, args) }
void run(const SiluAndMulArgs& args) { PDK_DISPATCH(silu_and_mul, args) }
void run(const WeightedRowsArgs& args) { PDK_DISPATCH(weighted_rows, args) }

class Mixture {
 public:
  Mixture(const ExpertsArgs& args, MemoryParts parts)
      : args_(args),
        routing_(args.experts->router.routing),
        experts_(args.experts->router.experts()),
        chosen_(args.rows * routing_.per_token),
        functions_(*args.functions),
        memory_(*args.experts, args.element, args.rows, args.width, parts) {}

  void compute() {
    sort(routing_.by_sigmoid ? choose_by_sigmoid() : choose_by_softmax());
    copy_sorted();
    const int64_t inner = args_.experts->inner();
    multiply(args_.experts->gate_up, memory_.sorted, args_.width, memory_.gate_up);
    SiluAndMulArgs gate;
    gate.element = args_.element, gate.rows = chosen_, gate.width = inner;
    gate.x = {memory_.gate_up, 2 * inner}, gate.out = {memory_.gated, inner};
    run(gate);
    multiply(args_.experts->down, memory_.gated, inner, memory_.sorted);
    WeightedRowsArgs sum;
    sum.element = args_.element, sum.x = {memory_.sorted, args_.width}, sum.plus = args_.plus, sum.out = args_.out;
    sum.slots = memory_.slots, sum.weights = memory_.weights, sum.rounds_weights = !routing_.by_sigmoid;
    sum.rows = args_.rows, sum.count = routing_.per_token, sum.width = args_.width;
    run(sum);
  }

 private:
  const void* logits_of(const void* x) {
    LinearArgs product = args_.experts->router.matrix;
    product.set_rows({const_cast<void*>(x), args_.width}, args_.rows, memory_.logits, memory_.scratch);
    run(product);
    return memory_.logits;
  }

  // Each chooses the experts of every row and sets their weights.
  const int64_t* choose_by_softmax() {
    const void* logits = logits_of(args_.x.data);
    const float* scores = functions_.softmax(logits, args_.element, args_.rows, experts_);
    const auto largest = functions_.topk(scores, args_.rows, experts_, routing_.per_token);
    set_weights(largest.values, routing_.normalized, 0);
    return largest.ids;
  }
  const int64_t* choose_by_sigmoid() {
    const auto* logits =
        static_cast<const float*>(logits_of(functions_.to_float(args_.x.data, args_.element, args_.rows, args_.width)));
    const float* scores = functions_.sigmoid(logits, args_.rows, experts_);
    const int64_t* ids = functions_.topk(ranked(scores), args_.rows, experts_, routing_.per_token).ids;
    for (int64_t i = 0; i < chosen_; ++i) {
      memory_.chosen_scores[i] = scores[i / routing_.per_token * experts_ + ids[i]];
    }
    set_weights(memory_.chosen_scores, routing_.normalized && routing_.per_token > 1, 1e-20f);
    return ids;
  }

  // The scores by which experts are chosen: with their bias, and of the best groups alone.
  const float* ranked(const float* scores) {
    const float* bias = args_.experts->router.bias;
    const int64_t groups = routing_.groups, total = args_.rows * experts_, size = experts_ / groups;
    if (bias == nullptr && groups == 1) return scores;
    float* biased = memory_.scores;
    for (int64_t i = 0; i < total; ++i) biased[i] = bias == nullptr ? scores[i] : scores[i] + bias[i % experts_];
    if (groups == 1) return biased;
    const float* two = functions_.topk(biased, args_.rows * groups, size, 2).values;
    for (int64_t i = 0; i < args_.rows * groups; ++i) memory_.group_sums[i] = two[2 * i] + two[2 * i + 1];
    const int64_t* best = functions_.topk(memory_.group_sums, args_.rows, groups, routing_.chosen_groups).ids;
    std::memset(memory_.in_chosen_group, 0, args_.rows * groups);
    for (int64_t i = 0; i < args_.rows * routing_.chosen_groups; ++i) {
      memory_.in_chosen_group[i / routing_.chosen_groups * groups + best[i]] = true;
    }
    for (int64_t i = 0; i < total; ++i) {
      if (!memory_.in_chosen_group[i / size]) biased[i] = -std::numeric_limits<float>::infinity();
    }
    return biased;
  }

  // Every operation is rounded on its own, as PyTorch's are: none is a product and a sum.
  void set_weights(const float* scores, bool normalized, float added) {
    const float* sums = normalized ? functions_.row_sums(scores, args_.rows, routing_.per_token) : nullptr;
    for (int64_t i = 0; i < chosen_; ++i) {
      const float weight = normalized ? scores[i] / (sums[i / routing_.per_token] + added) : scores[i];
      memory_.weights[i] = weight * routing_.scale;
    }
  }

  // Gives the rows of each expert a range of slots.
  void sort(const int64_t* ids) {
    int64_t* sizes = memory_.sizes;
    std::memset(sizes, 0, experts_ * sizeof(int64_t));
    for (int64_t i = 0; i < chosen_; ++i) ++sizes[ids[i]];
    int64_t first = 0, slot = 0, used = 0;
    constexpr int64_t kGroup = QuantizedRows::kGroup;
    for (int64_t e = 0; e < experts_; ++e) {
      const int64_t size = sizes[e];
      sizes[e] = first;  // from here on where its next row goes
      if (size == 0) continue;
      memory_.used[used++] = {e, first, size, slot};
      first += size, slot += (size + kGroup - 1) / kGroup * kGroup;
    }
    for (int64_t i = 0; i < chosen_; ++i) memory_.slots[i] = sizes[ids[i]]++;
    groups_.groups = experts_, groups_.used = memory_.used, groups_.count = used;
  }

  void copy_sorted() {
    const int64_t row_bytes = args_.width * bytes_of(args_.element), each = routing_.per_token;
    parallel_for(0, chosen_, 1 + 64 * 1024 / row_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* from = static_cast<const char*>(args_.x.data) + i / each * row_bytes;
        std::memcpy(memory_.sorted + memory_.slots[i] * row_bytes, from, row_bytes);
      }
    });
  }

  void multiply(const ExpertMatrix& matrix, void* x, int64_t width, void* out) {
    std::visit(
        [&](auto product) {
          product.groups = groups_;
          product.all.set_rows({x, width}, chosen_, out, memory_.scratch);
          run(product);
        },
        matrix.args);
  }

  const ExpertsArgs& args_;
  const Routing& routing_;
  int64_t experts_, chosen_;  // chosen experts of all rows
  RouterFunctions& functions_;
  ExpertsMemory memory_;
  RowGroups groups_;
};

}  // namespace

void experts(const ExpertsArgs& args) { Mixture(args, MemoryParts(args.memory)).compute(); }

}  // namespace pdkernels::cpu
