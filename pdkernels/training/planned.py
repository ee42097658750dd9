"""Planned texts as training batches: layout, noise, packing and loss. Plain-text plans are in
`pdkernels.training.plans`.

A text is a prompt, then rounds: a plan written token by token, its chunks filled in together, a sync if another round
follows. Plan rows predict the next token outside chunks, as in any causal model; masked tokens of chunks predict
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from pdkernels._validation import check, check_choice, check_flag, check_number, check_type, integer
from pdkernels.masks import SegmentMask, Stage, pack, planned, planned_streams
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.training.losses import JointLoss, _check_rows, _exact

Noise = Literal["text", "round", "one"]
Past = Literal["noisy", "clean", "clean_plans"]


class PlanItem(NamedTuple):
    """A chunk and the item of the plan that requests it."""

    topic: Sequence[int]
    """Ids of its topic, and of the separator before the number, if any."""
    content: Sequence[int]
    """Ids of the chunk, without its two tags."""
    number: int | None = None
    """The number in the plan. None: as many units as `content` needs, which is then padded."""


class PlannedSample(NamedTuple):
    """A prompt and its answer in rounds of items."""

    prompt: Sequence[int]
    rounds: Sequence[Sequence[PlanItem]] = ()
    tail: Sequence[int] = ()
    """Ids after the last round, predicted token by token. Without rounds: the whole answer."""


class PlannedLayout(NamedTuple):
    """Result of `lay_out`: a text of T tokens, all clean."""

    tokens: Tensor
    """(T,) int64 ids: prompt, plans, chunks with their tags, syncs, tail, end token."""
    stages: tuple[Stage, ...]
    """For `pdkernels.masks.planned`. The end token is its own stage, or the end of the tail."""
    rounds: Tensor
    """(T,) int64: the round of a chunk's token, tags included; -1 elsewhere."""
    content: Tensor
    """(T,) bool: tokens of chunks, with pads, without tags."""
    prompt_len: int


class NoisyPlan(NamedTuple):
    """A laid-out text and its masked tokens; the last two fields are the results of `draw_chunk_masks`."""

    layout: PlannedLayout
    masked: Tensor
    """(T,) bool."""
    p_mask: Tensor
    """(T,) float32: the probability with which a token was masked; outside chunks of the text, or 1 if rounds
    differ."""


class PlannedBatch(NamedTuple):
    """Result of `pack_planned`."""

    tokens: Tensor
    """(length,) ids."""
    positions: Tensor
    """(length,) position ids; a noisy chunk shares those of its clean copy."""
    mask: SegmentMask
    """(length, length); pass its ``plan()`` to attention."""
    ar_rows: Tensor
    """(n,) rows outside chunks, for each sample from the last of its prompt to its last but one."""
    ar_labels: Tensor
    """(n,) the ids they predict: those of the next such row."""
    ar_weights: Tensor
    """(n,) float32, 1."""
    masked_rows: Tensor
    """(m,) rows whose logits predict masked tokens."""
    masked_labels: Tensor
    """(m,) the ids of these tokens."""
    masked_weights: Tensor
    """(m,) float32, 1 / p_mask."""
    normaliser: Tensor
    """() float32: response tokens of all samples."""


