// What quantised formats there are: C++ kernels and packers read these tables, Python and Triton too, through _host.
// reference/quantized_linear.py and gguf_blocks.py have tables of their own, which tests compare.
//
// A format of a kind that is here takes one line of `kQuantizedFormats`. A new kind takes its lines in the first three
// tables, its blocks in host/gguf_blocks.h, and what is new about its numbers in the kernels of each device
// (cpu/simd/quantized_linear.cpp, cuda/quantized_linear.cu, pdkernels/triton/quantized_linear.py).
//
// The tables are each translation unit's own: what is compiled for a vector level shares no symbol with another level.
#pragma once

#include "common/platform.h"

namespace pdkernels {

struct QuantizedScales {
  enum Kind : int { kHalf, kHalfMin, kSuper, kSuper16, kFloat, kHalfZero, kFloatZero };

  const char* name;
  int64_t group_blocks;  // blocks of 32 columns in a group; 0: any number, or the whole width
  // What the header of a group holds for each output, in this order.
  int scale_bytes;  // of the scale: 2 for float16, 4 for float32
  bool minimum;     // float16: the number of code 0; with multiples minus that number
  bool zero;        // uint8: the code of zero; otherwise it is the same everywhere
  int multiples;    // bytes, two for each block: multiples of scale and minimum
  bool halves;      // multiples are signed, of the scale alone, for each half of a block
};

constexpr QuantizedScales kQuantizedScales[] = {
    // in the order of `Kind`
    {"half", 1, 2, false, false, 0, false},      {"half_min", 1, 2, true, false, 0, false},
    {"super", 8, 2, true, false, 16, false},     {"super16", 8, 2, false, false, 16, true},
    {"float", 0, 4, false, false, 0, false},     {"half_zero", 0, 2, false, true, 0, false},
    {"float_zero", 0, 4, false, true, 0, false},
};

// What kernels are compiled for: scales with the bits of a code.
struct QuantizedKind {
  QuantizedScales::Kind scales;
  int bits;
};

constexpr QuantizedKind kQuantizedKinds[] = {
    {QuantizedScales::kHalf, 4},      {QuantizedScales::kHalf, 5},      {QuantizedScales::kHalf, 8},
    {QuantizedScales::kHalfMin, 4},   {QuantizedScales::kHalfMin, 5},   {QuantizedScales::kSuper, 4},
    {QuantizedScales::kSuper, 5},     {QuantizedScales::kSuper16, 6},   {QuantizedScales::kFloat, 4},
    {QuantizedScales::kFloat, 8},     {QuantizedScales::kHalfZero, 4},  {QuantizedScales::kHalfZero, 8},
    {QuantizedScales::kFloatZero, 4}, {QuantizedScales::kFloatZero, 8},
};

// A format of GGUF that stays packed.
struct QuantizedFormat {
  const char* name;
  QuantizedScales::Kind scales;
  int bits;
  int group_bytes;  // of a group in a file
};

constexpr QuantizedFormat kQuantizedFormats[] = {
    {"Q8_0", QuantizedScales::kHalf, 8, 34},    {"Q4_0", QuantizedScales::kHalf, 4, 18},
    {"Q4_1", QuantizedScales::kHalfMin, 4, 20}, {"Q5_0", QuantizedScales::kHalf, 5, 22},
    {"Q5_1", QuantizedScales::kHalfMin, 5, 24}, {"Q4_K", QuantizedScales::kSuper, 4, 144},
    {"Q5_K", QuantizedScales::kSuper, 5, 176},  {"Q6_K", QuantizedScales::kSuper16, 6, 210},
};

constexpr int kQuantizedKindCount = sizeof(kQuantizedKinds) / sizeof(QuantizedKind);

// Calls body.operator()<scales, bits>() for the kind with these, if there is one.
template <int number = 0, class Body>
void with_quantized_kind(QuantizedScales::Kind scales, int bits, const Body& body) {
  if constexpr (number < kQuantizedKindCount) {
    constexpr QuantizedKind kind = kQuantizedKinds[number];
    if (kind.scales == scales && kind.bits == bits) return body.template operator()<kind.scales, kind.bits>();
    with_quantized_kind<number + 1>(scales, bits, body);
  }
}

}  // namespace pdkernels
