// The layers of a transformer on the CPU, one after the other. The kernels of other ops compute; those that check
// values do so in the first layer of each page table, before anything else is written there.
#include "ops/transformer_layers.h"

#include <cstring>
#include <stdexcept>

#include "check_steps.h"
#include "ops/kv_cache.h"
#include "parallel.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void run(const AddRmsNormArgs& args) { PDK_DISPATCH(add_rms_norm, args) }
void run_centred(const AddRmsNormArgs& args) { PDK_DISPATCH(centred_rms_norm, args) }
void run(const GatedRowsArgs& args) { PDK_DISPATCH(gated_rows, args) }
void run(const SiluAndMulArgs& args) { PDK_DISPATCH(silu_and_mul, args) }
void run(const GeluAndMulArgs& args) { PDK_DISPATCH(gelu_and_mul, args) }
void run(const ScaledRowsArgs& args) { PDK_DISPATCH(scaled_rows, args) }
void run(const QuantizeArgs& args) { PDK_DISPATCH(kv_quantize, args) }
void run(const LinearArgs& args) { PDK_DISPATCH(linear, args) }
void run(const QuantizedLinearArgs& args) { PDK_DISPATCH(quantized_linear, args) }
void run(const QuantizedEmbeddingArgs& args) { PDK_DISPATCH(quantized_embedding, args) }

class Layers {
 public:
  Layers(const TransformerLayersArgs& args, MemoryParts parts)
      : args_(args),
        memory_(args, parts),
        rows_(args.rows()),
        size_(bytes_of(args.attention.element)),
        x_(args.x.given() ? args.x : view(memory_.embedded)),
        rope_(args.rope),
        window_rope_(args.window_rope),
        attention_(args.attention) {
    set_rope();
    set_starts();
    set_attention();
  }

  void compute() {
    if (args_.states != nullptr) require_states();
    if (args_.embedding != nullptr) embed();
    if (args_.paired != nullptr && args_.layer_count > 0) pair(*args_.paired);
    for (int64_t i = 0; i < args_.layer_count; ++i) compute_layer(i, args_.layers[i]);
    if (args_.layer_count > 0) {
      norm(view(memory_.added), view(memory_.residual), args_.norm, args_.out);
      tap(args_.layer_count, args_.out);
      if (args_.normed_out) std::memcpy(args_.out.data, memory_.normed, rows_ * args_.width * size_);
    } else if (args_.normed_out) {
      std::memcpy(memory_.normed, x_.data, rows_ * args_.width * size_);
    } else {
      norm(x_, {}, args_.norm, {});
    }
    if (args_.head != nullptr) multiply(*args_.head, memory_.normed, args_.width, args_.logits);
  }

 private:
  // Rows of heads, of which each token has `heads` in memory.
  HeadsView heads_view(char* data, int64_t heads, int64_t head_size) const {
    const int64_t token = heads * head_size;
    return {data, args_.entry_rows() * token, token, head_size};
  }
  char* head(char* data, int64_t number) const { return data + number * attention_.head_dim * size_; }

  // Calls visit(row, entry, row of the entry) for all rows.
  template <class Visit>
  void for_rows(const Visit& visit) const {
    const int64_t each = args_.entry_rows();
    for (int64_t row = 0; row < rows_; ++row) visit(row, row / each, row % each);
  }

  void embed() const {
    const LayerMatrix& table = *args_.embedding;
    for_rows([&](int64_t row, int64_t entry, int64_t i) {
      const int64_t id = memory_.ids[row] = args_.ids.load(entry, i);
      // The caller looks for the reason, as for every argument that does not fit.
      if (id < 0 || id >= table.outputs) throw std::runtime_error("pdkernels: an id has no row in the embedding");
    });
    std::visit([&](const auto& matrix) { look_up(matrix); }, table.args);
    scale(memory_.embedded, args_.width, args_.width, args_.embedding_scale, true);
  }
  void look_up(const LinearArgs& table) const {
    const int64_t bytes = args_.width * size_;
    for_rows([&](int64_t row, int64_t, int64_t) {
      const char* from = static_cast<const char*>(table.weight) + memory_.ids[row] * bytes;
      std::memcpy(memory_.embedded + row * bytes, from, bytes);
    });
  }
  void look_up(const QuantizedLinearArgs& table) const {
    QuantizedEmbeddingArgs args;
    args.element = attention_.element, args.ids = {memory_.ids, 1, 0, true}, args.out = view(memory_.embedded);
    std::copy(table.parts, table.parts + table.part_count, args.parts), args.part_count = table.part_count;
    args.rows = rows_, args.width = args_.width;
    run(args);
  }

