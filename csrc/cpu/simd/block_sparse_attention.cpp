// Block-sparse attention, forward: a work item is one query tile of one KV head.
#include "forward.h"

namespace pdkernels::cpu::PDK_ISA {
namespace {

template <class T, class Tiles>
void forward(const AttentionArgs& args) {
  const int64_t bytes = Memory<Tiles>(nullptr, args.head_dim).bytes;
  for_tiles<Tiles>(args, args.of_q, bytes, [&](int64_t batch, int64_t kv_head, int64_t tile, char* base) {
    Memory<Tiles> memory(base, args.head_dim);
    const auto walk = [&](Chunks<T>& chunks) { for_keys<T>(args, batch, kv_head, tile, chunks); };
    attend<T>(args, batch, kv_head, tile, memory, walk, [&](int64_t head, int64_t token, Panel<Tiles>& panel) {
      finish<T>(args, args.out, args.lse, batch, head, token, panel);
    });
  });
}

template <class T>
void forward_usual_or_wide(const AttentionArgs& args) {
  return args.head_dim <= kUsualHead ? forward<T, VectorTiles>(args) : forward<T, WideTiles>(args);
}

}  // namespace

#ifdef PDK_AMX
void block_sparse_attention(const AttentionArgs& args) {
  if (args.element != Element::kBfloat16) return PDK_BELOW::block_sparse_attention(args);
  forward<Bfloat16, AmxTiles>(args);
}
#else
void block_sparse_attention(const AttentionArgs& args) { PDK_BY_ELEMENT(forward_usual_or_wide, args) }
#endif

}  // namespace pdkernels::cpu::PDK_ISA
