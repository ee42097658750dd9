"""The loss of a DFlash head: blocks of masks at anchors of packed texts, in one forward under an anchored mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels._validation import check, check_choice, check_number, check_shape, check_type, message
from pdkernels.masks import AnchoredMask, anchored
from pdkernels.models import Transformer
from pdkernels.models.architectures.rope import apply_rope
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters import DFlashConfig, DFlashHead
from pdkernels.ops import block_sparse_attention
from pdkernels.training.eagle import ABSENT, check_numbers, copy_layer_, usual_taps

_OP = "training.dflash_loss"
_TILE = 64


@torch.no_grad()
def new_dflash_head(
    model: Transformer,
    block_size: int,
    mask_token: int,
    *,
    layers: int = 1,
    vocabulary: Tensor | None = None,
    taps: Sequence[int] | None = None,
    sample_from_anchor: bool = False,
) -> DFlashHead:
    """A head to train for a target, whose layers begin as copies of the target's last ones, on its last tap. In place
    of experts they have an MLP, which begins with random numbers.

    Args:
        model: the target, with matrices of numbers (``packed=False``).
        block_size: rows of a block, the known token included.
        mask_token: the token whose embedding stands for what is to be guessed, one that texts do not contain.
        layers: of the head.
        vocabulary: ``(n,)`` int64, ascending: the tokens that it can draft, which then have a matrix of their own.
            None: all of them, by the target's head.
        taps: None: `usual_taps`.
        sample_from_anchor: whether the known token's row guesses too: a row predicts the token after its own.

    Returns:
        A head in float32, with the target's embedding, which it does not store.

    Example:
        >>> import torch
        >>> from pdkernels.models import Transformer, TransformerConfig
        >>> from pdkernels.training import new_dflash_head
        >>> sizes = dict(heads=4, kv_heads=2, head_dim=16, intermediate_size=24)
        >>> model = Transformer(TransformerConfig(vocab_size=11, hidden_size=16, layers=4, **sizes))
        >>> head = new_dflash_head(model, 4, mask_token=10, layers=2)
        >>> head.config.taps, head.head is None
        ((1, 2, 1), True)
    """
    op, config = "training.new_dflash_head", model.config
    check_numbers(op, model)
    check_type(type(layers) is int, op, "layers", "be an int", type(layers).__name__)
    check(1 <= layers <= config.layers, op, "layers", f"be in 1 .. {config.layers}, the target's", layers)
    taps = usual_taps(config.layers) if taps is None else tuple(taps)
    body = replace(config, layers=layers, experts=None, windows=(), **{**ABSENT, "qk_norm": True})  # layers of Qwen3
    drafted = config.vocab_size if vocabulary is None else len(vocabulary)
    own_head = vocabulary is not None
    head_config = DFlashConfig(body, taps, block_size, mask_token, drafted, sample_from_anchor, own_head=own_head)
    head: Any = DFlashHead(head_config)
    width = config.hidden_size
    for layer, target_layer in zip(head.layers, model.layers[-layers:], strict=True):
        copy_layer_(layer, target_layer)
        layer.qkv.copy_(target_layer.qkv)
        for name in ("attention_norm", "q_norm", "k_norm"):
            weight = getattr(target_layer, name)
            if weight is not None and not (config.whole_qk_norm and name in config.qk_norm_sizes):
                getattr(layer, name).copy_(weight)
    head.fc *= 0.05
    head.fc[:, -width:] += torch.eye(width, dtype=head.fc.dtype, device=head.fc.device)
    head.hidden_norm.copy_(head.layers[0].attention_norm)  # the context goes into K and V as it is
    head.norm.copy_(model.norm)
    if vocabulary is not None:
        rows: Any = model.embedding if model.head is None else model.head
        head.head.copy_(rows[vocabulary])
        head.vocabulary.copy_(vocabulary)
    return cast(DFlashHead, head)


def draw_anchors(scored: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Different tokens of answers at which blocks begin, ascending, at most `count`: ``(n,)`` int64 in host memory.

    Args:
        scored: ``(1, T)`` bool, the rows that count, as for `dflash_loss`.
        count: fewer if there are not as many.
        generator: on the CPU.

    A block begins at a token of an answer that is not its last one, so that it has something to guess.

    Source: DFlash (arXiv 2602.06036): anchors are drawn from the response, anew in each pass. SpecForge and speculators
    leave out the tokens less than a block before the end, where `dflash_loss` leaves out the rows past the end.

    Example:
        >>> import torch
        >>> from pdkernels.training import draw_anchors
        >>> draw_anchors(torch.tensor([[False, False, True, True, True, True]]), 8)
        tensor([3, 4, 5])
    """
    op = "training.draw_anchors"
    check_type(type(count) is int, op, "count", "be an int", type(count).__name__)
    check(count >= 0, op, "count", "be 0 or more", count)
    check_type(scored.dtype == torch.bool, op, "scored", "be bool", scored.dtype)
    check_shape(op, "scored", scored, (1, None))
    rows = scored[0].cpu()
    candidates = 1 + (rows[1:] & rows[:-1]).nonzero()[:, 0]
    return candidates[torch.randperm(len(candidates), generator=generator, device="cpu")[:count]].sort().values


