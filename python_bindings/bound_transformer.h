// A transformer whose parameters are read once, and again after a change: what the ops of
// python_bindings/transformer_layers.h work on.
#pragma once

#include "transformer_parameters.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <algorithm>
#include <memory>
#include <mutex>

namespace pdkernels::PDK_DEVICE::bindings {

// What was read of a tensor. One that is given other memory (`.data = `, `.to`) is another one from then on.
class TensorState {
 public:
  explicit TensorState(const Tensor& t) : memory_(t.data_ptr()), dtype_(t.scalar_type()), dim_(t.dim()) {
    PDK_CHECK(dim_ <= kMostDims);
    for (int64_t d = 0; d < dim_; ++d) sizes_[d] = t.sizes()[d], strides_[d] = t.strides()[d];
  }
  bool operator==(const TensorState&) const = default;
  bool has_memory_of(const Tensor& t) const { return t.data_ptr() == memory_; }

 private:
  static constexpr int64_t kMostDims = 3;

  const void* memory_;
  ScalarType dtype_;
  int64_t dim_, sizes_[kMostDims] = {}, strides_[kMostDims] = {};
};

struct TransformerArgs {
  std::optional<LayerMatrix> embedding, head;
  std::optional<PairedRows> paired;
  std::vector<LayerArgs> layers;
  std::vector<LayerWindow> windows;
  int64_t attending = 0;  // layers with attention
  void* norm;
  Tensors copies;
};

// A transformer whose parameters may change between two forwards.
class BoundTransformer {
 public:
  explicit BoundTransformer(const BindInputs& in) : self_(this), in_(in), tensors_{in.norm} {
    for (const OptionalTensor& t : in.parameters.tensors) {
      if (t.has_value()) tensors_.push_back(*t);
    }
  }

  const BindInputs& inputs() const { return in_; }

  // Reads the parameters anew if one of them has other memory than before.
  std::shared_ptr<const TransformerArgs> read() {
    const std::lock_guard lock(mutex_);
    if (args_ == nullptr || !args_->copies.empty() || !unchanged()) {
      args_ = nullptr;
      states_.clear(), dims_ = 0;
      for (const Tensor& t : tensors_) states_.emplace_back(t), dims_ += t.dim();
      args_ = std::make_shared<const TransformerArgs>(read_all());
    }
    return args_;
  }

  // A tensor that owns this object, and the object of such a tensor.
  static Tensor hold(std::unique_ptr<BoundTransformer> bound) {
    const int64_t size = sizeof(BoundTransformer), stride = 1;
    const auto destroy = [](void* object) { delete static_cast<BoundTransformer*>(object); };
    Tensor holder = torch::stable::from_blob(bound.get(), {&size, 1}, {&stride, 1}, bound->in_.norm.device(),
                                             ScalarType::Byte, destroy);
    bound.release();
    return holder;
  }
  static BoundTransformer& of(const Tensor& holder) {
    PDK_CHECK(holder.numel() == sizeof(BoundTransformer) && holder.element_size() == 1);
    auto* bound = static_cast<BoundTransformer*>(holder.data_ptr());
    PDK_CHECK(bound->self_ == bound);  // not a copy of its bytes
    return *bound;
  }

 private:
  // Step by step over all of them, from each to what it points to, so that reads from memory overlap: in a step of a
  // model nothing of this is in the caches.
  bool unchanged() const {
    int64_t dims = 0;
    for (const Tensor& t : tensors_) dims += t.dim();
    bool same = dims == dims_;
    for (size_t i = 0; i < tensors_.size(); ++i) same &= states_[i].has_memory_of(tensors_[i]);
    if (!same) return false;
    for (size_t i = 0; i < tensors_.size(); ++i) same &= states_[i] == TensorState(tensors_[i]);
    return same;
  }

  TransformerArgs read_all() const {
    PDK_CHECK(in_.norm.dim() == 1 && in_.norm.is_contiguous() && in_.eps >= 0 && in_.layers > 0);
    std::vector<bool> with_experts(in_.layers);
    for (const int64_t layer : in_.parameters.mixtures) {
      PDK_CHECK(layer >= 0 && layer < in_.layers);
      with_experts[layer] = true;
    }
    PDK_CHECK(in_.mixer.mixers.empty() || static_cast<int64_t>(in_.mixer.mixers.size()) == in_.layers);
    TransformerArgs args;
    ParameterReader reader(in_.parameters, in_.routing, in_.mixer, in_.norm);
    args.norm = in_.norm.data_ptr(), args.embedding = reader.embedding(), args.head = reader.head();
    if (in_.pairs.paired) args.paired = reader.paired(in_.pairs);
    args.layers.reserve(in_.layers);
    const void* q_norm = nullptr;  // of the first layer with attention
    for (int64_t i = 0; i < in_.layers; ++i) {
      const int64_t width = in_.norm.size(0), inputs = i == 0 && args.paired && !args.paired->merge ? 2 * width : width;
      const MixerKind mixer = mixer_of(in_.mixer, i);
      args.layers.push_back(reader.layer(in_.heads, in_.kv_heads, in_.head_dim, with_experts[i], inputs, mixer,
                                         in_.settings.whole_qk_norm));
      if (mixer != MixerKind::kAttention) continue;
      if (args.attending++ == 0) q_norm = args.layers[i].q_norm;
      PDK_CHECK((args.layers[i].q_norm == nullptr) == (q_norm == nullptr));
    }
    PDK_CHECK(args.attending > 0);
    PDK_CHECK(reader.done());
    args.copies = reader.copies();
    set_windows(args);
    return args;
  }

  // Layers with the same window share it.
  void set_windows(TransformerArgs& args) const {
    const SettingsInputs& in = in_.settings;
    if (in.windows.empty() && in.chunks.empty()) return;
    const size_t layers = args.layers.size();
    PDK_CHECK(in.windows.size() == layers && in.chunks.size() == layers);
    for (size_t i = 0; i < layers; ++i) {
      const LayerWindow window{std::max(in.windows[i], in.chunks[i]), in.chunks[i] > 0};
      PDK_CHECK(in.windows[i] >= 0 && in.chunks[i] >= 0 && (in.windows[i] == 0 || in.chunks[i] == 0));
      if (window.size == 0) continue;
      const auto found = std::find(args.windows.begin(), args.windows.end(), window);
      args.layers[i].window = found - args.windows.begin();
      if (found == args.windows.end()) args.windows.push_back(window);
    }
  }

  const BoundTransformer* self_;
  BindInputs in_;
  std::mutex mutex_;
  std::shared_ptr<const TransformerArgs> args_;
  Tensors tensors_;  // all there are
  std::vector<TensorState> states_;
  int64_t dims_ = 0;  // of all tensors
};

inline std::tuple<Tensor> bind_transformer(const BindInputs& in) {
  return BoundTransformer::hold(std::make_unique<BoundTransformer>(in));
}

PDK_IMPL("bind_transformer", bind_transformer)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
