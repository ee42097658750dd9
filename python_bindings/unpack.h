// Tensors -> the argument structs of the kernels.
//
// Shapes, dtypes and devices are checked here, once, because this is where it is cheap. The messages are short: the
// public Python functions catch them and say what is wrong in the words of the caller. Values are checked by the
// kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "pdkernels/kv_cache.h"
#include "pdkernels/verify_draft.h"

namespace pdkernels::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline char* bytes(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }

// Where the first tensor of a call lives; every other one must live there too.
class SameDevice {
 public:
  explicit SameDevice(const Tensor& t) : index_(t.get_device_index()), cuda_(t.is_cuda()) {}
  void require(const Tensor& t) const {
    STD_TORCH_CHECK(t.is_cuda() == cuda_ && t.get_device_index() == index_,
                    "pdkernels: all tensors must be on one device");
  }

 private:
  int32_t index_;
  bool cuda_;
};

inline bool is_wide(const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int,
                  "pdkernels: index tensors must be int32 or int64");
  return dtype == ScalarType::Long;
}

inline IndexView index_view(const SameDevice& device, const Tensor& t, int64_t dim, int64_t size0) {
  device.require(t);
  STD_TORCH_CHECK(t.dim() == dim && (dim == 0 || t.size(0) == size0), "pdkernels: an index tensor has the wrong shape");
  return {t.data_ptr(), dim > 0 ? t.stride(0) : 0, dim > 1 ? t.stride(1) : 0, is_wide(t)};
}

inline IndexView index_view(const SameDevice& device, const OptionalTensor& t, int64_t dim, int64_t size0) {
  return t.has_value() ? index_view(device, *t, dim, size0) : IndexView{};
}

struct Dim {
  int64_t size, stride;
};

// What is written has a place for each entry: of an expanded dimension only what is written last would stay.
inline void require_own_places(std::initializer_list<Dim> dims) {
  bool shared = false, empty = false;
  for (const Dim& dim : dims) shared |= dim.size > 1 && dim.stride == 0, empty |= dim.size == 0;
  STD_TORCH_CHECK(!shared || empty, "pdkernels: a tensor that is written must not be expanded");
}

inline IndexView written_view(const SameDevice& device, const Tensor& t, int64_t dim, int64_t size0) {
  const IndexView view = index_view(device, t, dim, size0);
  require_own_places({{size0, view.stride0}, {dim > 1 ? t.size(1) : 1, view.stride1}});
  return view;
}

// One side of a cache: stacked tensors (layers, pages, slots, heads, dim), or layers held apart without the first dim.
struct Side {
  std::vector<char*> layers;
  int64_t pages, slots;
  RowLayout row;
  ScalarType dtype;
  bool layers_shared = false;  // the layers of a stack lie in one place

  void require_own_places() const {
    bindings::require_own_places(
        {{layers_shared ? 2 : 1, 0}, {pages, row.page_stride}, {slots, row.slot_stride}, {row.heads, row.head_stride}});
  }
};

inline Side unpack_side(const SameDevice& device, const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "pdkernels: a cache must have at least one layer");
  Side side;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    device.require(t);
    const int64_t d = t.dim();
    STD_TORCH_CHECK(d == 4 || d == 5, "pdkernels: cache tensors must have 4 or 5 dimensions");
    const int64_t size = static_cast<int64_t>(t.element_size());
    RowLayout row{t.stride(d - 4) * size, t.stride(d - 3) * size, t.stride(d - 2) * size, t.size(d - 2),
                  t.size(d - 1) * size};
    STD_TORCH_CHECK(t.stride(d - 1) == 1 || t.size(d - 1) <= 1, "pdkernels: the last dimension must be contiguous");
    if (i == 0) {
      side.pages = t.size(d - 4);
      side.slots = t.size(d - 3);
      side.row = row;
      side.dtype = t.scalar_type();
    }
    STD_TORCH_CHECK(side.dtype == t.scalar_type() && side.pages == t.size(d - 4) && side.slots == t.size(d - 3) &&
                        side.row.heads == row.heads && side.row.head_bytes == row.head_bytes &&
                        side.row.page_stride == row.page_stride && side.row.slot_stride == row.slot_stride &&
                        side.row.head_stride == row.head_stride,
                    "pdkernels: all layers must have the same shape, strides and dtype");
    const int64_t layers = d == 5 ? t.size(0) : 1;
    const int64_t layer_stride = d == 5 ? t.stride(0) * size : 0;
    side.layers_shared |= layers > 1 && layer_stride == 0;
    for (int64_t layer = 0; layer < layers; ++layer) side.layers.push_back(bytes(t) + layer * layer_stride);
  }
  return side;
}