class DFlashLoss(NamedTuple):
    """Result of `dflash_loss`."""

    total: Tensor
    """0-dim: the mean over all guesses that count, each weighted by its place in the block."""
    agreed: Tensor
    """``(guesses,)``, the share of blocks in which head and target agree on the best token, at each place and all
    before it."""


class _Blocks:
    """The attention of the rows of blocks: they see the features before their anchor, as K and V, and each other."""

    def __init__(
        self, head: DFlashHead, hidden: Tensor, mask: AnchoredMask, windowed: Callable[[Window], AnchoredMask]
    ) -> None:
        self._body, self._layers, self._hidden = head.config.body, head.layers, hidden
        positions = mask.positions.to(hidden.device)
        table = head.tables.covering(int(mask.positions.max()) + 1, hidden.device, hidden.dtype)
        self._context, self._own = table.at(positions[: mask.base_len]), table.at(positions[mask.base_len :])
        windows: Any = head.config.body.windows or (None,) * head.config.body.layers
        masks = {window: mask if window is None else windowed(window) for window in set(windows)}
        plans = {window: window_mask.queries.plan(_TILE, _TILE, hidden.device) for window, window_mask in masks.items()}
        self._plans = [plans[window] for window in windows]

    def attend_(self, qkv: Tensor, layer: int) -> Tensor:
        body: Any = self._body
        context = self._layers[layer].project(self._hidden)[:, :, body.heads :]  # type: ignore[operator]
        keys, values = context.split(body.kv_heads, 2)
        q, k, v = qkv.split_with_sizes((body.heads, body.kv_heads, body.kv_heads), 2)
        q, k = (apply_rope(x, self._own, body.rope_style) for x in (q, k))
        if self._own.query_scale is not None:
            q = q * self._own.query_scale.to(q.dtype)
        keys = apply_rope(keys, self._context, body.rope_style)
        return block_sparse_attention(q, torch.cat([keys, k], 1), torch.cat([values, v], 1), self._plans[layer])


