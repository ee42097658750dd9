// What a real device refuses to launch.
#pragma once

#include "cuda_runtime.h"

namespace cudasim {

// If false, the reason is left for cudaGetLastError() and nothing may run.
bool launch_allowed(const void* kernel, unsigned cluster, dim3 grid, dim3 block, std::size_t shared_bytes);

}  // namespace cudasim
