// All layers of a transformer over new rows of a cache: the kernels that pdkernels/models/architectures/layer.py calls, in the same
// order, so that results have the same bits. See pdkernels/models/architectures/whole_step.py.
#pragma once

#include "attention.h"
#include "experts.h"
#include "kv_cache.h"
#include "linear.h"
#include "quantized_linear.h"
#include "speculative_attention.h"
#include "transformer_ops.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include <algorithm>
#include <cstring>
#include <variant>

#include "parallel.h"

namespace pdkernels::PDK_DEVICE::bindings {

struct LayersInputs {
  Tensor x;                                // (batch, rows, width)
  std::vector<OptionalTensor> parameters;  // of each layer, as LayerParameters reads them
  // Parts of each matrix, 0 for one that is not quantised, or empty if none is; and the layout and outputs of each
  // part.
  std::vector<int64_t> parts, layouts, outputs;
  Written k_cache, v_cache;  // all layers
  Tensor lengths;
  OptionalTensor counts, block_table;
  int64_t heads;  // of q
  Tensor cos, sin, positions;
  bool interleaved;
  PlanInputs plan;
  double scale, eps;
  RoutingInputs routing;
  std::vector<int64_t> mixtures;  // the layers with experts in place of an MLP
  auto fields() const {
    return std::tie(x, parameters, parts, layouts, outputs, k_cache, v_cache, lengths, counts, block_table, heads, cos,
                    sin, positions, interleaved, plan, scale, eps, routing, mixtures);
  }
};

class AnyMatrix {
 public:
  template <class Kind>
  AnyMatrix(Kind&& matrix) : matrix_(std::forward<Kind>(matrix)) {}

  int64_t width() const {
    return std::visit([](const auto& matrix) { return matrix.width(); }, matrix_);
  }
  int64_t outputs() const {
    return std::visit([](const auto& matrix) { return matrix.outputs(); }, matrix_);
  }
  int64_t scratch_bytes(int64_t rows) const {
    return std::visit([&](const auto& matrix) { return matrix.scratch_bytes(rows); }, matrix_);
  }
  void multiply(const Launch& launch, const RowsView& x, int64_t rows, void* out, void* scratch) {
    std::visit([&](auto& matrix) { matrix.multiply(launch, x, rows, out, scratch); }, matrix_);
  }

 private:
  std::variant<Matrix, QuantizedMatrix> matrix_;
};

// Reads parameters one after the other.
class ParameterReader {
 public:
  explicit ParameterReader(const LayersInputs& in) : in_(in), device_(in.x) {}

  OptionalTensor next() {
    PDK_CHECK(at_ < in_.parameters.size());
    return in_.parameters[at_++];
  }
  void* vector(int64_t size) {
    const Tensor given = dense(next());
    device_.require(given, in_.x.scalar_type(), {size});
    return given.data_ptr();
  }
  void* optional_vector(int64_t size) {
    PDK_CHECK(at_ < in_.parameters.size());
    return in_.parameters[at_].has_value() ? vector(size) : (++at_, nullptr);
  }
  // A matrix, and its bias if such matrices have one.
  AnyMatrix matrix(int64_t width, bool with_bias = true) {
    const auto bias = [&] { return with_bias ? next() : std::nullopt; };
    Parts parts = next_parts();
    if (parts.weights.empty()) {
      const Tensor given = dense(next());
      return Matrix(device_, in_.x, width, given, bias());
    }
    return QuantizedMatrix(device_, in_.x, width, parts.weights, parts.layouts, parts.outputs, bias());
  }
  // The same without a bias, if there is one.
  std::optional<AnyMatrix> optional_matrix(int64_t width) {
    PDK_CHECK(at_ < in_.parameters.size());
    if (in_.parameters[at_].has_value()) return matrix(width, false);
    ++at_, ++matrix_;
    return std::nullopt;
  }
  ExpertMatrices experts(int64_t width, int64_t count) {
    const Parts parts = next_parts();
    if (parts.weights.empty()) return {device_, in_.x, width, dense(next())};
    return {device_, in_.x, width, parts.weights, parts.layouts, parts.outputs, count};
  }
  Router router() {
    const Tensor weight = dense(next());
    return {device_, in_.x, in_.routing, weight, next()};
  }
  bool done() const { return at_ == in_.parameters.size(); }

