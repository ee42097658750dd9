// The ops between the matrix products of a layer: see pdkernels/ops/transformer_ops.py.
#pragma once

#include "device.h"
#include "ops/transformer_ops.h"
#include "ops/transformer_ops_backward.h"
#include "unpack_rows.h"

namespace pdkernels::PDK_DEVICE::bindings {

inline std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const OptionalTensor& residual,
                                               const OptionalTensor& weight, const OptionalTensor& next_weight,
                                               double eps) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  const std::optional<FlatRows> other = rows_like(device, residual, x);
  const auto weights = [&](const OptionalTensor& t) {
    if (!t.has_value()) return OptionalTensor();
    device.require(*t, x.scalar_type(), {rows.width});
    return OptionalTensor(packed(*t));
  };
  const OptionalTensor first = weights(weight), second = weights(next_weight);
  PDK_CHECK(eps >= 0 && (first || (second && other)));
  Tensor y = torch::stable::new_empty(x, shape_of(x, rows.width), x.scalar_type());
  Tensor next =
      torch::stable::new_empty(x, second ? shape_of(x, rows.width) : std::vector<int64_t>{0}, x.scalar_type());
  AddRmsNormArgs args;
  args.element = row_element(x);
  args.x = rows.view(), args.residual = other ? other->view() : RowsView{}, args.y = {y.data_ptr(), rows.width},
  args.next = {next.data_ptr(), rows.width};
  args.weight = first ? first->data_ptr() : nullptr, args.next_weight = second ? second->data_ptr() : nullptr;
  args.rows = rows.count, args.width = rows.width, args.eps = static_cast<float>(eps);
  if (args.rows > 0 && args.width > 0) launch(PDK_VECTOR(add_rms_norm), args);
  return {y, next};
}

inline std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(const OptionalTensor& grad,
                                                                const OptionalTensor& grad_next, const Tensor& x,
                                                                const OptionalTensor& residual,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& next_weight, double eps) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x);
  PDK_CHECK(eps >= 0 && (weight.has_value() || next_weight.has_value()) &&
            (grad.has_value() || grad_next.has_value()) && grad_next.has_value() == next_weight.has_value());
  const std::optional<FlatRows> held[3] = {rows_like(device, grad, x), rows_like(device, grad_next, x),
                                           rows_like(device, residual, x)};
  const auto view = [](const std::optional<FlatRows>& of) { return of ? of->view() : RowsView{}; };
  Tensor dx = torch::stable::new_empty(x, shape_of(x, rows.width), x.scalar_type());
  AddRmsNormBackwardArgs args;
  args.element = row_element(x);
  args.grad = view(held[0]), args.grad_next = view(held[1]), args.residual = view(held[2]), args.x = rows.view();
  args.dx = {dx.data_ptr(), rows.width};
  args.rows = rows.count, args.width = rows.width, args.eps = static_cast<float>(eps);
  const int64_t parts = norm_parts(rows.count);
  // The gradient of a weight, and its parts; of none, an empty tensor.
  std::vector<Tensor> kept;
  const auto weight_gradient = [&](const OptionalTensor& of, void*& values, void*& to, float*& partials) {
    values = to = nullptr, partials = nullptr;
    Tensor made = torch::stable::new_empty(x, {of.has_value() ? rows.width : 0}, x.scalar_type());
    if (!of.has_value()) return made;
    device.require(*of, x.scalar_type(), {rows.width});
    kept.push_back(packed(*of));
    values = kept.back().data_ptr(), to = made.data_ptr();
    kept.push_back(torch::stable::new_empty(x, {parts, rows.width}, ScalarType::Float));
    partials = data<float>(kept.back());
    return made;
  };
  Tensor dweight = weight_gradient(weight, args.weight, args.dweight, args.parts);
  Tensor dnext = weight_gradient(next_weight, args.next_weight, args.dnext, args.parts_next);
  if (args.width > 0) launch(PDK_VECTOR(add_rms_norm_backward), args);
  return {dx, dweight, dnext};
}

// `Args` are those of the kernel.
template <class Args, class Kernel>
Tensor gate(const Tensor& x, const Kernel& kernel) {
  const Launch launch(x);
  const FlatRows rows(x);
  PDK_CHECK(rows.width % 2 == 0);
  Tensor out = torch::stable::new_empty(x, shape_of(x, rows.width / 2), x.scalar_type());
  Args args;
  args.element = row_element(x);
  args.x = rows.view(), args.out = {out.data_ptr(), rows.width / 2};
  args.rows = rows.count, args.width = rows.width / 2;
  if (args.rows > 0 && args.width > 0) launch(kernel, args);
  return out;
}

inline Tensor silu_and_mul(const Tensor& x) { return gate<SiluAndMulArgs>(x, PDK_VECTOR(silu_and_mul)); }
inline Tensor gelu_and_mul(const Tensor& x) { return gate<GeluAndMulArgs>(x, PDK_VECTOR(gelu_and_mul)); }

