// Every CUDA launcher: raw pointers in, kernels on a stream out. Nothing allocates, synchronises or reads device
// values.
#pragma once

#include <cuda_runtime.h>

#include "pdkernels/feature_cache.h"
#include "pdkernels/kv_cache.h"
#include "pdkernels/logit_drift.h"
#include "pdkernels/record_step.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/sandwich.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/unmask.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cuda {

cudaError_t kv_append(const AppendArgs& args, cudaStream_t stream);
cudaError_t kv_commit(const CommitArgs& args, cudaStream_t stream);
cudaError_t kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch, cudaStream_t stream);
cudaError_t verify_draft(const VerifyArgs& args, cudaStream_t stream);
// The handle of a graph's conditional node is told whether to go on; none: nullptr.
cudaError_t record_step(const RecordArgs& args, const uint64_t* handle, cudaStream_t stream);
cudaError_t recurrence_inject(const InjectArgs& args, cudaStream_t stream);
cudaError_t recurrence_exit(const ExitArgs& args, cudaStream_t stream);
cudaError_t recurrence_advance(const AdvanceArgs& args, cudaStream_t stream);
cudaError_t add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream);
cudaError_t silu_gate(const SiluGateArgs& args, cudaStream_t stream);
cudaError_t rotate_append(const RotateAppendArgs& args, cudaStream_t stream);
cudaError_t rotate(const RotateArgs& args, cudaStream_t stream);
cudaError_t logit_drift(const LogitDriftArgs& args, cudaStream_t stream);
cudaError_t unmask(const UnmaskArgs& args, cudaStream_t stream);
cudaError_t value_drift_select(const ValueDriftArgs& args, cudaStream_t stream);
cudaError_t gather_rows(const GatherRowsArgs& args, cudaStream_t stream);
cudaError_t add_cached_rows(const AddCachedArgs& args, cudaStream_t stream);
cudaError_t token_statistics(const TokenStatisticsArgs& args, cudaStream_t stream);

}  // namespace pdkernels::cuda
