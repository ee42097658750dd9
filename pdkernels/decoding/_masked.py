"""What the decoders of masked-diffusion models share: the canvas of a batch, guesses for its masked positions, the record.

A canvas is a prompt and `max_new_tokens` masked positions after it. They hold the mask token until a token is committed there,
for good. Every sequence has the positions 0 .. of its own text, so a ragged batch needs no padding that a model would have
to ignore. A decoder is a loop around one forward:

    canvas = Canvas(session, mask_token, SamplingOptions(seeds, temperature))
    forward = WholeCanvas(session, canvas)
    while canvas.unfinished:
        canvas.begin()                                  # counts the forward
        step = canvas.open(windows)                     # the masked positions of a window for each sequence
        guesses = canvas.guess(forward(), step)         # head and statistics, only of rows that may be committed
        canvas.commit(step, guesses.ids, guesses.probs, quota=1)
        canvas.poll()                                   # the one read of the device in a step
    return canvas.finish()

A forward is any function that returns hidden states: `WholeCanvas` computes all, `KeptCanvas` keeps what did not change much.
Only `poll` and `finish` wait for the device. After a poll the host knows the texts, so it finds masked positions itself and
sends them in one copy (`Canvas.open`). If the schedule alone decides, a step may skip its poll (`Canvas.needs_polls`),
and the device finds them (`Canvas.open_on_device`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pdkernels.backends import backend_of
from pdkernels.decoding._masked_model import check_alone
from pdkernels.decoding._masked_model import checked_masked_model as checked_masked_model
from pdkernels.decoding._masked_trace import Record, masked_trace
from pdkernels.decoding._sampling import ORDER, likeliest, noise, statistics, uniforms, without_
from pdkernels.decoding._session import Session, is_end, sent
from pdkernels.models.feature_cache import FeatureCache
from pdkernels.ops import TokenStatistics, Unmasked, token_statistics, unmask_


def share(masks: int, steps: int, step: int) -> int:
    """How many of `masks` forward number `step`, of `steps`, fills: an equal share, with the remainder in the first ones.

    >>> [share(7, 3, step) for step in range(3)]
    [3, 2, 2]
    """
    return masks // steps + (step < masks % steps)


# Forwards that compute the texts with and without the prompt, whatever the interval of guidance.
_ALWAYS_GUIDED = 5

# Positions from the end of the prompt: the first, and the one after the last.
Window = tuple[int, int]


class SamplingOptions(NamedTuple):
    """How a token is guessed from its logits, and how its confidence is measured."""

    seeds: torch.Tensor  # (batch,) int64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None  # guess among this many of the likeliest tokens
    distribution: str = "model"  # confidence under the model's own distribution, or under that of the draw ("sampling")
    banned: tuple[int, ...] = ()  # ids that are never guessed, besides the mask token
    late: tuple[int, ...] = ()  # ids of confidence 0, left out of the confidence of others
    guidance: float = 0.0  # w of classifier-free guidance: hidden rows then come twice, with and without the prompt


class Step(NamedTuple):
    """What a forward may fill."""

    windows: torch.Tensor  # (batch, 2) int64, in positions of the texts; empty for a sequence not taking part
    positions: torch.Tensor  # (batch, R) int64: masked ones in the window, ascending, then -1
    full: bool  # none of them is -1
    number: int | torch.Tensor  # of each sequence's forward, keys its random numbers; (batch, 1) where they differ
    columns: tuple[torch.Tensor, ...] = ()  # (batch,) each: further inputs from the host


class Canvas:
    """The texts of a batch while they are being filled in.

    Attributes:
        mask_token: the id of masked positions.
        tokens: ``(batch, L)`` int64, prompts with their new positions; zeros after those.
        prompt_lengths, totals: ``(batch,)`` int64: the new positions of a sequence are ``prompt_lengths .. totals - 1``.
        starts: `prompt_lengths` on the host.
        given: ``(batch, L)`` bool, what no forward fills.
        fact: ``(batch,)`` int64, a value that the next poll returns.
        active: sequences with masks that they still need, as of the last poll.
        answers: the new positions of each sequence, as of the last poll.
    """

    def __init__(self, session: Session, mask_token: int, sampling: SamplingOptions) -> None:
        model, limit = session.model, session.max_new_tokens
        self.mask_token, self.sampling = mask_token, sampling
        self._session, self._limit, self._limits = session, limit, session.limits
        self._backend = backend_of(model.dtype)
        self._shift = 1 if model.config.predicts == "next" else 0  # a row predicts the position this many after it
        width = session.longest + limit
        packed, self.prompt_lengths = session.packed_prompts(width + 2, model.device)
        self.totals = self.prompt_lengths + limit
        if session.tails is not None:
            self.totals = sent([[n + len(ids)] for n, ids in zip(session.limits, session.prompts)], packed.device)[:, 0]
        self.starts = [len(prompt) for prompt in session.prompts]
        self._position = torch.arange(width, device=packed.device)
        self.given = self._position < self.prompt_lengths[:, None]
        new = ~self.given & (self._position < self.totals[:, None])
        # One tensor, for one read.
        self.tokens, self.fact, self._broken = packed[:, :width], packed[:, width], packed[:, width + 1]
        self.tokens.masked_fill_(new, mask_token)
        self._known = packed[:, min(self.starts) :]
        # On the device once: a copy from the host in every step would wait.
        self._seeds = sampling.seeds.to(packed.device)
        self._late = torch.tensor(sampling.late, dtype=torch.int64, device=packed.device)
        self.active = [own > 0 for own in self._limits]
        self.answers = [[mask_token] * limit for _ in self.starts]
        if session.tails is not None:
            self._take_in(session.tails)
        self._recorded = [0] * session.batch  # tokens of each sequence on record
        self._numbers = [0] * session.batch  # guessing forwards of each sequence
        self._others = 0  # other forwards, summed over sequences
        self._part = self.active
        self._span: tuple[Window, Step, torch.Tensor] | None = None
        self._parts: list[list[bool]] = []  # of each commit
        self._committed: list[torch.Tensor] = []
        self._records: list[Record] = []

    def _take_in(self, tails: Sequence[list[int]]) -> None:
        """Writes what the prompts hold after their first masks; end tokens in it do not end the text."""
        texts = [prompt + tail for prompt, tail in zip(self._session.prompts, tails, strict=True)]
        width = self.tokens.shape[1]
        rows = sent([ids + [self.mask_token] * (width - len(ids)) for ids in texts], self.tokens.device)
        self.given |= rows != self.mask_token
        self.tokens.copy_(torch.where(rows != self.mask_token, rows, self.tokens))
        rest = zip(tails, self._limits, strict=True)
        self.answers = [tail + [self.mask_token] * (own - len(tail)) for tail, own in rest]

    @property
    def fills_prompts(self) -> bool:
        """Whether there are masks inside prompts: sequences then have different numbers of masked positions."""
        return self._session.tails is not None

    @property
    def needs_polls(self) -> bool:
        """Whether every step must be polled: a sequence may end early, or a callback wants tokens."""
        return bool(self._session.end_tokens) or self._session.listens or self.fills_prompts

    @property
    def unfinished(self) -> bool:
        """Whether any sequence continues, as of the last poll."""
        return any(self.active)

    def begin(self, part: Sequence[bool] | None = None) -> None:
        """Starts a forward, in which the sequences of `active` take part, or those of them in `part`."""
        self._session.forwards += 1
        self._part = self.active if part is None else [a and b for a, b in zip(self.active, part, strict=True)]
        self._numbers = [number + taking for number, taking in zip(self._numbers, self._part, strict=True)]

    def run_again(self) -> None:
        """The step needs one more forward of the sequences that take part: it is counted, and keys no random numbers."""
        self._session.forwards += 1
        self._others += sum(self._part)

    def is_open(self, sequence: int, first: int, last: int) -> bool:
        """Whether a sequence has a mask in a window, as of the last poll."""
        return self.mask_token in self.answers[sequence][first:last]

    def open_counts(self, first: int = 0, last: int | None = None) -> list[int]:
        """Masks in a window of each active sequence, as of the last poll."""
        answers = zip(self.active, self.answers, strict=True)
        return [on * answer[first:last].count(self.mask_token) for on, answer in answers]

    def _number(self) -> int | None:
        """Number of the forward, if it is the same for all sequences taking part."""
        numbers = {number for number, taking in zip(self._numbers, self._part, strict=True) if taking}
        return numbers.pop() if len(numbers) == 1 else None

    def open(self, windows: Sequence[Window], columns: Sequence[Sequence[int]] = ()) -> Step:
        """Masked positions in a window of each sequence, as of the last poll, and other `columns` of numbers, in one copy."""
        mask, lines, found = self.mask_token, [], []
        for start, answer, window, taking in zip(self.starts, self.answers, windows, self._part, strict=True):
            first, last = window if taking else (window[0], window[0])
            lines.append([start + first, start + last])
            found.append([start + n for n in range(max(first, 0), min(last, len(answer))) if answer[n] == mask])
        width = max(map(len, found))
        full = min(map(len, found)) == width
        for sequence, (line, positions) in enumerate(zip(lines, found, strict=True)):
            line += [column[sequence] for column in columns]
            line += positions + [-1] * (width - len(positions))
            line.append(self._numbers[sequence])
        packed = sent(lines, self.tokens.device)
        number, more = self._number(), 2 + len(columns)
        return Step(
            packed[:, :2],
            packed[:, more:-1],
            full,
            packed[:, -1:] if number is None else number,
            tuple(packed[:, 2:more].unbind(1)) if columns else (),
        )

    def open_on_device(self, first: int, last: int, bound: int, full: bool) -> Step:
        """The first `bound` masked positions of a window in all sequences; `full`: each one taking part has that many.

        For forwards in which all active sequences take part.
        """
        if self._span is None or self._span[0] != (first, last):
            ends = [min(last, own) if on else first for own, on in zip(self._limits, self.active, strict=True)]
            rows = [[n + first, n + end] for n, end in zip(self.starts, ends, strict=True)]
            windows = sent(rows, self.tokens.device)
            inside = (self._position >= windows[:, :1]) & (self._position < windows[:, 1:])
            # The largest ranks come first: positions ascend, and what is outside or not masked has rank 0.
            ranks = (self._position.shape[0] - self._position) * inside
            self._span = (first, last), Step(windows, windows, False, 0), ranks
        _, step, ranks = self._span
        top = torch.where(self.tokens == self.mask_token, ranks, 0).topk(bound).values
        positions = self._position.shape[0] - top
        full = full and all(self.active)
        if not full:
            positions = positions.masked_fill_(top == 0, -1)
        number = self._number()
        assert number is not None
        return step._replace(positions=positions, full=full, number=number)

    def guess(self, hidden: torch.Tensor, step: Step, first: torch.Tensor | None = None) -> TokenStatistics:
        """A token for each position of `step` and its confidence; meaningless where there is none.

        Row i of `hidden` ``(batch, W, hidden_size)`` is for position ``first[b] + i`` (None: i). With guidance `hidden` has the
        rows without the prompt after those with it, and optionally both after the current rows: then they are of an earlier
        forward, whose difference guides this one.
        """
        model, sampling, rows = self._session.model, self.sampling, step.positions
        if first is not None:
            rows = rows - first[:, None]
        if self._shift:
            rows = rows - self._shift
        if not step.full:
            rows = rows.clamp(min=0)
        if sampling.guidance:
            rows = rows.repeat(len(hidden) // len(rows), 1)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        if not (sampling.guidance or sampling.late or sampling.top_k):
            guesses = statistics(model, hidden, **self._options(step))
            self._look_for_nan(guesses, step)
            return guesses
        # These options need sums of logits, two distributions or the best tokens: the logits are computed once.
        logits = model.logits(hidden)
        if sampling.guidance:
            parts = logits.split(len(step.positions))
            logits = parts[0] + sampling.guidance * (parts[-2] - parts[-1])
        options = self._options(step)
        if sampling.top_k is not None:  # with top_p, which uses the distribution of all tokens
            for token in options["suppress"]:
                without_(logits, token)
            logits = likeliest(logits, sampling.top_k, sampling.temperature, options.pop("top_p"))
        guesses = token_statistics(logits, backend=self._backend, **options)
        self._look_for_nan(guesses, step)
        if sampling.late:
            options["suppress"] += sampling.late
            sure = token_statistics(logits, backend=self._backend, **options)
            guesses = guesses._replace(probs=sure.probs.masked_fill(is_end(guesses.ids, self._late), 0))
        return guesses

    def _look_for_nan(self, guesses: TokenStatistics, step: Step) -> None:
        """Records, for the next poll, sequences that have a guess without a probability."""
        broken = guesses.probs.isnan() if step.full else guesses.probs.isnan() & (step.positions >= 0)
        self._broken += broken.any(1)

    def _options(self, step: Step) -> dict[str, Any]:
        sampling = self.sampling
        options = {
            "suppress": (self.mask_token, *sampling.banned),
            "top_k": 1,
            "top_p": sampling.top_p,
            "distribution": sampling.distribution,
            **noise(sampling.temperature, self._seeds, step.number, step.positions),
        }
        if not step.full:
            row = torch.arange(step.positions.numel(), device=step.positions.device).view_as(step.positions)
            options["row_index"] = row.masked_fill_(step.positions < 0, -1)
        return options

    def commit(self, step: Step, ids: torch.Tensor, confidence: torch.Tensor | None, **rule: Any) -> Unmasked:
        """Fills in the most confident positions of `step` by the `rule` of `unmask_` (quota, threshold, need, factor, strict).

        A `confidence` of None: random positions.
        """
        if self._session.trace is not None:
            scores = self.turns(step) if confidence is None else confidence
            self._records.append(Record(self.tokens.clone(), self._part, step.windows, step.positions, scores))
        if confidence is None:
            number = step.number
            rule |= {"seed": self._seeds, "step": number if isinstance(number, int) else number[:, 0]}
        done = unmask_(
            self.tokens,
            ids,
            confidence,
            mask_token=self.mask_token,
            positions=step.positions,
            windows=step.windows,
            backend=self._backend,
            **rule,
        )
        self._parts.append(self._part)
        self._committed.append(done.committed)
        return done

    def turns(self, step: Step) -> torch.Tensor:
        """fp64 in (0, 1): the numbers that replace the confidence for random choices."""
        return uniforms(self._seeds[:, None], step.number, step.positions.clamp(min=0), 1, ORDER)[..., 0]

    def poll(self) -> list[int]:
        """Reads the texts and `fact`, which it returns; updates which sequences are done, and emits their tokens.

        Tokens with no mask before them are final and go on record. A sequence is done with its last
        position, or with an end token among those.
        """
        ends, shortest, facts = self._session.end_tokens, min(self.starts), []
        for sequence, row in enumerate(self._known.tolist()):
            first = self.starts[sequence] - shortest
            own = self._limits[sequence]
            answer = self.answers[sequence] = row[first : first + own]
            facts.append(row[-2])
            if not self.active[sequence]:
                continue
            if row[-1]:
                self._session.fail_not_numbers(sequence)
            recorded = known = self._recorded[sequence]
            ended = False
            tail = self._session.tails[sequence] if self._session.tails else []
            while not ended and known < own and answer[known] != self.mask_token:
                ended = known >= len(tail) and answer[known] in ends
                known += 1
            if known > recorded:
                self._session.given += sum(token != self.mask_token for token in tail[recorded:known])
                self._session.emit(sequence, answer[recorded:known], known - recorded)
                self._recorded[sequence] = known
            if ended or known == own:
                self.active = [on and other != sequence for other, on in enumerate(self.active)]
                self._span = None
        return facts

    def finish(self) -> int:
        """Completes the session's record and returns the forwards its sequences took part in, summed."""
        if self.unfinished:
            self.poll()
        if self._committed:
            for part, counts in zip(self._parts, torch.stack(self._committed).tolist(), strict=True):
                for sequence, count in enumerate(counts):
                    if part[sequence]:
                        self._session.accepted[sequence].append(count)
        if self._session.trace is not None:
            totals = [start + limit for start, limit in zip(self.starts, self._limits, strict=True)]
            self._session.trace = masked_trace(self._records, self.tokens, totals)
        return sum(self._numbers) + self._others


