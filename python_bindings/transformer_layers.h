// The layers of a transformer over new rows of a cache: see csrc/ops/transformer_layers.h.
#pragma once

#include "attention.h"
#include "bound_transformer.h"
#include "lora.h"
#include "transformer_ops.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/transformer_layers.h"

namespace pdkernels::PDK_DEVICE::bindings {

// LayersArguments of pdkernels/models/architectures/whole_step.py.
struct LayersInputs {
  Tensor bound;                // of bind_transformer
  Tensor x;                    // (batch, rows) ids, or (batch, rows, width)
  OptionalTensor beside = {};  // (batch, rows, width), where rows are paired
  std::vector<int64_t> taps = {};
  int64_t first = 0, end;  // layers
  bool with_logits;
  Written k_cache, v_cache;  // of all layers, or of the first group of them
  Tensor lengths;
  // With cu_seqlens x has one entry, the rows of all sequences.
  OptionalTensor counts = {}, cu_seqlens = {}, block_table = {};
  WrittenList more_k = {}, more_v = {};  // those of further groups, which have tables of their own
  std::vector<Tensor> more_tables = {};
  std::vector<int64_t> groups = {};  // of every layer of the model; empty: there is one
  int64_t longest;                   // most rows of a sequence, those of the plan
  Tensor cos, sin;
  OptionalTensor window_cos = {}, window_sin = {};  // of layers with a window, if they have others
  OptionalTensor positions = {};                    // absent: those after the cached rows
  std::vector<OptionalTensor> starts = {};          // of each layer, or none at all
  AdaptedInputs adapted = {};
  PlanInputs plan;
  WrittenList states = {}, pending = {};  // of the layers with a state
  OptionalWritten state_lengths = {};     // (states, batch)
  StateStepInputs step = {};
  auto fields() const {
    return std::tie(bound, x, beside, taps, first, end, with_logits, k_cache, v_cache, lengths, counts, cu_seqlens,
                    block_table, more_k, more_v, more_tables, groups, longest, cos, sin, window_cos, window_sin,
                    positions, starts, adapted, plan, states, pending, state_lengths, step);
  }
};

// What attention takes in all layers, with the caches of the first.
inline void unpack_attention(const LayersInputs& in, const BindInputs& bound, TransformerLayersArgs& args) {
  const SameDevice device(bound.norm);
  SpeculativeArgs& attention = args.attention;
  const ScalarType dtype = bound.norm.scalar_type();
  attention.form = form_of(dtype, in.k_cache.scalar_type());
  attention.element = row_element(dtype), attention.batch = in.lengths.size(0);
  attention.q_len = attention.kv_len = in.longest, attention.lse_stride = in.x.size(1);
  if (in.cu_seqlens.has_value()) {
    PDK_CHECK(in.x.size(0) == 1);
    attention.row_begins = index_view(device, in.cu_seqlens, 1, attention.batch + 1);
  } else {
    PDK_CHECK(in.x.size(0) == attention.batch && in.longest == in.x.size(1));
  }
  attention.q_heads = bound.heads, attention.kv_heads = bound.kv_heads, attention.head_dim = bound.head_dim;
  attention.block_q = in.plan.block_q, attention.block_k = in.plan.block_k;
  attention.scale = static_cast<float>(bound.scale), attention.softcap = static_cast<float>(bound.settings.softcap);
  attention.sinks = nullptr, attention.sinks_stride = 0;
  require_sizes(attention);
  unpack_plan(device, in.plan, attention);
  const int64_t layer = in.groups.empty() ? in.first : 0;
  unpack_prefix(device, dtype, torch::stable::select(in.k_cache, 0, layer), torch::stable::select(in.v_cache, 0, layer),
                in.lengths, in.block_table, attention);
  attention.op = "speculative_attention_append_", attention.append_rows = attention.q_len;
  attention.counts = index_view(device, in.counts, 1, attention.batch);
  args.k_cache_stride = in.k_cache.stride(0) * static_cast<int64_t>(in.k_cache.element_size());
  args.v_cache_stride = in.v_cache.stride(0) * static_cast<int64_t>(in.v_cache.element_size());
  args.rope.batch = args.entries(), args.rope.rows = args.entry_rows();
  args.rope.head_dim = bound.mixer.rotary_dim > 0 ? bound.mixer.rotary_dim : attention.head_dim;
  PDK_CHECK(args.rope.head_dim <= attention.head_dim);
  unpack_rotation(device, in.cos, in.sin, in.positions, bound.interleaved, args.rope);
  PDK_CHECK(in.window_cos.has_value() == in.window_sin.has_value());
  args.window_rope = args.rope, args.window_rope.cos = nullptr;
  if (in.window_cos.has_value()) {
    unpack_rotation(device, *in.window_cos, *in.window_sin, {}, bound.interleaved, args.window_rope);
  }
}

// Where each layer's rows begin to see.
inline std::vector<IndexView> unpack_starts(const LayersInputs& in, const SpeculativeArgs& attention) {
  std::vector<IndexView> starts;
  std::vector<std::pair<const Tensor*, IndexView>> known;  // layers with one window have one tensor
  const auto same = [](const Tensor& a, const Tensor& b) {
    return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() &&
           a.sizes().equals(b.sizes()) && a.strides().equals(b.strides());
  };
  for (const OptionalTensor& of_layer : in.starts) {
    IndexView found;
    if (of_layer.has_value()) {
      auto at = known.begin();
      while (at != known.end() && !same(*at->first, *of_layer)) ++at;
      if (at == known.end()) {
        SpeculativeArgs args = attention;
        unpack_starts(SameDevice(in.lengths), of_layer, args);
        at = known.insert(at, {&*of_layer, args.starts});
      }
      found = at->second;
    }
    starts.push_back(found);
  }
  return starts;
}

// Where each layer's keys and values are, if there are several groups.
inline std::vector<LayerCache> unpack_caches(const LayersInputs& in, ScalarType dtype, int64_t layers,
                                             const SpeculativeArgs& attention) {
  std::vector<LayerCache> next, caches;  // of each group the next layer's; of each layer
  if (in.groups.empty()) return caches;
  const int64_t groups = static_cast<int64_t>(in.more_k.size()) + 1;
  PDK_CHECK(static_cast<int64_t>(in.groups.size()) == layers && groups == static_cast<int64_t>(in.more_v.size()) + 1 &&
            groups == static_cast<int64_t>(in.more_tables.size()) + 1);
  std::vector<int64_t> k_strides, v_strides, left;
  for (int64_t group = 0; group < groups; ++group) {
    const Tensor& k = group == 0 ? static_cast<const Tensor&>(in.k_cache) : in.more_k[group - 1];
    const Tensor& v = group == 0 ? static_cast<const Tensor&>(in.v_cache) : in.more_v[group - 1];
    PDK_CHECK(k.dim() == 5 && v.dim() == 5 && k.size(0) > 0 && v.size(0) == k.size(0));
    PDK_CHECK(k.scalar_type() == in.k_cache.scalar_type());
    SpeculativeArgs args = attention;
    unpack_prefix(SameDevice(in.lengths), dtype, torch::stable::select(k, 0, 0), torch::stable::select(v, 0, 0),
                  in.lengths, group == 0 ? in.block_table : OptionalTensor(in.more_tables[group - 1]), args);
    PDK_CHECK(args.pages.capacity() == attention.pages.capacity() && args.splits == attention.splits);
    next.push_back({args.k_cache, args.v_cache, args.pages});
    k_strides.push_back(k.stride(0) * static_cast<int64_t>(k.element_size()));
    v_strides.push_back(v.stride(0) * static_cast<int64_t>(v.element_size()));
    left.push_back(k.size(0));
  }
  for (int64_t layer = 0; layer < in.end; ++layer) {
    const int64_t group = in.groups[layer];
    PDK_CHECK(group >= 0 && group < groups && left[group]-- > 0);
    LayerCache& cache = next[group];
    if (layer >= in.first) caches.push_back(cache);
    cache.k.data = static_cast<char*>(cache.k.data) + k_strides[group];
    cache.v.data = static_cast<char*>(cache.v.data) + v_strides[group];
  }
  return caches;
}

// The states of each layer; empty: none has any.
inline std::vector<MixerStates> unpack_states(const LayersInputs& in, ScalarType dtype,
                                              const std::vector<LayerArgs>& layers, int64_t attending) {
  std::vector<MixerStates> states;
  if (attending == static_cast<int64_t>(layers.size())) return states;
  PDK_CHECK(in.first == 0 && in.end == static_cast<int64_t>(layers.size()) && !in.cu_seqlens && in.groups.empty());
  StatesReader reader(SameDevice(in.lengths), dtype, in.lengths, in.longest, in.states, in.pending, in.state_lengths,
                      in.step);
  for (const LayerArgs& layer : layers) states.push_back(layer.state ? reader.next(*layer.state) : MixerStates{});
  PDK_CHECK(reader.done());
  return states;
}

// The arguments of the kernel, and what they point to.
struct PreparedLayers {
  std::shared_ptr<const TransformerArgs> parameters;
  TorchRouterFunctions functions;
  std::vector<IndexView> starts;
  std::vector<LayerCache> caches;
  std::vector<MixerStates> states;
  std::vector<LoraGroup> lora;
  Tensor out, logits, features, memory;
  std::vector<int64_t> taps;
  TransformerLayersArgs args;

