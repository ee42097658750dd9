// The length of a draft that pays, shared by the CPU and the CUDA kernel: pdkernels/ops/draft_lengths.py.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// A tensor of any strides, in elements.
template <class T>
struct Numbers {
  T* data = nullptr;
  int64_t strides[3] = {0, 0, 0};

  PDK_HD T& at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return data[i * strides[0] + j * strides[1] + k * strides[2]];
  }
};

struct DraftLengthsArgs {
  IndexView lengths;              // of the last draft, then of the next one
  IndexView accepted, remaining;  // of the last draft; of the sequence
  Numbers<double> seen;           // [batch][2][slots]: acceptances, and how often a place was reached
  Numbers<double> balance;        // [batch]
  Numbers<const bool> ready;      // [batch]
  Numbers<const double> costs;    // [slots]
  int64_t batch = 0;
  int64_t slots = 0;
  double wake = 0, kept = 0, hope = 0, slack = 0;

  // Bad values are clamped; on the CPU they have already been refused.
  PDK_HD static int64_t clamped(int64_t value, int64_t most) { return value < 0 ? 0 : value > most ? most : value; }

  PDK_HD void choose(int64_t b) const {
    const int64_t own = clamped(lengths.load(b), slots), right = clamped(accepted.load(b), own);
    const bool kept_row = ready.at(b);
    const double first = costs.at(0), price = first * (1 + slack);
    double left = balance.at(b);
    if (own > 0) left += static_cast<double>(right) * price - costs.at(own - 1) - (own == 1 && kept_row ? wake : 0);
    balance.at(b) = left;
    const double spare = kept_row ? left : left - wake;
    double chance = 1, expected = 0, most = 0;
    int64_t chosen = 0;
    for (int64_t place = 0; place < slots; ++place) {
      double& count = seen.at(b, 0, place);
      double& reached = seen.at(b, 1, place);
      count = kept * count + (place < own && place < right ? 1 : 0);
      reached = kept * reached + (place < own && place <= right ? 1 : 0);
      chance *= (count + (place > 0 ? hope : 1)) / (reached + 1);  // with one imagined draft
      expected += chance;
      const double cost = costs.at(place), worth = expected / cost;
      if (place == 0 || (cost - price <= spare && worth > most)) most = worth, chosen = place;
    }
    lengths.store(clamped(remaining.load(b), chosen + 1), b);
  }
};

PDK_KERNEL(draft_lengths, DraftLengthsArgs)

}  // namespace pdkernels