inline bool heads_adjacent(const RowLayout& row) { return row.heads <= 1 || row.head_stride == row.head_bytes; }

inline void merge_heads(RowLayout& row) {
  row.head_bytes *= row.heads;
  row.heads = 1;
  row.head_stride = row.head_bytes;
}

// A cache and, for appends, the new rows. Heads become one run where they are adjacent on both sides of the copy.
struct Cache {
  SameDevice device;
  Side sides[2];
  std::optional<Side> sources[2];
  PageMap pages;
  int64_t batch;

  Cache(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const OptionalTensor& block_table,
        const Tensor& lengths)
      : device(lengths),
        sides{unpack_side(device, k), unpack_side(device, v)},
        batch(lengths.dim() == 1 ? lengths.size(0) : -1) {
    STD_TORCH_CHECK(sides[0].layers.size() == sides[1].layers.size() && sides[0].pages == sides[1].pages &&
                        sides[0].slots == sides[1].slots,
                    "pdkernels: k_cache and v_cache must have the same layers, batch or pages, and slots");
    for (const Side& side : sides) side.require_own_places();
    STD_TORCH_CHECK(block_table.has_value() || sides[0].pages == batch,
                    "pdkernels: lengths must have one entry a sequence");
    STD_TORCH_CHECK(!block_table.has_value() || sides[0].slots > 0, "pdkernels: pages must have at least one slot");
    pages.block_table = index_view(device, block_table, 2, batch);
    pages.num_pages = sides[0].pages;
    pages.page_size = sides[0].slots;
    pages.pages_per_sequence = block_table.has_value() ? block_table->size(1) : 1;
  }

  void add_rows(const std::vector<Tensor>& k, const std::vector<Tensor>& v) {
    const std::vector<Tensor>* given[2] = {&k, &v};
    for (int s = 0; s < 2; ++s) {
      sources[s] = unpack_side(device, *given[s]);
      STD_TORCH_CHECK(
          sources[s]->layers.size() == sides[s].layers.size() && sources[s]->pages == batch &&
              sources[s]->dtype == sides[s].dtype && sources[s]->row.heads == sides[s].row.heads &&
              sources[s]->row.head_bytes == sides[s].row.head_bytes,
          "pdkernels: new rows must have the cache's layers, heads, head_dim and dtype, and one entry a sequence");
    }
    STD_TORCH_CHECK(sources[0]->slots == sources[1]->slots,
                    "pdkernels: k_new and v_new must have the same number of rows");
  }

  // Runs `call(CacheView, first_layer)` for as many layers at a time as a launch can carry: one call up to 128 layers.
  template <class Call>
  void for_launches(const Call& call) {
    for (int s = 0; s < 2; ++s) {
      const bool merge = heads_adjacent(sides[s].row) && (!sources[s] || heads_adjacent(sources[s]->row));
      if (!merge) continue;
      merge_heads(sides[s].row);
      if (sources[s]) merge_heads(sources[s]->row);
    }
    const int64_t total = static_cast<int64_t>(sides[0].layers.size());
    for (int64_t first = 0; first < total; first += kMaxBuffers / 2) {
      CacheView view;
      view.layers = static_cast<int32_t>(total - first < kMaxBuffers / 2 ? total - first : kMaxBuffers / 2);
      fill(view.buffers, view.layers, first, sides[0], sides[1]);
      view.rows[0] = sides[0].row;
      view.rows[1] = sides[1].row;
      view.pages = pages;
      view.batch = batch;
      call(view, first);
    }
  }

  static void fill(BufferTable& table, int64_t layers, int64_t first, const Side& k, const Side& v) {
    for (int64_t i = 0; i < layers; ++i) {
      table.base[i] = k.layers[first + i];
      table.base[layers + i] = v.layers[first + i];
    }
  }
};

template <class Run>
void append(const std::vector<Tensor>& k_cache, const std::vector<Tensor>& v_cache, const std::vector<Tensor>& k_new,
            const std::vector<Tensor>& v_new, const Tensor& lengths, const OptionalTensor& counts,
            const OptionalTensor& block_table, const Run& run) {
  Cache cache(k_cache, v_cache, block_table, lengths);
  cache.add_rows(k_new, v_new);
  AppendArgs args;
  args.lengths = index_view(cache.device, lengths, 1, cache.batch);
  args.counts = index_view(cache.device, counts, 1, cache.batch);
  args.max_rows = cache.sources[0]->slots;
  cache.for_launches([&](const CacheView& view, int64_t first) {
    args.cache = view;
    for (int s = 0; s < 2; ++s) {
      args.source_rows[s] = cache.sources[s]->row;
      args.source_batch_stride[s] = cache.sources[s]->row.page_stride;
    }
    Cache::fill(args.source, view.layers, first, *cache.sources[0], *cache.sources[1]);
    run(args);
  });
}

