// Rows of a quantised matrix on the CPU: numbers are checked here, simd/quantized_linear.cpp computes.
#include "ops/quantized_linear.h"
#include "check_rows.h"
#include "simd/dispatch.h"

namespace pdkernels::cpu {

void quantized_embedding(const QuantizedEmbeddingArgs& args) {
  int64_t rows = 0;
  for (int64_t p = 0; p < args.part_count; ++p) rows += args.parts[p].outputs;
  for (int64_t i = 0; i < args.rows; ++i) {
    const int64_t id = args.ids.load(i);
    if (id < 0 || id >= rows) {
      fail("quantized_embedding", "ids must " + range(0, rows - 1) + ", got " + std::to_string(id) + ".");
    }
  }
  PDK_DISPATCH(quantized_embedding, args)
}

}  // namespace pdkernels::cpu
