"""The diffusion-forcing sampler of recurrent-depth models: many positions at once, each a few recurrences behind the
previous one.

Source: "Efficient parallel samplers for recurrent-depth models and their connection to diffusion language models",
Algorithms 1 and 2, equations 1 to 3. The plain form is reference/recurrent_diffusion.py; both take the same steps,
sample the same tokens and freeze the same rows. Differences between the paper and its code are described there.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding.recurrent._parts import (
    NewState,
    Sampling,
    Schedule,
    after_prompts,
    checked_core,
    checked_model,
    checked_recurrences,
    new_cache,
)
from pdkernels.decoding.recurrent._wave import Mixer, Rule, Wave, WaveOptions
from pdkernels.decoding.steps import Entry, Row, Rows, Steps, decoder, float_of, record_first, unfinished
from pdkernels.generation.noise import checked_flag, checked_name, checked_number, checked_size
from pdkernels.generation.params import MAX_POSITIONS, MAX_SCALE
from pdkernels.generation.session import Session
from pdkernels.generation.traces import RecurrentStep

_OP = "decoding.recurrent_diffusion"

Exit = Literal["latent-diff", "fixed", "token-stability", "latent-acceleration"]
_COMPARED = {"latent-diff": 1, "latent-acceleration": 2}  # earlier states that an exit test needs


class WaveSteps(Steps):
    """A step refines a wave of positions, freezes those at its front that are ready and appends new ones.

    An entry: rows of a sequence's wave, how many were frozen; predictions and inputs of the rows, their distances as
    bits of fp64.

    Args:
        inner_recurrence: recurrences per step.
        threshold: a row is ready if its state moved by less than this since the last step, relative to its norm.
        exit: what makes a row ready: "latent-diff" that distance; "latent-acceleration" the second difference of three
            steps; "token-stability" a prediction that has stayed the same for `stability` steps; "fixed" its
            `recurrences` (Algorithm 1).
        noise: share of fresh noise that a step mixes into a state, a new one too (line 7 of both algorithms).
        schedule: how that share decays with a position's recurrences: "linear" (None), down to 0 after `recurrences`,
            "harmonic", "root", or "constant" not at all.
        mixer: how noise is mixed in: "linear", or "sqrt", which keeps the variance.
        momentum: share of the last step's embedding in a row's embedding.
        headway: how many positions a step appends.
        max_wavefront: maximum number of active positions. 1 is autoregressive decoding with adaptive exits.
        rule: "prefix" freezes the rows before the first one that is not ready, "last" all rows up to the last one that
            is.
        new_state: a new row starts "fresh" from the state of its position or "copied" from that of the previous row.
        keep_changed: never freeze a row whose input changed in this step, because its K and V are those of the old
            token.
        recurrences: recurrences of the prompt; None: as many as the model was trained for.
        max_recurrences: a row is ready after this many at the latest; None: 4 * `recurrences`; 0: no limit.
        stability: steps for which a prediction must stay the same; None: ``recurrences // inner_recurrence + 1``.
        kept_recurrences: as elsewhere; those of a step count from 0 in every step, as in the released code.
        seed: seed of initial states, noise, samples and guesses.
    """

    shows_provisional = True

    def __init__(
        self,
        session: Session,
        *,
        inner_recurrence: int = 4,
        threshold: float = 0.03,
        exit: Exit = "latent-diff",
        noise: float = 0.0,
        schedule: Schedule | None = None,
        mixer: Mixer = "linear",
        momentum: float = 0.1,
        headway: int = 1,
        max_wavefront: int = 128,
        rule: Rule = "prefix",
        new_state: NewState = "fresh",
        keep_changed: bool = True,
        init_scale: float = 1.0,
        kept_recurrences: int = 1,
        recurrences: int | None = None,
        max_recurrences: int | None = None,
        stability: int | None = None,
        page_size: int | None = None,
    ) -> None:
        model = checked_model(_OP, session)
        recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
        sampling = Sampling.of(session)
        for name, size in (
            ("inner_recurrence", inner_recurrence),
            ("headway", headway),
            ("max_wavefront", max_wavefront),
        ):
            checked_size(_OP, name, size)
        checked_name(_OP, "exit", exit, get_args(Exit))
        headway = min(headway, max_wavefront, max(1, session.max_new_tokens))  # more does not fit in the wave
        if max_recurrences is not None:
            check_type(
                type(max_recurrences) is int, _OP, "max_recurrences", "be an int", type(max_recurrences).__name__
            )
            check(max_recurrences >= 0, _OP, "max_recurrences", "be at least 0", max_recurrences)
            check(
                max_recurrences <= MAX_POSITIONS, _OP, "max_recurrences", f"be at most {MAX_POSITIONS}", max_recurrences
            )
        maximum = 4 * recurrences if max_recurrences is None else max_recurrences
        if exit == "fixed":
            maximum = min(recurrences, maximum) if maximum > 0 else recurrences
        steady = recurrences // inner_recurrence + 1 if stability is None else checked_size(_OP, "stability", stability)
        core = checked_core(_OP, model, max(recurrences, inner_recurrence), init_scale, kept_recurrences)
        options = WaveOptions(
            inner_recurrence=inner_recurrence,
            threshold=checked_number(_OP, "threshold", threshold),
            noise=checked_number(_OP, "noise", noise),
            schedule=checked_name(_OP, "schedule", "linear" if schedule is None else schedule, get_args(Schedule)),
            mixer=checked_name(_OP, "mixer", mixer, get_args(Mixer)),
            momentum=checked_number(_OP, "momentum", momentum, 1.0),
            headway=headway,
            max_wavefront=max_wavefront,
            new_state=checked_name(_OP, "new_state", new_state, get_args(NewState)),
            compared=_COMPARED.get(exit, 0),
            horizon=recurrences,
            rule=checked_name(_OP, "rule", rule, get_args(Rule)),
            keep_changed=checked_flag(_OP, "keep_changed", keep_changed),
            max_recurrences=maximum,
            stability=steady if exit == "token-stability" else 0,
            init_scale=init_scale,
            kv_recurrences=core.kv_recurrences,
        )
        check(noise != math.inf, _OP, "noise", "be finite", noise)
        check(noise <= MAX_SCALE, _OP, "noise", f"be at most {MAX_SCALE:g}", noise)
        self.model, self.limit, self.recurrences, self.inner = (
            model,
            session.max_new_tokens,
            recurrences,
            inner_recurrence,
        )
        self.sampling, self.seeds, self.core, self.maximum = sampling, sampling.seeds, core, maximum
        self.needs_host = "" if maximum > 0 else "max_recurrences=0, with which a row may never be ready"
        self.cache = new_cache(session, page_size, core)
        self.wave = Wave(session, self.cache, session.ends_on(self.cache.lengths.device), options, sampling)
        self.capacity = capacity = self.wave.capacity
        self.entry = Entry(
            session.batch, self.wave.tokens.device, predictions=capacity, inputs=capacity, distances=capacity
        )

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, *self.wave.state

    @property
    def live(self) -> tuple[torch.Tensor, ...]:
        return self.wave.remaining, self.wave.width, self.entry.pending

    @property
    def max_entries(self) -> int:
        """The first row of a wave is ready after `max_recurrences`, a step later if its token was new."""
        return 1 + self.limit * (1 + -(-self.maximum // self.inner))

    def start(self, session: Session) -> None:
        self.cache.lengths.zero_()
        tokens, host_tokens, *_ = after_prompts(session, self.cache, self.recurrences, self.sampling, self.core)
        self.wave.start(session, tokens)
        self.entry.predictions[:, 0] = host_tokens
        self._write(torch.zeros_like(self.wave.advance), host_tokens < 0)

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        wave, rows = self.wave, width or self.capacity
        if width is not None and wave.tokens.is_cuda:  # so that shapes repeat
            rows = min(1 << (rows - 1).bit_length(), self.capacity)
        active = wave.width > 0
        self.entry.inputs.copy_(wave.tokens[:, : self.capacity])
        predictions, distance = wave.step(rows, full=not ragged and rows == width)
        self.entry.predictions[:, :rows] = predictions
        self.entry.distances[:, :rows] = distance.double().view(torch.int64)
        # It would never converge.
        self._write(wave.advance, (predictions[:, 0] < 0) & active)

    def forced(self, session: Session, rows: Rows) -> Rows:
        if session.grammar is None or not self.wave.append_forced(session, [row.pending for row in rows]):
            return rows
        self.entry.pending.copy_(self.wave.width)
        return self.entry.rows()

    def _write(self, advance: torch.Tensor, no_choice: torch.Tensor) -> None:
        self.wave.width.masked_fill_(no_choice, 0)
        self.entry.pending.copy_(self.wave.width)
        self.entry.accepted.copy_(advance.masked_fill(no_choice, -1))

    def opened(self, session: Session, rows: Rows) -> int:
        session.recurrences, session.counts_recurrences = self.recurrences, True
        return record_first(session, [row.predictions[0] for row in rows])

    def stepped(self, session: Session, before: Rows, rows: Rows) -> int:
        taken_part: int = sum(row.pending > 0 for row in before)
        session.forwards += taken_part > 0
        session.recurrences += self.inner * (taken_part > 0)
        for sequence, (old, row) in enumerate(zip(before, rows, strict=True)):
            width, frozen = old.pending, row.accepted
            if width == 0:
                continue
            predicted = row.predictions[:width]
            if session.trace is not None:
                moved = [float_of(bits) for bits in row.distances[:width]]
                cursor = len(session.prompts[sequence]) + len(session.tokens[sequence]) - 1
                step = RecurrentStep(cursor, row.inputs[:width], predicted, moved, frozen)
                session.trace[sequence].append(step)
            session.accepted[sequence].append(frozen)
            if frozen:  # all but the last of them were inputs of this step
                session.emit(sequence, predicted[:frozen], frozen - 1)
        return taken_part

    def provisional(self, session: Session, before: Row | None, row: Row) -> list[int | None]:
        return (
            [] if before is None else unfinished(row.predictions[row.accepted : before.pending], -1, session.end_tokens)
        )


decode = decoder(WaveSteps)
