"""Planned diffusion: a plan is written token by token, then the chunks that it requests are filled in together, by
confidence.

Source: "Planned Diffusion" and its released decoder; chunks written token by token: Jin et al., "Learning to keep a
promise" (Pasta), its baseline. The plain form is reference/planned.py; both take the same forwards, draw the same
tokens and fill the same positions.

A round's chunks are rows after the cached text that see it and, with `sparse`, only themselves; no step stores them.
Finished chunks enter the cache together with the sync token, whose forward starts the next plan: exact, and without an
extra forward.

Each sequence of a batch is in its own round. Each step has a forward for those that plan, one for those whose finished
chunks enter the cache, and one for those that fill chunks, if there are any, and one read of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from pdkernels._philox import uniforms
from pdkernels._validation import check, check_choice, check_type
from pdkernels.backends import backend_of
from pdkernels.decoding.planned._branches import Branches
from pdkernels.decoding.planned._grammar import ChunkGrammar, check_room, without
from pdkernels.decoding.planned._text import BAD_PLAN_WAYS, CACHES, Chunks, Keeping, OnBadPlan, PlannedText, PlanOptions
from pdkernels.decoding.planned.outline import joined, text_pieces
from pdkernels.generation.cache_rows import rows_of
from pdkernels.generation.noise import (
    ORDER,
    OWN,
    checked_flag,
    checked_mask_token,
    checked_number,
    checked_size,
    noise,
    statistics,
    suppress_,
)
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, to_device_async
from pdkernels.masks import Stage, TilePlan, pack, planned
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.ops import TokenStatistics, token_statistics, unmask_
from pdkernels.ops.token_statistics import MAX_SUPPRESSED

_OP = "decoding.planned"

Order = Literal["entropy", "confidence", "margin", "uniform"]


def decode(
    session: Session,
    *,
    sparse: bool = False,
    steps_ratio: float = 1.0,
    order: Order | None = None,
    threshold: float | None = None,
    chunks: Chunks = "diffusion",
    length_scale: float = 1.0,
    unit: int | None = None,
    cache: Keeping = "exact",
    on_bad_plan: OnBadPlan = "stop",
    max_rounds: int | None = None,
    joiner: str | None = None,
    mask_token: int | None = None,
    page_size: int | None = None,
) -> int:
    """Fills `session` round by round. Not the tokens of autoregressive decoding: a filled chunk is never revised.

    Args:
        sparse: whether the chunks of a round cannot see each other.
        steps_ratio: steps of a round per token of its longest chunk, above 0 and at most 1.
        order: the score that ranks the positions of a chunk: the "entropy" of their distribution, the "confidence" in
            the guess, or the "margin" between the two likeliest tokens; or "uniform", a random order. None: entropy, or
            confidence if there is a threshold.
        threshold: fill all positions of a chunk whose confidence reaches this, and always the most confident one,
            instead of as many as would be filled at equal shares per step.
        chunks: "diffusion" fills in the masks of a chunk; "autoregressive" writes it token by token, beside the others and
            without seeing them, up to the first filler or closing tag (Pasta), with a model that is trained for it
            (`pdkernels.training.pack_pasta`) and without the options of steps, `sparse` and `cache`.
        length_scale: factor of the lengths that plans request.
        unit: how many tokens a 1 in a plan stands for; None: the model's own.
        cache: "exact"; "drop_finished", for sparse chunks: the same, but a finished chunk is left out of further steps.
        on_bad_plan: "stop" ends the text there, "raise" raises `BadPlan`.
        max_rounds: end after this many rounds.
        joiner: text between chunks; None: a line break before a digit, else a space.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    checked = checked_mask_token(_OP, session.model, mask_token)
    tags, mask_token = _checked_tags(session, mask_token), checked
    checked_flag(_OP, "sparse", sparse)
    checked_number(_OP, "steps_ratio", steps_ratio, 1.0)
    check(steps_ratio > 0, _OP, "steps_ratio", "be above 0", steps_ratio)
    if order is not None:
        check_choice(_OP, "order", order, get_args(Order))
    if threshold is not None:
        checked_number(_OP, "threshold", threshold)
        by_confidence = order in (None, "confidence")
        check(by_confidence, _OP, "order", "be 'confidence' with a threshold", repr(order), "Leave one of them out.")
    checked_number(_OP, "length_scale", length_scale, 1000.0)
    unit = tags.unit if unit is None else checked_size(_OP, "unit", unit)
    check_choice(_OP, "chunks", chunks, get_args(Chunks))
    in_turn = chunks == "autoregressive"
    check_choice(_OP, "cache", cache, CACHES)
    default_steps = not sparse and (steps_ratio, order, threshold, cache) == (1.0, None, None, "exact")
    remedy = "They have no sparse, steps_ratio, order, threshold and cache."
    check(default_steps or not in_turn, _OP, "chunks", "be 'diffusion' with options of its steps", repr(chunks), remedy)
    visible = cache != "drop_finished" or sparse
    check(visible, _OP, "cache", "not drop chunks that others see", repr(cache), "Pass sparse=True.")
    check_choice(_OP, "on_bad_plan", on_bad_plan, BAD_PLAN_WAYS)
    if max_rounds is not None:
        checked_size(_OP, "max_rounds", max_rounds)
    check_type(joiner is None or isinstance(joiner, str), _OP, "joiner", "be a str or None", type(joiner).__name__)
    ends = session.end_tokens
    masks_of_unit, sparse = unit * length_scale, sparse or in_turn
    rules = sparse, steps_ratio, threshold, chunks, masks_of_unit, cache, on_bad_plan, max_rounds
    options = PlanOptions(tags, mask_token, ends, *rules)
    if session.model.tokenizer is not None:
        others, plain = {mask_token, *ends}, session.model.tokenizer.decode
        session.text_of = lambda tokens, decode=plain: joined(text_pieces(tokens, tags, others), tags, decode, joiner)
    texts = [PlannedText(session, sequence, options) for sequence in range(session.batch)]
    guess = Guesses(session.model, session.seeds, Sampler.of(session.params, "joint"))
    if session.max_new_tokens > 0:  # else no cache is needed
        order = order or ("entropy" if threshold is None else "confidence")
        Rounds(session, options, guess, order, page_size).run(texts)
    session.plans = [own.report for own in texts]
    return sum(own.number for own in texts)


