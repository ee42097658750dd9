// Arguments of the layers of a transformer over new rows of a cache, with the embedding before them and the head after
// them, for the CPU: the kernels that pdkernels/models/architectures/layer.py calls, in the same order, so that results
// have the same bits. See pdkernels/models/architectures/whole_step.py.
#pragma once

#include <algorithm>
#include <optional>
#include <variant>
#include <vector>

#include "ops/experts.h"
#include "ops/lora.h"
#include "ops/scaled_rows.h"
#include "ops/speculative_attention.h"
#include "ops/state_mixer.h"
#include "ops/transformer_ops.h"

namespace pdkernels {

// A matrix and its bias, plain or quantised.
struct LayerMatrix {
  std::variant<LinearArgs, QuantizedLinearArgs> args;
  int64_t outputs;

  int64_t scratch_bytes(int64_t rows) const {
    return std::visit([&](const auto& product) { return product.scratch_bytes(rows); }, args);
  }
};

struct Mlp {
  LayerMatrix gate_up, down;

  int64_t inner() const { return gate_up.outputs / 2; }
};

// Experts, and an MLP for every row beside them.
struct MixtureMlp {
  Experts experts;
  std::optional<Mlp> shared;
};

struct LayerArgs {
  void* attention_norm;             // each norm may be nullptr
  LayerMatrix qkv;                  // or the inputs of `state`
  void *q_norm, *k_norm;            // (head_dim,), or of all heads together
  const float* sinks = nullptr;     // of each head, or nullptr
  std::optional<StateMixer> state;  // in place of attention
  LayerMatrix output;
  void *attention_out_norm, *mlp_norm;
  std::variant<Mlp, MixtureMlp> mlp;
  void* mlp_out_norm;
  int64_t window = -1;  // number of its window; -1: it has none

  // The MLP of every row.
  const Mlp* dense() const {
    if (const auto* mixture = std::get_if<MixtureMlp>(&mlp)) return mixture->shared ? &*mixture->shared : nullptr;
    return &std::get<Mlp>(mlp);
  }
  const MixtureMlp* mixture() const { return std::get_if<MixtureMlp>(&mlp); }
};

// Where a layer's keys and values are, if layers have several page tables.
struct LayerCache {
  HeadsView k, v;
  PageMap pages;
};

// What rows of a layer see of the text before them: so many positions, their own included, or those from the last
// multiple of this number on.
struct LayerWindow {
  int64_t size;
  bool chunked;

  bool operator==(const LayerWindow&) const = default;
  int64_t first(int64_t position) const {
    return chunked ? position / size * size : std::max<int64_t>(position + 1 - size, 0);
  }
};

// How a drafter's layers begin (EAGLE-3, multi-token prediction): a row of the embedding and a row of x, each after its
// own norm, lie side by side in rows of twice the width.
struct PairedRows {
  void *embedding_norm, *x_norm;
  std::optional<LayerMatrix>
      merge;                      // makes rows of the layers of them; nullopt: attention of the first layer reads them
  bool x_first, normed_residual;  // whether x is on the left; whether what the first layer adds to is x after its norm
};

struct TransformerLayersArgs {
  const LayerArgs* layers;
  int64_t layer_count;                 // 0: the norm and the head alone
  const IndexView* starts;             // of each layer, as in SpeculativeArgs; nullptr: as their windows say
  const LayerMatrix* embedding;        // of x, or of `beside` where x is given; nullptr: both are
  float embedding_scale = 1;           // of the embedding's rows, rounded to the element type
  IndexView ids;                       // (entries, rows of one), with an embedding
  const PairedRows* paired = nullptr;  // nullptr: the layers begin with x, or with the embedding's rows
  RowsView x, beside, out;        // contiguous; the result: x plus what the layers add; `beside`: rows of the embedding
  bool normed_out = false;        // whether `out` is what the head reads
  const int64_t* taps = nullptr;  // layers, counted from 0, whose inputs `features` gets, (rows, tap_count, width)
  int64_t tap_count = 0;
  char* features = nullptr;
  void* norm;               // before the head
  const LayerMatrix* head;  // nullptr: no logits
  void* logits;             // (rows, outputs of the head)
  int64_t width;
  float eps;
  float query_factor = 1;      // of queries after their rotation, beside attention's scale
  bool whole_qk_norm = false;  // norms of q and k over all heads together
  bool gelu = false;           // in place of silu, in the MLPs of layers without experts
  const LayerWindow* windows = nullptr;
  int64_t window_count = 0;
  // What layers have in common: sizes, plan, lengths, and the caches of the first; from each to the next, in bytes.
  SpeculativeArgs attention;
  int64_t k_cache_stride, v_cache_stride;
  const LayerCache* caches = nullptr;  // of each layer, in place of these strides
  ApplyRopeArgs rope;         // tables and positions of what is rotated of a head; without positions, rows follow the
                              // cached ones
  ApplyRopeArgs window_rope;  // tables of layers with a window; cos is nullptr: they have the same
  bool gated = false;         // whether a head of q and its gate, of attention's output, lie side by side
  bool centred = false;       // whether norms but those of a state multiply by 1 plus their weight
  const MixerStates* states = nullptr;  // of each layer
  RouterFunctions* router_functions;
  const LoraGroup* lora = nullptr;  // rows with adapters of their own, each in one group
  int64_t lora_count = 0;
  LoraSizes lora_sizes;
  char* memory;  // memory_bytes()

