"""Models whose heads, MLPs and vocabulary are split across ranks.

Every rank runs the same program on the same tokens. It computes attention for its own heads and its own part of each
MLP. Their contributions to the residual are summed over the ranks, twice per layer, and once for the embedding. The KV
cache of a rank holds its own heads. Logits stay sharded by vocabulary (`ShardedLogits`). Sums have the same bits on all
ranks, so all ranks make the same decisions. The sums of a row do not depend on other rows, so lossless methods remain
exactly lossless.

Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism" (2019),
section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pdkernels._validation import check, check_type, message
from pdkernels.backends import backend_of
from pdkernels.cache import Cache, PagePool
from pdkernels.distributed.logits import ShardedLogits
from pdkernels.distributed.mesh import group_of
from pdkernels.distributed.shards import OP, Shards
from pdkernels.models import RecurrentDepth, RecurrentDepthConfig, Transformer, TransformerConfig
from pdkernels.models.architectures.fused import gated, linear, rms_norm
from pdkernels.models.architectures.layer import Layer
from pdkernels.models.architectures.lora import Added
from pdkernels.models.architectures.recurrent_layer import RecurrentLayer
from pdkernels.ops import TokenStatistics, linear_token_statistics
from pdkernels.ops.collectives import gathered, summed
from pdkernels.ops.quantized_weight import QuantizedWeight
from pdkernels.ops.vocabulary import VocabularyShard

ParallelModel = Transformer | RecurrentDepth


class Ranks:
    """The group of a model, and the rank's slice of its vocabulary."""

    def __init__(self, group: Any, vocabulary: tuple[int, int], vocab_size: int) -> None:
        first, end = vocabulary
        self.group, self.vocab_size = group, vocab_size
        self.shard = VocabularyShard(group, first, end - first)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' partial results."""
        if x.requires_grad and torch.is_grad_enabled():
            remedy = "Train with FSDP2 or DDP, and parallelize what was trained."
            raise NotImplementedError(message(OP, "model", "run without gradients", "parameters that need one", remedy))
        return summed(x, self.group)

    def look_up(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Looks up rows of the embedding, each of which one rank holds."""
        row = tokens - self.shard.first_id
        elsewhere = (row < 0) | (row >= self.shard.width)
        wrong = (tokens < 0) | (tokens >= self.vocab_size)  # refused on every rank, as on one device
        row = torch.where(wrong, self.shard.width, torch.where(elsewhere, 0, row))
        return self.sum(F.embedding(row, embedding).masked_fill(elsewhere[..., None], 0))

    def logits(self, local: torch.Tensor) -> torch.Tensor:
        """`ShardedLogits` from this rank's slice."""
        return ShardedLogits(local, self.shard, self.vocab_size)

    def agree(self, op: str, device: torch.device, *numbers: int) -> None:
        """Raises ValueError on all ranks if their sizes differ, because they would wait forever."""
        sizes = gathered(torch.tensor(numbers, device=device), self.group).tolist()
        expectation = "be called with the same sizes on every rank"
        check(
            all(row == sizes[0] for row in sizes), op, "batch and capacity", expectation, sizes, "Pass equal prompts."
        )


class ParallelLayer(Layer):
    """The rank's heads of a layer and its part of the MLP."""

    def __init__(self, config: TransformerConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks = ranks

    def project_out(
        self, mixed: torch.Tensor, adapted: torch.Tensor | None = None, lora: Added | None = None
    ) -> torch.Tensor:
        assert lora is None  # `load_adapter` refuses such models
        mixed = mixed.flatten(-2)
        out = linear(mixed, self.output)
        if adapted is not None:
            assert self.adapter_in is not None and self.adapter_out is not None
            # A partial result, like `out`, so that one all-reduce serves both.
            out = out + linear(linear(mixed, self.adapter_in), self.adapter_out) * adapted
        return self._biased(out, self.output_bias)

    def _mlp(self, normed: torch.Tensor, lora: Added | None = None) -> torch.Tensor:
        return self._biased(linear(gated(linear(normed, self.gate_up, self.gate_up_bias)), self.down), self.down_bias)

    def _biased(self, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self.ranks.sum(out)
        return out if bias is None else out + bias


class ParallelTransformer(Transformer):
    """A `Transformer` on several ranks. `config` has the sizes of this rank's heads and MLPs."""

    def __init__(self, config: TransformerConfig, shards: Shards, group: Any, **attributes: Any) -> None:
        super().__init__(shards.local(config), **attributes)
        self.ranks = Ranks(group, shards.vocabulary, config.vocab_size)
        self.copies = shards.kv_heads * shards.ranks // config.kv_heads  # ranks that hold the same KV head
        self.layers = cast(Sequence[Layer], nn.ModuleList(ParallelLayer(self.config, self.ranks) for _ in self.layers))
        _slice_vocabulary(self, self.ranks.shard.width)

    @property
    def packs_rows(self) -> bool:
        return False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ranks.logits(super().logits(hidden))

    def statistics(self, hidden: torch.Tensor, **options: Any) -> TokenStatistics:
        head = self.embedding if self.head is None else self.head
        normed, shard = rms_norm(hidden, self.norm, self.config.norm_eps), self.ranks.shard
        slices = {"group": shard.group, "first_id": shard.first_id}
        return linear_token_statistics(normed, head, backend=backend_of(self.dtype), **slices, **options)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        dtype: torch.dtype | None = None,
        pool: PagePool | None = None,
        drafts: int | None = None,
    ) -> Cache:
        pages = page_size * (kind == "paged") if pool is None else pool.num_pages * pool.page_size
        row_size = (dtype or self.cache_dtype or self.dtype).itemsize
        self.ranks.agree("Transformer.new_cache", self.device, batch, capacity, pages, row_size)
        return super().new_cache(batch, capacity, kind=kind, page_size=page_size, dtype=dtype, pool=pool, drafts=drafts)

    def with_all_heads(self, kv: torch.Tensor) -> torch.Tensor:
        """Gathers keys or values ``(..., own KV heads, head_dim)`` of all ranks, in order."""
        # With fewer KV heads than ranks, adjacent ranks hold the same one.
        shards = gathered(kv, self.ranks.group)[:: self.copies]
        return torch.cat(list(shards.unbind(0)), -2)

    def _look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ranks.look_up(tokens, cast(torch.Tensor, self.embedding))


class ParallelRecurrentLayer(RecurrentLayer):
    """The rank's heads of a layer and its part of the MLP."""

    def __init__(self, config: RecurrentDepthConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self.ranks = ranks

    def _project_out(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(super()._project_out(mixed))

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(super()._mlp(normed))


class ParallelRecurrentDepth(RecurrentDepth):
    """A `RecurrentDepth` model on several ranks. `config` has the sizes of this rank's heads and MLPs."""

    def __init__(self, config: RecurrentDepthConfig, shards: Shards, group: Any, **attributes: Any) -> None:
        super().__init__(shards.local(config), **attributes)
        self.ranks = Ranks(group, shards.vocabulary, config.vocab_size)
        for name in ("prelude_layers", "core_layers", "coda_layers"):
            layers = nn.ModuleList(ParallelRecurrentLayer(self.config, self.ranks) for _ in getattr(self, name))
            setattr(self, name, layers)
        _slice_vocabulary(self, self.ranks.shard.width)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        *,
        kind: Literal["contiguous", "paged"] = "contiguous",
        page_size: int = 16,
        kept: int = 1,
    ) -> Cache:
        self.ranks.agree("RecurrentDepth.new_cache", self.device, batch, capacity, page_size * (kind == "paged"), kept)
        return super().new_cache(batch, capacity, kind=kind, page_size=page_size, kept=kept)

    def _look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ranks.look_up(tokens, self.embedding)

    def _project(self, normed: torch.Tensor) -> torch.Tensor:
        return self.ranks.logits(super()._project(normed))


def _slice_vocabulary(model: Transformer | RecurrentDepth, rows: int) -> None:
    hidden = model.config.hidden_size
    for name in ("embedding", "head"):
        if getattr(model, name, None) is not None:
            setattr(model, name, nn.Parameter(torch.empty(rows, hidden)))


@overload
def parallelize(model: Transformer, mesh: Any) -> Transformer: ...
@overload
def parallelize(model: RecurrentDepth, mesh: Any) -> RecurrentDepth: ...
def parallelize(model: ParallelModel, mesh: Any) -> ParallelModel:
    """The rank's shard of a model that all ranks run together, for all decoding methods.

    Args:
        model: the whole model, equal on all ranks. It is not changed; the parts are copies.
            `pdkernels.distributed.load` reads a checkpoint without ever holding all of it.
        mesh: a `DeviceMesh` of one dimension (of a larger mesh: ``mesh["tp"]``), or a `ProcessGroup`.

    Returns:
        A model of the same kind, in evaluation mode and without gradients. Its `config` has the sizes of the rank's
        heads and MLPs. All ranks must make the same calls: `pdkernels.decoding.generate` with the same arguments gives
        the same tokens on all ranks. A forward returns `ShardedLogits`.

    Raises:
        ValueError: heads or the MLP's width that the ranks do not divide, KV heads that neither divide the ranks nor
            are divided by them, fewer than 4 ids for a rank.
        TypeError: another kind of model, or not a mesh.
        NotImplementedError: a forward that would need gradients.

    Logits differ from those of one device by rounding, because sums have another order.

    Example:
        >>> import pdkernels as pd
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,))                                    # doctest: +SKIP
        >>> model = pd.distributed.parallelize(pd.models.load("tiny-code"), mesh)   # doctest: +SKIP
        >>> pd.decoding.generate(model, "import o", max_new_tokens=2).text          # doctest: +SKIP
        's\\n'
    """
    kinds = (Transformer, RecurrentDepth)
    check_type(isinstance(model, kinds), OP, "model", "be a Transformer or RecurrentDepth", type(model).__name__)
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise NotImplementedError(message(OP, "model", "have no packed matrices", "some", "Load it with packed=False."))
    is_parallel = isinstance(model, (ParallelTransformer, ParallelRecurrentDepth))
    check(not is_parallel, OP, "model", "be a whole model", "one that is parallel already")
    group = group_of(OP, mesh)
    shards = Shards(model.config, dist.get_rank(group), dist.get_world_size(group))
    parameters = ((name, shards.take(name, parameter)) for name, parameter in model.state_dict().items())
    parallel = assembled(model.config, shards, group, parameters, facts_of(model))
    parallel.generation_config = dict(model.generation_config)
    return parallel


def facts_of(model: ParallelModel) -> dict[str, Any]:
    """The attributes of a model other than sizes and weights, as arguments of its class."""
    attributes: dict[str, Any] = {"tokenizer": model.tokenizer, "end_tokens": model.end_tokens}
    if isinstance(model, Transformer):
        attributes |= {"mask_token": model.mask_token, "plan_tokens": model.plan_tokens}
    return attributes


def assembled(
    config: TransformerConfig | RecurrentDepthConfig,
    shards: Shards,
    group: Any,
    parameters: Iterator[tuple[str, torch.Tensor]],
    attributes: dict[str, Any],
) -> ParallelModel:
    """A parallel model made of a rank's shards of the parameters."""
    model: ParallelTransformer | ParallelRecurrentDepth
    state = dict(parameters)
    with torch.device("meta"):
        if isinstance(config, RecurrentDepthConfig):
            model = ParallelRecurrentDepth(config, shards, group, **attributes)
        else:
            model = ParallelTransformer(config, shards, group, **attributes)
    if isinstance(model, Transformer) and "layers.0.adapter_in" in state:
        pairs = [(state[f"layers.{i}.adapter_in"], state[f"layers.{i}.adapter_out"]) for i in range(config.layers)]
        model.attach_adapter_(pairs)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()
