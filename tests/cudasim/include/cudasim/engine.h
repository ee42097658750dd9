// What the runtime (runtime.cpp) offers to the headers in this folder: launching, meeting, failing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>

#include "host_api.h"
#include "vectors.h"

// Set again before each thread of the block is resumed.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

namespace cudasim {

using Where = std::source_location;  // default argument of every collective, so that reports name its line

// Aborts the running kernel; the launch throws std::runtime_error with kernel, block, thread and this sentence.
[[noreturn]] void fail(const std::string& sentence);

void* dynamic_shared();

// One lane's part in a warp collective: its value, the lane it reads from, and its result.
struct LaneSlot {
  std::uint64_t value;
  int source;
  std::uint64_t result;
};
// Runs once, when the last lane has arrived: fills `result` of every lane in `arrived`, and of no other.
using Combine = void (*)(LaneSlot* lanes, unsigned arrived);

unsigned lane();
// Waits until every live lane of `mask` has made the same call, and returns this lane's result.
std::uint64_t meet_warp(const char* call, unsigned mask, std::uint64_t value, int source, Combine combine, Where where);

struct Votes {
  int yes;      // threads whose predicate was true
  int threads;  // threads that took part: returned ones do not
};
Votes meet_block(const char* call, bool predicate, Where where);

// Blocks of a cluster, which are neighbours along x, and their barrier.
unsigned cluster_rank();
unsigned cluster_size();
void arrive_cluster(const char* call, Where where);
void wait_cluster(const char* call, Where where);
// Where the shared variable at this address is in another block of the cluster.
void* map_shared(const void* at, unsigned rank);

// `run(body)` is one thread's execution of the kernel.
void launch_erased(const char* name, const void* kernel, unsigned cluster, dim3 grid, dim3 block,
                   std::size_t shared_bytes, void (*run)(void* body), void* body);

template <class... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block,
            std::size_t shared_bytes, cudaStream_t, std::type_identity_t<Parameters>... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernel parameters are copied bit by bit");
  static_assert((sizeof(Parameters) + ... + 0) <= 32764, "kernel parameters take at most 32764 bytes");
  auto body = [&] { kernel(arguments...); };
  launch_erased(
      name, reinterpret_cast<const void*>(kernel), cluster, grid, block, shared_bytes,
      [](void* erased) { (*static_cast<decltype(body)*>(erased))(); }, &body);
}

}  // namespace cudasim
