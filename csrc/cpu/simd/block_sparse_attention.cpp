// Block-sparse attention, forward: a work item is one query tile of one KV head.
#include "forward.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class T, class Tiles>
void forward(const AttentionArgs& args) {
  const int64_t bytes = Memory<Tiles>(nullptr, args.head_dim).bytes;
  for_tiles<Tiles>(args, args.of_q, bytes, [&](int64_t batch, int64_t kv_head, int64_t tile, char* base) {
    Memory<Tiles> memory(base, args.head_dim);
    const auto chunks = [&](const auto& consume) { for_keys<T>(args, batch, kv_head, tile, consume); };
    attend<T>(args, batch, kv_head, tile, memory, chunks, [&](int64_t head, int64_t token, Panel<Tiles>& panel) {
      finish<T>(args, args.out, args.lse, batch, head, token, panel);
    });
  });
}

template <class T, class Tiles, class Wide>
void forward(const AttentionArgs& args) {
  return args.head_dim <= kUsualHead ? forward<T, Tiles>(args) : forward<T, Wide>(args);
}

}  // namespace

void block_sparse_attention(const AttentionArgs& args) {
  switch (args.element) {
    case Element::kFloat: return forward<float, VectorTiles, WideTiles>(args);
    case Element::kHalf: return forward<Half, VectorTiles, WideTiles>(args);
    case Element::kBfloat16: return forward<Bfloat16, Bfloat16Tiles, WideBfloat16Tiles>(args);
  }
}

}  // namespace pdkernels::cpu::PDK_ISA
