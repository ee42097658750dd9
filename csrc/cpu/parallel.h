// Parallel loops on the library's own threads. OpenMP's threads meet in a barrier at the end of every loop, so on a
// busy machine all of them wait for one that was preempted.
#pragma once

#include <cstdint>

namespace pdkernels::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// parallel_for for a range of more than `grain` items.
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

// The number of threads that a loop of the calling thread may use: torch's setting, read by the bindings.
int64_t max_threads();

// Calls body(begin, end) on disjoint ranges, on at most one thread for every `grain` items. The ranges
// and their threads differ between calls. An exception of a body is rethrown here when no other body is running.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (end - begin <= grain) {
    if (begin < end) body(begin, end);
    return;
  }
  run_parallel(
      begin, end, grain,
      [](int64_t first, int64_t last, void* context) { (*static_cast<const Body*>(context))(first, last); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace pdkernels::cpu