  int64_t rows() const { return attention.rows(); }
  // Rows of packed sequences are those of a single entry.
  int64_t entries() const { return attention.packed() ? 1 : attention.batch; }
  int64_t entry_rows() const { return attention.lse_stride; }
  int64_t turned_heads() const { return attention.q_heads + attention.kv_heads; }
  int64_t all_heads() const { return attention.q_heads * (gated ? 2 : 1) + 2 * attention.kv_heads; }
  bool norms_heads() const {
    const LayerArgs* layer = layers;
    for (int64_t i = 1; i < layer_count && layer->state; ++i) ++layer;
    return layer->q_norm != nullptr;
  }
  // Whether the rows follow the cached ones, so that it is computed here what they see in layers with windows.
  bool computes_starts() const { return window_count > 0 && !rope.positions.given(); }
  int64_t memory_bytes() const;
};

// The memory for what is between two kernels, which all layers share.
struct LayersMemory {
  char *embedded, *residual, *added;
  int64_t *ids, *positions, *starts;
  char *pairs, *merged, *normed, *input, *qkv, *normed_qk, *mixed, *gate_up, *gated, *shared, *experts, *scratch;
  LoraMemory lora;
  MixerMemory mixer;
  char* stored;  // new keys and values in the cache's form, if that is another
  float *lse, *parts, *parts_lse;

  LayersMemory(const TransformerLayersArgs& args, MemoryParts& memory)
      : lora(args.lora_sizes, args.attention.element, args.lora_count > 0 ? args.rows() : 0, memory),
        mixer(mixer_sizes(args), args.attention.element, args.rows(), memory) {
    const SpeculativeArgs& attention = args.attention;
    const int64_t rows = args.rows(), size = bytes_of(attention.element), head_bytes = attention.head_dim * size;
    const auto take_rows = [&] { return memory.take(rows * args.width * size); };
    embedded = args.embedding == nullptr ? nullptr : take_rows();
    ids = memory.take<int64_t>(args.embedding == nullptr ? 0 : rows);
    positions = memory.take<int64_t>(args.rope.positions.given() ? 0 : rows);
    starts = memory.take<int64_t>(args.computes_starts() ? args.window_count * rows : 0);
    const PairedRows* const paired = args.paired;
    pairs = paired == nullptr ? nullptr : memory.take(rows * 2 * args.width * size);
    merged = paired == nullptr || !paired->merge ? nullptr : take_rows();
    residual = take_rows(), added = take_rows(), normed = take_rows(), input = take_rows();
    const MixerSizes mixers = mixer_sizes(args);
    qkv = memory.take(rows * std::max(args.all_heads() * head_bytes, mixers.inputs * size));
    mixed = memory.take(rows * std::max(attention.q_heads * head_bytes, mixers.outputs * size));
    normed_qk = args.norms_heads() ? memory.take(rows * args.turned_heads() * head_bytes) : qkv;
    const int64_t row_bytes = cache_row_bytes(attention.form, attention.head_dim, size);
    stored = memory.take(attention.form == CacheRows::kSame ? 0 : rows * 2 * attention.kv_heads * row_bytes);
    lse = memory.take<float>(rows * attention.q_heads);
    const int64_t results = attention.splits > 1 ? attention.splits * rows * attention.q_heads : 0;
    parts = memory.take<float>(results * attention.head_dim), parts_lse = memory.take<float>(results);
    int64_t inner = 0, expert_bytes = 0, scratch_bytes = 0;
    bool shares = false;
    const auto include = [&](const LayerMatrix& matrix) {
      scratch_bytes = std::max(scratch_bytes, matrix.scratch_bytes(rows));
    };
    if (args.head != nullptr) include(*args.head);
    if (paired != nullptr && paired->merge) include(*paired->merge);
    for (int64_t i = 0; i < args.layer_count; ++i) {
      const LayerArgs& layer = args.layers[i];
      include(layer.qkv), include(layer.output);
      if (const Mlp* mlp = layer.dense()) {
        include(mlp->gate_up), include(mlp->down);
        inner = std::max(inner, mlp->inner());
      }
      if (const MixtureMlp* mixture = layer.mixture()) {
        shares = shares || mixture->shared;
        const int64_t needed = ExpertsArgs::memory_bytes(mixture->experts, attention.element, rows, args.width);
        expert_bytes = std::max(expert_bytes, needed);
      }
    }
    gate_up = memory.take(rows * 2 * inner * size), gated = memory.take(rows * inner * size);
    shared = memory.take(shares ? rows * args.width * size : 0);
    experts = memory.take(expert_bytes), scratch = memory.take(scratch_bytes);
  }

  static MixerSizes mixer_sizes(const TransformerLayersArgs& args) {
    MixerSizes sizes;
    for (int64_t i = 0; i < args.layer_count; ++i) {
      if (args.layers[i].state) sizes.include(*args.layers[i].state);
    }
    return sizes;
  }
};

inline int64_t TransformerLayersArgs::memory_bytes() const {
  MemoryParts parts;
  LayersMemory(*this, parts);
  return parts.used();
}

PDK_KERNEL(transformer_layers, TransformerLayersArgs)

}  // namespace pdkernels