 private:
  // Of a quantised matrix; none of another one.
  struct Parts {
    Tensors weights;
    std::vector<int64_t> layouts, outputs;
  };

  Parts next_parts() {
    const int64_t count = next_of(in_.parts, matrix_++);
    PDK_CHECK(count >= 0);
    Parts found;
    for (int64_t i = 0; i < count; ++i, ++part_) {
      found.weights.push_back(dense(next()));
      found.layouts.push_back(next_of(in_.layouts, part_)), found.outputs.push_back(next_of(in_.outputs, part_));
    }
    return found;
  }
  // Copying parameters in every call would cost more than this op saves.
  static Tensor dense(const OptionalTensor& t) {
    PDK_CHECK(t.has_value() && t->is_contiguous());
    return *t;
  }
  static int64_t next_of(const std::vector<int64_t>& numbers, size_t at) {
    PDK_CHECK(at < numbers.size());
    return numbers[at];
  }

  const LayersInputs& in_;
  SameDevice device_;
  size_t at_ = 0, matrix_ = 0, part_ = 0;
};

// Of a SwiGLU with its rows, the elements of memory that it needs.
struct InnerSizes {
  int64_t gate_up = 0, gated = 0, sorted = 0, scratch = 0;

  void include(int64_t rows, int64_t inner) {
    gate_up = std::max(gate_up, rows * 2 * inner), gated = std::max(gated, rows * inner);
  }
};

struct Mlp {
  AnyMatrix gate_up, down;

  Mlp(ParameterReader& reader, int64_t width)
      : gate_up(reader.matrix(width)), down(reader.matrix(gate_up.outputs() / 2)) {
    PDK_CHECK(down.outputs() == width && gate_up.outputs() % 2 == 0);
  }
  void include(int64_t rows, InnerSizes& sizes) const {
    sizes.include(rows, down.width());
    sizes.scratch = std::max({sizes.scratch, gate_up.scratch_bytes(rows), down.scratch_bytes(rows)});
  }
};

struct Mixture {
  Router router;
  ExpertMatrices gate_up, down;
  std::optional<AnyMatrix> shared_gate_up, shared_down;
  int64_t per_token;

  Mixture(ParameterReader& reader, int64_t width, int64_t chosen)
      : router(reader.router()),
        gate_up(reader.experts(width, router.count())),
        down(reader.experts(gate_up.outputs() / 2, router.count())),
        shared_gate_up(reader.optional_matrix(width)),
        shared_down(reader.optional_matrix(shared_gate_up ? shared_gate_up->outputs() / 2 : 0)),
        per_token(chosen) {
    PDK_CHECK(gate_up.count() == router.count() && down.count() == router.count());
    PDK_CHECK(gate_up.outputs() % 2 == 0 && down.outputs() == width);
    PDK_CHECK(shared_gate_up.has_value() == shared_down.has_value());
    PDK_CHECK(!shared_down || (shared_down->outputs() == width && shared_gate_up->outputs() % 2 == 0));
  }
  void include(int64_t rows, InnerSizes& sizes) const {
    const int64_t chosen = rows * per_token;
    sizes.include(chosen, gate_up.outputs() / 2);
    sizes.sorted = std::max(sizes.sorted, chosen * down.outputs());
    sizes.scratch = std::max({sizes.scratch, gate_up.scratch_bytes(chosen), down.scratch_bytes(chosen)});
    if (!shared_down) return;
    sizes.include(rows, shared_down->width());
    sizes.scratch = std::max({sizes.scratch, shared_gate_up->scratch_bytes(rows), shared_down->scratch_bytes(rows)});
  }
};

// The order of initialisation is that of NAMES, or EXPERT_NAMES, in whole_step.py.
struct LayerParameters {
  void* attention_norm;
  AnyMatrix qkv;
  void *q_norm, *k_norm;
  AnyMatrix output;
  void* mlp_norm;
  std::variant<Mlp, Mixture> mlp;

