// Steps of greedy decoding with one known token a sequence: see pdkernels/models/architectures/greedy_steps.py.
#pragma once

#include "next_token.h"
#include "transformer_layers.h"

#ifndef PDKERNELS_DEVICE_CUDA

namespace pdkernels::PDK_DEVICE::bindings {

// GreedyArguments of pdkernels/models/architectures/greedy_steps.py: of `transformer_layers_` and `next_token_`.
struct GreedyInputs {
  Tensor bound;
  Written table, remaining, lengths;
  Written k_cache, v_cache;
  OptionalTensor block_table, ends;
  Tensor cos, sin;
  std::vector<int64_t> suppress;
  int64_t capacity, draft, steps;
  PlanInputs plan;
  auto fields() const {
    return std::tie(bound, table, remaining, lengths, k_cache, v_cache, block_table, ends, cos, sin, suppress, capacity,
                    draft, steps, plan);
  }
};

// The table after each step. There are fewer than asked for if nothing is pending any more.
inline std::tuple<Tensor> greedy_steps(const GreedyInputs& in) {
  PDK_CHECK(in.table.dim() == 2 && in.table.is_contiguous() && in.table.scalar_type() == ScalarType::Long);
  PDK_CHECK(in.steps > 0 && in.draft >= 2 && in.draft < in.table.size(1));
  const int64_t layers = in.k_cache.dim() > 0 ? in.k_cache.size(0) : 0, batch = in.table.size(0);
  const int64_t columns = in.table.size(1), size = batch * columns;
  Tensor table = in.table;
  const Tensor ids = torch::stable::narrow(table, 1, in.draft, 1);
  const LayersInputs forward{in.bound,       ids, 0,      layers, true, in.k_cache, in.v_cache, in.lengths, {}, {},
                             in.block_table, 1,   in.cos, in.sin, {},   {},         in.plan};
  const auto any_pending = [&] {
    bool any = false;
    for (int64_t b = 0; b < batch; ++b) any = any || data<int64_t>(in.table)[b * columns] > 0;
    return any;
  };
  std::vector<int64_t> log;
  int64_t done = 0;
  for (; done < in.steps && (done == 0 || any_pending()); ++done) {
    const Tensor logits = std::get<1>(transformer_layers(forward));
    OptionalWritten lengths;
    lengths.emplace(in.lengths);
    next_token({in.table, in.remaining, lengths, logits, {}, in.ends, in.suppress, in.capacity, in.draft});
    const int64_t* entries = data<int64_t>(table);
    log.insert(log.end(), entries, entries + size);
  }
  Tensor entries = torch::stable::new_empty(in.table, {done, batch, columns});
  std::copy(log.begin(), log.end(), data<int64_t>(entries));
  return {entries};
}

PDK_IMPL("greedy_steps_", greedy_steps)

}  // namespace pdkernels::PDK_DEVICE::bindings

#endif
