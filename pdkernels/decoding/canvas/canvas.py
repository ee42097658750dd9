"""Shared by the decoders of masked-diffusion models: the canvas of a batch, guesses for its masked positions, the
record.

A canvas is a prompt and `max_new_tokens` masked positions after it. They hold the mask token until a token is committed
there, which is final. The positions of every sequence are those of its own text, 0 .. , so a ragged batch needs no
padding that a model would have to ignore. A decoder is a loop around one forward:

    canvas = Canvas(session, mask_token, GuessOptions(session.sampler))
    forward = WholeCanvas(session, canvas)
    while canvas.unfinished:
        canvas.begin()                                  # counts the forward
        step = canvas.open(windows)                     # the masked positions of a window for each sequence
        guesses = canvas.guess(forward(), step)         # head and statistics, only of rows that may be committed
        canvas.commit(step, guesses.ids, guesses.probs, quota=1)
        canvas.poll()                                   # the one read of the device in a step
    return canvas.finish()

A forward is any function that returns hidden states (`forward.py`): `WholeCanvas` computes all rows, `KeptCanvas`
reuses those that changed little. Only `poll` and `finish` wait for the device. After a poll the host knows the texts,
so it finds masked positions itself and sends them in one copy (`Canvas.open`). If the schedule alone decides, a step
may skip its poll (`Canvas.needs_polls`), and the device finds them (`Canvas.open_on_device`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pdkernels._philox import uniforms
from pdkernels._validation import check
from pdkernels.backends import backend_of
from pdkernels.decoding.canvas.checks import checked_masked_model as checked_masked_model
from pdkernels.decoding.canvas.record import CanvasRecord
from pdkernels.decoding.canvas.trace import Record, masked_trace
from pdkernels.decoding.grammar_fill import Guessed, joint_guesses, settle_
from pdkernels.generation.noise import ORDER, noise, statistics, suppress_
from pdkernels.generation.prefixes import Prefixes, Seen
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, is_end, to_device_async
from pdkernels.models.capabilities import rows_ahead
from pdkernels.ops import TokenStatistics, Unmasked, token_statistics, unmask_


def share(masks: int, steps: int, step: int, spread: bool = False) -> int:
    """The number of `masks` that forward `step` of `steps` fills: equal shares, with the remainder in the first
    forwards, or `spread` so that after n of them ``n * masks // steps`` are filled.

    >>> [share(7, 4, step) for step in range(4)], [share(7, 4, step, spread=True) for step in range(4)]
    ([2, 2, 2, 1], [1, 2, 2, 2])
    """
    if spread:
        return masks * (step + 1) // steps - masks * step // steps
    return masks // steps + (step < masks % steps)


# Positions from the end of the prompt: the first, and the one after the last.
Window = tuple[int, int]


class GuessOptions(NamedTuple):
    """How tokens are guessed, and their confidence measured."""

    sampler: Sampler
    distribution: str = "model"  # confidence under the model's own distribution, or under that of the draw ("sampling")
    banned: tuple[int, ...] = ()  # ids that are never guessed, besides the mask token
    late: tuple[int, ...] = ()  # ids of confidence 0, left out of the confidence of others
    guidance: float = 0.0  # w of classifier-free guidance: hidden rows then come twice, with and without the prompt


class Step(NamedTuple):
    """The positions that a forward may fill."""

    windows: torch.Tensor  # (batch, 2) int64, in positions of the texts; empty for a sequence not taking part
    positions: torch.Tensor  # (batch, R) int64: masked ones in the window, ascending, then -1
    full: bool  # none of them is -1
    number: int | torch.Tensor  # of each sequence's forward, keys its random numbers; (batch, 1) where they differ
    columns: tuple[torch.Tensor, ...] = ()  # (batch,) each: further inputs from the host
    seen: Seen | None = None  # for a grammar: the canvases, read before the forward


class Canvas(CanvasRecord):
    """The texts of a batch while they are being filled in.

    Attributes:
        tokens: ``(batch, L)`` int64, prompts with their new positions; zeros after those.
        prompt_lengths, totals: ``(batch,)`` int64: the new positions of a sequence are ``prompt_lengths .. totals -
            1``.
        given: ``(batch, L)`` bool, the positions that no forward fills.
        fact: ``(batch,)`` int64, a value that the next poll returns.
        broken: ``(batch,)`` int64, not 0 once a guess had no probability.
        seeds: ``(batch,)`` int64, of sampling and random orders.
    """

    def __init__(self, session: Session, mask_token: int, sampling: GuessOptions) -> None:
        super().__init__(session, mask_token)
        model, self.limit = session.model, session.max_new_tokens
        self.sampling = sampling
        self._backend = backend_of(model.dtype)
        self._shift = rows_ahead(model)  # a row predicts the position this many after it
        width = session.longest + self.limit
        self._packed, self.prompt_lengths = session.packed_prompts(width + 2, model.device)
        self._position = torch.arange(width, device=model.device)
        # One tensor, for one read.
        self.tokens, self.fact, self.no_choice = self._packed[:, :width], self._packed[:, width], self._packed[:, -1]
        self.given = self._position < self.prompt_lengths[:, None]
        self.totals = self.prompt_lengths + self.limit
        if session.tails is not None:
            lengths = [[n + len(ids)] for n, ids in zip(session.limits, session.prompts, strict=True)]
            self.totals = to_device_async(lengths, model.device)[:, 0]
        self._mask_new()
        self._known = self._packed[:, min(self.starts) :]
        # On the device once: a copy from the host in every step would wait.
        self.seeds = session.seeds.to(model.device)
        self._late = torch.tensor(sampling.late, dtype=torch.int64, device=model.device)
        if session.tails is not None:
            self._take_in(session.tails)
        self._span: tuple[Window, Step, torch.Tensor] | None = None
        self._parts: list[list[bool]] = []  # of each commit
        self._committed: list[torch.Tensor] = []
        self._records: list[Record] = []
        self._guessed: Guessed | None = None  # of the last forward, under a grammar
        self._plain: torch.Tensor | None = None  # logits of its guesses before filters, if log-probabilities are wanted
        self.logits_hook: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """See `Steps.state`."""
        return self._packed, self.prompt_lengths, self.totals, self.given

    def restart(self, session: Session) -> None:
        """Puts the prompts of another session, no longer ones, in the place of these: on the device, not in the
        record."""
        self.starts = [len(prompt) for prompt in session.prompts]
        packed, lengths = session.packed_prompts(self._packed.shape[1], self.tokens.device)
        self._packed.copy_(packed)
        self.prompt_lengths.copy_(lengths)
        self.totals.copy_(lengths + self.limit)
        self.given.copy_(self._position < self.prompt_lengths[:, None])
        self._mask_new()

    def _mask_new(self) -> None:
        new = ~self.given & (self._position < self.totals[:, None])
        self.tokens.masked_fill_(new, self.mask_token)

    def _take_in(self, tails: Sequence[list[int]]) -> None:
        """Writes the prompts' tokens after their first masks; end tokens among them do not end the text."""
        texts = [prompt + tail for prompt, tail in zip(self._session.prompts, tails, strict=True)]
        width = self.tokens.shape[1]
        rows = to_device_async([ids + [self.mask_token] * (width - len(ids)) for ids in texts], self.tokens.device)
        self.given |= rows != self.mask_token
        self.tokens.copy_(torch.where(rows != self.mask_token, rows, self.tokens))

    @property
    def fills_prompts(self) -> bool:
        """Whether there are masks inside prompts: sequences then have different numbers of masked positions."""
        return self._session.tails is not None

    @property
    def needs_polls(self) -> bool:
        """Whether every step must be polled: a sequence may end early, or a callback wants tokens."""
        session = self._session
        return bool(session.end_tokens) or session.stops.any or session.listens or self.fills_prompts

    def _number(self) -> int | None:
        """Number of the forward, if it is the same for all sequences taking part."""
        numbers = {number for number, taking in zip(self._numbers, self._part, strict=True) if taking}
        return numbers.pop() if len(numbers) == 1 else None

    def open(self, windows: Sequence[Window], columns: Sequence[Sequence[int]] = ()) -> Step:
        """Masked positions in a window of each sequence, as of the last poll, and other `columns` of numbers, in one
        copy."""
        mask, lines, masked = self.mask_token, [], []
        for start, answer, window, taking in zip(self.starts, self.answers, windows, self._part, strict=True):
            first, last = window if taking else (window[0], window[0])
            lines.append([start + first, start + last])
            masked.append([start + n for n in range(max(first, 0), min(last, len(answer))) if answer[n] == mask])
        width = max(map(len, masked))
        full = min(map(len, masked)) == width
        for sequence, (line, positions) in enumerate(zip(lines, masked, strict=True)):
            line += [column[sequence] for column in columns]
            line += positions + [-1] * (width - len(positions))
            line.append(self._numbers[sequence])
        packed = to_device_async(lines, self.tokens.device)
        number, last_column = self._number(), 2 + len(columns)
        return self._read(
            Step(
                packed[:, :2],
                packed[:, last_column:-1],
                full,
                packed[:, -1:] if number is None else number,
                tuple(packed[:, 2:last_column].unbind(1)) if columns else (),
            )
        )

    def open_on_device(self, first: int, last: int, bound: int, full: bool) -> Step:
        """The first `bound` masked positions of a window in all sequences; `full`: each one taking part has that many.

        For forwards in which all active sequences take part.
        """
        if self._span is None or self._span[0] != (first, last):
            ends = [min(last, limit) if on else first for limit, on in zip(self._limits, self.active, strict=True)]
            rows = [[n + first, n + end] for n, end in zip(self.starts, ends, strict=True)]
            windows = to_device_async(rows, self.tokens.device)
            in_window = (self._position >= windows[:, :1]) & (self._position < windows[:, 1:])
            # The largest ranks come first: positions ascend, and what is outside or not masked has rank 0.
            ranks = (self._position.shape[0] - self._position) * in_window
            self._span = (first, last), Step(windows, windows, False, 0), ranks
        _, step, ranks = self._span
        top = torch.where(self.tokens == self.mask_token, ranks, 0).topk(bound).values
        positions = self._position.shape[0] - top
        full = full and all(self.active)
        if not full:
            positions = positions.masked_fill_(top == 0, -1)
        number = self._number()
        assert number is not None
        return self._read(step._replace(positions=positions, full=full, number=number))

    def _read(self, step: Step) -> Step:
        """With what the grammar needs to know before the forward."""
        if self._session.grammar is None:
            return step
        return step._replace(seen=self._prefixes(step).read().seen)

    def guess(self, hidden: torch.Tensor, step: Step, first: torch.Tensor | None = None) -> TokenStatistics:
        """A token for each position of `step` and its confidence; meaningless where there is none.

        Row i of `hidden` ``(batch, W, hidden_size)`` is for position ``first[b] + i`` (None: i). With guidance `hidden`
        has the rows without the prompt after those with it, and optionally both after the current rows: then they are
        of an earlier forward, whose difference guides this one.
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
        filters = self._session.filters
        cuts = sampling.sampler.cuts
        wants_logprobs = self._session.likely is not None
        if not (sampling.guidance or sampling.late or cuts or filters.any or self.logits_hook or wants_logprobs):
            guesses = statistics(model, hidden, **self._options(step))
            self._look_for_broken(guesses, step)
            return guesses
        # These options need sums of logits, two distributions or the best tokens: the logits are computed once.
        logits = model.logits(hidden)
        if wants_logprobs:
            streams = logits.split(len(step.positions))
            self._plain = (
                logits.clone() if len(streams) == 1 else streams[0] + sampling.guidance * (streams[-2] - streams[-1])
            )
        if filters.any and not sampling.guidance:
            logits = filters.apply(logits, self._prefixes(step))
        if sampling.guidance:
            # Penalties belong to the model. What is impossible stays so: two -inf have no difference.
            if filters.finite.any:
                logits = filters.finite.apply(logits, self._prefixes(step, len(logits) // len(self.tokens)))
            streams = logits.split(len(step.positions))
            logits = streams[0] + sampling.guidance * (streams[-2] - streams[-1])
            if filters.exclusions.any:
                logits = filters.exclusions.apply(logits, self._prefixes(step))
        if self.logits_hook is not None:
            before = logits.shape
            logits = self.logits_hook(self._session.forwards - 1, self.tokens, step.positions, logits)
            actual: Any = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            expectation = f"return logits of shape {tuple(before)}"
            check(actual == tuple(before), "decoding.dream", "logits_hook", expectation, actual)
        if self._session.grammar is not None:
            self._guessed = self._what_is_guessed(step, logits)
        options = self._options(step)
        cut_logits = self._cut(logits, options) if cuts else logits
        guesses = token_statistics(cut_logits, backend=self._backend, **options)
        if cuts and sampling.distribution == "model":
            guesses = self._as_model(guesses, logits)
        self._look_for_broken(guesses, step)
        if self._guessed is not None:
            assert self._session.grammar is not None
            canvases = [canvas.tolist() for canvas in self._canvases()]
            ids, probs = joint_guesses(self._session.grammar, canvases, self._guessed, guesses.ids, guesses.probs)
            guesses = guesses._replace(ids=ids, probs=probs)
        if sampling.late:
            options["suppress"] += sampling.late
            unlate = token_statistics(cut_logits, backend=self._backend, **options)
            if cuts:
                for token in sampling.late:
                    suppress_(logits, token)
                unlate = self._as_model(unlate, logits)
            guesses = guesses._replace(probs=unlate.probs.masked_fill(is_end(guesses.ids, self._late), 0))
        return guesses

    def _cut(self, logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """`logits` without what those filters drop that `token_statistics` does not have for all rows; takes from
        `options` what is done here. Writes to `logits`."""
        for token in options["suppress"]:
            suppress_(logits, token)
        logits, remaining = self.sampling.sampler.cut(logits)
        for name in ("top_p", "min_p"):
            del options[name]
        options |= remaining
        return logits

    def _as_model(self, guesses: TokenStatistics, logits: torch.Tensor) -> TokenStatistics:
        """`guesses` from filtered logits, with their confidence in the distribution before."""
        unfiltered = token_statistics(logits, top_k=1, backend=self._backend)
        probs = guesses.probs * (guesses.logsumexp - unfiltered.logsumexp).exp()
        return guesses._replace(
            probs=probs.masked_fill(guesses.ids < 0, 0), margin=unfiltered.margin, entropy=unfiltered.entropy
        )

    def _canvases(self) -> list[torch.Tensor]:
        """The positions of each sequence after its prompt."""
        # Not those of the host: a sequence that joins a running batch is on the device only.
        bounds = zip(self.tokens, self.prompt_lengths.tolist(), self._limits, strict=True)
        return [row[start : start + limit] for row, start, limit in bounds]

    def _what_is_guessed(self, step: Step, logits: torch.Tensor) -> Guessed:
        """For a grammar: the guesses of a forward, and how a token is drawn again from what is left of a row."""
        sampling, backend = self.sampling, self._backend

        def draw(sequence: int, row: int, allowed: torch.Tensor) -> torch.Tensor:
            options = self._options(step._replace(full=True))
            for name in ("seed", "step", "positions"):
                value = options.get(name)
                if isinstance(value, torch.Tensor):
                    value = value.expand(len(step.positions), -1)[sequence : sequence + 1]
                    options[name] = value[:, row : row + 1] if value.shape[1] > 1 else value
            if sampling.sampler.cuts:
                allowed = self._cut(allowed, options)
            return token_statistics(allowed, backend=backend, **options).ids

        places = (step.positions - self.prompt_lengths[:, None]).masked_fill(step.positions < 0, -1)
        return Guessed(logits, places, [[] for _ in self.starts], draw)

    def _prefixes(self, step: Step, copies: int = 1) -> Prefixes:
        """What the rows of `step` see: the whole canvas; the last of several `copies` is without the prompt."""
        text, prompt = self.tokens.repeat(copies, 1), self.given.repeat(copies, 1)
        filled = (self._position < self.totals[:, None]).repeat(copies, 1) & (text != self.mask_token)
        if copies > 1:
            filled[-len(self.tokens) :] &= ~self.given
        positions, size = step.positions.repeat(copies, 1), len(text)
        number = (positions - self.prompt_lengths.repeat(copies)[:, None]).clamp(min=0)
        return Prefixes(
            text,
            filled,
            ~prompt,
            self.totals.repeat(copies),
            text.new_zeros(size, 0),
            filled.new_zeros(size, positions.shape[1], 0),
            filled.new_ones(size),
            number,
            filled.new_ones(positions.shape),
            self._session.model.config.vocab_size,
            self.mask_token,
            seen=step.seen if copies == 1 else None,
        )

    def _look_for_broken(self, guesses: TokenStatistics, step: Step) -> None:
        """Records, for the next poll, sequences that have a guess without a probability."""
        no_choice = guesses.probs.isnan() | (guesses.ids < 0)
        self.no_choice += (no_choice if step.full else no_choice & (step.positions >= 0)).any(1)

    def _options(self, step: Step) -> dict[str, Any]:
        sampling = self.sampling
        options = {
            "suppress": (self.mask_token, *sampling.banned),
            "top_k": 1,
            "top_p": sampling.sampler.top_p,
            "min_p": sampling.sampler.min_p,
            "distribution": sampling.distribution,
            **noise(sampling.sampler.temperature, self.seeds, step.number, step.positions),
        }
        if not step.full:
            row = torch.arange(step.positions.numel(), device=step.positions.device).view_as(step.positions)
            options["row_index"] = row.masked_fill_(step.positions < 0, -1)
        return options

    def commit(
        self,
        step: Step,
        ids: torch.Tensor,
        confidence: torch.Tensor | None,
        displayed: torch.Tensor | None = None,
        **rule: Any,
    ) -> Unmasked:
        """Fills in the most confident positions of `step` by the `rule` of `unmask_` (quota, threshold, min_count,
        factor, strict).

        A `confidence` of None: random positions. The trace has `displayed` in place of it, if that is given.
        """
        if self._session.trace is not None:
            scores = self.turns(step) if confidence is None else confidence if displayed is None else displayed
            self._records.append(Record(self.tokens.clone(), self._part, step.windows, step.positions, scores))
        done = self.fill(step, ids, confidence, **rule)
        self._parts.append(self._part)
        self._committed.append(done.committed)
        return done

    def fill(
        self,
        step: Step,
        ids: torch.Tensor,
        confidence: torch.Tensor | None,
        ranking: torch.Tensor | None = None,
        **rule: Any,
    ) -> Unmasked:
        """`commit` without the record. `ranking`: the order in which a grammar takes positions; None: by `confidence`."""
        before = None if self._guessed is None else [canvas.tolist() for canvas in self._canvases()]
        if ranking is None:
            ranking = self.turns(step) if confidence is None and before is not None else confidence
        if confidence is None:
            number = step.number
            rule |= {"seed": self.seeds, "step": number if isinstance(number, int) else number[:, 0]}
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
        if before is not None and self._guessed is not None and ranking is not None:
            assert self._session.grammar is not None
            settle_(self._session.grammar, self._canvases(), before, self._guessed, ranking)
        if self._plain is not None:
            tokens = self.tokens.gather(1, step.positions.clamp(min=0))
            self._session.note(self._plain, tokens, step.positions, (step.positions >= 0) & (tokens != self.mask_token))
        return done

    def turns(self, step: Step) -> torch.Tensor:
        """fp64 in (0, 1): the numbers that replace the confidence for random choices."""
        return uniforms(self.seeds[:, None], step.number, step.positions.clamp(min=0), 1, ORDER)[..., 0]

    def rewrite(self, texts: torch.Tensor, last: Sequence[bool]) -> None:
        """Takes over `texts` ``(batch, L)`` of the sequences that take part, but not prompts, and no masks in the
        `last` step of one."""
        actual: Any = tuple(texts.shape) if isinstance(texts, torch.Tensor) else type(texts).__name__
        expectation = f"return texts of shape {tuple(self.tokens.shape)}"
        check(actual == tuple(self.tokens.shape), "decoding.dream", "tokens_hook", expectation, actual)
        flags = to_device_async(
            [[on, final] for on, final in zip(self._part, last, strict=True)], self.tokens.device
        ).bool()
        new = ~self.given & (self._position < self.totals[:, None]) & flags[:, :1]
        new &= ~(flags[:, 1:] & (texts == self.mask_token))
        self.tokens.copy_(torch.where(new, texts, self.tokens))

    def reopen(self, hidden: torch.Tensor, window: Window, below: float, first: torch.Tensor | None = None) -> None:
        """Puts masks over tokens in a window that the forward of `hidden` thinks less probable than `below`, each
        position once. Rows are as in `guess`; the tokens are those of the last poll."""
        for sequence, (answer, taking) in enumerate(zip(self.answers, self._part, strict=True)):
            candidates = range(window[0], min(window[1], len(answer)) if taking else 0)
            filled = [n for n in candidates if answer[n] != self.mask_token and n not in self._doubted[sequence]]
            self._asked[sequence] = filled
        width = max(map(len, self._asked))
        if width == 0:
            return
        lines = [
            [start + n for n in filled] + [-1] * (width - len(filled))
            for start, filled in zip(self.starts, self._asked, strict=True)
        ]
        positions = to_device_async(lines, self.tokens.device)
        rows = positions - self._shift - (0 if first is None else first[:, None])
        hidden = hidden.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = suppress_(self._session.model.logits(hidden), self.mask_token).double()
        at = positions.clamp(min=0)
        current = self.tokens.gather(1, at)
        log_probs = logits.log_softmax(-1).gather(-1, current[..., None])[..., 0]
        low = (positions >= 0) & (log_probs < math.log(max(below, 1e-300)))
        opened = torch.zeros_like(self.tokens).scatter_add_(1, at, low.to(self.tokens.dtype))
        self.tokens.masked_fill_(opened > 0, self.mask_token)

    def edit(
        self, hidden: torch.Tensor, places: Sequence[Sequence[int]], above: float, first: torch.Tensor | None = None
    ) -> None:
        """Replaces tokens at new positions `places` of each sequence, which hold one, where the forward of `hidden` has
        another guess whose confidence is above `above`. Rows are as in `guess`."""
        width = max(map(len, places))
        if width == 0:
            return
        pairs = zip(self.starts, places, strict=True)
        lines = [[start + n for n in inside] + [-1] * (width - len(inside)) for start, inside in pairs]
        positions = to_device_async(lines, self.tokens.device)
        number = torch.zeros_like(positions[:, :1])  # nothing is drawn
        step = Step(torch.zeros_like(positions[:, :2]), positions, min(map(len, places)) == width, number)
        guesses = self.guess(hidden, step, first)
        at = positions.clamp(min=0)
        current = self.tokens.gather(1, at)
        new = (positions >= 0) & (guesses.ids != current) & (guesses.probs > above)
        self.tokens.scatter_(1, at, torch.where(new, guesses.ids, current))

    def overwrite(self, step: Step, confidence: torch.Tensor, texts: torch.Tensor, changed: torch.Tensor) -> None:
        """Puts `texts` ``(batch, R)`` at the positions of `step`, as a commit of `changed` ``(batch,)`` positions each."""
        if self._session.trace is not None:
            self._records.append(Record(self.tokens.clone(), self._part, step.windows, step.positions, confidence))
        self.put(step, texts)
        self._parts.append(self._part)
        self._committed.append(changed)

    def put(self, step: Step, texts: torch.Tensor) -> None:
        """`overwrite` without the record."""
        at = step.positions.clamp(min=0)
        self.tokens.scatter_(1, at, torch.where(step.positions >= 0, texts, self.tokens.gather(1, at)))

    def poll(self) -> list[int]:
        """Reads the texts and `fact`, which it returns; updates which sequences are done, and emits their tokens."""
        shortest, values, before = min(self.starts), [], self.active
        for sequence, row in enumerate(self._known.tolist()):
            first = self.starts[sequence] - shortest
            self.look(sequence, row[first : first + self._limits[sequence]], row[-1] != 0)
            values.append(row[-2])
        if self.active != before:
            self._span = None
        return values

    def finish(self) -> int:
        """Completes the session's record and returns the forwards its sequences took part in, summed."""
        if self.unfinished:
            self.poll()
        if self._committed:
            for taking, counts in zip(self._parts, torch.stack(self._committed).tolist(), strict=True):
                for sequence, count in enumerate(counts):
                    if taking[sequence]:
                        self._session.accepted[sequence].append(count)
        if self._session.trace is not None:
            totals = [start + limit for start, limit in zip(self.starts, self._limits, strict=True)]
            self._session.trace = masked_trace(self._records, self.tokens, totals)
        return self.taken_part


def blocks_of(limit: int, block_size: int | None) -> list[Window]:
    """First and last (exclusive) new position of each block; the last block may be shorter. None: one block.

    >>> blocks_of(10, 4), blocks_of(10, None)
    ([(0, 4), (4, 8), (8, 10)], [(0, 10)])
    """
    size = max(1, limit) if block_size is None else block_size
    return [(first, min(first + size, limit)) for first in range(0, limit, size)]