class WholeCanvas:
    """A forward over the whole canvases: hidden states of all rows, with nothing kept for the next one.

    With guidance the batch is doubled by copies with masked prompts.

    Attributes:
        first_row: positions of the first rows; None: 0.
        width: positions of a canvas.
    """

    first_row: torch.Tensor | None = None

    def __init__(self, session: Session, canvas: Canvas, page_size: int | None = None) -> None:
        self._canvas = canvas
        self._copies = 2 if canvas.sampling.guidance else 1
        self.width = canvas.tokens.shape[1]
        self._prompt = canvas.given
        self._start(session, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        self._model, self._cache = session.model, session.new_cache(page_size, copies=self._copies)
        self._visible = self._canvas.totals.repeat(self._copies)
        self._starts = torch.zeros_like(self._visible)
        self._counts = session.ragged(self._visible)

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, width, hidden_size)``. Without guidance the canvases are cut at `ends` ``(batch,)`` and at `width`; None: they
        are not."""
        visible, counts = self._visible, self._counts
        if ends is not None:
            visible = counts = ends.clamp(max=width)
        hidden: torch.Tensor = self._model.recompute(
            self._tokens()[:, :width], self._cache, self._starts, counts=counts, visible=visible
        )
        return hidden

    def _tokens(self) -> torch.Tensor:
        tokens = self._canvas.tokens
        if self._copies == 1:
            return tokens
        return torch.cat([tokens, tokens.masked_fill(self._prompt, self._canvas.mask_token)])


class KeptCanvas(WholeCanvas):
    """A forward that computes few rows and keeps the others in a `FeatureCache`: hidden states of the rows that predict new
    positions.

    With a `guidance_interval` above 1 the canvases with masked prompts have their own cache, and a forward only at
    each interval and in the first five. In between, the hidden states of that forward come after the current ones.

    Its other `options` are those of the cache.
    """

    def __init__(
        self, session: Session, canvas: Canvas, page_size: int | None = None, guidance_interval: int = 1, **options: Any
    ) -> None:
        self._options, self._guidance_interval = options, guidance_interval
        super().__init__(session, canvas, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        check_alone(session)
        model, parts = session.model, 1 if self._guidance_interval == 1 else self._copies
        self._together = self._copies // parts
        sizes = self._together * session.batch, session.longest, session.max_new_tokens
        self._cache, *self._free = (
            FeatureCache(model, *sizes, page_size=page_size, **self._options) for _ in range(parts)
        )
        self._prompt_lengths = self._canvas.prompt_lengths.repeat(self._together)
        self.first_row = self._canvas.prompt_lengths - int(model.config.predicts == "next")

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, new positions, hidden_size)``. The canvases are cut at `ends` ``(batch,)``, after their prompts."""
        visible, before = None if ends is None else ends.repeat(self._together), self._cache.step
        tokens = self._tokens()
        hidden: torch.Tensor = self._cache.forward(tokens[: len(self._prompt_lengths)], self._prompt_lengths, visible)
        if not self._free:
            return hidden
        if before % self._guidance_interval == 0 or before < _ALWAYS_GUIDED:
            self._canvas.run_again()
            free = self._free[0].forward(tokens[len(hidden) :], self._prompt_lengths, visible)
            self._compared = torch.cat([hidden, free])
            return self._compared
        return torch.cat([hidden, self._compared])


def blocks_of(limit: int, block_size: int | None) -> list[Window]:
    """First and last (exclusive) new position of each block; the last block may be shorter. None: one block.

    >>> blocks_of(10, 4), blocks_of(10, None)
    ([(0, 4), (4, 8), (8, 10)], [(0, 10)])
    """
    size = max(1, limit) if block_size is None else block_size
    return [(first, min(first + size, limit)) for first in range(0, limit, size)]