  // The first layers with a state write before attention checks anything.
  void require_states() const {
    require_rows(attention_);
    require_positions(rope_);
    for (int64_t i = 0; i < args_.layer_count; ++i) {
      if (!args_.layers[i].state) continue;
      require_step(args_.states[i].conv);
      if (args_.layers[i].state->delta) require_step(args_.states[i].scan);
    }
  }

  void set_rope() {
    const SpeculativeArgs& sizes = args_.attention;
    if (!rope_.positions.given()) {
      for_rows([&](int64_t row, int64_t b, int64_t i) { memory_.positions[row] = sizes.lengths.load(b) + i; });
      rope_.positions = {memory_.positions, args_.entry_rows(), 1, true};
    }
    const int64_t heads = args_.norms_heads() ? args_.turned_heads() : args_.all_heads();
    rope_.element = sizes.element, rope_.x = memory_.normed_qk, rope_.heads = args_.turned_heads();
    rope_.head_stride = sizes.head_dim, rope_.row_stride = heads * sizes.head_dim;
    rope_.batch_stride = args_.entry_rows() * rope_.row_stride;
    const float *const cos = window_rope_.cos, *const sin = window_rope_.sin;
    const int64_t table_rows = window_rope_.table_rows;
    window_rope_ = rope_, window_rope_.cos = cos, window_rope_.sin = sin, window_rope_.table_rows = table_rows;
  }

  void set_starts() {
    if (!args_.computes_starts()) return;
    for (int64_t i = 0; i < args_.window_count; ++i) {
      int64_t* const starts = memory_.starts + i * rows_;
      for (int64_t row = 0; row < rows_; ++row) starts[row] = args_.windows[i].first(memory_.positions[row]);
    }
  }

  // From where on rows see in a layer; not given: from the first one on.
  IndexView starts_of(int64_t number) const {
    if (args_.starts != nullptr) return args_.starts[number];
    const int64_t window = args_.layers[number].window;
    if (window < 0 || !args_.computes_starts()) return {};
    return {memory_.starts + window * rows_, args_.entry_rows(), 1, true};
  }

  void set_attention() {
    const int64_t dim = attention_.head_dim, queries = attention_.q_heads, all = args_.all_heads();
    const int64_t of_qk = args_.norms_heads() ? args_.turned_heads() : all;
    attention_.q = heads_view(memory_.normed_qk, of_qk, dim);
    attention_.k = heads_view(head(memory_.normed_qk, queries), of_qk, dim);
    attention_.v = heads_view(head(memory_.qkv, all - attention_.kv_heads), all, dim);
    if (converts()) {  // attention reads and stores the new rows in the cache's form
      const CacheRows form = attention_.form;
      const int64_t bytes = cache_row_bytes(form, dim, size_), kv_heads = attention_.kv_heads;
      const int64_t row = form == CacheRows::kCodes ? bytes : dim;
      const HeadsView stored[2] = {heads_view(memory_.stored, 2 * kv_heads, row),
                                   heads_view(memory_.stored + kv_heads * bytes, 2 * kv_heads, row)};
      convert_[0] = conversion(attention_.k, stored[0], bytes / row);
      convert_[1] = conversion(attention_.v, stored[1], bytes / row);
      attention_.k = stored[0], attention_.v = stored[1];
    }
    attention_.out = heads_view(memory_.mixed, queries, dim);
    attention_.lse = memory_.lse;
    attention_.parts = memory_.parts, attention_.parts_lse = memory_.parts_lse;
  }

