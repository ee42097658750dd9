"""Planned texts whose chunks are written token by token: training batches of Pasta-SFT."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkernels._validation import check, check_type, integer
from pdkernels.masks import pack, planned
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.training.planned import PlannedBatch, PlannedLayout


def pack_pasta(
    layouts: Sequence[PlannedLayout], plan_tokens: PlanTokens, length: int | None = None, *, pad_token: int = 0
) -> PlannedBatch:
    """Packs texts with plans, all of which are written token by token: the autoregressive baseline of planned
    diffusion.

    A row outside chunks predicts the next token outside chunks, as in `pack_planned`. A row of a chunk predicts the
    next token of the chunk, up to what ends its content: the first filler, or the closing tag. Chunks attend to the
    text before their round and causally to themselves, as ``decoding.generate(.., "planned",
    chunks="autoregressive")`` writes them.

    Args:
        layouts: from `lay_out`.
        plan_tokens: of the model; its `predicts` has no meaning here.
        length: total tokens, padded with `pad_token`; None: those of the texts.
        pad_token: the id of the padding, which attends to nothing and to which no row attends.

    Returns:
        A batch of one packed sequence for `planned_loss`, whose `masked_rows` are empty: pass it ``(0, vocab)`` logits
        for them.

    Raises:
        ValueError: more tokens than `length`.
        TypeError: other layouts or plan tokens.

    Source: Planned Diffusion, section 5 (decoding strategy 4), after Jin et al., "Learning to keep a promise: scaling
    language model decoding parallelism with learned asynchronous decoding" (Pasta), with the plan before its chunks.

    Example:
        >>> from pdkernels.models import PlanTokens
        >>> from pdkernels.training import PlanItem, PlannedSample, lay_out, pack_pasta
        >>> plan_tokens = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10), unit=2)
        >>> items = [PlanItem([31], [40, 41, 42]), PlanItem([32], [43, 44])]
        >>> layout = lay_out(PlannedSample([30], [items]), plan_tokens, end_token=16)
        >>> batch = pack_pasta([layout], plan_tokens)
        >>> batch.tokens.tolist()
        [30, 12, 31, 2, 13, 12, 32, 1, 13, 10, 40, 41, 42, 15, 11, 10, 43, 44, 11, 16]
        >>> batch.ar_labels.tolist()
        [12, 31, 2, 13, 12, 32, 1, 13, 16, 40, 41, 42, 15, 43, 44, 11]
    """
    op = "training.pack_pasta"
    check_type(
        isinstance(plan_tokens, PlanTokens), op, "plan_tokens", "be those of a model", type(plan_tokens).__name__
    )
    integer(op, "pad_token", pad_token, 0)
    masks, tokens, rows, labels = [], [], [], []
    first = responses = 0
    for layout in layouts:
        check_type(isinstance(layout, PlannedLayout), op, "layouts", "hold PlannedLayouts", type(layout).__name__)
        ids, chunk = layout.tokens, layout.rounds >= 0
        plan = (~chunk).nonzero()[:, 0][max(layout.prompt_len - 1, 0) :]
        filler, place = (ids == plan_tokens.pad).cumsum(0), torch.arange(len(ids), device="cpu")
        opened = place.masked_fill(ids != plan_tokens.chunk_open, 0).cummax(0).values
        unfinished = (filler == filler[opened]) & (ids != plan_tokens.chunk_close)
        written = (chunk & unfinished).nonzero()[:, 0]
        rows += [plan[:-1] + first, written + first]
        labels += [ids[plan[1:]], ids[written + 1]]
        masks.append(planned(layout.stages, sparse=True, inside="causal"))
        tokens.append(ids)
        first, responses = first + len(ids), responses + len(ids) - layout.prompt_len
    check(length is None or first <= length, op, "length", f"be at least the {first} tokens of the texts", length)
    packed = pack(masks, length)
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    padding = torch.full((packed.q_len - first,), pad_token, dtype=torch.int64, device="cpu")
    ar_rows, ar_labels = torch.cat([none, *rows]), torch.cat([none, *labels])
    weights = torch.ones(len(ar_rows), dtype=torch.float32, device="cpu")
    normaliser = torch.tensor(float(max(responses, 1)), dtype=torch.float32, device="cpu")
    text = torch.cat([*tokens, padding]), packed.positions, packed
    return PlannedBatch(*text, ar_rows, ar_labels, weights, none, none, none.float(), normaliser)
