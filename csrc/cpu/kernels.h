// Every CPU kernel. They check values first and throw std::invalid_argument with nothing written.
#pragma once

#include "pdkernels/block_sparse_attention.h"
#include "pdkernels/feature_cache.h"
#include "pdkernels/kv_cache.h"
#include "pdkernels/logit_drift.h"
#include "pdkernels/record_step.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/sandwich.h"
#include "pdkernels/speculative_attention.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/unmask.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cpu {

void kv_append(const AppendArgs& args);
void kv_commit(const CommitArgs& args);
void kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch);
void verify_draft(const VerifyArgs& args);
void record_step(const RecordArgs& args);
void recurrence_inject(const InjectArgs& args);
void recurrence_exit(const ExitArgs& args);
void recurrence_advance(const AdvanceArgs& args);
void block_sparse_attention(const AttentionArgs& args);
void block_sparse_attention_backward(const AttentionGradArgs& args);
void speculative_attention(const SpeculativeArgs& args);
void add_rms_norm(const AddRmsNormArgs& args);
void silu_gate(const SiluGateArgs& args);
void rotate_append(const RotateAppendArgs& args);
void rotate(const RotateArgs& args);
void logit_drift(const LogitDriftArgs& args);
void unmask(const UnmaskArgs& args);
void value_drift_select(const ValueDriftArgs& args);
void gather_rows(const GatherRowsArgs& args);
void add_cached_rows(const AddCachedArgs& args);
void token_statistics(const TokenStatisticsArgs& args);

}  // namespace pdkernels::cpu
