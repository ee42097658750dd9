// What adapters add to a product: for each adapter its rows, and for these the kernels of two products.
#include "ops/lora.h"

#include <cstring>
#include <stdexcept>

#include "simd/dispatch.h"

namespace pdkernels::cpu {
namespace {

void run(const LinearArgs& args) { PDK_DISPATCH(linear, args) }
void run(const LowRankArgs& args){PDK_DISPATCH(low_rank, args)}

// The rows of a group, one after the other.
RowsView rows_of(const LoraGroup& group, const LoraAddArgs& args, char* own) {
  const int64_t size = bytes_of(args.element), stride = args.x.row_stride * size, bytes = args.width * size;
  char* x = static_cast<char*>(args.x.data);
  if (group.contiguous()) return {x + group.rows[0] * stride, args.x.row_stride};
  for (int64_t i = 0; i < group.count; ++i) std::memcpy(own + i * bytes, x + group.rows[i] * stride, bytes);
  return {own, args.width};
}

}  // namespace

void lora_add(const LoraAddArgs& args) {
  const LoraMemory& memory = args.memory;
  for (int64_t i = 0; i < args.group_count; ++i) {
    const LoraGroup& group = args.groups[i];
    const std::vector<LoraPair>& pairs = group.layers[args.layer].pairs[static_cast<int>(args.matrix)];
    if (pairs.empty()) continue;
    for (const LoraPair& pair : pairs) {
      const bool fits = pair.a.width == args.width && pair.first + pair.outputs <= args.out.row_stride;
      if (!fits) throw std::runtime_error("pdkernels: an adapter does not fit a matrix");
    }
    const RowsView own = rows_of(group, args, memory.own);
    for (const LoraPair& pair : pairs) {
      LinearArgs a = pair.a;
      a.set_rows(own, group.count, memory.inner, memory.scratch);
      run(a);
      LowRankArgs b;
      b.element = args.element, b.weight_element = a.weight_element, b.b = pair.b, b.x = a.out;
      b.out = {static_cast<char*>(args.out.data) + pair.first * bytes_of(args.element), args.out.row_stride};
      b.numbers = group.rows, b.rows = group.count, b.rank = a.outputs, b.outputs = pair.outputs;
      run(b);
    }
  }
}

}  // namespace pdkernels::cpu
