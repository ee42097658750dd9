// A chain of drafted tokens: see pdkernels/models/drafters/chain.py.
#pragma once

#include "transformer_layers.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/draft_chain.h"

namespace pdkernels::PDK_DEVICE::bindings {

// ChainArguments of pdkernels/models/drafters/chain.py.
struct ChainInputs {
  Tensor bound;
  Written hidden, lengths;  // (batch, 1, width), and (batch,) of the cached rows
  Written k_cache, v_cache;
  Tensor busy;  // (batch,)
  OptionalTensor block_table;
  Tensor cos, sin, vocabulary;
  int64_t guesses;
  PlanInputs plan;
  auto fields() const {
    return std::tie(bound, hidden, lengths, k_cache, v_cache, busy, block_table, cos, sin, vocabulary, guesses, plan);
  }
};

// The guesses, (batch, guesses).
inline std::tuple<Tensor> draft_chain(const ChainInputs& in) {
  const Launch launch(in.hidden);
  const SameDevice device(in.hidden);
  PDK_CHECK(in.hidden.dim() == 3 && in.hidden.size(1) == 1 && in.guesses > 0 && in.k_cache.dim() == 5);
  const int64_t batch = in.hidden.size(0), layers = in.k_cache.size(0);
  const auto longs = [&](const Tensor& t, int64_t size) {
    device.require(t, ScalarType::Long, {size});
    PDK_CHECK(t.is_contiguous());
    return data<int64_t>(t);
  };
  const PreparedLayers prepared(LayersInputs{.bound = in.bound,
                                             .x = in.hidden,
                                             .beside = in.hidden,
                                             .end = layers,
                                             .with_logits = true,
                                             .k_cache = in.k_cache,
                                             .v_cache = in.v_cache,
                                             .lengths = in.lengths,
                                             .counts = in.busy,
                                             .block_table = in.block_table,
                                             .longest = 1,
                                             .cos = in.cos,
                                             .sin = in.sin,
                                             .plan = in.plan});
  DraftChainArgs args;
  args.layers = prepared.args;
  const Tensor tokens = torch::stable::new_empty(in.lengths, {batch});
  args.tokens = data<int64_t>(tokens), args.lengths = longs(in.lengths, batch), args.busy = longs(in.busy, batch);
  args.layers.beside = {}, args.layers.embedding = prepared.embedding();
  args.layers.ids = index_table(device, torch::stable::unsqueeze(tokens, 1), batch, 1);
  const Tensor rows = torch::stable::new_empty(in.hidden, {args.layers.memory_bytes()}, ScalarType::Byte);
  args.layers.memory = bytes(rows);
  args.choice = {}, args.choice.element = row_element(prepared.logits), args.choice.batch = batch;
  args.choice.vocabulary = prepared.logits.size(2);
  args.choice.logits = {prepared.logits.data_ptr(), args.choice.vocabulary};
  args.vocabulary = longs(in.vocabulary, args.choice.vocabulary);
  const Tensor memory = torch::stable::new_empty(in.hidden, {args.memory_bytes()}, ScalarType::Byte);
  args.memory = bytes(memory), args.hidden = static_cast<char*>(in.hidden.data_ptr());
  Tensor found = torch::stable::new_empty(in.lengths, {batch, in.guesses});
  args.batch = batch, args.guesses = in.guesses, args.found = data<int64_t>(found);
  launch(PDK_DEVICE::draft_chain, args);
  return {found};
}

PDK_IMPL("draft_chain_", draft_chain)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