def dflash_loss(
    head: DFlashHead,
    tokens: Tensor,
    features: Tensor,
    targets: Tensor,
    scored: Tensor,
    anchors: Tensor,
    *,
    documents: Sequence[int] | None = None,
    embedding: Tensor | None = None,
    shared: Tensor | None = None,
    labels: Literal["distribution", "text"] = "distribution",
    gamma: float = 4.0,
) -> DFlashLoss:
    """The loss of a head on packed texts: a block at every anchor, all in one forward.

    Args:
        head: what is trained.
        tokens: ``(1, T)`` int64, the texts, one after the other.
        features: ``(1, T, taps, hidden_size)``, those of `Transformer.tapped` on each text by itself.
        targets: ``(1, T, draft_vocab_size)``, the target's logits of the tokens that the head can draft; row r is about
            token r + 1.
        scored: ``(1, T)`` bool, the rows of `targets` that count: those of the answers.
        anchors: ``(n,)`` int64, the tokens at which blocks begin, such as `draw_anchors`.
        documents: lengths of the texts; None: there is one.
        embedding: ``(vocab_size, hidden_size)``, the target's, for a head without its own.
        shared: ``(vocab_size, hidden_size)``, the matrix of the target's head, for a head without its own.
        labels: "distribution": a guess learns the target's distribution, by KL divergence. "text": it learns the token
            of the text, by cross-entropy, as in the paper; tokens that it cannot draft are left out.
        gamma: guess j of a block has weight ``exp(-j / gamma)``: what comes after a wrong guess is lost. SpecForge's
            runs have 7 for blocks of 16; speculators has 4 for blocks of 8.

    Returns:
        The block at anchor a has the known token a and masks, at positions a, a + 1, ... As while drafting, its rows
        see the features before row a, and each other, as far as windows of the head's layers let them. The mask at position p learns what row p - 1 of the target says;
        with ``sample_from_anchor`` row p of the block does so for row p. Rows past the end of their text, and those
        that are not scored, do not count.

    Raises:
        ValueError: shapes that do not fit each other, anchors outside of the texts, or options out of range.
        NotImplementedError: a `DSparkHead`, a `DFlash2Head` or an `XPressHead`, whose losses have further terms.

    Source: DFlash (arXiv 2602.06036), equation 4. SpecForge trains on the text and takes the weighted mean, as here;
    speculators trains on the distribution and divides by the number of guesses instead. None of them draws drafts:
    anchors are drawn, tokens are those of the text, so there is nothing like `draw_drafts` here.

    Example:
        >>> import torch
        >>> from pdkernels.models import TransformerConfig
        >>> from pdkernels.models import DFlashConfig, DFlashHead
        >>> from pdkernels.training import dflash_loss
        >>> sizes = dict(heads=2, kv_heads=1, head_dim=16, intermediate_size=24)
        >>> body = TransformerConfig(vocab_size=11, hidden_size=16, layers=2, **sizes)
        >>> head = DFlashHead(DFlashConfig(body, taps=(1, 2), block_size=4, mask_token=10, draft_vocab_size=5))
        >>> tokens, scored = torch.arange(9)[None], torch.ones(1, 9, dtype=torch.bool)
        >>> features, targets = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 5)
        >>> anchors, embedding = torch.tensor([2, 5]), torch.randn(11, 16)
        >>> loss = dflash_loss(head, tokens, features, targets, scored, anchors, embedding=embedding)
        >>> loss.total.backward()
        >>> loss.agreed.shape, head.fc.grad is None
        (torch.Size([3]), False)
    """
    if type(head) is not DFlashHead:  # others have further terms in their losses
        raise NotImplementedError(message(_OP, "head", "be a plain DFlashHead", type(head).__name__))
    config, device = head.config, tokens.device
    length, size, first = tokens.shape[1], config.block_size, 0 if config.sample_from_anchor else 1
    lengths = [length] if documents is None else list(documents)
    shapes = {"features": features.shape[:2], "targets": targets.shape[:2], "scored": scored.shape}
    for name, shape in {"tokens": tokens.shape, **shapes}.items():
        check(shape == (1, length), _OP, name, f"have shape (1, {length}, ..)", tuple(shape))
    check(sum(lengths) == length, _OP, "documents", f"add up to the {length} tokens", sum(lengths))
    drafted, columns = config.draft_vocab_size, targets.shape[-1]
    check(columns == drafted, _OP, "targets", f"have {drafted} columns, the tokens that the head can draft", columns)
    check_choice(_OP, "labels", labels, ("distribution", "text"))
    check_number(_OP, "gamma", gamma, 1e-6, expectation="be positive")

    mask = anchored(lengths, anchors, size)
    starts, offsets, ends = mask.anchor_rows, mask.offsets, torch.tensor(lengths, device="cpu").cumsum(0)
    taught = starts + offsets - first  # the row of `targets` that a row of a block learns from
    within = ends[torch.searchsorted(ends, starts, right=True)]
    own_text = taught + (labels == "text") < within  # and the token after it, where that is learnt
    chosen = (own_text & (offsets >= first)).nonzero()[:, 0].to(device)
    taught, offsets = taught.to(device)[chosen], offsets.to(device)[chosen]

    blocks = tokens.new_full((len(mask.anchors), size), config.mask_token)
    blocks[:, 0] = tokens[0, mask.anchors.to(device)]
    inputs = blocks.view(1, -1)
    embedded = head.embed(inputs) if embedding is None else F.embedding(inputs, embedding)

    def windowed(window: Window) -> AnchoredMask:
        return anchored(lengths, anchors, size, inside="full" if config.whole_blocks else "causal", window=window.size)

    hidden = head.run(embedded, _Blocks(head, head.fused(features), mask, windowed).attend_)
    logits = head.logits(hidden[0, chosen], shared).float()

    counts = scored[0, taught]
    if labels == "distribution":
        goal = targets[0, taught].float().log_softmax(-1)
        losses = F.kl_div(logits.log_softmax(-1), goal, reduction="none", log_target=True).sum(-1)
    else:
        places = tokens.new_full((config.body.vocab_size,), -1)
        places[head.vocabulary] = torch.arange(len(head.vocabulary), device=device)
        label_ids = places[tokens[0, taught + 1]]
        counts = counts & (label_ids >= 0)
        losses = F.cross_entropy(logits, label_ids.clamp(min=0), reduction="none")
    weights = torch.exp(-(offsets - first) / gamma) * counts
    total = (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
    with torch.no_grad():
        right = torch.zeros(len(mask.anchors) * size, dtype=torch.bool, device=device)
        evaluated = right.clone()
        right[chosen] = (logits.argmax(-1) == targets[0, taught].argmax(-1)) & counts
        evaluated[chosen] = counts
        right, evaluated = (flags.view(-1, size)[:, first:] for flags in (right, evaluated))
        agreed = right.cumprod(1).sum(0) / evaluated.sum(0).clamp(min=1)
    return DFlashLoss(total, agreed)