inline Tensor silu_and_mul_backward(const Tensor& grad, const Tensor& x) {
  const Launch launch(x);
  const SameDevice device(x);
  const FlatRows rows(x), grads(grad);
  device.require(grad, x.scalar_type());
  PDK_CHECK(rows.width % 2 == 0 && sizes_of(grad) == shape_of(x, rows.width / 2));
  Tensor dx = torch::stable::new_empty(x, shape_of(x, rows.width), x.scalar_type());
  SiluAndMulBackwardArgs args;
  args.element = row_element(x);
  args.grad = grads.view(), args.x = rows.view(), args.dx = {dx.data_ptr(), rows.width};
  args.rows = rows.count, args.width = rows.width / 2;
  if (args.rows > 0 && args.width > 0) launch(PDK_VECTOR(silu_and_mul_backward), args);
  return dx;
}

inline const float* rotary_table(const SameDevice& device, const Tensor& t, const Tensor& cos, int64_t head_dim) {
  device.require(t, ScalarType::Float, {-1, head_dim});
  PDK_CHECK(t.is_contiguous() && t.size(0) > 0 && t.size(0) == cos.size(0));
  return data<float>(t);
}

inline void apply_rope_append(Tensor& qkv, const OptionalTensor& bias, const Tensor& cos, const Tensor& sin,
                              Tensor& k_cache, Tensor& v_cache, const Tensor& lengths, const OptionalTensor& counts,
                              const OptionalTensor& block_table, bool interleaved, const OptionalTensor& slots) {
  const Launch launch(qkv);
  const SameDevice device(qkv);
  PDK_CHECK(qkv.dim() == 4 && k_cache.dim() == 4 && v_cache.dim() == 4);
  ApplyRopeAppendArgs args;
  args.element = row_element(qkv);
  args.qkv = qkv.data_ptr();
  args.batch_stride = qkv.stride(0), args.row_stride = qkv.stride(1), args.head_stride = qkv.stride(2);
  args.batch = qkv.size(0), args.rows = qkv.size(1), args.head_dim = qkv.size(3);
  PDK_CHECK(args.head_dim >= 2 && args.head_dim % 2 == 0 && qkv.stride(3) == 1);
  const Cache cache({k_cache}, {v_cache}, block_table, lengths);
  PDK_CHECK(cache.batch == args.batch);
  for (int s = 0; s < 2; ++s) {
    const Tensor& t = s == 0 ? k_cache : v_cache;
    device.require(t, qkv.scalar_type(), {-1, -1, k_cache.size(2), args.head_dim});
    args.cache[s] = bytes(t);
    args.cache_rows[s] = cache.sides[s].row;
  }
  args.pages = cache.pages;
  args.kv_heads = k_cache.size(2), args.heads = qkv.size(2) - 2 * args.kv_heads;
  PDK_CHECK(args.kv_heads > 0 && args.heads >= args.kv_heads && args.heads % args.kv_heads == 0);
  OptionalTensor held;
  if (bias.has_value()) {
    device.require(*bias, qkv.scalar_type(), {args.turned_heads(), args.head_dim});
    held = packed(*bias);
  }
  args.bias = held ? held->data_ptr() : nullptr;
  args.cos = rotary_table(device, cos, cos, args.head_dim), args.sin = rotary_table(device, sin, cos, args.head_dim);
  args.positions = cos.size(0);
  args.lengths = index_view(device, lengths, 1, args.batch);
  args.counts = index_view(device, counts, 1, args.batch);
  args.slots = index_table(device, slots, args.batch, args.rows);
  args.interleaved = interleaved;
  launch(PDK_DEVICE::apply_rope_append, args);
}

// The tables and positions, for `args` that have the sizes of x.
// Without positions they are still to be set.
inline void unpack_rotation(const SameDevice& device, const Tensor& cos, const Tensor& sin,
                            const OptionalTensor& positions, bool interleaved, ApplyRopeArgs& args) {
  PDK_CHECK(args.head_dim >= 2 && args.head_dim % 2 == 0);
  args.cos = rotary_table(device, cos, cos, args.head_dim), args.sin = rotary_table(device, sin, cos, args.head_dim);
  args.table_rows = cos.size(0), args.interleaved = interleaved;
  if (!positions.has_value()) return;
  if (positions->dim() == 1) {  // the same for every sequence
    args.positions = index_view(device, *positions, 1, args.rows);
    args.positions.stride1 = args.positions.stride0, args.positions.stride0 = 0;
  } else {
    args.positions = index_table(device, *positions, args.batch, args.rows);
  }
}

inline void apply_rope(Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool interleaved) {
  const Launch launch(x);
  PDK_CHECK(x.dim() == 4 && x.stride(3) == 1);
  ApplyRopeArgs args;
  args.element = row_element(x);
  args.x = x.data_ptr();
  args.batch_stride = x.stride(0), args.row_stride = x.stride(1), args.head_stride = x.stride(2);
  args.batch = x.size(0), args.rows = x.size(1), args.heads = x.size(2), args.head_dim = x.size(3);
  unpack_rotation(SameDevice(x), cos, sin, positions, interleaved, args);
  launch(PDK_DEVICE::apply_rope, args);
}

PDK_IMPL("add_rms_norm", add_rms_norm)
PDK_IMPL("add_rms_norm_backward", add_rms_norm_backward)
PDK_IMPL("silu_and_mul", silu_and_mul)
PDK_IMPL("gelu_and_mul", gelu_and_mul)
PDK_IMPL("silu_and_mul_backward", silu_and_mul_backward)
PDK_IMPL("apply_rope_append_", apply_rope_append)
PDK_IMPL("apply_rope_", apply_rope)

}  // namespace pdkernels::PDK_DEVICE::bindings
