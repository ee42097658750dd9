// Replaces NVIDIA's cuda_runtime.h when a .cu file is compiled by g++ to be executed on the CPU. Test-only.
//
// It finds: results that depend on the order of threads or blocks (run a kernel under every schedule), deadlocks, lanes
// and threads that meet at different calls, misaligned vector accesses, indices past a shared array, writes past
// dynamic shared memory, use of unwritten shared memory, and launches that a device would refuse; in a cluster also
// memory of a block that has not started or has returned, and arrivals and waits that do not alternate.
//
// It does not detect: accesses outside global memory, launches beyond __launch_bounds__, static shared memory in the 48
// KiB limit (the compile budgets show it), races inside one statement, what a relaxed arrival at the barrier of a
// cluster leaves unordered, speed.
//
// It cannot run: inline PTX, tensor-core and TMA instructions, cooperative groups, textures, kernels launched by
// kernels, and threads that spin until another thread or block does something (blocks run one after the other). Code
// that needs PTX has a plain C++ counterpart under `#ifdef PDKERNELS_CUDASIM`. As for any host compiler, __CUDACC__ and
// __CUDA_ARCH__ are unset.
#pragma once

#ifndef PDKERNELS_CUDASIM
#error "tests/cudasim/include is for simulator builds only: compile with -DPDKERNELS_CUDASIM"
#endif

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run one at a time, those of a cluster in turns, so a static is a block's memory. It is thread-local only
// because that puts all of a library's shared variables, those of template kernels too, side by side where the runtime
// can poison them.
#define __shared__ static thread_local

#include "cudasim/arithmetic.h"
#include "cudasim/collectives.h"
#include "cudasim/engine.h"
#include "cudasim/host_api.h"
#include "cudasim/memory.h"
#include "cudasim/vectors.h"