  explicit PreparedLayers(const LayersInputs& in) : PreparedLayers(in, BoundTransformer::of(in.bound)) {}
  PreparedLayers(const PreparedLayers&) = delete;

  const LayerMatrix* embedding() const { return present(parameters->embedding); }
  const LayerMatrix* head() const { return present(parameters->head); }

 private:
  static const LayerMatrix* present(const std::optional<LayerMatrix>& matrix) {
    PDK_CHECK(matrix.has_value());
    return &*matrix;
  }
  PreparedLayers(const LayersInputs& in, BoundTransformer& bound)
      : parameters(bound.read()), functions(bound.inputs().norm) {
    const BindInputs& given = bound.inputs();
    const SameDevice device(given.norm);
    PDK_CHECK(in.k_cache.dim() == 5 && in.v_cache.dim() == 5 && in.lengths.dim() == 1 && in.x.numel() > 0);
    const int64_t attending = parameters->attending;
    PDK_CHECK(!in.groups.empty() || (in.k_cache.size(0) == attending && in.v_cache.size(0) == attending));
    PDK_CHECK(in.first >= 0 && in.first < in.end && in.end <= given.layers);
    args.layers = parameters->layers.data() + in.first, args.layer_count = in.end - in.first;
    args.width = given.norm.size(0), args.eps = static_cast<float>(given.eps), args.norm = parameters->norm;
    args.router_functions = &functions;
    const SettingsInputs& settings = given.settings;
    PDK_CHECK(settings.softcap >= 0);
    args.embedding_scale = static_cast<float>(settings.embedding_scale);
    args.query_factor = static_cast<float>(settings.query_factor);
    args.whole_qk_norm = settings.whole_qk_norm, args.gelu = settings.gelu;
    args.windows = parameters->windows.data(), args.window_count = static_cast<int64_t>(parameters->windows.size());
    unpack_attention(in, given, args);
    const int64_t entries = in.x.size(0), rows = in.x.size(1);
    const auto rows_of = [&](const Tensor& x) -> RowsView {
      device.require(x, given.norm.scalar_type(), {entries, rows, args.width});
      PDK_CHECK(x.is_contiguous());
      return {x.data_ptr(), args.width};
    };
    args.embedding = in.x.dim() == 2 ? embedding() : nullptr;
    if (args.embedding != nullptr) {
      args.ids = index_table(device, in.x, entries, rows);
    } else {
      args.x = rows_of(in.x);
    }
    const bool paired = parameters->paired && in.first == 0;
    PDK_CHECK(paired == in.beside.has_value() && !(paired && args.embedding != nullptr));
    if (paired) args.paired = &*parameters->paired, args.beside = rows_of(*in.beside);
    args.normed_out = given.pairs.normed_out && in.end == given.layers;
    PDK_CHECK(in.starts.empty() ? args.window_count == 0 || !in.positions.has_value()
                                : static_cast<int64_t>(in.starts.size()) == args.layer_count);
    starts = unpack_starts(in, args.attention);
    args.starts = starts.empty() ? nullptr : starts.data();
    caches = unpack_caches(in, given.norm.scalar_type(), given.layers, args.attention);
    args.caches = caches.empty() ? nullptr : caches.data();
    states = unpack_states(in, given.norm.scalar_type(), parameters->layers, attending);
    args.states = states.empty() ? nullptr : states.data();
    args.gated = given.mixer.gated, args.centred = given.mixer.centred;
    lora = unpack_lora(in.adapted, given.layers, in.first, entries * rows, args.lora_sizes);
    args.lora = lora.data(), args.lora_count = static_cast<int64_t>(lora.size());
    out = torch::stable::new_empty(given.norm, {entries, rows, args.width});
    args.out = {out.data_ptr(), args.width};
    args.head = in.with_logits ? head() : nullptr;
    std::vector<int64_t> shape{0};
    if (in.with_logits) shape = {entries, rows, args.head->outputs};
    logits = torch::stable::new_empty(given.norm, shape);
    args.logits = logits.data_ptr();
    for (const int64_t tap : in.taps) {
      PDK_CHECK(tap >= in.first && tap <= in.end && in.first == 0);
      taps.push_back(tap);
    }
    const int64_t tapped = args.tap_count = static_cast<int64_t>(taps.size());
    features = torch::stable::new_empty(given.norm, {tapped == 0 ? 0 : entries, rows, tapped, args.width});
    args.taps = taps.data(), args.features = static_cast<char*>(features.data_ptr());
    memory = torch::stable::new_empty(given.norm, {args.memory_bytes()}, ScalarType::Byte);
    args.memory = bytes(memory);
  }
};

// The rows after the last layer, their logits, and what flows into the tapped layers.
inline std::tuple<Tensor, Tensor, Tensor> transformer_layers(const LayersInputs& in) {
  const Launch launch(in.x);
  const PreparedLayers prepared(in);
  launch(PDK_DEVICE::transformer_layers, prepared.args);
  return {prepared.out, prepared.logits, prepared.features};
}

PDK_IMPL("transformer_layers_", transformer_layers)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
