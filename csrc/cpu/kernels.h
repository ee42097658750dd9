// Every CPU kernel. They check values first and throw std::invalid_argument with nothing written.
#pragma once

#include "pdkernels/block_sparse_attention.h"
#include "pdkernels/kv_cache.h"
#include "pdkernels/speculative_attention.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cpu {

void kv_append(const AppendArgs& args);
void kv_commit(const CommitArgs& args);
void kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch);
void verify_draft(const VerifyArgs& args);
void block_sparse_attention(const AttentionArgs& args);
void block_sparse_attention_backward(const AttentionGradArgs& args);
void speculative_attention(const SpeculativeArgs& args);

}  // namespace pdkernels::cpu
