// The only thread pool is torch's. Kernels reach it through this declaration; the bindings define it.
#pragma once

#include <cstdint>

namespace pdkernels::cpu {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

// Calls body(begin, end) on disjoint ranges of at least `grain` items. The body must not throw.
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
