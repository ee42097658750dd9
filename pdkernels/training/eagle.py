"""The loss of an EAGLE-3 head: training-time test, in which the head reads its own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pdkernels._validation import check, check_number, check_type, message
from pdkernels.models import Transformer
from pdkernels.models.architectures.rope import apply_rope
from pdkernels.models.drafters import EagleConfig, EagleHead
from pdkernels.models.drafters.rows import tables_of
from pdkernels.ops.quantized_weight import QuantizedWeight

_OP = "training.eagle_loss"

ABSENT: dict[str, Any] = {
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "whole_qk_norm", "tied_head"), False),
    **{"outer_norms": False, "inner_norms": True, "sinks": False, "activation": "silu"},
    **dict.fromkeys(("query_scale", "window_rope_theta", "attention_softcap", "logits_softcap")),
}
"""Options that layers of drafters do without."""


def usual_taps(layers: int) -> tuple[int, int, int]:
    """An early, a middle and a late layer of a target, as in EAGLE's released code.

    >>> usual_taps(30)
    (2, 15, 27)
    """
    check(layers >= 4, "training.usual_taps", "layers", "be at least 4", layers)
    return min(2, layers - 3), layers // 2, layers - 3


def check_numbers(op: str, model: Transformer) -> None:
    """Refuses packed matrices, of which there is nothing to copy, and layers whose sizes differ."""
    if hasattr(model.config, "heads_of"):
        raise NotImplementedError(message(op, "model", "have layers of one size", f"a {type(model).__name__}"))
    packed = any(isinstance(module, QuantizedWeight) for module in model.modules())
    check(not packed, op, "model", "hold numbers", "packed matrices", "Load it with packed=False.")


def copy_layer_(layer: Any, last: Any) -> None:
    """Copies what layers of drafters have in common with those of a target."""
    for name in ("output", "gate_up", "down", "mlp_norm"):
        if getattr(last, name, None) is not None:  # a layer with experts has no MLP
            getattr(layer, name).copy_(getattr(last, name))


@torch.no_grad()
def new_eagle_head(model: Transformer, vocabulary: Tensor, taps: Sequence[int] | None = None) -> EagleHead:
    """A head of one layer to train for a target, which begins as a copy of the target's last layer on its last tap. In
    place of experts it has an MLP, which begins with random numbers.

    Args:
        model: the target, with matrices of numbers (``packed=False``).
        vocabulary: ``(n,)`` int64, ascending: the tokens that it can draft, such as the most frequent ones of the
            target's texts.
        taps: None: `usual_taps`.

    Returns:
        A head in float32, with the target's embedding, which it does not store.

    Example:
        >>> import torch
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> from pdkernels.training import new_eagle_head
        >>> sizes = dict(heads=4, kv_heads=2, head_dim=8, intermediate_size=24)
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=4, **sizes))
        >>> new_eagle_head(model, torch.tensor([1, 4, 7])).config.taps
        (1, 2, 1)
    """
    config = model.config
    check_numbers("training.new_eagle_head", model)
    taps = usual_taps(config.layers) if taps is None else tuple(taps)
    body = replace(config, layers=1, experts=None, windows=(), **ABSENT)
    head_config = EagleConfig(body, tuple(taps), len(vocabulary), config.hidden_size, own_embedding=False)
    head: Any = EagleHead(head_config)
    last: Any = model.layers[-1]
    first = head.layers[0]
    width = config.hidden_size
    first.qkv[:, width:] = last.qkv.float()
    first.qkv[:, :width] *= 0.1
    copy_layer_(first, last)
    if last.attention_norm is not None:
        first.hidden_norm.copy_(last.attention_norm)
    head.fc *= 0.05
    head.fc[:, -width:] += torch.eye(width, dtype=head.fc.dtype, device=head.fc.device)
    head.norm.copy_(model.norm)
    rows: Any = model.embedding if model.head is None else model.head
    head.head.copy_(rows[vocabulary])
    head.vocabulary.copy_(vocabulary)
    return cast(EagleHead, head)


class EagleLoss(NamedTuple):
    """Result of `eagle_loss`."""

    total: Tensor
    """0-dim: cross-entropies of the depths, each weighted by a power of `decay`."""
    agreed: Tensor
    """``(steps,)``, the share of scored rows in which head and target agree on the best token, at each depth and all
    before it."""


class _Rollouts:
    """The attention of rows of one depth after another: a row sees features up to its own, and itself earlier."""

    def __init__(self, head: EagleHead) -> None:
        self._config = head.config.body
        self._tables = tables_of(self._config)
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.depth = 0

    def attend_(self, qkv: Tensor, layer: int) -> Tensor:
        config, rows = self._config, qkv.shape[1]
        positions = torch.arange(rows, device=qkv.device) + self.depth
        rotation = self._tables.covering(rows + self.depth, qkv.device, qkv.dtype).at(positions)
        q, k, v = qkv.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), 2)
        q = apply_rope(q, rotation, config.rope_style).unflatten(2, (config.kv_heads, -1))
        k = apply_rope(k, rotation, config.rope_style)
        cached = self._kept.setdefault(layer, [])
        cached.append((k, v))
        scale = config.head_dim**-0.5
        keys, values = cached[0][0][:, :rows], cached[0][1][:, :rows]
        scores = torch.einsum("bikgd,bjkd->bkgij", q * scale, keys)
        later = torch.ones(rows, rows, dtype=torch.bool, device=qkv.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        rollout_kv = [(k[:, :rows], v[:, :rows]) for k, v in cached[1:]]
        rollout_scores = [torch.einsum("bikgd,bikd->bkgi", q * scale, k)[..., None] for k, _ in rollout_kv]
        shares = torch.cat([scores, *rollout_scores], -1).softmax(-1)
        mixed = torch.einsum("bkgij,bjkd->bikgd", shares[..., :rows], values)
        for place, (_, v) in enumerate(rollout_kv):
            mixed = mixed + shares[..., rows + place].permute(0, 3, 1, 2)[..., None] * v[:, :, :, None]
        return mixed.flatten(2, 3)


def eagle_loss(
    head: EagleHead,
    embedded: Tensor,
    features: Tensor,
    targets: Tensor,
    scored: Tensor,
    *,
    steps: int = 4,
    decay: float = 0.8,
) -> EagleLoss:
    """The loss of a head on one text, at every position and depth of a draft.

    Args:
        head: what is trained.
        embedded: ``(1, T, hidden_size)``, the embeddings of the text's tokens.
        features: ``(1, T, taps, target_hidden_size)``, those of `Transformer.tapped`.
        targets: ``(1, T, draft_vocab_size)``, the target's logits of the tokens that the head can draft; row r is about
            token r + 1.
        scored: ``(1, T)`` bool, the rows of `targets` that count: those of the answer.
        steps: depths of a draft.
        decay: weight of each depth relative to the one before it.

    Returns:
        At depth s, row i reads the embedding of token i + 1 + s and the head's own row of depth s - 1, at depth 0 the
        target's features, and learns the target's distribution of token i + 2 + s by cross-entropy. As while drafting,
        it sees the features of rows up to i, and its own rows of earlier depths.

    Raises:
        ValueError: a text that is too short, or `steps` or `decay` out of range.

    Source: EAGLE-3, section 3.2. Its training-time test feeds back rows of the head, not tokens: tokens are those of
    the text, and none are drawn.

    Example:
        >>> import torch
        >>> from pdkernels.models import TransformerConfig
        >>> from pdkernels.models import EagleConfig, EagleHead
        >>> from pdkernels.training import eagle_loss
        >>> sizes = dict(heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
        >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=1, **sizes)
        >>> head = EagleHead(EagleConfig(body, taps=(0, 1, 2), draft_vocab_size=5, target_hidden_size=16))
        >>> shapes = (1, 9, 16), (1, 9, 3, 16), (1, 9, 5)
        >>> loss = eagle_loss(head, *map(torch.randn, shapes), torch.ones(1, 9, dtype=torch.bool), steps=2)
        >>> loss.total.backward()
        >>> loss.agreed.shape, head.fc.grad is None
        (torch.Size([2]), False)
    """
    check_type(type(steps) is int, _OP, "steps", "be an int", type(steps).__name__)
    check(1 <= steps, _OP, "steps", "be at least 1", steps)
    check_number(_OP, "decay", decay, 0, 1, "be in 0 .. 1")
    length = embedded.shape[1]
    check(length > steps + 1, _OP, "embedded", f"have more than {steps + 1} rows", length)
    together = head.config.mask_token is not None
    check(not together, _OP, "head", "guess token after token", "a P-EAGLE head")
    rollouts: Any = _Rollouts(head)
    hidden = head.fused(features[:, :-1])
    total, weights = torch.zeros((), dtype=torch.float32, device=hidden.device), 0.0
    right, agreed = torch.ones((), dtype=torch.bool, device=hidden.device), []
    for depth in range(steps):
        rows, first = length - 1 - depth, 1 + depth
        rollouts.depth = depth
        hidden = head.run(embedded[:, first : first + rows], hidden[:, :rows], rollouts)
        logits = head.logits(hidden).float()
        target_logits, counts = targets[:, first : first + rows].float(), scored[:, first : first + rows]
        entropy = -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        total = total + decay**depth * (entropy * counts).sum() / counts.sum().clamp(min=1)
        weights += decay**depth
        with torch.no_grad():
            right = (right[:, :rows] if depth else right) & (logits.argmax(-1) == target_logits.argmax(-1))
            agreed.append((right & counts).sum() / counts.sum().clamp(min=1))
    return EagleLoss(total / weights, torch.stack(agreed))
