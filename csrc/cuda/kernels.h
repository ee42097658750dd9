// Every CUDA launcher: raw pointers in, kernels on a stream out. Nothing allocates, synchronises or reads device
// values.
#pragma once

#include <cuda_runtime.h>

#include "pdkernels/feature_cache.h"
#include "pdkernels/kv_cache.h"
#include "pdkernels/log_step.h"
#include "pdkernels/logit_divergence.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/transformer_ops.h"
#include "pdkernels/unmask.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cuda {

cudaError_t kv_append(const AppendArgs& args, cudaStream_t stream);
cudaError_t kv_commit(const CommitArgs& args, cudaStream_t stream);
cudaError_t kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch, cudaStream_t stream);
cudaError_t verify_draft(const VerifyArgs& args, cudaStream_t stream);
// Sets the condition of a graph's conditional node, if there is a handle.
cudaError_t log_step(const LogStepArgs& args, const uint64_t* handle, cudaStream_t stream);
cudaError_t recurrence_inject(const InjectArgs& args, cudaStream_t stream);
cudaError_t recurrence_exit(const ExitArgs& args, cudaStream_t stream);
cudaError_t recurrence_advance(const AdvanceArgs& args, cudaStream_t stream);
cudaError_t add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream);
cudaError_t silu_and_mul(const SiluAndMulArgs& args, cudaStream_t stream);
cudaError_t apply_rope_append(const ApplyRopeAppendArgs& args, cudaStream_t stream);
cudaError_t apply_rope(const ApplyRopeArgs& args, cudaStream_t stream);
cudaError_t logit_divergence(const LogitDivergenceArgs& args, cudaStream_t stream);
cudaError_t unmask(const UnmaskArgs& args, cudaStream_t stream);
cudaError_t select_stale_rows(const StaleRowsArgs& args, cudaStream_t stream);
cudaError_t gather_rows(const GatherRowsArgs& args, cudaStream_t stream);
cudaError_t add_cached_rows(const AddCachedArgs& args, cudaStream_t stream);
cudaError_t token_statistics(const TokenStatisticsArgs& args, cudaStream_t stream);

}  // namespace pdkernels::cuda