def lay_out(
    sample: PlannedSample,
    plan_tokens: PlanTokens,
    end_token: int,
    *,
    max_pads: int = 0,
    generator: torch.Generator | None = None,
) -> PlannedLayout:
    """A sample in text order: prompt, then in each round plan, chunks and sync, then tail and end token.

    The last round has a sync only if a tail follows. Items without a number get the smallest one whose chunk holds the
    content and up to `max_pads` pads; the chunk is filled up to ``number * unit``, so that the plan matches its chunk,
    and a decoder that follows it makes a chunk of this length.

    Args:
        sample: ids. Given numbers have at most two digits.
        plan_tokens: of the model.
        end_token: ends the text.
        max_pads: the minimum number of pads in a chunk is sampled from 0 .. `max_pads`; the paper's augmentation has
            10.
        generator: the random generator; required if `max_pads` is not 0.

    Raises:
        ValueError: a round without items, a topic that ends with a digit, an empty topic, a number that is not in 0 ..
            99 or would be, control tokens out of place, a negative id, pads without a generator.
        TypeError: other samples, ids that are not ints.

    Source: Planned Diffusion, section 4 (control tags, fine-tuning data), with the number counted after the padding.

    Example:
        >>> from pdkernels.models import PlanTokens
        >>> from pdkernels.training import PlanItem, PlannedSample, lay_out
        >>> plan_tokens = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10), unit=2)
        >>> layout = lay_out(PlannedSample([30], [[PlanItem([31], [40, 41, 42])]]), plan_tokens, end_token=16)
        >>> layout.tokens.tolist()
        [30, 12, 31, 2, 13, 10, 40, 41, 42, 15, 11, 16]
        >>> layout.stages
        (Stage(plan=5, chunks=(6,), sync=False), Stage(plan=1, chunks=(), sync=False))
    """
    op = "training.lay_out"
    check_type(isinstance(sample, PlannedSample), op, "sample", "be a PlannedSample", type(sample).__name__)
    check_type(
        isinstance(plan_tokens, PlanTokens), op, "plan_tokens", "be those of a model", type(plan_tokens).__name__
    )
    integer(op, "end_token", end_token, 0)
    max_pads = integer(op, "max_pads", max_pads, 0)
    check(max_pads == 0 or generator is not None, op, "generator", "be given with max_pads", None)
    banned = {*plan_tokens.control, end_token}
    prompt, tail = _ids(op, "prompt", sample.prompt), _ids(op, "tail", sample.tail, banned)
    ids, stages, planned_from = list(prompt), [], 0
    rounds, content = [-1] * len(ids), [False] * len(ids)
    for number, items in enumerate(sample.rounds):
        check(len(items) > 0, op, "rounds", "hold items", "an empty round")
        chunks = []
        for item in items:
            check_type(isinstance(item, PlanItem), op, "rounds", "hold PlanItems", type(item).__name__)
            topic = _ids(op, "topic", item.topic, banned)
            sane = len(topic) > 0 and topic[-1] not in plan_tokens.digits
            check(sane, op, "topic", "be ids that do not end with a digit", topic, "Put a space before the number.")
            chunk_ids = _ids(op, "content", item.content, banned - {plan_tokens.pad})
            pads = 0
            if max_pads:
                pads = int(torch.randint(max_pads + 1, (), generator=generator, device="cpu"))
            units = item.number
            if units is None:
                units = max(1, -(-(len(chunk_ids) + pads) // plan_tokens.unit))
                chunk_ids = chunk_ids + [plan_tokens.pad] * (units * plan_tokens.unit - len(chunk_ids))
            check(0 <= integer(op, "number", units, 0) <= 99, op, "number", "have at most two digits", units)
            digits = [plan_tokens.digits[int(digit)] for digit in str(units)]
            ids += [plan_tokens.topic_open, *topic, *digits, plan_tokens.topic_close]
            chunks.append(chunk_ids)
        rounds += [-1] * (len(ids) - len(rounds))
        plan = len(ids) - planned_from
        for chunk_ids in chunks:
            content += [False] * (len(ids) + 1 - len(content)) + [True] * len(chunk_ids)
            ids += [plan_tokens.chunk_open, *chunk_ids, plan_tokens.chunk_close]
        rounds += [number] * (len(ids) - len(rounds))
        synced = number + 1 < len(sample.rounds) or len(tail) > 0
        stages.append(Stage(plan, tuple(len(chunk_ids) + 2 for chunk_ids in chunks), synced))
        ids += [plan_tokens.sync] * synced
        planned_from = len(ids)
    ids += [*tail, end_token]
    stages.append(Stage(len(ids) - planned_from, (), False))
    rounds += [-1] * (len(ids) - len(rounds))
    content += [False] * (len(ids) - len(content))
    device = torch.device("cpu")
    return PlannedLayout(
        torch.tensor(ids, dtype=torch.int64, device=device),
        tuple(stages),
        torch.tensor(rounds, dtype=torch.int64, device=device),
        torch.tensor(content, dtype=torch.bool, device=device),
        len(prompt),
    )


def draw_chunk_masks(
    layout: PlannedLayout,
    generator: torch.Generator,
    *,
    noise: Noise = "text",
    min_p_mask: float = 1e-3,
    tags: bool = False,
) -> NoisyPlan:
    """Masks tokens of chunks, each with the same probability ``p_mask = (1 - min_p_mask) * t + min_p_mask``, t uniform
    on [0, 1].

    Args:
        layout: from `lay_out`. Prompt, plans, syncs and the tags of chunks are never masked.
        generator: the random generator.
        noise: t is sampled once for the "text", or for each "round", so that a noisy round may follow one that is
            nearly clean. "one" masks tokens of only one randomly chosen round; as in decoding, the rounds before it are
            clean. A token is then masked with probability ``p_mask / rounds``, which is the `p_mask` of the result.
        min_p_mask: the smallest probability.
        tags: also mask the two tags of a chunk, as the released code does; a decoder never does that.

    Raises:
        ValueError: an unknown name, `min_p_mask` outside (0, 1].
        TypeError: another layout or generator, `tags` that is not a bool.

    Source: Planned Diffusion, equation 10; its released code for `tags`.

    Example:
        >>> import torch
        >>> from pdkernels.models import PlanTokens
        >>> from pdkernels.training import PlanItem, PlannedSample, draw_chunk_masks, lay_out
        >>> plan_tokens = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10), unit=2)
        >>> layout = lay_out(PlannedSample([30], [[PlanItem([31], [40, 41])]]), plan_tokens, end_token=16)
        >>> draw_chunk_masks(layout, torch.Generator().manual_seed(0), min_p_mask=1.0).masked.int().tolist()
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0]
    """
    op = "training.draw_chunk_masks"
    check_type(isinstance(layout, PlannedLayout), op, "layout", "be a PlannedLayout", type(layout).__name__)
    is_generator = isinstance(generator, torch.Generator)
    check_type(is_generator, op, "generator", "be a torch.Generator", type(generator).__name__)
    check_choice(op, "noise", noise, get_args(Noise))
    check_number(op, "min_p_mask", min_p_mask, 0, 1, "lie in (0, 1]")
    check(min_p_mask > 0, op, "min_p_mask", "lie in (0, 1]", min_p_mask)
    check_flag(op, "tags", tags)
    rounds = max(int(layout.rounds.max()) + 1, 1)
    device = generator.device
    shares = torch.rand(
        rounds if noise == "round" else 1, generator=generator, dtype=torch.float32, device=device
    ).cpu()
    shares = ((1 - min_p_mask) * shares + min_p_mask).expand(rounds)
    chance = torch.rand(len(layout.tokens), generator=generator, dtype=torch.float32, device=device).cpu()
    masked = (layout.rounds >= 0 if tags else layout.content) & (chance < shares[layout.rounds.clamp(min=0)])
    if noise == "one":
        chosen = torch.randint(rounds, (), generator=generator, device=device).cpu()
        masked, shares = masked & (layout.rounds == chosen), shares / rounds
    p_mask = shares[layout.rounds.clamp(min=0)]
    return NoisyPlan(layout, masked, p_mask if noise == "text" else p_mask.masked_fill(layout.rounds < 0, 1.0))


def pack_planned(
    samples: Sequence[NoisyPlan],
    plan_tokens: PlanTokens,
    mask_token: int,
    length: int | None = None,
    *,
    sparse: bool = False,
    past: Past = "noisy",
    pad_token: int = 0,
) -> PlannedBatch:
    """Packs samples under the mask of planned diffusion, masked from each other.

    Args:
        samples: noisy texts. Any chunk tokens may be `masked`.
        plan_tokens: of the model; its `predicts` says which row predicts a masked token: its own, or the row before it
            in the chunk.
        mask_token: the id of a masked token.
        length: total tokens, padded with `pad_token`; None: those of the samples.
        sparse: whether the chunks of a round are masked from each other.
        past: how later rounds see the chunks of a round. "noisy": in one copy of the text, including masks. "clean":
            `planned_streams`, whose noisy chunks see earlier rounds clean, as in decoding, at the cost of a second
            copy. "clean_plans": two whole copies, a clean one for plans and a noisy one for chunks, as equation 10
            is written.
        pad_token: the id of the padding, which attends to nothing and to which no row attends.

    Returns:
        A batch of one packed sequence.

    Raises:
        ValueError: an unknown name, tensors of other shapes, a mask outside chunks or on their tags, probabilities
            outside (0, 1], more tokens than `length`.
        TypeError: other samples or dtypes.

    Source: Planned Diffusion, section 4.2 and equation 10.

    Example:
        >>> import torch
        >>> from pdkernels.models import PlanTokens
        >>> from pdkernels.training import PlanItem, PlannedSample, draw_chunk_masks, lay_out, pack_planned
        >>> plan_tokens = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10), unit=2)
        >>> layout = lay_out(PlannedSample([30], [[PlanItem([31], [40, 41])]]), plan_tokens, end_token=16)
        >>> noisy = draw_chunk_masks(layout, torch.Generator().manual_seed(0), min_p_mask=1.0)
        >>> batch = pack_planned([noisy], plan_tokens, mask_token=9)
        >>> batch.tokens.tolist()
        [30, 12, 31, 1, 13, 10, 9, 9, 11, 16]
        >>> batch.ar_rows.tolist(), batch.ar_labels.tolist()
        ([0, 1, 2, 3, 4], [12, 31, 1, 13, 16])
        >>> batch.masked_rows.tolist(), batch.masked_labels.tolist(), int(batch.normaliser)
        ([6, 7], [40, 41], 9)
    """
    op = "training.pack_planned"
    check_choice(op, "past", past, get_args(Past))
    integer(op, "mask_token", mask_token, 0)
    integer(op, "pad_token", pad_token, 0)
    check_type(
        isinstance(plan_tokens, PlanTokens), op, "plan_tokens", "be those of a model", type(plan_tokens).__name__
    )
    masks: list[SegmentMask] = []
    tokens: list[Tensor] = []
    # For each sample (rows, labels, weights) of its plan and of its masked tokens.
    plans: list[tuple[Tensor, Tensor, Tensor]] = []
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    first = responses = 0
    for sample in samples:
        _check_noisy(op, sample)
        layout, masked, p_mask = sample
        ids, chunk = layout.tokens, layout.rounds >= 0
        noisy = ids.masked_fill(masked, mask_token)
        mask = (planned_streams if past == "clean" else planned)(layout.stages, sparse)
        if past != "clean":
            sample_tokens = noisy
            noisy_row = clean_row = torch.arange(len(ids), device="cpu")
            if past == "clean_plans":
                mask, sample_tokens, clean_row = pack([mask, mask]), torch.cat([noisy, ids]), clean_row + len(ids)
        else:
            copies = int(chunk.sum())
            sample_tokens = torch.cat([noisy[chunk], ids[mask.positions[copies:]]])
            noisy_row = chunk.cumsum(0) - 1
            clean_row = torch.full((len(ids),), -1, device="cpu")
            clean_row[mask.positions[copies:]] = torch.arange(copies, mask.q_len, device="cpu")
        response = len(ids) - layout.prompt_len
        plan = (~chunk).nonzero()[:, 0][max(layout.prompt_len - 1, 0) :]
        hidden = masked.nonzero()[:, 0]
        source = hidden if plan_tokens.predicts == "own" else hidden - 1
        plans.append(
            (clean_row[plan[:-1]] + first, ids[plan[1:]], torch.ones(len(plan) - 1, dtype=torch.float32, device="cpu"))
        )
        chunks.append((noisy_row[source] + first, ids[hidden], 1 / p_mask[hidden]))
        masks.append(mask)
        tokens.append(sample_tokens)
        first, responses = first + len(sample_tokens), responses + response
    check(length is None or first <= length, op, "length", f"be at least the {first} tokens of the samples", length)
    packed_mask = pack(masks, length)
    padding = torch.full((packed_mask.q_len - first,), pad_token, dtype=torch.int64, device="cpu")
    normaliser = torch.tensor(float(max(responses, 1)), dtype=torch.float32, device="cpu")
    return PlannedBatch(
        torch.cat([*tokens, padding]), packed_mask.positions, packed_mask, *_joined(plans), *_joined(chunks), normaliser
    )


def _joined(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, labels and weights of all samples."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    rows, labels, weights = ([sample[kind] for sample in samples] for kind in range(3))
    return torch.cat([none, *rows]), torch.cat([none, *labels]), torch.cat([none.float(), *weights])


def planned_terms(
    ar_logits: Tensor, masked_logits: Tensor, batch: PlannedBatch, *, normaliser: float | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The contribution of each row to the two sums of `planned_loss`, same arguments and errors: ``(n,)`` and
    ``(m,)``."""
    op = "training.planned_loss"
    _check_rows(op, "ar_logits", ar_logits, batch.ar_labels)
    _check_rows(op, "masked_logits", masked_logits, batch.masked_labels)
    terms = []
    for logits, labels, weights in (
        (ar_logits, batch.ar_labels, batch.ar_weights),
        (masked_logits, batch.masked_labels, batch.masked_weights),
    ):
        losses = F.cross_entropy(_exact(logits), labels.to(logits.device), reduction="none")
        divisor = batch.normaliser.to(logits.device) if normaliser is None else normaliser
        terms.append(losses * weights.to(logits.device) / divisor)
    return terms[0], terms[1]


def planned_loss(
    ar_logits: Tensor, masked_logits: Tensor, batch: PlannedBatch, *, normaliser: float | Tensor | None = None
) -> JointLoss:
    """Cross-entropy of plans, token by token, and of the masked tokens of chunks.

    Args:
        ar_logits: ``(n, vocab)`` of ``batch.ar_rows``.
        masked_logits: ``(m, vocab)`` of ``batch.masked_rows``.
        batch: from `pack_planned`.
        normaliser: the divisor of both sums. None: that of the batch. For several batches or ranks pass the sum of
            their normalisers, a number or a 0-dim tensor: the losses then add up to that of one big batch.

    Returns:
        Its `total` is ``(sum of CE over plans + sum of CE / p_mask over masked tokens) / response tokens``. Only the
        second sum is divided by the noise; all tokens of a batch count equally, regardless of their sample. The mean
        over batches of one sample each is equation 10, which divides by the length of each text.

    Raises:
        ValueError: logits that are not one row of floats per label.
        TypeError: logits that are not floating.

    Source: Planned Diffusion, equation 10. The released code also divides the first sum by the noise.

    Example:
        >>> import torch
        >>> from pdkernels.models import PlanTokens
        >>> from pdkernels.training import PlanItem, PlannedSample, draw_chunk_masks, lay_out
        >>> from pdkernels.training import pack_planned, planned_loss
        >>> plan_tokens = PlanTokens(10, 11, 12, 13, 14, 15, digits=range(10), unit=2)
        >>> layout = lay_out(PlannedSample([30], [[PlanItem([31], [40, 41])]]), plan_tokens, end_token=16)
        >>> noisy = draw_chunk_masks(layout, torch.Generator().manual_seed(0), min_p_mask=1.0)
        >>> batch = pack_planned([noisy], plan_tokens, mask_token=9)
        >>> loss = planned_loss(torch.zeros(5, 42), torch.zeros(2, 42), batch)  # log(42) = 3.7377, 7 of 9 rows
        >>> [round(float(part), 4) for part in loss]
        [2.9071, 2.0765, 0.8306]
    """
    ar, masked = planned_terms(ar_logits, masked_logits, batch, normaliser=normaliser)
    ar, masked = ar.sum(), masked.sum()
    return JointLoss(ar + masked, ar, masked)


def _ids(op: str, name: str, ids: Sequence[int], banned: Set[int] = frozenset()) -> list[int]:
    token_ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    for token in token_ids:
        check_type(type(token) is int, op, name, "hold ids", type(token).__name__)
        check(token >= 0 and token not in banned, op, name, "hold ids without control tokens", token)
    return token_ids


def _check_noisy(op: str, sample: NoisyPlan) -> None:
    check_type(isinstance(sample, NoisyPlan), op, "samples", "hold NoisyPlans", type(sample).__name__)
    layout, masked, p_mask = sample
    check_type(isinstance(layout, PlannedLayout), op, "layout", "be a PlannedLayout", type(layout).__name__)
    count = len(layout.tokens)
    for name, tensor, dtype in (("masked", masked, torch.bool), ("p_mask", p_mask, torch.float32)):
        actual = getattr(tensor, "dtype", type(tensor).__name__)
        check_type(actual == dtype, op, name, f"be a {str(dtype).removeprefix('torch.')} tensor", actual)
        check(tensor.shape == (count,), op, name, f"have shape ({count},)", tuple(tensor.shape))
    stray = (masked & ~layout.content).nonzero()[:, 0].tolist()
    check(not stray, op, "masked", "be True inside the tags of chunks alone", f"True at {stray[:1]}")
    check(bool(((p_mask > 0) & (p_mask <= 1)).all()), op, "p_mask", "lie in (0, 1]", "others")