def _checked_tags(session: Session, mask_token: int | None) -> PlanTokens:
    tags = getattr(session.model, "plan_tokens", None)
    remedy = "Pass plan_tokens= to the Transformer."
    check_type(isinstance(tags, PlanTokens), _OP, "model", "have plan_tokens", type(session.model).__name__, remedy)
    assert isinstance(tags, PlanTokens)
    plan_tokens = (*tags.control, *tags.digits)
    check(mask_token not in plan_tokens, _OP, "mask_token", "not be a plan token", mask_token)
    for token in session.end_tokens:
        check(token not in plan_tokens, _OP, "end_tokens", "hold no plan token", token)
    maximum = MAX_SUPPRESSED - len(tags.control)
    check(len(session.end_tokens) <= maximum, _OP, "end_tokens", f"be at most {maximum}", len(session.end_tokens))
    return tags


class Guesses:
    """Draws of tokens for rows of hidden states."""

    def __init__(self, model: Any, seeds: torch.Tensor, sampler: Sampler) -> None:
        self._model, self._seeds, self._sampler = model, seeds, sampler

    def to_(self, device: torch.device) -> None:
        """To the device of the hidden states: a copy from the host within a step would wait."""
        self._seeds = self._seeds.to(device)

    def seeds_of(self, sequences: torch.Tensor) -> torch.Tensor:
        """``(len(sequences), 1)``."""
        return self._seeds.index_select(0, sequences)[:, None]

    def __call__(
        self,
        hidden: torch.Tensor,
        sequences: torch.Tensor,
        step: torch.Tensor | int,
        positions: torch.Tensor,
        banned: tuple[int, ...],
        allowed: torch.Tensor | None = None,
    ) -> TokenStatistics:
        """For rows ``(batch, R, hidden_size)`` at `positions` ``(batch, R)`` of the texts, -1 where there is nothing to
        guess."""
        row = torch.arange(positions.numel(), device=positions.device).view_as(positions)
        options: dict[str, Any] = {
            "row_index": row.masked_fill_(positions < 0, -1),
            "top_k": 1,
            "distribution": "sampling",
            **noise(self._sampler.temperature, self._seeds.index_select(0, sequences), step, positions),
        }
        if not self._sampler.cuts and allowed is None:
            options |= {"top_p": self._sampler.top_p, "min_p": self._sampler.min_p}
            return statistics(self._model, hidden, suppress=banned, **options)
        logits = self._model.logits(hidden)
        for token in banned:
            suppress_(logits, token)
        if allowed is not None:
            logits = without(logits, allowed)
        logits, filters = self._sampler.cut(logits)
        return token_statistics(logits, backend=backend_of(logits.dtype), **filters, **options)