  // `per_token`: experts of a row, 0 for a layer with an MLP.
  LayerParameters(ParameterReader& reader, int64_t width, int64_t heads_width, int64_t head_dim, int64_t per_token)
      : attention_norm(reader.vector(width)),
        qkv(reader.matrix(width)),
        q_norm(reader.optional_vector(head_dim)),
        k_norm(reader.optional_vector(head_dim)),
        output(reader.matrix(heads_width)),
        mlp_norm(reader.vector(width)),
        mlp(read_mlp(reader, width, per_token)) {
    PDK_CHECK((q_norm == nullptr) == (k_norm == nullptr));
    PDK_CHECK(output.outputs() == width);
  }

 private:
  static std::variant<Mlp, Mixture> read_mlp(ParameterReader& reader, int64_t width, int64_t per_token) {
    if (per_token == 0) return Mlp(reader, width);
    return Mixture(reader, width, per_token);
  }
};

// The layers, one after the other. They share the memory for what is between two kernels.
class Layers {
 public:
  explicit Layers(const LayersInputs& in) : in_(in), launch_(in.x), device_(in.x) {
    PDK_CHECK(in.x.dim() == 3 && in.x.is_contiguous() && in.x.numel() > 0 && in.eps >= 0);
    PDK_CHECK(in.k_cache.dim() == 5 && in.v_cache.dim() == 5);
    codes_ = in.k_cache.scalar_type() == ScalarType::Char;
    const int64_t layers = in.k_cache.size(0),
                  dim = in.k_cache.size(4) - (codes_ ? static_cast<int64_t>(sizeof(float)) : 0);
    PDK_CHECK(layers > 0 && in.v_cache.size(0) == layers && dim > 0);
    batch_ = in.x.size(0), rows_ = batch_ * in.x.size(1), width_ = in.x.size(2);
    element_ = row_element(in.x);
    kv_heads_ = in.k_cache.size(3), heads_ = in.heads;
    PDK_CHECK(kv_heads_ > 0 && heads_ > 0);
    InnerSizes sizes;
    ParameterReader reader(in);
    std::vector<int64_t> per_token(layers);
    for (const int64_t layer : in.mixtures) {
      PDK_CHECK(layer >= 0 && layer < layers && in.routing.per_token > 0);
      per_token[layer] = in.routing.per_token;
    }
    layers_.reserve(layers);
    for (int64_t i = 0; i < layers; ++i) {
      layers_.emplace_back(reader, width_, heads_ * dim, dim, per_token[i]);
      const LayerParameters& layer = layers_.back();
      PDK_CHECK(layer.qkv.outputs() == (heads_ + 2 * kv_heads_) * dim);
      PDK_CHECK((layer.q_norm == nullptr) == (layers_[0].q_norm == nullptr));
      std::visit([&](const auto& mlp) { mlp.include(rows_, sizes); }, layer.mlp);
      sizes.scratch = std::max({sizes.scratch, layer.qkv.scratch_bytes(rows_), layer.output.scratch_bytes(rows_)});
    }
    PDK_CHECK(reader.done());
    const ScalarType dtype = in.x.scalar_type();
    const auto rows_of = [&](int64_t width) { return torch::stable::new_empty(in_.x, {rows_, width}, dtype); };
    const auto heads_of = [&](int64_t heads) {
      return torch::stable::new_empty(in_.x, {batch_, in_.x.size(1), heads, dim}, dtype);
    };
    const auto flat = [&](int64_t size) { return torch::stable::new_empty(in_.x, {size}, dtype); };
    normed_ = rows_of(width_), input_ = rows_of(width_), gate_up_ = flat(sizes.gate_up), gated_ = flat(sizes.gated);
    sorted_ = flat(sizes.sorted), shared_ = flat(sizes.sorted > 0 ? rows_ * width_ : 0);
    residual_ = torch::stable::empty_like(in.x), added_ = torch::stable::empty_like(in.x);
    scratch_ = torch::stable::new_empty(in.x, {sizes.scratch}, ScalarType::Byte);
    qkv_ = heads_of(heads_ + 2 * kv_heads_), mixed_ = heads_of(heads_);
    normed_qk_ = layers_[0].q_norm != nullptr ? heads_of(heads_ + kv_heads_) : qkv_;
    unpack_heads(dim);
  }

  std::tuple<Tensor, Tensor> run() {
    for (size_t i = 0; i < layers_.size(); ++i) run_layer(static_cast<int64_t>(i), layers_[i]);
    return {residual_, added_};
  }

 private:
  RowsView view(const Tensor& t) const { return {t.data_ptr(), width_}; }

