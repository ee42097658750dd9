"""The shard of each parameter that a rank holds.

Query heads, KV heads and the intermediate size of the MLP are cut into equal shards in the order of the ranks; a rank's
q, k and v are therefore three slices of one matrix. The vocabulary is also cut into equal shards, of a multiple of 4
rows, with the remainder on the last rank. Norms, and biases that are added once, are replicated. Source: Shoeybi et
al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pdkernels._validation import check, message
from pdkernels.models import HybridConfig, RecurrentDepthConfig, TransformerConfig

OP = "distributed.parallelize"


class Piece(NamedTuple):
    """A rank's shard of a tensor: ranges of one dimension, concatenated."""

    dim: int
    ranges: list[tuple[int, int]]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, so that the whole tensor is not kept alive."""
        cuts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(cuts, self.dim) if len(cuts) > 1 else cuts[0].clone(memory_format=torch.contiguous_format)


class Shards:
    """The shards of rank `rank` out of `ranks` for a model with this `config`.

    >>> sizes = dict(hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=96)
    >>> config = TransformerConfig(vocab_size=258, **sizes)
    >>> second = Shards(config, 1, 2)
    >>> second.piece("layers.0.qkv")                     # 2 of 4 query heads, a KV head of each kind
    Piece(dim=0, ranges=[(32, 64), (80, 96), (112, 128)])
    >>> second.vocabulary, second.local(config).heads
    ((132, 258), 2)
    """

    def __init__(self, config: TransformerConfig | RecurrentDepthConfig, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        if isinstance(config, TransformerConfig) and config.experts is not None:
            remedy = "Load it on one rank."
            raise NotImplementedError(
                message(OP, "model", "have no experts", f"{config.experts.count} a layer", remedy)
            )
        if isinstance(config, HybridConfig):
            expectation, remedy = "have attention in every layer", "Load it on one rank."
            raise NotImplementedError(message(OP, "model", expectation, "a hybrid", remedy))
        if isinstance(config, TransformerConfig) and not config.usual:
            expectation, remedy = "have the layers of Llama or Qwen3", "Load it on one rank."
            raise NotImplementedError(message(OP, "model", expectation, "others", remedy))
        expectation = f"be divisible by the {ranks} ranks"
        check(config.heads % ranks == 0, OP, "heads", expectation, config.heads)
        check(config.intermediate_size % ranks == 0, OP, "intermediate_size", expectation, config.intermediate_size)
        kv = config.kv_heads
        shared = ranks % kv == 0
        check(kv % ranks == 0 or shared, OP, "kv_heads", f"divide the {ranks} ranks, or be divisible by them", kv)
        share = -(-config.vocab_size // (4 * ranks)) * 4
        is_divisible = share * (ranks - 1) < config.vocab_size
        check(is_divisible, OP, "vocab_size", f"give each of {ranks} ranks a multiple of 4 rows", config.vocab_size)
        self.vocabulary = rank * share, min((rank + 1) * share, config.vocab_size)
        self.heads = config.heads // ranks
        # With fewer KV heads than ranks, adjacent ranks hold the same one.
        self.kv_heads = kv // ranks if kv % ranks == 0 else 1
        first_kv = rank * self.kv_heads if kv % ranks == 0 else rank * kv // ranks
        width, inner = config.head_dim, config.intermediate_size // ranks
        heads = self._ranges(width, config.heads, rank * self.heads, self.heads)
        keys = self._ranges(width, kv, first_kv, self.kv_heads)
        starts = 0, config.heads * width, (config.heads + kv) * width
        qkv = [(start + low, start + high) for start, (low, high) in zip(starts, (heads, keys, keys))]
        gate = rank * inner, (rank + 1) * inner
        gate_up = [gate, (config.intermediate_size + gate[0], config.intermediate_size + gate[1])]
        # One row of `qk_bias` per head.
        bias = [(rank * self.heads, (rank + 1) * self.heads)]
        bias.append((config.heads + bias[0][0], config.heads + bias[0][1]))
        rows, columns = Piece(0, [self.vocabulary]), Piece(1, [heads])
        self._pieces = {"embedding": rows, "head": rows, "qkv": Piece(0, qkv), "qkv_bias": Piece(0, qkv)}
        self._pieces |= {"qk_bias": Piece(0, bias), "output": columns, "adapter_in": columns}
        self._pieces |= {"gate_up": Piece(0, gate_up), "gate_up_bias": Piece(0, gate_up), "down": Piece(1, [gate])}
        self._inner = inner

    @staticmethod
    def _ranges(width: int, count: int, first: int, local_count: int) -> tuple[int, int]:
        assert first + local_count <= count
        return first * width, (first + local_count) * width

    def piece(self, name: str) -> Piece | None:
        """The rank's shard of the parameter of this name; None: the whole parameter."""
        return self._pieces.get(name.rpartition(".")[2])

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's shard of a whole parameter."""
        piece = self.piece(name)
        return tensor.detach() if piece is None else piece.of(tensor.detach())

    def local(self, config: Any) -> Any:
        """The sizes of the rank's own heads and inner width; the vocabulary keeps its full size for callers."""
        if isinstance(config, TransformerConfig):
            return replace(config, heads=self.heads, kv_heads=self.kv_heads, intermediate_size=self._inner)
        return replace(config, heads=self.heads, intermediate_size=self._inner)