  bool converts() const { return attention_.form != CacheRows::kSame; }

  QuantizeArgs conversion(const HeadsView& x, const HeadsView& stored, int64_t stored_size) const {
    QuantizeArgs args;
    args.element = attention_.element, args.form = attention_.form, args.head_dim = attention_.head_dim;
    args.x = static_cast<char*>(x.data), args.rows = static_cast<char*>(stored.data);
    args.sizes[0] = args_.entries(), args.sizes[1] = args_.entry_rows(), args.sizes[2] = attention_.kv_heads;
    const int64_t x_strides[3] = {x.batch_stride, x.token_stride, x.head_stride};
    const int64_t row_strides[3] = {stored.batch_stride, stored.token_stride, stored.head_stride};
    for (int d = 0; d < 3; ++d) args.x_strides[d] = x_strides[d] * size_;
    for (int d = 0; d < 3; ++d) args.row_strides[d] = row_strides[d] * stored_size;
    return args;
  }

  RowsView view(void* data) const { return {data, args_.width}; }

  void pair(const PairedRows& paired) {
    const int64_t width = args_.width;
    const RowsView halves[2] = {{memory_.pairs, 2 * width}, {memory_.pairs + width * size_, 2 * width}};
    const RowsView &of_embedding = halves[paired.x_first], &of_x = halves[!paired.x_first];
    norm_into(args_.beside.given() ? args_.beside : view(memory_.embedded), paired.embedding_norm, of_embedding);
    norm_into(x_, paired.x_norm, of_x);
    if (paired.merge) {
      multiply(*paired.merge, memory_.pairs, 2 * width, memory_.merged);
      x_ = view(memory_.merged);
    } else if (paired.normed_residual) {
      x_ = of_x;
    }
  }

  // Gives `features` the input of a layer.
  void tap(int64_t number, const RowsView& input) const {
    const int64_t bytes = args_.width * size_;
    for (int64_t t = 0; t < args_.tap_count; ++t) {
      if (args_.taps[t] != number) continue;
      for (int64_t row = 0; row < rows_; ++row) {
        const char* from = static_cast<const char*>(input.data) + row * input.row_stride * size_;
        std::memcpy(args_.features + (row * args_.tap_count + t) * bytes, from, bytes);
      }
    }
  }

  void compute_layer(int64_t number, const LayerArgs& layer) {
    const bool first = number == 0;
    const RowsView added = view(memory_.added), residual = view(memory_.residual);
    if (first && args_.paired != nullptr && !args_.paired->merge) {
      multiply(layer.qkv, memory_.pairs, 2 * args_.width, memory_.qkv);
    } else {
      const RowsView sum = view(memory_.input);
      char* const taken = take(first ? x_ : added, first ? RowsView{} : residual, layer.attention_norm, sum);
      multiply(layer.qkv, taken, args_.width, memory_.qkv);
      add_lora(number, LoraMatrix::kQkv, layer.qkv, taken, args_.width, memory_.qkv);
    }
    tap(number, first ? x_ : view(memory_.input));
    const int64_t mixed_width = layer.state ? layer.state->outputs() : attention_.q_heads * attention_.head_dim;
    if (layer.state) {
      state_mixer({attention_.element, &*layer.state, args_.states + number, memory_.qkv, memory_.mixed,
                   args_.entries(), args_.entry_rows(), args_.eps, memory_.mixer});
    } else {
      if (layer.q_norm != nullptr) norm_heads(layer);
      const IndexView starts = starts_of(number);
      apply_rope(starts.given() && window_rope_.cos != nullptr ? window_rope_ : rope_);
      scale(rope_.x, rope_.row_stride, mixed_width, args_.query_factor, false);
      for (int i = 0; converts() && i < 2; ++i) run(convert_[i]);
      attend(number, starts);
      if (args_.gated) gate_heads();
    }
    multiply(layer.output, memory_.mixed, mixed_width, memory_.added);
    add_lora(number, LoraMatrix::kOutput, layer.output, memory_.mixed, mixed_width, memory_.added);
    norm_in_place(layer.attention_out_norm, added);
    char* const taken = take(added, first ? x_ : view(memory_.input), layer.mlp_norm, residual);
    if (const MixtureMlp* mixture = layer.mixture()) {
      compute_mixture(*mixture, taken);
    } else {
      const Mlp& mlp = *layer.dense();
      multiply(mlp.gate_up, taken, args_.width, memory_.gate_up);
      add_lora(number, LoraMatrix::kGateUp, mlp.gate_up, taken, args_.width, memory_.gate_up);
      if (args_.gelu) {
        gate<GeluAndMulArgs>(mlp);
      } else {
        gate<SiluAndMulArgs>(mlp);
      }
      multiply(mlp.down, memory_.gated, mlp.inner(), memory_.added);
      add_lora(number, LoraMatrix::kDown, mlp.down, memory_.gated, mlp.inner(), memory_.added);
    }
    norm_in_place(layer.mlp_out_norm, added);
  }

