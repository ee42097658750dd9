// Steps of greedy decoding with one known token a sequence: see pdkernels/models/architectures/greedy_steps.py.
#pragma once

#include "next_token.h"
#include "transformer_layers.h"

#ifndef PDKERNELS_DEVICE_CUDA

#include "ops/greedy_steps.h"

namespace pdkernels::PDK_DEVICE::bindings {

// GreedyArguments of pdkernels/models/architectures/greedy_steps.py: of `transformer_layers_` and `next_token_`.
struct GreedyInputs {
  Tensor bound;
  Written table, remaining, lengths;
  Written k_cache, v_cache;
  OptionalTensor block_table;
  WrittenList more_k, more_v;
  std::vector<Tensor> more_tables;
  std::vector<int64_t> groups;
  OptionalTensor ends;
  Tensor cos, sin;
  OptionalTensor window_cos, window_sin;
  std::vector<int64_t> suppress;
  int64_t capacity, draft, steps;
  PlanInputs plan;
  auto fields() const {
    return std::tie(bound, table, remaining, lengths, k_cache, v_cache, block_table, more_k, more_v, more_tables,
                    groups, ends, cos, sin, window_cos, window_sin, suppress, capacity, draft, steps, plan);
  }
};

// The table after each step. There are fewer than asked for if nothing is pending any more.
inline std::tuple<Tensor> greedy_steps(const GreedyInputs& in) {
  const Launch launch(in.table);
  PDK_CHECK(in.table.dim() == 2 && in.draft >= 2 && in.draft < in.table.size(1) && in.steps > 0);
  Tensor table = in.table, memory;
  const Tensor ids = torch::stable::narrow(table, 1, in.draft, 1);
  const PreparedLayers layers(LayersInputs{.bound = in.bound,
                                           .x = ids,
                                           .end = BoundTransformer::of(in.bound).inputs().layers,
                                           .with_logits = true,
                                           .k_cache = in.k_cache,
                                           .v_cache = in.v_cache,
                                           .lengths = in.lengths,
                                           .block_table = in.block_table,
                                           .more_k = in.more_k,
                                           .more_v = in.more_v,
                                           .more_tables = in.more_tables,
                                           .groups = in.groups,
                                           .longest = 1,
                                           .cos = in.cos,
                                           .sin = in.sin,
                                           .window_cos = in.window_cos,
                                           .window_sin = in.window_sin,
                                           .plan = in.plan});
  OptionalWritten lengths;
  lengths.emplace(in.lengths);
  GreedyStepsArgs args;
  args.layers = layers.args;
  const NextTokenInputs next{in.table, in.remaining, lengths,     layers.logits, {},
                             in.ends,  in.suppress,  in.capacity, in.draft};
  args.next = unpack_next_token(next, memory);
  Tensor log = torch::stable::new_empty(table, {in.steps, table.size(0), table.size(1)});
  int64_t done = 0;
  args.steps = in.steps, args.log = data<int64_t>(log), args.done = &done;
  launch(PDK_DEVICE::greedy_steps, args);
  return {torch::stable::narrow(log, 0, 0, done)};
}

PDK_IMPL("greedy_steps_", greedy_steps)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