  // The arguments of attention and of the rotary embedding, for the first layer.
  void unpack_heads(int64_t dim) {
    Tensor qk = torch::stable::narrow(normed_qk_, 2, 0, heads_ + kv_heads_);
    Tensor k = torch::stable::narrow(qk, 2, heads_, kv_heads_);
    Tensor v = torch::stable::narrow(qkv_, 2, heads_ + kv_heads_, kv_heads_);
    if (codes_) {  // attention reads and stores the codes of the new rows
      new_rows_ = torch::stable::new_empty(
          in_.x, {batch_, in_.x.size(1), 2 * kv_heads_, dim + static_cast<int64_t>(sizeof(float))}, ScalarType::Char);
      const Tensor numbers[2] = {k, v};
      k = torch::stable::narrow(new_rows_, 2, 0, kv_heads_),
      v = torch::stable::narrow(new_rows_, 2, kv_heads_, kv_heads_);
      quantize_[0] = unpack_quantize(numbers[0], k), quantize_[1] = unpack_quantize(numbers[1], v);
    }
    SpeculativeInputs<Tensor> attention{torch::stable::narrow(qk, 2, 0, heads_),
                                        k,
                                        v,
                                        torch::stable::select(in_.k_cache, 0, 0),
                                        torch::stable::select(in_.v_cache, 0, 0),
                                        in_.lengths,
                                        in_.plan,
                                        in_.scale,
                                        in_.block_table,
                                        std::nullopt,
                                        std::nullopt,
                                        0,
                                        std::nullopt};
    lse_ = torch::stable::new_empty(in_.x, {batch_, heads_, in_.x.size(1)}, ScalarType::Float);
    unpack_speculative(attention, mixed_, lse_, attention_);
    attention_.op = "speculative_attention_append_";
    attention_.counts = index_view(device_, in_.counts, 1, batch_);
    attention_.append_rows = attention_.q_len;
    splits_.emplace(in_.x, attention_);
    rope_ = unpack_rope(qk, in_.cos, in_.sin, in_.positions, in_.interleaved);
    head_dim_ = dim;
  }

  void norm(const RowsView& x, const RowsView& residual, void* weight, const RowsView& sum) {
    AddRmsNormArgs args;
    args.element = element_, args.rows = rows_, args.width = width_, args.eps = static_cast<float>(in_.eps);
    args.x = x, args.residual = residual;
    if (residual.given()) {
      args.y = sum, args.weight = nullptr, args.next = view(normed_), args.next_weight = weight;
    } else {
      args.y = view(normed_), args.weight = weight, args.next = {}, args.next_weight = nullptr;
    }
    launch_(PDK_VECTOR(add_rms_norm), args);
  }

  // Norms q and k of all rows into `normed_qk_`; v is read where it is.
  void norm_heads(const LayerParameters& layer) {
    const int64_t size = static_cast<int64_t>(qkv_.element_size()), turned = heads_ + kv_heads_;
    parallel_for(0, rows_, 1 + 16 * 1024 / (turned * head_dim_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        char* from = bytes(qkv_) + row * (turned + kv_heads_) * head_dim_ * size;
        char* to = bytes(normed_qk_) + row * turned * head_dim_ * size;
        AddRmsNormArgs args;
        args.element = element_, args.width = head_dim_, args.eps = static_cast<float>(in_.eps);
        args.residual = args.next = {}, args.next_weight = nullptr;
        args.rows = heads_, args.x = {from, head_dim_}, args.y = {to, head_dim_}, args.weight = layer.q_norm;
        launch_(PDK_VECTOR(add_rms_norm), args);
        const int64_t queries = heads_ * head_dim_ * size;
        args.rows = kv_heads_, args.x.data = from + queries, args.y.data = to + queries, args.weight = layer.k_norm;
        launch_(PDK_VECTOR(add_rms_norm), args);
      }
    });
  }

  void attend(int64_t layer) {
    SpeculativeArgs args = attention_;
    const auto advance = [&](HeadsView& cache, const Tensor& t) {
      cache.data = static_cast<char*>(cache.data) + layer * t.stride(0) * static_cast<int64_t>(t.element_size());
    };
    advance(args.k_cache, in_.k_cache), advance(args.v_cache, in_.v_cache);
    launch_(PDK_DEVICE::speculative_attention, args);
  }