class Rounds:
    """The forwards of a batch."""

    def __init__(
        self, session: Session, options: PlanOptions, guess: Guesses, order: Order, page_size: int | None
    ) -> None:
        self._session, self._options, self._guess, self._order = session, options, guess, order
        self._model = session.model
        self._cache = session.new_cache(page_size)
        self._device = self._cache.lengths.device
        guess.to_(self._device)
        tags = options.tags
        in_turn = options.chunks == "autoregressive"
        self._inside: Literal["full", "causal"] = "causal" if in_turn else "full"
        allowed = (tags.pad, tags.chunk_close) if in_turn else (tags.pad,)
        self._banned = (options.mask_token, *(token for token in tags.control if token not in allowed), *options.ends)
        self._branches = Branches(self._model, self._cache) if in_turn else None

    def run(self, texts: Sequence[PlannedText]) -> None:
        """Until all are done."""
        while unfinished := [text for text in texts if text.phase != "done"]:
            self._step(unfinished)

    def _step(self, texts: Sequence[PlannedText]) -> None:
        planning = [text for text in texts if text.phase == "plan"]
        outlining = [text for text in planning if not text.round_lengths]
        entering = [text for text in planning if text.round_lengths]
        filling = [text for text in texts if text.phase == "fill"]
        answers = [self._plan(group) for group in (outlining, entering) if group]
        if planning:
            grown = {text.sequence: len(text.rows) for text in planning}
            counts = [[grown.get(sequence, 0)] for sequence in range(self._session.batch)]
            self._cache.commit_(to_device_async(counts, self._device)[:, 0])
        live = [text.live for text in filling]
        if filling and self._branches is not None:
            answers.append(self._continue(self._branches, filling, live))
        elif filling:
            quotas = [text.quotas(chunks) for text, chunks in zip(filling, live, strict=True)]
            answers.append(self._fill(filling, live, quotas))
        # The one read of the device in a step.
        read = torch.cat(answers).tolist()
        for text in (*outlining, *entering):
            text.planned(read.pop(0))
        if self._branches is not None:
            for text, chunks in zip(filling, live, strict=True):
                tokens = [read.pop(0) for _ in chunks]
                if min(tokens) < 0:
                    self._session.fail_without_choice(text.sequence)
                text.continued(chunks, tokens)
                self._branches.keep_(text)
            return
        width = len(read) // max(len(filling), 1)
        for index, text in enumerate(filling):
            *row, no_choice = read[index * width : (index + 1) * width]
            if no_choice:
                self._session.fail_without_choice(text.sequence)
            contents, first = [], 0
            for chunk in live[index]:
                length = len(text.chunks[chunk])
                contents.append(row[first + 1 : first + 1 + length])
                first += length + 2
            text.filled(live[index], contents)

    def _group(self, texts: Sequence[PlannedText]) -> tuple[Any, torch.Tensor]:
        """The cache rows of these sequences, and their numbers."""
        self._session.forwards += 1
        sequences = [text.sequence for text in texts]
        return rows_of(self._cache, sequences), to_device_async([sequences], self._device)[0]

    def _plan(self, texts: Sequence[PlannedText]) -> torch.Tensor:
        """``(len(texts),)``: the tokens after their rows, which are stored; -1 where logits gave no choice."""
        cache, sequences = self._group(texts)
        width = max(len(text.rows) for text in texts)
        lines = [
            [*text.rows, *[0] * (width - len(text.rows)), len(text.rows), text.cached + len(text.rows)]
            for text in texts
        ]
        table = to_device_async(lines, self._device)
        tokens, counts, positions = table[:, :width], table[:, width], table[:, width + 1 :]
        ragged = any(len(text.rows) < width for text in texts)
        layouts = tuple((text.round_lengths, True) for text in texts)
        entered = bool(texts[0].round_lengths)
        mask = _tail(layouts, self._options.sparse, self._device, self._inside) if entered else None
        hidden = self._model.hidden(tokens, cache=cache, counts=counts if ragged else None, mask=mask)
        last = hidden.gather(1, (counts - 1)[:, None, None].expand(-1, 1, hidden.shape[-1]))
        guesses = self._guess(last, sequences, OWN, positions, (self._options.mask_token,))
        return guesses.ids.masked_fill(guesses.probs.isnan(), -1)[:, 0]

    def _continue(self, branches: Branches, texts: Sequence[PlannedText], live: Sequence[list[int]]) -> torch.Tensor:
        """The next token of each of the chunks, text by text; -1 where logits gave no choice."""
        self._session.forwards += 1
        options, lines, allowed = self._options, [], []
        for text, chunks in zip(texts, live, strict=True):
            starts = text.chunk_starts
            for chunk in chunks:
                content = text.chunks[chunk]
                written = content.index(options.mask_token)
                token = content[written - 1] if written else options.tags.chunk_open
                position = text.cached + starts[chunk] + 1 + written
                lines.append([token, starts[chunk], position, text.number + 1, text.sequence])
                if self._session.grammar is not None:
                    check_room(self._session.grammar, text, chunk)
                    allowed.append(self._session.grammar.chunk(text.sequence, content)[:1])
        branches.grow_(texts)
        order = branches.rows(texts, live)
        table = to_device_async(lines, self._device)
        ranked = to_device_async([order.ranked, order.back], self._device)
        tokens, starts_of = (table[:, column : column + 1].index_select(0, ranked[0]) for column in (0, 1))
        hidden = branches.forward_(tokens, starts_of, order.rows).index_select(0, ranked[1])
        positions, number, sequences = table[:, 2:3], table[:, 3:4], table[:, 4]
        grammar_rows = torch.stack(allowed) if allowed else None
        guesses = self._guess(hidden, sequences, number, positions, self._banned, grammar_rows)
        return guesses.ids.masked_fill(guesses.probs.isnan(), -1)[:, 0]

    def _fill(
        self, texts: Sequence[PlannedText], live: Sequence[list[int]], quotas: Sequence[list[int]]
    ) -> torch.Tensor:
        """One step of all chunks: the canvases ``(len(texts), width)`` with what was committed, and whether a guess had
        no distribution, concatenated per row."""
        cache, sequences = self._group(texts)
        options, step = self._options, _StepTable(texts, live, quotas, self._options)
        table = to_device_async(step.lines, self._device)
        canvas, shifts, positions, offsets, windows, quota, stored, number = table.split(step.widths, 1)
        windows = windows.unflatten(1, (-1, 2))
        layouts = tuple((lengths, False) for lengths in step.layouts)
        hidden = self._model.hidden(
            canvas,
            cache=cache,
            counts=stored[:, 0],
            mask=_tail(layouts, options.sparse, self._device),
            positions=shifts if step.gaps else None,
        )
        shift = int(options.tags.predicts == "next")
        rows = (positions - shift).clamp(min=0)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        chunks = allowed = None
        if self._session.grammar is not None:
            chunks = ChunkGrammar(self._session, texts, live, options.mask_token, options.tags.pad)
            allowed = chunks.words(positions.shape[1])
        guesses = self._guess(hidden, sequences, number, offsets, self._banned, allowed)
        there = positions >= 0
        no_choice = ((guesses.probs.isnan() | (guesses.ids < 0)) & there).any(1, keepdim=True)
        if self._order == "uniform":
            scores = uniforms(self._guess.seeds_of(sequences), number, offsets.clamp(min=0), 1, ORDER)[..., 0]
        else:
            scores = {"entropy": -guesses.entropy, "confidence": guesses.probs, "margin": guesses.margin}[self._order]
        threshold = options.threshold
        limits: dict[str, Any] = {"quota": quota} if threshold is None else {"quota": 1, "threshold": threshold}
        canvas = canvas.clone()  # the op must not write to memory that it reads
        unmask_(
            canvas,
            guesses.ids,
            scores,
            mask_token=options.mask_token,
            positions=positions,
            windows=windows,
            backend=backend_of(scores.dtype),
            **limits,
        )
        if chunks is not None:

            def draw(text: int, row: int, allowed_row: torch.Tensor) -> int:
                text_slice, at = slice(text, text + 1), slice(row, row + 1)
                arguments = hidden[text_slice, at], sequences[text_slice], number[text_slice], offsets[text_slice, at]
                return int(self._guess(*arguments, self._banned, allowed_row[None, None]).ids.item())

            chunks.settle_(canvas, positions, scores, draw)
        return torch.cat([canvas, no_choice.to(canvas.dtype)], 1).flatten()


