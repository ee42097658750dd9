// Tensors -> the argument structs of the sandwich and logit-drift kernels. As in unpack.h: geometry is checked here, in
// short words.
#pragma once

#include "pdkernels/transformer_ops.h"
#include "unpack.h"

namespace pdkernels::bindings {

inline Element row_element(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Element::kFloat;
    case ScalarType::Half: return Element::kHalf;
    case ScalarType::BFloat16: return Element::kBfloat16;
    default: STD_TORCH_CHECK(false, "pdkernels: tensors must be float32, float16 or bfloat16");
  }
}

inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// A tensor (..., width) as rows. A layout that no single distance between rows describes is copied.
struct Rows {
  Tensor held;
  int64_t count = 1, width, stride = 0;

  explicit Rows(const Tensor& t) : held(t) {
    STD_TORCH_CHECK(t.dim() > 0, "pdkernels: a tensor of rows must have at least one dimension");
    width = t.size(t.dim() - 1);
    if (!describe()) held = torch::stable::contiguous(t), stride = width;
  }
  RowsView view() const { return {held.data_ptr(), stride}; }

 private:
  bool describe() {
    bool fits = width <= 1 || held.stride(held.dim() - 1) == 1;
    for (int64_t d = held.dim() - 2; d >= 0; --d) {
      const int64_t size = held.size(d);
      if (size != 1) {
        if (count == 1) stride = held.stride(d);
        fits = fits && (count == 1 || held.stride(d) == stride * count);
      }
      count *= size;
    }
    return fits;
  }
};

inline std::vector<int64_t> shape_of(const Tensor& t, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) shape.push_back(t.size(d));
  if (last >= 0) shape.push_back(last);
  return shape;
}

inline void require_like(const SameDevice& device, const Tensor& t, const Tensor& other) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == other.scalar_type(), "pdkernels: all tensors must have one dtype");
}

inline void require_shape(const Tensor& t, const Tensor& other) {
  bool same = t.dim() == other.dim();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == other.size(d);
  STD_TORCH_CHECK(same, "pdkernels: two tensors must have one shape");
}

template <class Run>
std::tuple<Tensor, Tensor> run_add_rms_norm(const Tensor& x, const OptionalTensor& residual,
                                            const OptionalTensor& weight, const OptionalTensor& next_weight, double eps,
                                            const Run& run) {
  const SameDevice device(x);
  const auto weights = [&](const OptionalTensor& t) {
    if (!t.has_value()) return OptionalTensor();
    require_like(device, *t, x);
    STD_TORCH_CHECK(x.dim() > 0 && t->dim() == 1 && t->size(0) == x.size(x.dim() - 1),
                    "pdkernels: a weight must have shape (E,)");
    return OptionalTensor(packed(*t));
  };
  std::optional<Rows> other;
  if (residual.has_value()) {
    require_like(device, *residual, x);
    require_shape(*residual, x);
    other.emplace(*residual);
  }
  STD_TORCH_CHECK(eps >= 0, "pdkernels: eps must be at least 0");
  const Rows rows(x);
  const OptionalTensor first = weights(weight), second = weights(next_weight);
  STD_TORCH_CHECK(first || (second && other), "pdkernels: a weight must be given, or a residual and a next weight");
  Tensor y = torch::stable::new_empty(x, shape_of(x, rows.width), x.scalar_type());
  Tensor next =
      torch::stable::new_empty(x, second ? shape_of(x, rows.width) : std::vector<int64_t>{0}, x.scalar_type());
  AddRmsNormArgs args;
  args.element = row_element(x);
  args.x = rows.view(), args.residual = other ? other->view() : RowsView{}, args.y = {y.data_ptr(), rows.width},
  args.next = {next.data_ptr(), rows.width};
  args.weight = first ? first->data_ptr() : nullptr, args.next_weight = second ? second->data_ptr() : nullptr;
  args.rows = rows.count, args.width = rows.width, args.eps = static_cast<float>(eps);
  if (args.rows > 0 && args.width > 0) run(args);
  return {y, next};
}

template <class Run>
Tensor run_silu_and_mul(const Tensor& x, const Run& run) {
  const Rows rows(x);
  STD_TORCH_CHECK(rows.width % 2 == 0, "pdkernels: x must have an even last dimension");
  Tensor out = torch::stable::new_empty(x, shape_of(x, rows.width / 2), x.scalar_type());
  SiluAndMulArgs args;
  args.element = row_element(x);
  args.x = rows.view(), args.out = {out.data_ptr(), rows.width / 2};
  args.rows = rows.count, args.width = rows.width / 2;
  if (args.rows > 0 && args.width > 0) run(args);
  return out;
}

