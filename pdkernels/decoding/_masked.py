"""What the decoders of masked-diffusion models share: the canvas of a batch, guesses for its open places, the record.

A canvas is a prompt and `max_new_tokens` open places behind it. They hold the mask token until a token is committed there,
for good. Every sequence stands at positions 0 .. of its own text, so a ragged batch needs no padding that a model would have
to ignore. A decoder is a loop around one forward:

    canvas = Canvas(session, mask_token, SamplingOptions(temperature, seed=seed))
    forward = WholeCanvas(session, canvas)
    while canvas.unfinished:
        canvas.begin()                                         # counts the forward
        windows = canvas.windows(first, last)                  # where tokens may be committed, from each prompt's end on
        places = canvas.open_places(windows, bound)            # the masked ones; bound: at most so many, which the host knows
        guesses = canvas.guess(forward(), places)              # head and statistics, on rows that may be committed alone
        canvas.commit(windows, places, guesses.ids, guesses.probs, quota=1)
        facts = canvas.poll(...)                               # the one read of the device in a step
    return canvas.finish()

A forward is whatever gives rows of hidden states: `WholeCanvas` computes all, `KeptCanvas` keeps what did not change much.
Nothing but `poll` and `finish` waits for the device. A step may go without its poll where the schedule alone decides
(`Canvas.needs_polls`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pdkernels._validation import check_type
from pdkernels.backends import backend_of
from pdkernels.decoding._sampling import ORDER, checked_mask_token, likeliest, uniforms, without_
from pdkernels.decoding._session import Session, is_end
from pdkernels.decoding.result import MaskedStep
from pdkernels.models.feature_cache import FeatureCache
from pdkernels.ops import TokenStatistics, Unmasked, token_statistics, unmask_


def share(masks: Any, steps: Any, step: Any) -> Any:
    """How many of `masks` forward number `step`, of `steps`, fills: an equal share, the first ones more. Ints or tensors of them.

    >>> [share(7, 3, step) for step in range(3)]
    [3, 2, 2]
    """
    return masks // steps + (step < masks % steps)


# Forwards that compute the texts with and without the prompt, whatever the interval of guidance.
_ALWAYS_GUIDED = 5


class SamplingOptions(NamedTuple):
    """How a token is guessed from its logits, and what its confidence is taken from."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None  # guess among so many of the likeliest tokens
    distribution: str = "model"  # confidence under the model's own distribution, or under that of the draw ("sampling")
    seed: int = 0
    banned: tuple[int, ...] = ()  # ids that are never guessed; the mask token is not in any case
    late: tuple[int, ...] = ()  # ids without confidence, and those of the others leave them out
    guidance: float = 0.0  # w of classifier-free guidance: hidden rows then come twice, given the prompt and without it