class _StepTable:
    """The host's inputs of a step, a line per text; see `Rounds._fill` for the columns."""

    def __init__(
        self, texts: Sequence[PlannedText], live: Sequence[list[int]], quotas: Sequence[list[int]], options: PlanOptions
    ) -> None:
        tags, mask = options.tags, options.mask_token
        self.layouts = [
            tuple(len(text.chunks[chunk]) + 2 for chunk in open_chunks) for text, open_chunks in zip(texts, live)
        ]
        masks = [sum(text.chunks[chunk].count(mask) for chunk in open_chunks) for text, open_chunks in zip(texts, live)]
        rows, maximum, chunks = max(map(sum, self.layouts)), max(masks), max(map(len, live))
        self.widths = [rows, rows, maximum, maximum, 2 * chunks, chunks, 1, 1]
        self.gaps = any(len(open_chunks) < len(text.chunks) for text, open_chunks in zip(texts, live))
        self.lines = []
        for text, open_chunks, quota in zip(texts, live, quotas):
            canvas: list[int] = []
            shifts: list[int] = []  # of these rows, from the cached length on
            positions: list[int] = []
            windows: list[int] = []
            starts = text.chunk_starts
            for chunk in open_chunks:
                content = text.chunks[chunk]
                first = len(canvas) + 1
                windows += [first, first + len(content)]
                masked = [first + index for index, token in enumerate(content) if token == mask]
                positions += masked
                canvas += [tags.chunk_open, *content, tags.chunk_close]
                shifts += range(starts[chunk], starts[chunk + 1])
            offsets = [text.cached + shifts[position] for position in positions]
            spare, empty = maximum - len(positions), chunks - len(open_chunks)
            line = [*canvas, *[tags.pad] * (rows - len(canvas)), *shifts, *[0] * (rows - len(shifts))]
            line += [*positions, *[-1] * spare, *offsets, *[-1] * spare]
            stored = 0  # rows of a step: the cache gets the finished chunks
            line += [*windows, *[0] * (2 * empty), *quota, *[0] * empty, stored, text.number + 1]
            self.lines.append(line)


@lru_cache(maxsize=64)
def _tail(
    layouts: tuple[tuple[tuple[int, ...], bool], ...],
    sparse: bool,
    device: torch.device,
    inside: Literal["full", "causal"] = "full",
) -> TilePlan:
    """The mask among the rows of rounds, from each sequence's lengths of chunks and whether a sync token follows
    them."""
    masks = [planned([Stage(0, chunks, sync)], sparse, inside=inside) for chunks, sync in layouts]
    length = max(mask.q_len for mask in masks)
    plans = [(mask if mask.q_len == length else pack([mask], length=length)).plan(64, 64, device) for mask in masks]
    return plans[0] if len(set(layouts)) == 1 else TilePlan.stack(plans)