inline const float* rotary_table(const SameDevice& device, const Tensor& t, const Tensor& cos, int64_t head_dim) {
  device.require(t);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.dim() == 2 && t.size(0) > 0 &&
                      t.size(0) == cos.size(0) && t.size(1) == head_dim,
                  "pdkernels: tables must be contiguous, of float32, with shape (P, D)");
  return static_cast<const float*>(t.data_ptr());
}

template <class Run>
void run_apply_rope_append(const Tensor& qkv, const OptionalTensor& bias, const Tensor& cos, const Tensor& sin,
                           const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                           const OptionalTensor& counts, const OptionalTensor& block_table, bool interleaved,
                           const OptionalTensor& slots, const Run& run) {
  const SameDevice device(qkv);
  STD_TORCH_CHECK(qkv.dim() == 4 && k_cache.dim() == 4 && v_cache.dim() == 4,
                  "pdkernels: qkv and caches must have 4 dimensions");
  ApplyRopeAppendArgs args;
  args.element = row_element(qkv);
  args.qkv = qkv.data_ptr();
  args.batch_stride = qkv.stride(0), args.row_stride = qkv.stride(1), args.head_stride = qkv.stride(2);
  args.batch = qkv.size(0), args.rows = qkv.size(1), args.head_dim = qkv.size(3);
  STD_TORCH_CHECK(args.head_dim >= 2 && args.head_dim % 2 == 0 && qkv.stride(3) == 1,
                  "pdkernels: qkv must have even, contiguous heads");
  require_own_places({{args.batch, args.batch_stride}, {args.rows, args.row_stride}, {qkv.size(2), args.head_stride}});
  const Cache cache({k_cache}, {v_cache}, block_table, lengths);
  STD_TORCH_CHECK(cache.batch == args.batch, "pdkernels: lengths must have one entry a sequence");
  for (int s = 0; s < 2; ++s) {
    const Tensor& t = s == 0 ? k_cache : v_cache;
    require_like(device, t, qkv);
    STD_TORCH_CHECK(t.size(2) == k_cache.size(2) && t.size(3) == args.head_dim,
                    "pdkernels: a cache has the wrong heads");
    args.cache[s] = bytes(t);
    args.cache_rows[s] = cache.sides[s].row;
  }
  args.pages = cache.pages;
  args.kv_heads = k_cache.size(2), args.heads = qkv.size(2) - 2 * args.kv_heads;
  STD_TORCH_CHECK(args.kv_heads > 0 && args.heads >= args.kv_heads && args.heads % args.kv_heads == 0,
                  "pdkernels: qkv must have heads + 2 * kv_heads heads");
  OptionalTensor held;
  if (bias.has_value()) {
    require_like(device, *bias, qkv);
    STD_TORCH_CHECK(bias->dim() == 2 && bias->size(0) == args.turned_heads() && bias->size(1) == args.head_dim,
                    "pdkernels: bias must have shape (heads + kv_heads, D)");
    held = packed(*bias);
  }
  args.bias = held ? held->data_ptr() : nullptr;
  args.cos = rotary_table(device, cos, cos, args.head_dim), args.sin = rotary_table(device, sin, cos, args.head_dim);
  args.positions = cos.size(0);
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.counts = index_view(device, counts, 1, args.batch);
  args.slots = index_view(device, slots, 2, args.batch);
  STD_TORCH_CHECK(!slots.has_value() || slots->size(1) == args.rows, "pdkernels: slots must have one entry a row");
  args.interleaved = interleaved;
  run(args);
}

template <class Run>
void run_apply_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool interleaved,
                    const Run& run) {
  const SameDevice device(x);
  STD_TORCH_CHECK(x.dim() == 4, "pdkernels: x must have 4 dimensions");
  ApplyRopeArgs args;
  args.element = row_element(x);
  args.x = x.data_ptr();
  args.batch_stride = x.stride(0), args.row_stride = x.stride(1), args.head_stride = x.stride(2);
  args.batch = x.size(0), args.rows = x.size(1), args.heads = x.size(2), args.head_dim = x.size(3);
  STD_TORCH_CHECK(args.head_dim >= 2 && args.head_dim % 2 == 0 && x.stride(3) == 1,
                  "pdkernels: x must have even, contiguous heads");
  require_own_places({{args.batch, args.batch_stride}, {args.rows, args.row_stride}, {args.heads, args.head_stride}});
  args.cos = rotary_table(device, cos, cos, args.head_dim), args.sin = rotary_table(device, sin, cos, args.head_dim);
  args.table_rows = cos.size(0);
  if (positions.dim() == 1) {  // the same for every sequence
    args.positions = index_view(device, positions, 1, args.rows);
    args.positions.stride1 = args.positions.stride0, args.positions.stride0 = 0;
  } else {
    args.positions = index_view(device, positions, 2, args.batch);
    STD_TORCH_CHECK(positions.size(1) == args.rows, "pdkernels: positions must have one entry a row");
  }
  args.interleaved = interleaved;
  run(args);
}

}  // namespace pdkernels::bindings
