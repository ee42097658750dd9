// Feature-cache kernels: the rows whose values changed most, and residual sums with cached rows. Rows are independent
// work items.
#include "kernels.h"
#include "strips.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

// The partial sums of a row; feature_cache.h defines the order.
struct Sum {
  static constexpr int kParts = kPartialSums / kLanes;
  static_assert(kPartialSums % kLanes == 0);
  Vec parts[kParts]{};

  PDK_INLINE void add(int part, Vec x, Vec y) { parts[part] += rounded(x * y); }
  PDK_INLINE void add(const Sum& piece) {
    for (int part = 0; part < kParts; ++part) parts[part] += piece.parts[part];
  }
  float total() const {
    float numbers[kPartialSums];
    __builtin_memcpy(numbers, parts, sizeof numbers);
    for (int half = kPartialSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) numbers[i] += numbers[i + half];
    }
    return numbers[0];
  }
};

// The three sums of a cosine in one read of both rows.
template <class T>
uint32_t key_of(const StaleRowsArgs& args, const char* fresh, const char* cached) {
  const int64_t dim = args.head_dim;
  Sum of_fresh, of_cached, dot;
  Ints same = splat(-1);
  const auto add_piece = [&](const T* a, const T* b, int64_t size) {
    Sum fresh_piece, cached_piece, dot_piece;
    const auto add = [&](int part, int64_t at, auto lanes) {
      const Vec x = load(a + at, lanes), y = load(b + at, lanes);
      fresh_piece.add(part, x, x), cached_piece.add(part, y, y), dot_piece.add(part, x, y);
      same &= x == y;
    };
    int64_t at = 0;
    for (; at + kPartialSums <= size; at += kPartialSums) {
      for (int part = 0; part < Sum::kParts; ++part) add(part, at + part * kLanes, Whole{});
    }
    for (int part = 0; at < size; ++part, at += kLanes) add(part, at, Part{smaller(kLanes, size - at)});
    of_fresh.add(fresh_piece), of_cached.add(cached_piece), dot.add(dot_piece);
  };
  for (int64_t head = 0; head < args.v_row.heads; ++head) {
    const char* a = fresh + head * args.v_row.head_stride;
    const char* b = cached + head * args.cache_row.head_stride;
    const int64_t end = args.v_row.head_bytes, step = dim * static_cast<int64_t>(sizeof(T));
    for (int64_t byte = 0; byte < end; byte += step) {
      for (int64_t at = 0; at < dim; at += kPieceComponents) {
        add_piece(reinterpret_cast<const T*>(a + byte) + at, reinterpret_cast<const T*>(b + byte) + at,
                  smaller(kPieceComponents, dim - at));
      }
    }
  }
  const float lengths = __builtin_sqrtf(of_fresh.total()) * __builtin_sqrtf(of_cached.total());
  return stale_key(dot.total(), lengths, bits_of(~same) != 0 || !(lengths > 1e-8f));
}

void replace(const StaleRowsArgs& args, const char* fresh, char* cached) {
  if (args.v_row.head_bytes == 0) return;  // then the address may be invalid too
  for (int64_t head = 0; head < args.v_row.heads; ++head) {
    __builtin_memcpy(cached + head * args.cache_row.head_stride, fresh + head * args.v_row.head_stride,
                     args.v_row.head_bytes);
  }
}

void choose_rows(const StaleRowsArgs& args, int64_t b) {
  const int64_t count = args.count(b), n = args.chosen(b, count);
  const uint32_t* keys = args.keys + b * args.rows;
  int64_t *to = args.index + b * args.max_selected, *const end = to + args.max_selected;
  if (n > 0) {
    Cut cut = lowest(n, [&](uint32_t key) {
      int32_t smaller = 0;
      for (int64_t i = 0; i < count; ++i) smaller += keys[i] < key;
      return smaller;
    });
    for (int64_t i = 0; i < count; ++i) {
      if (keys[i] < cut.key || (keys[i] == cut.key && cut.ties-- > 0)) *to++ = i;
    }
  }
  while (to < end) *to++ = -1;
}

template <class T>
void select_stale_rows_of(const StaleRowsArgs& args) {
  const int64_t width = args.v_row.row_bytes() / static_cast<int64_t>(sizeof(T));
  for_rows(args.batch * args.rows, width, [&](int64_t item) {
    const int64_t b = item / args.rows, i = item % args.rows;
    if (i >= args.count(b)) return;
    const char* fresh = args.fresh(b, i);
    char* cached = args.cached(b, args.starts.load(b) + i);
    args.keys[item] = key_of<T>(args, fresh, cached);
    if (args.update == Update::kAll) replace(args, fresh, cached);
  });
  for_rows(args.batch, 32 * args.rows, [&](int64_t b) { choose_rows(args, b); });
  if (args.update != Update::kSelected) return;
  for_rows(args.batch * args.max_selected, width, [&](int64_t item) {
    const int64_t b = item / args.max_selected, i = args.index[item];
    if (i >= 0) replace(args, args.fresh(b, i), args.cached(b, args.starts.load(b) + i));
  });
}

// The index of the fresh row that replaces row i, or -1. Bisection: indices ascend and end with -1.
int64_t replacement(const AddCachedArgs& args, int64_t b, int64_t i) {
  int64_t low = 0, high = args.replaced;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2, at = args.index.load(b, middle);
    if (at >= 0 && at < i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < args.replaced && args.index.load(b, low) == i ? low : -1;
}

template <class T>
void add_cached_rows_of(const AddCachedArgs& args) {
  for_rows(args.batch * args.rows, args.width, [&](int64_t item) {
    const int64_t b = item / args.rows, i = item % args.rows, j = replacement(args, b, i);
    T* cached = args.cached.row<T>(b, i);
    if (j >= 0) __builtin_memcpy(cached, args.fresh.row<const T>(b, j), args.width * sizeof(T));
    const T* x = args.x.row<const T>(b, i);
    T* out = static_cast<T*>(args.out) + item * args.width;
    for_vectors(0, args.width, [&](int64_t at, auto lanes) {
      store(out + at, load(x + at, lanes) + load(cached + at, lanes), lanes);
    });
  });
}

}  // namespace

void select_stale_rows(const StaleRowsArgs& args) { PDK_BY_ELEMENT(select_stale_rows_of, args) }
void add_cached_rows(const AddCachedArgs& args) { PDK_BY_ELEMENT(add_cached_rows_of, args) }

}  // namespace pdkernels::cpu::PDK_ISA