template <class Run>
void commit(const std::vector<Tensor>& k_cache, const std::vector<Tensor>& v_cache, const Tensor& lengths,
            const Tensor& counts, const OptionalTensor& source_index, const OptionalTensor& block_table,
            const Run& run) {
  Cache cache(k_cache, v_cache, block_table, lengths);
  CommitArgs args;
  args.lengths = written_view(cache.device, lengths, 1, cache.batch);
  args.counts = index_view(cache.device, counts, 1, cache.batch);
  args.source_index = index_view(cache.device, source_index, 2, cache.batch);
  args.max_rows = source_index.has_value() ? source_index->size(1) : cache.pages.capacity();
  const int64_t launches =
      (static_cast<int64_t>(cache.sides[0].layers.size()) + kMaxBuffers / 2 - 1) / (kMaxBuffers / 2);
  int64_t launch = 0;
  cache.for_launches([&](const CacheView& view, int64_t) {
    args.cache = view;
    args.advance = ++launch == launches;
    run(args);
  });
}

using Verdict = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct VerdictTensors {
  Tensor accepted, next_token, ended, new_draft, row;

  explicit VerdictTensors(const Tensor& draft) {
    const int64_t batch = draft.size(0);
    const int64_t width = draft.size(draft.dim() - 1);
    accepted = torch::stable::new_empty(draft, {batch}, ScalarType::Long);
    next_token = torch::stable::new_empty(draft, {batch}, ScalarType::Long);
    ended = torch::stable::new_empty(draft, {batch}, ScalarType::Bool);
    new_draft = torch::stable::new_empty(draft, {batch, width}, ScalarType::Long);
    row = torch::stable::new_empty(draft, {batch}, ScalarType::Long);
  }
  Verdict tuple() const { return {accepted, next_token, ended, new_draft, row}; }
};

template <class Run>
void trim(const Tensor& lengths, const Tensor& new_lengths, const Run& run) {
  const SameDevice device(lengths);
  const int64_t batch = lengths.dim() == 1 ? lengths.size(0) : -1;
  run(written_view(device, lengths, 1, batch), index_view(device, new_lengths, 1, batch), batch);
}

inline VerifyArgs verify_args(const Tensor& draft, const Tensor& predictions, const OptionalTensor& draft_lengths,
                              const OptionalTensor& end_tokens, const OptionalTensor& refill,
                              const VerdictTensors& out) {
  const bool rows = draft.dim() == 3;
  STD_TORCH_CHECK((rows || draft.dim() == 2) && predictions.dim() == draft.dim(),
                  "pdkernels: draft must be 2-D or 3-D");
  for (int64_t d = 0; d < draft.dim(); ++d) {
    STD_TORCH_CHECK(draft.size(d) == predictions.size(d), "pdkernels: predictions must have the shape of draft");
  }
  const SameDevice device(draft);
  const auto tokens = [&](const Tensor& t) {
    device.require(t);
    const int64_t last = t.dim() - 1;
    return TokenView{t.data_ptr(), {t.stride(0), rows ? t.stride(1) : 0, t.stride(last)}, is_wide(t)};
  };
  VerifyArgs args;
  args.draft = tokens(draft);
  args.predictions = tokens(predictions);
  args.batch = draft.size(0);
  args.candidates = rows ? draft.size(1) : 1;
  STD_TORCH_CHECK(args.candidates > 0, "pdkernels: draft must have at least one candidate");
  args.width = draft.size(draft.dim() - 1);
  args.draft_lengths = index_view(device, draft_lengths, 1, args.batch);
  args.num_end_tokens = end_tokens.has_value() ? end_tokens->size(0) : 0;
  args.end_tokens = index_view(device, end_tokens, 1, args.num_end_tokens);
  args.refill = index_view(device, refill, 2, args.batch);
  STD_TORCH_CHECK(!refill.has_value() || refill->size(1) == args.width,
                  "pdkernels: refill must have the shape of draft");
  args.accepted = static_cast<int64_t*>(out.accepted.data_ptr());
  args.next_token = static_cast<int64_t*>(out.next_token.data_ptr());
  args.ended = static_cast<bool*>(out.ended.data_ptr());
  args.new_draft = static_cast<int64_t*>(out.new_draft.data_ptr());
  args.row = static_cast<int64_t*>(out.row.data_ptr());
  return args;
}

}  // namespace pdkernels::bindings
