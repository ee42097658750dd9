// Every CUDA launcher: raw pointers in, kernels on a stream out. Nothing allocates, synchronises or reads device values.
#pragma once

#include <cuda_runtime.h>

#include "pdkernels/kv_cache.h"
#include "pdkernels/recurrence.h"
#include "pdkernels/logit_drift.h"
#include "pdkernels/sandwich.h"
#include "pdkernels/token_statistics.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cuda {

cudaError_t kv_append(const AppendArgs& args, cudaStream_t stream);
cudaError_t kv_commit(const CommitArgs& args, cudaStream_t stream);
cudaError_t kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch, cudaStream_t stream);
cudaError_t verify_draft(const VerifyArgs& args, cudaStream_t stream);
cudaError_t recurrence_inject(const InjectArgs& args, cudaStream_t stream);
cudaError_t recurrence_exit(const ExitArgs& args, cudaStream_t stream);
cudaError_t recurrence_advance(const AdvanceArgs& args, cudaStream_t stream);
cudaError_t add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream);
cudaError_t silu_gate(const SiluGateArgs& args, cudaStream_t stream);
cudaError_t rotate_append(const RotateAppendArgs& args, cudaStream_t stream);
cudaError_t logit_drift(const LogitDriftArgs& args, cudaStream_t stream);
cudaError_t token_statistics(const TokenStatisticsArgs& args, cudaStream_t stream);

}  // namespace pdkernels::cuda
