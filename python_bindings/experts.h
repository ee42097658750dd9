// A mixture of experts in place of the MLP of a layer: the kernels that pdkernels/models/architectures/experts.py calls, and
// PyTorch's own where it calls those, in the same order, so that results have the same bits.
#pragma once

#include "grouped_linear.h"
#include "ops/weighted_rows.h"
#include "transformer_ops.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <array>
#include <cstring>
#include <limits>
#include <variant>

#include "parallel.h"

namespace pdkernels::PDK_DEVICE::bindings {

// How the router's logits choose experts: the fields of ExpertsConfig in pdkernels/models/architectures/config.py.
struct RoutingInputs {
  int64_t per_token;
  bool normalized, by_sigmoid;
  int64_t groups, chosen_groups;
  double scale;
  auto fields() const { return std::tie(per_token, normalized, by_sigmoid, groups, chosen_groups, scale); }
};

namespace aten {

template <class... Arguments>
std::array<StableIValue, sizeof...(Arguments)> call(const char* op, const char* overload,
                                                    const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return stack;
}
inline Tensor softmax(const Tensor& x) {
  const std::optional<ScalarType> dtype = ScalarType::Float;
  return torch::stable::detail::to<Tensor>(call("aten::softmax", "int", x, int64_t{-1}, dtype)[0]);
}
inline Tensor sigmoid(const Tensor& x) { return torch::stable::detail::to<Tensor>(call("aten::sigmoid", "", x)[0]); }
// The largest of the last dimension and their indices.
inline std::pair<Tensor, Tensor> topk(const Tensor& x, int64_t k) {
  const auto found = call("aten::topk", "", x, k, int64_t{-1}, true, true);
  return {torch::stable::detail::to<Tensor>(found[0]), torch::stable::detail::to<Tensor>(found[1])};
}
inline Tensor sum_of_last(const Tensor& x) {
  const std::array<int64_t, 1> last{-1};
  return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(last.data(), 1), true);
}

}  // namespace aten

// The matrices of all experts, with rows sorted by expert.
class ExpertMatrices {
 public:
  ExpertMatrices(const SameDevice& device, const Tensor& like, int64_t width, const Tensor& given) {
    PDK_CHECK(given.dim() == 3 && given.size(2) == width);
    device.require(given);
    PDK_CHECK(given.scalar_type() == like.scalar_type() || like.scalar_type() == ScalarType::Float);
    GroupedLinearArgs args;
    count_ = given.size(0), outputs_ = given.size(1);
    args.all.element = row_element(like), args.all.weight_element = row_element(given);
    args.all.width = args.all.weight_stride = width, args.all.outputs = outputs_;
    args.all.weight = given.data_ptr(), args.all.bias = nullptr;
    args.matrix_stride = outputs_ * width;
    args_ = args;
  }
  ExpertMatrices(const SameDevice& device, const Tensor& like, int64_t width, const Tensors& weights,
                 const std::vector<int64_t>& layouts, const std::vector<int64_t>& outputs, int64_t count)
      : count_(count) {
    QuantizedGroupedLinearArgs args;
    args.all.element = row_element(like), args.all.width = width, args.all.bias = nullptr;
    args.all.part_count = static_cast<int64_t>(weights.size());
    args.outputs = outputs_ = unpack_parts(device, weights, layouts, outputs, width, args.all.parts, count);
    args.all.quantized.blocks = (width + QuantizedLayout::kBlock - 1) / QuantizedLayout::kBlock;
    args_ = args;
  }

  int64_t count() const { return count_; }
  int64_t outputs() const { return outputs_; }
  int64_t scratch_bytes(int64_t rows) const {
    if (const auto* plain = std::get_if<GroupedLinearArgs>(&args_)) return bindings::scratch_bytes(plain->all, rows);
    const auto& packed = std::get<QuantizedGroupedLinearArgs>(args_);
    return packed.all.quantized.bytes(QuantizedGroupedLinearArgs::slots(rows, count_));
  }

  void multiply(const Launch& launch, const RowsView& x, int64_t rows, const RowGroups& groups, void* out,
                void* scratch) {
    const auto common = [&](auto& args) {
      args.groups = groups, args.all.x = x, args.all.rows = rows, args.all.out = {out, outputs_};
    };
    if (auto* plain = std::get_if<GroupedLinearArgs>(&args_)) {
      common(*plain);
      plain->all.wide = reads_rows(plain->all) ? nullptr : static_cast<float*>(scratch);
      launch(PDK_VECTOR(grouped_linear), *plain);
    } else {
      auto& packed = std::get<QuantizedGroupedLinearArgs>(args_);
      common(packed);
      packed.all.quantized.data = static_cast<QuantizedBlock*>(scratch);
      launch(PDK_VECTOR(quantized_grouped_linear), packed);
    }
  }

 private:
  std::variant<GroupedLinearArgs, QuantizedGroupedLinearArgs> args_;
  int64_t count_, outputs_;
};

// The experts of some rows: their weights (rows, per_token), float32, and the rows sorted by expert.
struct ChosenExperts {
  std::vector<float> weights;
  std::vector<int64_t> slots;  // (rows, per_token): where a row is among the sorted ones
  std::vector<RowGroup> used;
  RowGroups groups;

  void sort(const int64_t* ids, int64_t count, int64_t experts) {
    std::vector<int64_t> sizes(experts);
    for (int64_t i = 0; i < count; ++i) ++sizes[ids[i]];
    used.clear();
    int64_t first = 0, slot = 0;
    constexpr int64_t kGroup = QuantizedRows::kGroup;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t size = sizes[e];
      sizes[e] = first;  // from here on where its next row goes
      if (size == 0) continue;
      used.push_back({e, first, size, slot});
      first += size, slot += (size + kGroup - 1) / kGroup * kGroup;
    }
    slots.resize(count);
    for (int64_t i = 0; i < count; ++i) slots[i] = sizes[ids[i]]++;
    groups.groups = experts, groups.used = used.data(), groups.count = static_cast<int64_t>(used.size());
  }
};