class Canvas:
    """The texts of a batch while they are being filled in.

    Attributes:
        mask_token: the id of open places.
        tokens: ``(batch, L)`` int64, prompts with their new places; zeros behind those.
        prompt_lengths, totals: ``(batch,)`` int64: the new places of a sequence are ``prompt_lengths .. totals - 1``.
        forward: ``(batch,)`` int64, number of each sequence's last forward, which names the random numbers of its guesses.
        going: ``(batch,)`` bool: sequences that have something open which they need.
        part: ``(batch,)`` bool: sequences that take part in the last forward.
        running: the host's copy of `going`, as of the last poll.
    """

    def __init__(self, session: Session, mask_token: int, sampling: SamplingOptions) -> None:
        model = session.model
        self.mask_token, self.sampling = mask_token, sampling
        self._session = session
        self._backend = backend_of(model.dtype)
        self._shift = 1 if model.config.predicts == "next" else 0  # a row is about the place so many behind it
        limit = session.max_new_tokens
        packed, self.prompt_lengths = session.packed_prompts(session.longest + limit, model.device)
        self.totals = self.prompt_lengths + limit
        self._place = torch.arange(packed.shape[1], device=packed.device)
        new = (self._place >= self.prompt_lengths[:, None]) & (self._place < self.totals[:, None])
        self.tokens = packed.masked_fill(new, mask_token)
        self._answer = self.prompt_lengths[:, None] + self._place[:limit]
        self._filled = (
            new.long() - 1
        )  # number of the forward that filled a place, 0 while it is open, -1 where it is not ours
        # On the device once: a copy from the host in every step would wait for it.
        self._ends, self._late = (
            torch.tensor(ids, dtype=torch.int64, device=packed.device) for ids in (session.end_tokens, sampling.late)
        )
        self.forward = torch.zeros_like(self.totals)
        self.going = torch.ones_like(self.totals, dtype=torch.bool)
        self.part = self.going
        self.running = [limit > 0] * session.batch
        self._told = [0] * session.batch  # tokens of each sequence that are on record
        self._records: list[_Record] = []

    @property
    def needs_polls(self) -> bool:
        """Whether every step has to be polled: something may end a sequence early, or somebody listens."""
        return bool(self._session.end_tokens) or self._session.listens

    @property
    def unfinished(self) -> bool:
        """Whether any sequence goes on, as of the last poll."""
        return any(self.running)

    def begin(self, part: torch.Tensor | None = None) -> None:
        """A forward begins. The sequences of `going` take part, or those of them that are in `part` ``(batch,)`` bool."""
        self._session.forwards += 1
        self.part = self.going if part is None else self.going & part
        self.forward = self.forward + self.part

    def windows(self, first: torch.Tensor | int, last: torch.Tensor | int) -> torch.Tensor:
        """``(batch, 2)``: places `first` up to `last`, counted from each prompt's end; none of a sequence that is done."""
        start = self.prompt_lengths + first
        return torch.stack([start, torch.where(self.going, self.prompt_lengths + last, start)], 1)

    def masked(self, windows: torch.Tensor) -> torch.Tensor:
        """``(batch, L)`` bool: open places in `windows`."""
        return (self._place >= windows[:, :1]) & (self._place < windows[:, 1:]) & (self.tokens == self.mask_token)

    def open_places(self, windows: torch.Tensor, bound: int) -> torch.Tensor:
        """The first `bound` open places in `windows`, ascending: ``(batch, bound)`` int64, -1 behind them."""
        open_ = self.masked(windows)
        rank = (open_.cumsum(1) - 1).clamp_(max=bound).masked_fill_(~open_, bound)
        places = rank.new_full((rank.shape[0], bound + 1), -1)
        return places.scatter_(1, rank, self._place.expand_as(rank))[:, :bound]

    def guess(self, hidden: torch.Tensor, places: torch.Tensor, first: torch.Tensor | None = None) -> TokenStatistics:
        """A token for each of `places` ``(batch, R)`` and how sure the model is of it; "no row" where a place is -1.

        Row i of `hidden` ``(batch, W, hidden_size)`` stands at place ``first[b] + i`` (None: i). With guidance `hidden` has the
        rows without the prompt behind those with it, and both maybe behind the rows of now: then they are of an earlier forward,
        whose difference guides this one.
        """
        model, sampling = self._session.model, self.sampling
        rows = (places - self._shift if first is None else places - self._shift - first[:, None]).clamp_(min=0)
        if sampling.guidance:
            rows = rows.repeat(len(hidden) // len(rows), 1)
        logits = model.logits(hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1])))
        if sampling.guidance:
            parts = logits.split(len(places))
            logits = parts[0] + sampling.guidance * (parts[-2] - parts[-1])
        guesses = self._statistics(logits, places, ())
        if sampling.late:
            sure = self._statistics(logits, places, sampling.late)
            guesses = guesses._replace(probs=sure.probs.masked_fill(is_end(guesses.ids, self._late), 0))
        return guesses

    def _statistics(self, logits: torch.Tensor, places: torch.Tensor, late: tuple[int, ...]) -> TokenStatistics:
        sampling = self.sampling
        row = torch.arange(places.numel(), device=places.device).view_as(places).masked_fill(places < 0, -1)
        suppress, top_p = (self.mask_token, *sampling.banned, *late), sampling.top_p
        if sampling.top_k is not None:  # with top_p, which is of the distribution of all tokens
            for token in suppress:
                without_(logits, token)
            logits, top_p = likeliest(logits, sampling.top_k, sampling.temperature, top_p), 1.0
        return token_statistics(
            logits,
            temperature=sampling.temperature,
            seed=sampling.seed,
            step=self.forward[:, None],
            positions=places,
            row_index=row,
            suppress=suppress,
            top_k=1,
            top_p=top_p,
            distribution=sampling.distribution,
            backend=self._backend,
        )

    def commit(
        self,
        windows: torch.Tensor,
        places: torch.Tensor,
        ids: torch.Tensor,
        confidence: torch.Tensor | None,
        **rule: Any,
    ) -> Unmasked:
        """Fill in the surest of `places` as the `rule` of `unmask_` says (quota, threshold, need, factor, strict).

        A `confidence` of None: any of them, at random.
        """
        if self._session.trace is not None:
            scores = self.turns(places) if confidence is None else confidence
            self._records.append(_Record(self.tokens.clone(), self.part, windows, places, scores))
        done = unmask_(
            self.tokens,
            ids,
            confidence,
            mask_token=self.mask_token,
            positions=places,
            windows=windows,
            seed=self.sampling.seed,
            step=self.forward,
            backend=self._backend,
            **rule,
        )
        now = (self._filled == 0) & (self.tokens != self.mask_token)
        self._filled = torch.where(now, self.forward[:, None], self._filled)
        return done

    def turns(self, places: torch.Tensor) -> torch.Tensor:
        """fp64 in (0, 1): the numbers that stand in for a confidence where chance decides."""
        return uniforms(self.sampling.seed, self.forward[:, None], places.clamp(min=0), 1, ORDER)[..., 0]

    def poll(self, *facts: torch.Tensor) -> list[list[int]]:
        """Reads `facts`, each ``(batch,)`` of ints, row by row; says which sequences are done, and hands their tokens on.

        Tokens with nothing open before them are final: they are on record from here on. A sequence is done with its last
        place, or with an end token among those.
        """
        answer = self.tokens.gather(1, self._answer)
        final = (answer == self.mask_token).cumsum(1) == 0
        end = final & is_end(answer, self._ends)
        ended = end.any(1)
        count = torch.where(ended, end.long().argmax(1) + 1, final.sum(1))
        self.going = self.going & ~ended & (count < answer.shape[1])
        rows = torch.cat([torch.stack([self.going, count, *facts], 1), answer], 1).tolist()
        self.running = [row[0] != 0 for row in rows]
        for sequence, (_, known, *rest) in enumerate(rows):
            if known > self._told[sequence]:
                new = rest[len(facts) + self._told[sequence] : len(facts) + known]
                self._session.emit(sequence, new, len(new))
                self._told[sequence] = known
        return [row[2 : 2 + len(facts)] for row in rows]

    def finish(self) -> int:
        """Leaves the session's record behind and returns in how many forwards its sequences took part, all together."""
        if self.unfinished:
            self.poll()
        rows = torch.cat([self.forward[:, None], self._filled.gather(1, self._answer)], 1).tolist()
        for sequence, (forwards, *filled) in enumerate(rows):
            accepted = [0] * forwards
            for number in filled:
                if number > 0:
                    accepted[number - 1] += 1
            self._session.accepted[sequence] = accepted
        if self._session.trace is not None:
            self._session.trace = self._trace()
        return sum(row[0] for row in rows)

    def _trace(self) -> list[list[MaskedStep]]:
        totals = self.totals.tolist()
        trace: list[list[MaskedStep]] = [[] for _ in totals]
        after = [*(record.tokens for record in self._records), self.tokens][1:]
        for record, following in zip(self._records, after, strict=True):
            for sequence, parts in enumerate(zip(*record.on_host(), following.tolist(), strict=True)):
                part, before, window, places, confidence, now = parts
                if part:
                    guessed = {place: sure for place, sure in zip(places, confidence, strict=True) if place >= 0}
                    committed = {place: now[place] for place in guessed if before[place] != now[place]}
                    trace[sequence].append(MaskedStep(before[: totals[sequence]], committed, guessed, tuple(window)))
        return trace