  void multiply(AnyMatrix& matrix, const Tensor& x, const Tensor& out) {
    matrix.multiply(launch_, {x.data_ptr(), matrix.width()}, rows_, out.data_ptr(), scratch_.data_ptr());
  }

  void run_layer(int64_t number, LayerParameters& layer) {
    const bool first = number == 0;
    norm(view(first ? in_.x : added_), first ? RowsView{} : view(residual_), layer.attention_norm, view(input_));
    multiply(layer.qkv, normed_, qkv_);
    if (layer.q_norm != nullptr) norm_heads(layer);
    launch_(PDK_DEVICE::apply_rope, rope_);
    for (int i = 0; codes_ && i < 2; ++i) launch_(PDK_VECTOR(kv_quantize), quantize_[i]);
    attend(number);
    multiply(layer.output, mixed_, added_);
    norm(view(added_), view(first ? in_.x : input_), layer.mlp_norm, view(residual_));
    std::visit([&](auto& mlp) { run_mlp(mlp); }, layer.mlp);
  }

  // gated_ = silu(gate) * up of gate_up_.
  void gate(int64_t rows, int64_t inner) {
    SiluAndMulArgs args;
    args.element = element_, args.rows = rows, args.width = inner;
    args.x = {gate_up_.data_ptr(), 2 * inner}, args.out = {gated_.data_ptr(), inner};
    launch_(PDK_VECTOR(silu_and_mul), args);
  }
  void run_swiglu(AnyMatrix& gate_up, AnyMatrix& down, const Tensor& out) {
    multiply(gate_up, normed_, gate_up_);
    gate(rows_, down.width());
    multiply(down, gated_, out);
  }

  void run_mlp(Mlp& mlp) { run_swiglu(mlp.gate_up, mlp.down, added_); }

  void run_mlp(Mixture& mixture) {
    const int64_t each = mixture.per_token, chosen = rows_ * each, inner = mixture.gate_up.outputs() / 2;
    mixture.router.choose(launch_, normed_, experts_);
    const int64_t row_bytes = width_ * static_cast<int64_t>(normed_.element_size());
    parallel_for(0, chosen, 1 + 64 * 1024 / row_bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(bytes(sorted_) + experts_.slots[i] * row_bytes, bytes(normed_) + i / each * row_bytes, row_bytes);
      }
    });
    const auto multiply_sorted = [&](ExpertMatrices& matrices, const Tensor& x, int64_t width, const Tensor& out) {
      matrices.multiply(launch_, {x.data_ptr(), width}, chosen, experts_.groups, out.data_ptr(), scratch_.data_ptr());
    };
    multiply_sorted(mixture.gate_up, sorted_, width_, gate_up_);
    gate(chosen, inner);
    multiply_sorted(mixture.down, gated_, inner, sorted_);
    WeightedRowsArgs sum;
    if (mixture.shared_down) {
      run_swiglu(*mixture.shared_gate_up, *mixture.shared_down, shared_);
      sum.plus = view(shared_);
    }
    sum.element = element_, sum.x = view(sorted_), sum.out = view(added_);
    sum.slots = experts_.slots.data(), sum.weights = experts_.weights.data();
    sum.rounds_weights = !in_.routing.by_sigmoid;
    sum.rows = rows_, sum.count = each, sum.width = width_;
    launch_(PDK_VECTOR(weighted_rows), sum);
  }

  const LayersInputs& in_;
  Launch launch_;
  SameDevice device_;
  std::vector<LayerParameters> layers_;
  Element element_;
  int64_t batch_, rows_, width_, heads_, kv_heads_, head_dim_ = 0;
  bool codes_;  // the caches hold 8 bits
  Tensor normed_, input_, residual_, added_, qkv_, normed_qk_, mixed_, gate_up_, gated_, sorted_, shared_, scratch_,
      lse_, new_rows_;
  QuantizeArgs quantize_[2];  // of K and V
  ChosenExperts experts_;
  SpeculativeArgs attention_;
  std::optional<SplitResults> splits_;
  ApplyRopeArgs rope_;
};

// The residual, and what the last layer adds to it.
inline std::tuple<Tensor, Tensor> transformer_layers(const LayersInputs& in) { return Layers(in).run(); }

PDK_IMPL("transformer_layers_", transformer_layers)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