// The router of a layer.
class Router {
 public:
  // `like`: rows of the layer.
  Router(const SameDevice& device, const Tensor& like, const RoutingInputs& routing, const Tensor& weight,
         const OptionalTensor& bias)
      : routing_(routing),
        wide_(routing.by_sigmoid ? torch::stable::new_empty(like, {0}, ScalarType::Float) : like),
        matrix_(device, wide_, like.size(like.dim() - 1), weight, std::nullopt) {
    const int64_t count = matrix_.outputs(), groups = routing.groups;
    PDK_CHECK(routing.per_token > 0 && routing.per_token <= count && groups > 0);
    PDK_CHECK(routing.chosen_groups > 0 && routing.chosen_groups <= groups);
    PDK_CHECK(groups == 1 || (routing.by_sigmoid && count % groups == 0 && count / groups >= 2 &&
                              routing.chosen_groups * (count / groups) >= routing.per_token));
    PDK_CHECK(!bias.has_value() || routing.by_sigmoid);
    if (bias.has_value()) {
      device.require(*bias, bias->scalar_type(), {count});
      bias_ = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
    }
  }

  int64_t count() const { return matrix_.outputs(); }

  void choose(const Launch& launch, const Tensor& x, ChosenExperts& chosen) {
    const Tensor rows = routing_.by_sigmoid ? torch::stable::to(x, ScalarType::Float) : x;
    const int64_t total = rows.size(0), experts = count();
    const Tensor logits = torch::stable::new_empty(rows, {total, experts}, rows.scalar_type());
    const Tensor scratch = torch::stable::new_empty(rows, {matrix_.scratch_bytes(total)}, ScalarType::Byte);
    matrix_.multiply(launch, {rows.data_ptr(), matrix_.width()}, total, logits.data_ptr(), scratch.data_ptr());
    const Tensor ids = routing_.by_sigmoid ? by_sigmoid(logits, chosen.weights) : by_softmax(logits, chosen.weights);
    chosen.sort(data<int64_t>(ids), total * routing_.per_token, experts);
  }

 private:
  Tensor by_softmax(const Tensor& logits, std::vector<float>& weights) const {
    const auto [largest, ids] = aten::topk(aten::softmax(logits), routing_.per_token);
    scale(largest, routing_.normalized, 0, weights);
    return ids;
  }

  Tensor by_sigmoid(const Tensor& logits, std::vector<float>& weights) const {
    const Tensor scores = aten::sigmoid(logits);
    const Tensor ids = aten::topk(ranked(scores), routing_.per_token).second;
    const int64_t rows = ids.size(0), chosen = routing_.per_token, experts = count();
    const Tensor own = torch::stable::new_empty(scores, {rows, chosen}, ScalarType::Float);
    for (int64_t i = 0; i < rows * chosen; ++i) {
      data<float>(own)[i] = data<float>(scores)[i / chosen * experts + data<int64_t>(ids)[i]];
    }
    scale(own, routing_.normalized && chosen > 1, 1e-20f, weights);
    return ids;
  }

  // The scores by which experts are chosen.
  Tensor ranked(const Tensor& scores) const {
    const int64_t rows = scores.size(0), experts = count(), groups = routing_.groups, size = experts / groups;
    if (!bias_.has_value() && groups == 1) return scores;
    const Tensor found = torch::stable::new_empty(scores, {rows, experts}, ScalarType::Float);
    float* to = data<float>(found);
    std::memcpy(to, data<float>(scores), rows * experts * sizeof(float));
    if (bias_.has_value()) {
      for (int64_t i = 0; i < rows * experts; ++i) to[i] += data<float>(*bias_)[i % experts];
    }
    if (groups == 1) return found;
    const std::array<int64_t, 3> shape{rows, groups, size};
    const Tensor grouped = torch::stable::view(found, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), 3));
    const Tensor two = aten::topk(grouped, 2).first;
    const Tensor sums = torch::stable::new_empty(scores, {rows, groups}, ScalarType::Float);
    for (int64_t i = 0; i < rows * groups; ++i) {
      data<float>(sums)[i] = data<float>(two)[2 * i] + data<float>(two)[2 * i + 1];
    }
    const Tensor best = aten::topk(sums, routing_.chosen_groups).second;
    std::vector<bool> inside(rows * groups);
    for (int64_t i = 0; i < rows * routing_.chosen_groups; ++i) {
      inside[i / routing_.chosen_groups * groups + data<int64_t>(best)[i]] = true;
    }
    for (int64_t i = 0; i < rows * experts; ++i) {
      if (!inside[i / size]) to[i] = -std::numeric_limits<float>::infinity();
    }
    return found;
  }

  // Every operation is rounded on its own, as PyTorch's are: none is a product and a sum.
  void scale(const Tensor& given, bool normalized, float added, std::vector<float>& weights) const {
    const int64_t rows = given.size(0), each = routing_.per_token;
    const float* from = data<float>(given);
    const auto factor = static_cast<float>(routing_.scale);
    weights.assign(from, from + rows * each);
    if (normalized) {
      const Tensor sums = aten::sum_of_last(given);
      for (int64_t i = 0; i < rows * each; ++i) weights[i] /= data<float>(sums)[i / each] + added;
    }
    for (float& weight : weights) weight *= factor;
  }

  const RoutingInputs& routing_;
  Tensor wide_;
  Matrix matrix_;
  OptionalTensor bias_;
};

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
