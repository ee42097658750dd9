// Every CPU kernel. They check values first and throw std::invalid_argument with nothing written.
#pragma once

#include "pdkernels/block_sparse_attention.h"
#include "pdkernels/feature_cache.h"
#include "pdkernels/kv_cache.h"
#include "pdkernels/log_step.h"
#include "pdkernels/logit_divergence.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/speculative_attention.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/transformer_ops.h"
#include "pdkernels/unmask.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cpu {

void kv_append(const AppendArgs& args);
void kv_commit(const CommitArgs& args);
void kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch);
void verify_draft(const VerifyArgs& args);
void log_step(const LogStepArgs& args);
void recurrence_inject(const InjectArgs& args);
void recurrence_exit(const ExitArgs& args);
void recurrence_advance(const AdvanceArgs& args);
void block_sparse_attention(const AttentionArgs& args);
void block_sparse_attention_backward(const AttentionGradArgs& args);
void speculative_attention(const SpeculativeArgs& args);
void add_rms_norm(const AddRmsNormArgs& args);
void silu_and_mul(const SiluAndMulArgs& args);
void apply_rope_append(const ApplyRopeAppendArgs& args);
void apply_rope(const ApplyRopeArgs& args);
void logit_divergence(const LogitDivergenceArgs& args);
void unmask(const UnmaskArgs& args);
void select_stale_rows(const StaleRowsArgs& args);
void gather_rows(const GatherRowsArgs& args);
void add_cached_rows(const AddCachedArgs& args);
void token_statistics(const TokenStatisticsArgs& args);

}  // namespace pdkernels::cpu