  // What follows takes: x, or `sum`, which becomes x + residual; normed, if there is a weight.
  char* take(const RowsView& x, const RowsView& residual, void* weight, const RowsView& sum) const {
    if (weight == nullptr && !residual.given()) return static_cast<char*>(x.data);
    norm(x, residual, weight, sum);
    return weight == nullptr ? static_cast<char*>(sum.data) : memory_.normed;
  }
  void norm_in_place(void* weight, const RowsView& x) const {
    if (weight != nullptr) norm_into(x, weight, x);
  }
  void scale(void* x, int64_t row_stride, int64_t width, float factor, bool rounds_factor) const {
    if (factor == 1) return;
    ScaledRowsArgs args;
    args.element = attention_.element, args.x = {x, row_stride}, args.rows = rows_, args.width = width;
    args.factor = factor, args.rounds_factor = rounds_factor;
    run(args);
  }

  void run_norm(const AddRmsNormArgs& args) const { args_.centred ? run_centred(args) : run(args); }
  // The norm of x in `out`.
  void norm_into(const RowsView& x, void* weight, const RowsView& out) const {
    AddRmsNormArgs args;
    args.element = attention_.element, args.rows = rows_, args.width = args_.width, args.eps = args_.eps;
    args.x = x, args.y = out, args.weight = weight;
    args.residual = args.next = {}, args.next_weight = nullptr;
    run_norm(args);
  }
  // The norm of x, or of `sum`, which becomes x + residual, in memory_.normed; without a weight the sum alone.
  void norm(const RowsView& x, const RowsView& residual, void* weight, const RowsView& sum) const {
    if (!residual.given()) return norm_into(x, weight, view(memory_.normed));
    AddRmsNormArgs args;
    args.element = attention_.element, args.rows = rows_, args.width = args_.width, args.eps = args_.eps;
    args.x = x, args.residual = residual;
    args.y = sum, args.weight = nullptr, args.next = view(memory_.normed), args.next_weight = weight;
    run_norm(args);
  }

