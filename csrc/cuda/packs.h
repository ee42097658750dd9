// Neighbouring elements of a row in one access, where all rows are aligned to 16 bytes.
#pragma once

#include "elements.h"
#include "pdkernels/sandwich.h"

namespace pdkernels::cuda {

// kSize neighbours of a row: one access.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T at[kSize];

  __device__ static Pack load(const T* row, int64_t pack) { return reinterpret_cast<const Pack*>(row)[pack]; }
  __device__ void store(T* row, int64_t pack) const { reinterpret_cast<Pack*>(row)[pack] = *this; }
};

template <class T>
bool in_packs(const RowsView& rows) {
  return (reinterpret_cast<int64_t>(rows.data) | rows.stride * static_cast<int64_t>(sizeof(T))) % 16 == 0;
}

}  // namespace pdkernels::cuda
