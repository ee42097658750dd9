"""Shared by the decoders of recurrent-depth models: options, filtered sampling, the prompt's forward.

Initial states depend on positions (`pdkernels.recurrence_inject`), and so do the random numbers of sampling. One seed
per sequence keys both, so all methods start a position from the same state and sample its token with the same noise, in
any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pdkernels._validation import check, check_type
from pdkernels.backends import backend_of
from pdkernels.generation.noise import OWN, checked_name, checked_number, checked_size
from pdkernels.generation.params import MAX_SCALE
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, flag_no_choice, is_end
from pdkernels.models.architectures.fused import rms_norm
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth
from pdkernels.models.capabilities import capabilities
from pdkernels.models.protocols import RecurrentPartsModel, missing
from pdkernels.ops import recurrence_inject

Schedule = Literal["linear", "root", "harmonic", "constant"]
NewState = Literal["fresh", "copied"]


class Sampling(NamedTuple):
    """A request's sampler with the seeds of its sequences, on the device of the model."""

    sampler: Sampler
    seeds: torch.Tensor  # (batch,) int64

    @classmethod
    def of(cls, session: Session) -> Sampling:
        """Draws as the published model does, whose top-p is another one (`Sampler`)."""
        return cls(Sampler.of(session.params, "within").when_drawing, session.seeds.to(session.model.device))

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for each row of `logits` ``(batch, R, V)``, for `positions` ``(batch, R)``: int64."""
        return self.sampler.sample(logits, positions, self.seeds, OWN)


def checked_model(op: str, session: Session) -> RecurrentDepth:
    """The model of `session`, with counting of recurrences switched on."""
    model: RecurrentDepth = session.model
    check_type(
        "recurrent" in capabilities(model),
        op,
        "model",
        "be a recurrent-depth model",
        type(model).__name__,
        "Its config has `mean_recurrence`: see docs/own_models.md.",
    )
    session.counts_recurrences = True
    return model


def checked_recurrences(op: str, name: str, model: RecurrentDepth, requested: int | None) -> int:
    """`requested`, or the recurrences that the model was trained for."""
    return model.config.mean_recurrence if requested is None else checked_size(op, name, requested)


class Core(NamedTuple):
    """The options of the core other than the number of recurrences."""

    init_scale: float
    kv_recurrences: int  # recurrences whose K and V the cache keeps apart
    noise: float
    schedule: Schedule
    horizon: int
    copied: bool  # a new token starts from the last state of the one before it

    @property
    def plain(self) -> bool:
        """Whether the model's own forward suffices."""
        return self.kv_recurrences == 1 and self.noise == 0 and not self.copied

    def begin(self, model: RecurrentDepth, embedding: Tensor, context: Any, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Initial states and the embedding's term, as `RecurrentDepth.begin` gives them."""
        scale = () if self.init_scale == 1 else (self.init_scale,)
        return model.begin(embedding, context, seeds, *scale)

    def run(
        self, model: RecurrentDepth, state: Tensor, term: Tensor, context: Any, seeds: Tensor, first: int, count: int
    ) -> Tensor:
        """`count` recurrences of ``(batch, T, E)``, of which number `first` is the next one."""
        for recurrence in range(first, first + count):
            if self.noise > 0 and recurrence > 0:
                state = self._noisy(model, state, context, seeds, recurrence)
            state = model.core(
                state, term, context if self.kv_recurrences == 1 else context._replace(recurrence=recurrence)
            )
        return state

    def _noisy(self, model: RecurrentDepth, state: Tensor, context: Any, seeds: Tensor, recurrence: int) -> Tensor:
        cursor = context.cache.lengths
        numbers = torch.full_like(cursor, recurrence)
        width = torch.full_like(cursor, state.shape[1]) if context.counts is None else context.counts
        injected = recurrence_inject(
            state,
            state,
            None,
            numbers[:, None].expand(-1, state.shape[1]),
            cursor,
            width,
            torch.zeros_like(cursor),
            numbers - 1,  # noise of step t, counted from 1, which these are
            seed=seeds,
            noise=self.noise,
            schedule=self.schedule,
            horizon=self.horizon,
            init_std=1.0,
            backend=backend_of(model.dtype),
        )
        return rms_norm(injected[..., : state.shape[-1]].contiguous(), model.exit_weight, model.config.norm_eps)

    def forward(
        self,
        model: RecurrentDepth,
        tokens: Tensor,
        cache: Any,
        recurrences: int,
        seeds: Tensor,
        counts: Tensor | None = None,
        rows: Tensor | None = None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of `rows`, or of all, and the last states ``(batch, T, E)`` where they are needed; from `before`, if
        it is given."""
        if self.plain:
            scale = {} if self.init_scale == 1 else {"init_scale": self.init_scale}
            logits: Tensor = model(
                tokens, cache=cache, counts=counts, rows=rows, recurrences=recurrences, seed=seeds, **scale
            )
            return logits, None
        context = model.context(tokens.shape[1], cache, counts)
        state, term = self.begin(model, model.prelude(tokens, context), context, seeds)
        state = self.run(model, state if before is None else before, term, context, seeds, 0, recurrences)
        logits = model.coda(state, context, rows)
        if recurrences < self.kv_recurrences:
            self.fill(model, cache, tokens.shape[1], counts, torch.full_like(cache.lengths, recurrences))
        return logits, state

    def fill(self, model: RecurrentDepth, cache: Any, rows: int, counts: Tensor | None, done: Tensor) -> None:
        """For new rows that have had ``done[b]`` recurrences, fewer than are kept: the missing ones are as the last one
        was."""
        config, table, page = model.config, cache.block_table, cache.k.shape[2]
        at = cache.lengths[:, None] + torch.arange(rows, device=done.device)
        at = at.clamp(max=cache.capacity - 1)
        pages = (
            torch.arange(len(done), device=done.device)[:, None]
            if table is None
            else table.gather(1, at // page).long()
        )
        for copy in range(1, self.kv_recurrences):
            fills = torch.where(done <= copy, rows if counts is None else counts, 0)
            for layer in range(config.core_layers):
                slot = config.prelude_layers + (copy - 1) * config.core_layers + layer
                k, v = (stored[slot][pages.clamp(min=0), at % page] for stored in (cache.k, cache.v))
                cache.append_(slot + config.core_layers, k, v, fills)


def checked_core(
    op: str,
    model: RecurrentDepth,
    maximum: int,
    init_scale: float,
    kept_recurrences: int,
    core_noise: float = 0.0,
    core_noise_schedule: Schedule = "harmonic",
    new_state: NewState = "fresh",
) -> Core:
    """Of options of a decoder whose tokens have at most `maximum` recurrences: more are not worth keeping."""
    checked_number(op, "init_scale", init_scale)
    check(init_scale != math.inf, op, "init_scale", "be finite", init_scale)
    check(init_scale <= MAX_SCALE, op, "init_scale", f"be at most {MAX_SCALE:g}", init_scale)
    check_type(type(kept_recurrences) is int, op, "kept_recurrences", "be an int", type(kept_recurrences).__name__)
    check(kept_recurrences >= 0, op, "kept_recurrences", "be at least 0", kept_recurrences)
    checked_number(op, "core_noise", core_noise)
    check(core_noise != math.inf, op, "core_noise", "be finite", core_noise)
    check(core_noise <= MAX_SCALE, op, "core_noise", f"be at most {MAX_SCALE:g}", core_noise)
    checked_name(op, "core_noise_schedule", core_noise_schedule, get_args(Schedule))
    checked_name(op, "new_state", new_state, get_args(NewState))
    slots = maximum if kept_recurrences == 0 else min(kept_recurrences, maximum)
    core = Core(init_scale, slots, core_noise, core_noise_schedule, maximum, new_state == "copied")
    missing_member = None if core.plain and init_scale == 1 else missing(model, RecurrentPartsModel)
    check_type(
        not missing_member,
        op,
        "model",
        f"have {missing_member} for these options",
        type(model).__name__,
        "See docs/own_models.md.",
    )
    return core


class Prefill(NamedTuple):
    """The initial state of a decoder's steps."""

    cache: Any  # holds the prompts
    tokens: torch.Tensor  # (batch, 1) int64: the first new tokens, already on record
    ended: torch.Tensor  # (batch,) bool: the first token ends its sequence
    ends: torch.Tensor | None  # int64 ids that end a sequence
    first: list[int]  # `tokens` on the host
    active: list[bool]  # which sequences still need tokens
    state: Tensor | None = (
        None  # (batch, 1, E), the last ones of the prompts' last rows, where new tokens start from them
    )


RunPrompts = Callable[[Any, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor, int]]


def prefill(
    session: Session,
    recurrences: int,
    sampling: Sampling,
    page_size: int | None,
    core: Core,
    run_prompts: RunPrompts | None = None,
) -> Prefill:
    """Runs the prompts through the model and records the token after each; at least one new token must be requested.

    `run_prompts` replaces the fixed number of recurrences: it takes the cache, the prompts, their counts and their last
    rows, and returns the logits of these, the states of all rows, and the number of recurrences.
    """
    cache = new_cache(session, page_size, core)
    ends = session.ends_on(cache.lengths.device)  # before the forward, for which a copy to the device would wait
    tokens, host_tokens, state, recurrences = after_prompts(session, cache, recurrences, sampling, core, run_prompts)
    session.forwards, session.recurrences = 1, recurrences
    ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool) if ends is None else is_end(tokens[:, 0], ends)
    first = host_tokens.tolist()
    for sequence, token in enumerate(first):
        session.record_first(sequence, token)
    active = [token not in session.end_tokens and session.max_new_tokens > 1 for token in first]
    return Prefill(cache, tokens, ended, ends, first, active, state)


def new_cache(session: Session, page_size: int | None, core: Core) -> Any:
    """A cache for a session."""
    options: dict[str, Any] = {} if core.kv_recurrences == 1 else {"kept": core.kv_recurrences}
    return session.new_cache(page_size, **options)


def after_prompts(
    session: Session,
    cache: Any,
    recurrences: int,
    sampling: Sampling,
    core: Core,
    run_prompts: RunPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Puts the prompts into an empty cache. The tokens after them ``(batch, 1)``; the same ``(batch,)`` for the host,
    -1 without a choice; the last states of `Prefill`; and how often the core ran. The host reads nothing here."""
    prompts, lengths = session.packed_prompts(session.longest, cache.lengths.device)
    last, counts = (lengths - 1)[:, None], session.ragged(lengths)
    state: Tensor | None
    if run_prompts is None:
        logits, state = core.forward(session.model, prompts, cache, recurrences, sampling.seeds, counts, last)
    else:
        logits, state, recurrences = run_prompts(cache, prompts, counts, last)
    if state is not None:
        state = state.gather(1, last[..., None].expand(-1, -1, state.shape[-1])) if core.copied else None
    tokens = sampling.sample(logits, lengths[:, None])
    session.note(session.plain(logits), tokens, lengths[:, None], torch.ones_like(tokens, dtype=torch.bool))
    cache.commit_(lengths)
    return tokens, flag_no_choice(logits, tokens)[:, 0], state, recurrences
