// Adapters of single sequences, whose tensors are read once: see csrc/ops/lora.h.
#pragma once

#include "linear.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <memory>

#include "ops/lora.h"

namespace pdkernels::PDK_DEVICE::bindings {

// AdapterArguments of pdkernels/models/architectures/lora.py.
struct AdapterInputs {
  Tensor like;                                    // has the dtype of rows
  std::vector<Tensor> tensors;                    // a and b of each pair
  std::vector<int64_t> layers, matrices, firsts;  // of each pair
  int64_t layer_count;
  auto fields() const { return std::tie(like, tensors, layers, matrices, firsts, layer_count); }
};

class BoundAdapter {
 public:
  explicit BoundAdapter(const AdapterInputs& in) : self_(this), held_(in.tensors), layers_(checked(in)) {
    const SameDevice device(in.like);
    const ScalarType dtype = in.like.scalar_type();
    for (size_t i = 0; i < in.layers.size(); ++i) {
      const Tensor &a = in.tensors[2 * i], &b = in.tensors[2 * i + 1];
      PDK_CHECK(a.dim() == 2 && b.dim() == 2 && a.is_contiguous() && b.is_contiguous());
      PDK_CHECK(in.layers[i] >= 0 && in.layers[i] < in.layer_count && in.firsts[i] >= 0);
      PDK_CHECK(in.matrices[i] >= 0 && in.matrices[i] < static_cast<int64_t>(LoraMatrix::kCount));
      const int64_t width = a.size(1), rank = a.size(0);
      PDK_CHECK(width > 0 && rank > 0 && b.size(0) == rank && b.scalar_type() == a.scalar_type());
      device.require(b);
      layers_[in.layers[i]].pairs[in.matrices[i]].push_back(
          {unpack_matrix(device, dtype, width, a, width), b.data_ptr(), b.size(1), in.firsts[i]});
      sizes_.include({width, rank});
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
  return BoundAdapter::hold(std::make_unique<BoundAdapter>(in), in.like);
}

PDK_IMPL("bind_adapter", bind_adapter)

// The rows that have adapters: AdaptedRows of lora.py.
struct AdaptedInputs {
  std::vector<Tensor> adapters;  // of bind_adapter
  OptionalTensor rows;           // int64: numbers of the rows of each adapter, one after the other
  std::vector<int64_t> ends;     // where those of each end
  auto fields() const { return std::tie(adapters, rows, ends); }
};

// The rows of each adapter of a model with so many layers, `all` of them in a forward, from layer `first` on.
inline std::vector<LoraGroup> unpack_lora(const AdaptedInputs& in, int64_t layers, int64_t first, int64_t all,
                                          LoraSizes& sizes) {
  std::vector<LoraGroup> groups;
  if (in.adapters.empty()) return groups;
  PDK_CHECK(in.adapters.size() == in.ends.size() && in.rows.has_value());
  const Tensor& rows = *in.rows;
  PDK_CHECK(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long && rows.is_contiguous());
  const auto* numbers = static_cast<const int64_t*>(rows.data_ptr());
  int64_t begin = 0;
  for (size_t i = 0; i < in.adapters.size(); ++i) {
    const BoundAdapter& adapter = BoundAdapter::of(in.adapters[i]);
    const int64_t end = in.ends[i];
    PDK_CHECK(static_cast<int64_t>(adapter.layers().size()) == layers && begin < end && end <= rows.size(0));
    groups.push_back({adapter.layers().data() + first, numbers + begin, end - begin});
    PDK_CHECK(groups.back().ascending(all));
    sizes.include(adapter.sizes());
    begin = end;
  }
  return groups;
}

// AddArguments of lora.py.
struct AddAdaptersInputs {
  Written product;  // (rows, outputs)
  Tensor x;         // (rows, width)
  AdaptedInputs adapted;
  int64_t layers, layer, matrix;
  auto fields() const { return std::tie(product, x, adapted, layers, layer, matrix); }
};

inline std::tuple<> add_adapters(const AddAdaptersInputs& in) {
  const Launch launch(in.x);
  const SameDevice device(in.x);
  PDK_CHECK(in.x.dim() == 2 && in.x.is_contiguous() && in.product.is_contiguous() && in.layer >= 0);
  const int64_t rows = in.x.size(0);
  device.require(in.product, in.x.scalar_type(), {rows, -1});
  PDK_CHECK(in.matrix >= 0 && in.matrix < static_cast<int64_t>(LoraMatrix::kCount) && in.layer < in.layers);
  LoraSizes sizes;
  const std::vector<LoraGroup> groups = unpack_lora(in.adapted, in.layers, in.layer, rows, sizes);
  LoraAddArgs args;
  args.element = row_element(in.x), args.groups = groups.data(), args.layer = 0;
  args.group_count = static_cast<int64_t>(groups.size()), args.matrix = static_cast<LoraMatrix>(in.matrix);
  args.x = {in.x.data_ptr(), in.x.size(1)}, args.width = in.x.size(1);
  args.out = {in.product.data_ptr(), in.product.size(1)};
  MemoryParts counted;
  args.memory = LoraMemory(sizes, args.element, rows, counted);
  const Tensor memory = torch::stable::new_empty(in.x, {counted.used()}, ScalarType::Byte);
  MemoryParts parts(bytes(memory));
  args.memory = LoraMemory(sizes, args.element, rows, parts);
  launch(PDK_DEVICE::lora_add, args);
  return {};
}

PDK_IMPL("add_adapters_", add_adapters)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
