// Products of few rows with a quantised matrix, and rows of such a matrix as numbers.
#pragma once

#include "common/element.h"
#include "common/index_view.h"
#include "common/quantized_layout.h"
#include "common/rows_view.h"

namespace pdkernels {

// A matrix that is quantised part by part, `outputs` rows each.
struct QuantizedPart {
  QuantizedLayout layout;
  const uint8_t* data;
  int64_t outputs;
};

// Thirty-two columns of a row of x as the products read them: codes, their scale, and the sum of the codes.
struct QuantizedBlock {
  int8_t codes[QuantizedLayout::kBlock];
  float scale, scaled_sum;              // the sum times the scale
  int32_t negative_sum, negative_half;  // of the first half
};

// Rows of x, in groups of eight: (groups, blocks, 8).
struct QuantizedRows {
  static constexpr int kGroup = 8;

  QuantizedBlock* data;
  int64_t blocks;

  PDK_HD int64_t bytes(int64_t rows) const {
    return (rows + kGroup - 1) / kGroup * kGroup * blocks * static_cast<int64_t>(sizeof(QuantizedBlock));
  }
  // Its blocks are `kGroup` apart.
  PDK_HD QuantizedBlock* row(int64_t i) const { return data + i / kGroup * kGroup * blocks + i % kGroup; }
};

// out[r] = x[r] weight^T + bias. Integer products are exact and a block's are added up in ascending order, so that an
// element of `out` has the same bits for any number of rows, on every level and any number of threads. Parts whose
// layout says so take rows as they are, with sums in an order of the reference.
struct QuantizedLinearArgs {
  static constexpr int kMaxParts = 8;

  Element element;  // of x, out and bias
  RowsView x, out;
  QuantizedPart parts[kMaxParts];
  int64_t part_count;
  const void* bias;  // (outputs,), or nullptr
  QuantizedRows quantized;
  int64_t rows, width;

  PDK_HD int64_t outputs() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < part_count; ++i) sum += parts[i].outputs;
    return sum;
  }
  // Whether some part takes rows quantised.
  PDK_HD bool quantizes() const {
    bool some = false;
    for (int64_t i = 0; i < part_count; ++i) some = some || !parts[i].layout.number_rows;
    return some;
  }
  // Memory that the product of so many rows needs: of quantised ones.
  PDK_HD int64_t scratch_bytes(int64_t count) const { return quantizes() ? quantized.bytes(count) : 0; }
  // Whether CUDA pads rows that stay numbers: it reads four numbers at a time, and whole blocks.
  PDK_HD bool pads(const RowsView& from, int64_t count) const {
    bool numbers = false;
    for (int64_t i = 0; i < part_count; ++i) numbers = numbers || parts[i].layout.number_rows;
    const int64_t bytes = bytes_of(element), stride = count > 1 ? from.row_stride * bytes : 0;
    const bool aligned = (static_cast<int64_t>(reinterpret_cast<uintptr_t>(from.data)) | stride) % (4 * bytes) == 0;
    return numbers && (!aligned || quantized.blocks * QuantizedLayout::kBlock != width);
  }
  // Memory for these, behind the quantised ones.
  PDK_HD int64_t padded_bytes(const RowsView& from, int64_t count) const {
    return pads(from, count) ? count * quantized.blocks * QuantizedLayout::kBlock * bytes_of(element) : 0;
  }
  PDK_HD void* padded_rows() const { return reinterpret_cast<char*>(quantized.data) + scratch_bytes(rows); }
  PDK_HD void set_rows(const RowsView& from, int64_t count, void* to, void* scratch) {
    x = from, rows = count, out = {to, outputs()}, quantized.data = static_cast<QuantizedBlock*>(scratch);
  }
};

// out[i] = the row of the matrix with number ids[i].
struct QuantizedEmbeddingArgs {
  Element element;  // of out
  IndexView ids;
  RowsView out;
  QuantizedPart parts[QuantizedLinearArgs::kMaxParts];
  int64_t part_count;
  int64_t rows, width;
};

PDK_INT8_KERNEL(quantized_linear, QuantizedLinearArgs)
PDK_KERNEL(quantized_embedding, QuantizedEmbeddingArgs)
PDK_INT8_KERNEL(quantized_embedding, QuantizedEmbeddingArgs)

}  // namespace pdkernels
