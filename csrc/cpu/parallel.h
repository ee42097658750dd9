// Loops on several threads. The library has threads of its own, not OpenMP's: those meet in a barrier at the end of
// every loop, so that on a busy machine all of them wait for one that the system has set aside.
#pragma once

#include <cstdint>

namespace pdkernels::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// For a range of more than `grain` items.
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

// How many threads the calling one may use: torch's setting, which the bindings ask for.
int64_t max_threads();

// Calls body(begin, end) on disjoint ranges, on at most one thread for every `grain` items. Which thread gets a range,
// and where it is cut, differs between calls. What a range throws is thrown here, once no other one is running.
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
