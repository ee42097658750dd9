// A mixture of experts in place of the MLP of a layer: see csrc/ops/experts.h.
#pragma once

#include "grouped_linear.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <array>

#include "ops/experts.h"

namespace pdkernels::PDK_DEVICE::bindings {

// RoutingArguments of pdkernels/models/architectures/whole_step.py.
struct RoutingInputs {
  int64_t per_token;
  bool normalized, by_sigmoid;
  int64_t groups, chosen_groups;
  double routing_scale;
  auto fields() const { return std::tie(per_token, normalized, by_sigmoid, groups, chosen_groups, routing_scale); }
};

// Calls PyTorch's functions on the kernels' memory.
class TorchRouterFunctions final : public RouterFunctions {
 public:
  // `like`: a tensor of the layers' rows.
  explicit TorchRouterFunctions(const Tensor& like) : device_(like.device()), dtype_(like.scalar_type()) {}

  const float* to_float(const void* x, Element, int64_t rows, int64_t width) override {
    floats_ = torch::stable::to(tensor(x, dtype_, rows, width), ScalarType::Float);
    return data<float>(*floats_);
  }
  const float* softmax(const void* x, Element, int64_t rows, int64_t width) override {
    const std::optional<ScalarType> dtype = ScalarType::Float;
    scores_ = to<Tensor>(call("aten::softmax", "int", tensor(x, dtype_, rows, width), int64_t{-1}, dtype)[0]);
    return data<float>(*scores_);
  }
  const float* sigmoid(const float* x, int64_t rows, int64_t width) override {
    scores_ = to<Tensor>(call("aten::sigmoid", "", tensor(x, ScalarType::Float, rows, width))[0]);
    return data<float>(*scores_);
  }
  Largest topk(const float* x, int64_t rows, int64_t width, int64_t count) override {
    const auto results =
        call("aten::topk", "", tensor(x, ScalarType::Float, rows, width), count, int64_t{-1}, true, true);
    values_ = to<Tensor>(results[0]), ids_ = to<Tensor>(results[1]);
    return {data<float>(*values_), data<int64_t>(*ids_)};
  }
  const float* row_sums(const float* x, int64_t rows, int64_t width) override {
    const std::array<int64_t, 1> last{-1};
    sums_ = torch::stable::sum(tensor(x, ScalarType::Float, rows, width),
                               torch::headeronly::IntHeaderOnlyArrayRef(last.data(), 1), true);
    return data<float>(*sums_);
  }

 private:
  template <class T>
  static T to(StableIValue value) {
    return torch::stable::detail::to<T>(value);
  }
  template <class... Arguments>
  static std::array<StableIValue, sizeof...(Arguments)> call(const char* op, const char* overload,
                                                             const Arguments&... arguments) {
    std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
    return stack;
  }
  Tensor tensor(const void* x, ScalarType dtype, int64_t rows, int64_t width) const {
    const std::array<int64_t, 2> sizes{rows, width}, strides{width, 1};
    return torch::stable::from_blob(const_cast<void*>(x), {sizes.data(), sizes.size()},
                                    {strides.data(), strides.size()}, device_, dtype);
  }

  torch::stable::Device device_;
  ScalarType dtype_;
  OptionalTensor floats_, scores_, values_, ids_, sums_;  // the last results
};

// `bias`: in float32, and contiguous.
inline Router unpack_router(const SameDevice& device, ScalarType dtype, int64_t width, const RoutingInputs& in,
                            const Tensor& weight, const OptionalTensor& bias) {
  PDK_CHECK(weight.dim() == 2);
  Router router;
  router.matrix = unpack_matrix(device, in.by_sigmoid ? ScalarType::Float : dtype, width, weight, width);
  router.routing = {in.per_token, in.normalized,    in.by_sigmoid,
                    in.groups,    in.chosen_groups, static_cast<float>(in.routing_scale)};
  PDK_CHECK(router.routing.fits(router.experts()));
  PDK_CHECK(!bias.has_value() || in.by_sigmoid);
  if (bias.has_value()) device.require(*bias, ScalarType::Float, {router.experts()});
  router.bias = bias.has_value() ? data<float>(*bias) : nullptr;
  return router;
}

// The matrices of all experts: a tensor (experts, outputs, width), or the parts of quantised ones.
inline ExpertMatrix unpack_experts(const SameDevice& device, ScalarType dtype, int64_t width, const Tensor& weight) {
  PDK_CHECK(weight.dim() == 3);
  GroupedLinearArgs args;
  args.all = unpack_matrix(device, dtype, width, weight, width);
  args.groups.groups = weight.size(0), args.matrix_stride = args.all.outputs * width;
  return {args, args.groups.groups, args.all.outputs};
}
inline ExpertMatrix unpack_experts(const SameDevice& device, ScalarType dtype, int64_t width, const Tensors& weights,
                                   const std::vector<int64_t>& layouts, const std::vector<int64_t>& outputs,
                                   int64_t experts) {
  QuantizedGroupedLinearArgs args;
  args.all = unpack_matrix(device, dtype, width, weights, layouts, outputs, experts);
  args.groups.groups = experts, args.outputs = args.all.outputs();
  return {args, experts, args.outputs};
}

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
