// Every CUDA launcher: raw pointers in, kernels on a stream out. Nothing allocates, synchronises or reads device values.
#pragma once

#include <cuda_runtime.h>

#include "pdkernels/kv_cache.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::cuda {

cudaError_t kv_append(const AppendArgs& args, cudaStream_t stream);
cudaError_t kv_commit(const CommitArgs& args, cudaStream_t stream);
cudaError_t kv_trim(const IndexView& lengths, const IndexView& new_lengths, int64_t batch, cudaStream_t stream);
cudaError_t verify_draft(const VerifyArgs& args, cudaStream_t stream);

}  // namespace pdkernels::cuda