class _Record(NamedTuple):
    """A commit as the trace needs it: what stood there, who took part, where, and how sure of what."""

    tokens: torch.Tensor
    part: torch.Tensor
    windows: torch.Tensor
    places: torch.Tensor
    confidence: torch.Tensor

    def on_host(self) -> tuple[list[Any], ...]:
        return tuple(field.tolist() for field in (self.part, self.tokens, self.windows, self.places, self.confidence))


class WholeCanvas:
    """A forward over the canvases from their first place on: hidden states of all rows, nothing kept for the next one.

    With guidance there are as many sequences again, whose prompts are masked.

    Attributes:
        first_row: places that the first rows stand at; None: 0.
        width: places of a canvas.
    """

    first_row: torch.Tensor | None = None

    def __init__(self, session: Session, canvas: Canvas, page_size: int | None = None) -> None:
        self._canvas = canvas
        self._copies = 2 if canvas.sampling.guidance else 1
        self.width = canvas.tokens.shape[1]
        self._prompt = torch.arange(self.width, device=canvas.tokens.device) < canvas.prompt_lengths[:, None]
        self._start(session, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        self._model, self._cache = session.model, session.new_cache(page_size, copies=self._copies)
        self._starts = torch.zeros_like(self._canvas.totals).repeat(self._copies)
        self._ragged = session.ragged(self._canvas.totals) is not None

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, width, hidden_size)``. The canvases are cut at `ends` ``(batch,)`` and at `width`; None: they are not."""
        visible = self._canvas.totals if ends is None else ends.clamp(max=width)
        visible = visible.repeat(self._copies)
        counts = visible if self._ragged or ends is not None else None
        return self._model.recompute(
            self._tokens()[:, :width], self._cache, self._starts, counts=counts, visible=visible
        )

    def _tokens(self) -> torch.Tensor:
        tokens = self._canvas.tokens
        return (
            tokens
            if self._copies == 1
            else torch.cat([tokens, tokens.masked_fill(self._prompt, self._canvas.mask_token)])
        )


class KeptCanvas(WholeCanvas):
    """A forward that computes few rows and keeps the others in a `FeatureCache`: hidden states of rows that predict new places.

    With a `guidance_interval` above 1 the canvases whose prompts are masked have a cache of their own, and a forward only at
    each interval and in the first five. In between, the hidden states of that forward stand behind those of now.

    Its other `options` are those of the cache.
    """

    def __init__(
        self, session: Session, canvas: Canvas, page_size: int | None = None, guidance_interval: int = 1, **options: Any
    ) -> None:
        self._options, self._guidance_interval = options, guidance_interval
        super().__init__(session, canvas, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        model, prompt_lengths, parts = (
            session.model,
            self._canvas.prompt_lengths,
            1 if self._guidance_interval == 1 else self._copies,
        )
        self._together = self._copies // parts
        sizes = self._together * session.batch, session.longest, session.max_new_tokens
        self._cache, *self._free = (
            FeatureCache(model, *sizes, page_size=page_size, **self._options) for _ in range(parts)
        )
        self._prompt_lengths = prompt_lengths.repeat(self._together)
        self.first_row = prompt_lengths - int(model.config.predicts == "next")

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, new places, hidden_size)``. The canvases are cut at `ends` ``(batch,)``, behind their prompts."""
        visible, before = None if ends is None else ends.repeat(self._together), self._cache.step
        tokens = self._tokens()
        hidden = self._cache.forward(tokens[: len(self._prompt_lengths)], self._prompt_lengths, visible)
        if not self._free:
            return hidden
        if before % self._guidance_interval == 0 or before < _ALWAYS_GUIDED:
            free = self._free[0].forward(tokens[len(hidden) :], self._prompt_lengths, visible)
            self._compared = torch.cat([hidden, free])
            return self._compared
        return torch.cat([hidden, self._compared])


def checked_masked_model(op: str, session: Session, mask_token: int | None) -> int:
    """The mask token of the session's model, which fills in places that it sees both sides of."""
    model = session.model
    attention = getattr(model.config, "attention", None)
    check_type(
        attention == "bidirectional",
        op,
        "model",
        "be a masked-diffusion model (config.attention 'bidirectional')",
        type(model).__name__ if attention is None else f"attention {attention!r}",
    )
    return checked_mask_token(op, model, mask_token)


def blocks_of(limit: int, block_size: int | None) -> list[tuple[int, int]]:
    """First and last (exclusive) new place of each block; the last block may be shorter. None: one block.

    >>> blocks_of(10, 4), blocks_of(10, None)
    ([(0, 4), (4, 8), (8, 10)], [(0, 10)])
    """
    size = max(1, limit) if block_size is None else block_size
    return [(first, min(first + size, limit)) for first in range(0, limit, size)]
