// Whether strided memory overlaps, exactly: views that interleave, such as K and V of one buffer, do not.
// pdkernels/_aliasing.py does the same in Python and raises the error.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace pdkernels {

struct StridedDim {
  int64_t size, stride;  // bytes
};

// All sizes are above 0 and all strides 0 or more.
struct Strided {
  int64_t item;
  std::vector<StridedDim> dims;
};

// stride * x for an integer x in [min, max], stride > 0.
struct Term {
  int64_t stride, min, max;
};

// Whether some sum of one value per term is in [low, high]. The strides of ordinary layouts nest, so few values
// qualify; for other strides the search gives up after a number of steps and returns true.
class SumSearch {
 public:
  explicit SumSearch(std::vector<Term> terms) : terms_(std::move(terms)) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.stride > b.stride; });
    rest_.resize(terms_.size() + 1);
    for (size_t k = terms_.size(); k-- > 0;) {
      const Term& t = terms_[k];
      rest_[k] = {rest_[k + 1].min + t.stride * t.min, rest_[k + 1].max + t.stride * t.max,
                  std::gcd(rest_[k + 1].divisor, t.stride)};
    }
  }
  bool finds(int64_t low, int64_t high) { return finds(0, low, high); }

 private:
  struct Rest {
    int64_t min = 0, max = 0, divisor = 0;
  };

  static int64_t floor(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool finds(size_t k, int64_t low, int64_t high) {
    if (k == terms_.size()) return low <= 0 && 0 <= high;
    if (--steps_ < 0) return true;
    const Rest& all = rest_[k];
    if (floor(high, all.divisor) * all.divisor < low || high < all.min || low > all.max) return false;
    const Term& t = terms_[k];
    const int64_t first = std::max(t.min, -floor(rest_[k + 1].max - low, t.stride));
    const int64_t last = std::min(t.max, floor(high - rest_[k + 1].min, t.stride));
    for (int64_t x = first; x <= last; ++x) {
      if (finds(k + 1, low - t.stride * x, high - t.stride * x)) return true;
    }
    return false;
  }

  std::vector<Term> terms_;
  std::vector<Rest> rest_;
  int64_t steps_ = 10000;
};

// Whether two tensors share a byte, the second one starting `distance` bytes after the first.
inline bool overlap(const Strided& a, const Strided& b, int64_t distance) {
  std::vector<Term> terms;
  const auto add = [&](const StridedDim& dim, int64_t min, int64_t max) {
    if (dim.size == 1 || dim.stride == 0) return;
    for (Term& t : terms) {
      if (t.stride == dim.stride) {
        t.min += min, t.max += max;
        return;
      }
    }
    terms.push_back({dim.stride, min, max});
  };
  for (const StridedDim& dim : a.dims) add(dim, 0, dim.size - 1);
  for (const StridedDim& dim : b.dims) add(dim, 1 - dim.size, 0);
  return SumSearch(std::move(terms)).finds(distance - a.item + 1, distance + b.item - 1);
}

// Whether two entries share a byte.
inline bool overlaps_itself(Strided strided) {
  auto& dims = strided.dims;
  std::erase_if(dims, [](const StridedDim& dim) { return dim.size == 1; });
  std::sort(dims.begin(), dims.end(), [](const StridedDim& a, const StridedDim& b) { return a.stride > b.stride; });
  bool nested = true;
  int64_t extent = strided.item;
  for (size_t d = dims.size(); d-- > 0;) {
    nested = nested && dims[d].stride >= extent;
    extent += (dims[d].size - 1) * dims[d].stride;
  }
  if (nested) return false;
  if (dims.back().stride == 0) return true;
  // The first dimension in which the two entries differ, by 1 or more.
  for (size_t first = 0; first < dims.size(); ++first) {
    std::vector<Term> terms{{dims[first].stride, 1, dims[first].size - 1}};
    for (size_t d = first + 1; d < dims.size(); ++d)
      terms.push_back({dims[d].stride, 1 - dims[d].size, dims[d].size - 1});
    if (SumSearch(std::move(terms)).finds(1 - strided.item, strided.item - 1)) return true;
  }
  return false;
}

}  // namespace pdkernels
