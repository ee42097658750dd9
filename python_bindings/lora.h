// Adapters of single sequences, whose tensors are read once: see csrc/ops/lora.h.
#pragma once

#include "linear.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <memory>

#include "ops/lora.h"

namespace pdkernels::PDK_DEVICE::bindings {

// AdapterArguments of pdkernels/models/architectures/whole_step.py.
struct AdapterInputs {
  Tensor norm;                                    // of the model, whose dtype rows have
  Tensors tensors;                                // a and b of each pair
  std::vector<int64_t> layers, matrices, firsts;  // of each pair
  int64_t layer_count;
  auto fields() const { return std::tie(norm, tensors, layers, matrices, firsts, layer_count); }
};

class BoundAdapter {
 public:
  explicit BoundAdapter(const AdapterInputs& in) : self_(this), held_(in.tensors), layers_(checked(in)) {
    const SameDevice device(in.norm);
    const ScalarType dtype = in.norm.scalar_type();
    for (size_t i = 0; i < in.layers.size(); ++i) {
      const Tensor &a = in.tensors[2 * i], &b = in.tensors[2 * i + 1];
      PDK_CHECK(a.dim() == 2 && b.dim() == 2 && a.is_contiguous() && b.is_contiguous());
      PDK_CHECK(in.layers[i] >= 0 && in.layers[i] < in.layer_count && in.firsts[i] >= 0);
      PDK_CHECK(in.matrices[i] >= 0 && in.matrices[i] < static_cast<int64_t>(LoraMatrix::kCount));
      const int64_t width = a.size(1), rank = a.size(0), outputs = b.size(0);
      PDK_CHECK(width > 0 && rank > 0 && outputs > 0);
      layers_[in.layers[i]].pairs[in.matrices[i]].push_back({unpack_matrix(device, dtype, width, a, width),
                                                             unpack_matrix(device, dtype, rank, b, rank),
                                                             in.firsts[i]});
      sizes_.include(width, rank, outputs);
    }
  }

  const std::vector<LoraLayer>& layers() const { return layers_; }
  const LoraSizes& sizes() const { return sizes_; }

  // A tensor that owns this object, and the object of such a tensor.
  static Tensor hold(std::unique_ptr<BoundAdapter> bound, const Tensor& like) {
    const int64_t size = sizeof(BoundAdapter), stride = 1;
    const auto destroy = [](void* object) { delete static_cast<BoundAdapter*>(object); };
    Tensor holder =
        torch::stable::from_blob(bound.get(), {&size, 1}, {&stride, 1}, like.device(), ScalarType::Byte, destroy);
    bound.release();
    return holder;
  }
  static const BoundAdapter& of(const Tensor& holder) {
    PDK_CHECK(holder.numel() == sizeof(BoundAdapter) && holder.element_size() == 1);
    const auto* bound = static_cast<const BoundAdapter*>(holder.data_ptr());
    PDK_CHECK(bound->self_ == bound);  // not a copy of its bytes
    return *bound;
  }

 private:
  static int64_t checked(const AdapterInputs& in) {
    const size_t pairs = in.layers.size();
    PDK_CHECK(in.tensors.size() == 2 * pairs && in.matrices.size() == pairs && in.firsts.size() == pairs);
    PDK_CHECK(in.layer_count > 0);
    return in.layer_count;
  }

  const BoundAdapter* self_;
  Tensors held_;
  std::vector<LoraLayer> layers_;
  LoraSizes sizes_;
};

inline std::tuple<Tensor> bind_adapter(const AdapterInputs& in) {
  return BoundAdapter::hold(std::make_unique<BoundAdapter>(in), in.norm);
}

PDK_IMPL("bind_adapter", bind_adapter)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
