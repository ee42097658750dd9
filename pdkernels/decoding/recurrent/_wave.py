"""The active rows of recurrent diffusion, in tensors that are allocated once.

Source: "Efficient parallel samplers for recurrent-depth models and their connection to diffusion language models",
Algorithm 2 and equations 1 to 3. Row i of a sequence's wave is at position ``cursor + i``. The cursor is the lengths of
the cache: everything before it is frozen, everything after it is rewritten by every recurrence. So when rows freeze,
only the cursor moves: the next step reads this step's states and embeddings that many rows further on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from pdkernels._philox import random_words
from pdkernels.backends import backend_of
from pdkernels.decoding.recurrent._parts import NewState, Sampling, Schedule
from pdkernels.generation.session import Session, has_no_choice, is_end
from pdkernels.models.architectures.recurrent_depth import STATE_STD, RecurrentDepth
from pdkernels.ops import recurrence_advance_, recurrence_exit, recurrence_inject

Mixer = Literal["linear", "sqrt"]
Rule = Literal["prefix", "last"]


class WaveOptions(NamedTuple):
    """Options of `recurrent_diffusion`, checked and with defaults filled in."""

    inner_recurrence: int
    threshold: float
    compared: int  # earlier states that the exit test needs: 0, 1 or 2
    noise: float
    schedule: Schedule
    horizon: int
    mixer: Mixer
    momentum: float
    headway: int
    max_wavefront: int
    rule: Rule
    new_state: NewState
    keep_changed: bool
    max_recurrences: int
    stability: int
    init_scale: float
    kv_recurrences: int


class Wave:
    """Rows of all sequences; `width` is how many a sequence has, 0 once it has finished.

    Attributes:
        capacity: the largest number of rows of a sequence.
        tokens: ``(batch, capacity + 1)`` int64, inputs of the rows; arbitrary valid ids past the wave.
        width, advance: ``(batch,)`` int64, rows of each sequence, and how many the last step froze.
        remaining: ``(batch,)`` int64, tokens that are still to be generated.
    """

    def __init__(
        self, session: Session, cache: Any, ends: torch.Tensor | None, options: WaveOptions, sampling: Sampling
    ) -> None:
        self.model: RecurrentDepth = session.model
        self.options, self.sampling, self._session = options, sampling, session
        self._cache, self._ends = cache, ends
        # Only requested tokens get a row: the wave ends where the text will.
        limit = session.max_new_tokens
        self.capacity = max(1, min(options.max_wavefront, limit - 1))
        cursor, batch = cache.lengths, session.batch
        self._slot = torch.arange(self.capacity, device=cursor.device)
        self.tokens = cursor.new_zeros(batch, self.capacity + 1)
        self._recurrences, self._unchanged_steps = (
            cursor.new_zeros(batch, self.capacity),
            cursor.new_zeros(batch, self.capacity),
        )
        self.remaining, self.width, self.advance, self._steps = (torch.zeros_like(cursor) for _ in range(4))
        # A row is new until its first recurrence, whatever is in these.
        rows = self.model.exit_weight.new_zeros(batch, self.capacity, len(self.model.exit_weight))
        self._state, self._blended = rows, torch.zeros_like(rows)
        self._older = (torch.zeros_like(rows), torch.zeros_like(cursor)) if options.compared == 2 else None
        self._text: torch.Tensor | None = None
        if options.headway > 1:  # guesses are sampled from the text
            self._text = cursor.new_zeros(batch, session.longest + limit + self.capacity)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """As `Steps.state`."""
        counters = (
            self.tokens,
            self._recurrences,
            self._unchanged_steps,
            self.remaining,
            self.width,
            self.advance,
            self._steps,
        )
        return (
            *counters,
            self._state,
            self._blended,
            *(self._older or ()),
            *(() if self._text is None else (self._text,)),
        )

    def start(self, session: Session, tokens: torch.Tensor) -> None:
        """Begins with the `tokens` ``(batch, 1)`` after the prompts that are in the cache."""
        for state in (self.tokens, self._recurrences, self._unchanged_steps, self.advance, self._steps):
            state.zero_()
        self.tokens[:, :1] = tokens
        self.remaining.fill_(session.max_new_tokens - 1)
        if self._ends is not None:
            self.remaining.masked_fill_(is_end(tokens[:, 0], self._ends), 0)
        self.width.copy_(self.remaining.clamp(max=1))
        if self._text is not None:
            packed, lengths = session.packed_prompts(self._text.shape[1], self._text.device)
            self._text.copy_(packed.scatter_(1, lengths[:, None], tokens))

    def step(self, rows: int, full: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Refines the first `rows` rows of every sequence, predicts, freezes what is ready and advances. The host reads
        nothing here.

        Args:
            rows: at least the largest width.
            full: every sequence has that many rows, so none is padding.

        Returns:
            Predictions ``(batch, rows)`` int64, of the token after each row, -1 where logits give no choice, and the
            distance of each row, inf where there is none.
        """
        model, options, cache, width = self.model, self.options, self._cache, self.width
        cursor, backend = cache.lengths, backend_of(self.model.dtype)
        filler = self._filler()
        context = model.context(rows, cache, None if full else width)
        injected = recurrence_inject(
            self._state,
            model.prelude(self.tokens[:, :rows], context),
            self._blended,
            self._recurrences,
            cursor,
            width,
            self.advance,
            self._steps,
            seed=self.sampling.seeds,
            noise=options.noise,
            schedule=options.schedule,
            horizon=options.horizon,
            mixer=options.mixer,
            momentum=options.momentum,
            init_std=STATE_STD * options.init_scale,
            new_state=options.new_state,
            backend=backend,
        )
        x, blended = injected.chunk(2, -1)
        term = model.embedding_term(blended)
        contexts = [context] * options.inner_recurrence
        if options.kv_recurrences > 1:
            contexts = [layer_context._replace(recurrence=number) for number, layer_context in enumerate(contexts)]
        for layer_context in contexts[:-1]:
            x = model.core(x, term, layer_context)
        x, residual = model.core_parts(x, term, contexts[-1])
        older, older_advance = self._older or (None, None)
        state, distance, converged = recurrence_exit(
            x,
            residual,
            model.exit_weight,
            self._state if options.compared else None,
            self._recurrences,
            width,
            self.advance,
            threshold=options.threshold,
            older=older,
            older_advance=older_advance,
            eps=model.config.norm_eps,
            min_recurrences=max(1, options.compared) * options.inner_recurrence,
            backend=backend,
        )
        positions = cursor[:, None] + 1 + self._slot[:rows]
        logits = model.coda(state, context)
        drawn = self.sampling.sample(logits, positions)
        predictions = drawn.clamp(min=0)
        self._session.note(self._session.plain(logits), drawn, positions, self._slot[:rows] < width[:, None])
        if self._text is not None:
            # Drafts come after the text at their own positions; only moving the cursor makes them part of it.
            self._text.scatter_(1, positions, predictions)
        if self._older is not None:
            self._older[0].copy_(self._state)
            self._older[1].copy_(self.advance)
        self._state[:, :rows] = state
        self._blended[:, :rows] = blended
        recurrence_advance_(
            self.tokens,
            predictions,
            self._recurrences,
            self._unchanged_steps,
            width,
            cursor,
            self.advance,
            self._steps,
            self.remaining,
            converged=converged if options.compared else None,
            inner_recurrence=options.inner_recurrence,
            max_wavefront=self.capacity,
            max_recurrences=options.max_recurrences,
            stability=options.stability,
            rule=options.rule,
            headway=options.headway,
            filler=filler,
            end_tokens=self._ends,
            keep_changed=options.keep_changed,
            backend=backend,
        )
        return drawn.masked_fill(has_no_choice(logits, drawn), -1), distance

    def append_forced(self, session: Session, widths: Sequence[int]) -> bool:
        """Appends the tokens that grammars force after the inputs of the waves, as far as these stay. Whether there
        were any."""
        assert session.grammar is not None
        inputs, remaining, changed = self.tokens.tolist(), self.remaining.tolist(), False
        for sequence, width in enumerate(widths):
            if width == 0:
                continue
            room = min(self.capacity, remaining[sequence]) - width
            text = [*session.tokens[sequence], *inputs[sequence][1:width]]
            forced = session.grammar.drafted(sequence, text, room)
            if forced:
                rows = slice(width, width + len(forced))
                self.tokens[sequence, rows] = torch.tensor(forced, device=self.tokens.device)
                self._recurrences[sequence, rows] = 0
                self._unchanged_steps[sequence, rows] = 0
                self.width[sequence] = rows.stop
                changed = True
        return changed

    def _filler(self) -> torch.Tensor | None:
        """Tokens from the text, ``(batch, headway - 1)``, for new rows without a prediction."""
        if self._text is None:
            return None
        random_indices = random_words(
            self.sampling.seeds, self._steps, torch.zeros_like(self._steps), self.options.headway - 1
        )
        return self._text.gather(1, random_indices % (self._cache.lengths + 1)[:, None])