  // Norms q and k of all rows into memory_.normed_qk; v is read where it is.
  void norm_heads(const LayerArgs& layer) const {
    const int64_t dim = attention_.head_dim, turned = args_.turned_heads(), all = args_.all_heads();
    const bool whole = args_.whole_qk_norm;
    parallel_for(0, rows_, 1 + 16 * 1024 / (turned * dim), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        char *from = head(memory_.qkv, row * all), *to = head(memory_.normed_qk, row * turned);
        AddRmsNormArgs args;
        args.element = attention_.element, args.eps = args_.eps;
        args.residual = args.next = {}, args.next_weight = nullptr;
        const auto norm_each = [&](int64_t begin, int64_t stride, int64_t first, int64_t heads, void* weight) {
          args.rows = whole ? 1 : heads, args.width = whole ? heads * dim : dim, args.weight = weight;
          args.x = {head(from, begin), stride}, args.y = {head(to, first), dim};
          run_norm(args);
        };
        const int64_t queries = attention_.q_heads, keys = attention_.kv_heads;
        norm_each(0, args_.gated ? 2 * dim : dim, 0, queries, layer.q_norm);
        norm_each(all - 2 * keys, dim, queries, keys, layer.k_norm);
      }
    });
  }

  // Attention's output times the sigmoid of the gates, which lie behind each head of q.
  void gate_heads() const {
    const int64_t dim = attention_.head_dim, queries = attention_.q_heads;
    const GroupsView mixed{memory_.mixed, queries * dim, dim};
    const GroupsView gates{head(memory_.qkv, 1), args_.all_heads() * dim, 2 * dim};
    run(GatedRowsArgs{attention_.element, GateForm::kSigmoid, mixed, gates, mixed, rows_, queries, dim});
  }

  // Layers with a state have no keys and values.
  void attend(int64_t number, const IndexView& starts) {
    SpeculativeArgs args = attention_;
    args.starts = starts;
    if (const float* sinks = args_.layers[number].sinks) args.sinks = sinks, args.sinks_stride = 1;
    if (args_.caches != nullptr) {
      args.k_cache = args_.caches[number].k, args.v_cache = args_.caches[number].v;
      args.pages = args_.caches[number].pages;
    } else {
      args.k_cache.data = static_cast<char*>(args.k_cache.data) + attended_ * args_.k_cache_stride;
      args.v_cache.data = static_cast<char*>(args.v_cache.data) + attended_ * args_.v_cache_stride;
    }
    ++attended_;
    speculative_attention(args);
  }

  void multiply(const LayerMatrix& matrix, void* x, int64_t width, void* out) const {
    if (matrix.outputs == 0) return;
    std::visit(
        [&](auto product) {
          product.set_rows({x, width}, rows_, out, memory_.scratch);
          run(product);
        },
        matrix.args);
  }

  // Adds to `out`, the product of `x` with a matrix, what the rows' adapters make of `x`.
  void add_lora(int64_t number, LoraMatrix which, const LayerMatrix& matrix, char* x, int64_t width, char* out) const {
    LoraAddArgs args;
    args.element = attention_.element, args.groups = args_.lora, args.group_count = args_.lora_count;
    args.layer = number, args.matrix = which, args.x = {x, width}, args.out = {out, matrix.outputs}, args.width = width;
    args.memory = memory_.lora;
    lora_add(args);
  }

  template <class Args>
  void gate(const Mlp& mlp) const {
    const int64_t inner = mlp.inner();
    Args args;
    args.element = attention_.element, args.rows = rows_, args.width = inner;
    args.x = {memory_.gate_up, 2 * inner}, args.out = {memory_.gated, inner};
    run(args);
  }

  void compute_mixture(const MixtureMlp& mixture, char* x) const {
    ExpertsArgs args;
    if (mixture.shared) {
      multiply(mixture.shared->gate_up, x, args_.width, memory_.gate_up);
      gate<SiluAndMulArgs>(*mixture.shared);
      multiply(mixture.shared->down, memory_.gated, mixture.shared->inner(), memory_.shared);
      args.plus = view(memory_.shared);
    }
    args.experts = &mixture.experts, args.element = attention_.element;
    args.x = view(x), args.out = view(memory_.added), args.rows = rows_, args.width = args_.width;
    args.functions = args_.router_functions, args.memory = memory_.experts;
    experts(args);
  }

  const TransformerLayersArgs& args_;
  LayersMemory memory_;
  int64_t rows_, size_;  // of an element
  RowsView x_;
  ApplyRopeArgs rope_, window_rope_;
  SpeculativeArgs attention_;
  QuantizeArgs convert_[2];  // of K and V
  int64_t attended_ = 0;     // layers with attention that are behind
};

}  // namespace

void transformer_layers(const TransformerLayersArgs& args) { Layers(args, MemoryParts(args.memory)).compute(); }

}  // namespace pdkernels::cpu
