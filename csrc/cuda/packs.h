// Vectorised access: packs of elements if all rows are aligned to 16 bytes, and for bytes the widest word that the
// alignment allows.
#pragma once

#include "common/rows_view.h"
#include "elements.h"

namespace pdkernels::cuda {

// kSize neighbouring elements of a row, loaded or stored in one access.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Pack {
  T at[kSize];

  __device__ static Pack load(const T* row, int64_t pack) { return reinterpret_cast<const Pack*>(row)[pack]; }
  __device__ void store(T* row, int64_t pack) const { reinterpret_cast<Pack*>(row)[pack] = *this; }
};

template <class T>
bool in_packs(const RowsView& rows) {
  return (reinterpret_cast<int64_t>(rows.data) | rows.row_stride * static_cast<int64_t>(sizeof(T))) % 16 == 0;
}

// The widest word (up to 16 bytes) that divides all addresses, strides and sizes. `bits` is their bitwise or.
inline int64_t widest_word(int64_t bits) { return (bits | 16) & -(bits | 16); }

// Calls launch with a null pointer of the word's type, so that the kernel's template argument follows the alignment.
template <class Launch>
void with_word(int64_t bytes, const Launch& launch) {
  switch (bytes) {
    case 16: return launch(static_cast<int4*>(nullptr));
    case 8: return launch(static_cast<int2*>(nullptr));
    case 4: return launch(static_cast<int32_t*>(nullptr));
    case 2: return launch(static_cast<int16_t*>(nullptr));
    default: return launch(static_cast<int8_t*>(nullptr));
  }
}

}  // namespace pdkernels::cuda
