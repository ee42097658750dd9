"""The diffusion-forcing sampler step by step as in its authors' code, bugs included: for comparison, not for use.

Source: the released code of "Efficient parallel samplers for recurrent-depth models and their connection to diffusion language
models". Differences from pdkernels.reference.recurrent_diffusion:

- The states that a step is compared with are stored after the cut, but read as if they had been stored before it: after a
  step that froze i rows, each position is compared with one i positions further on, and hardly anything freezes. The first step
  compares nothing. The embeddings are aligned correctly.
- A row that converges freezes the *inputs* up to its own and stays as the new first row; its prediction is still a draft. The last
  converged row decides, regardless of the rows before it. So a wave of one row never moves.
- A row whose token changed in this step may freeze with the K and V of the old token.
- A new row's embedding is damped: ``(1 - momentum) * e``, its norm is not restored. New rows are mixed with noise too.
- Noise decays as ``1 / (1 + recurrences of the position)``. The first position counts the prompt's recurrences as its own.
- "fixed" freezes from step ``recurrences // inner_recurrence + 1`` on (counted from 0): of 32 recurrences, 4 in a step, after 40.
- "token-stability" never restarts its count when a token changes.
- Stop tokens are searched for only after step number `recurrences`, and only among what that step froze (the first freeze of the
  latent modes counts the prompt as its own; the other modes check the last `headway` tokens, new or not); before that they
  are ignored. The text is cut neither after one nor at `max_new_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels.reference.recurrent_sampling import Init, RecurrentModel, RecurrentStep, forward, refine, rows

FREEZES = ("latent-diff", "latent-acceleration-1", "latent-acceleration-2", "token-stability", "fixed")

# sample(logits (R, V), positions) -> R tokens
Sample = Callable[[Tensor, Sequence[int]], list[int]]
# guess(step, count) -> count tokens for positions without a prediction
Guess = Callable[[int, int], list[int]]


class ReleasedResult(NamedTuple):
    tokens: list[int]  # frozen tokens without the prompt: possibly more than requested, and not cut after a stop token
    forwards: int  # sampler steps, and the prompt's forward
    trace: list[RecurrentStep]  # `distance` covers rows 0, 1, ..., possibly fewer than the wave has
    standing: int  # steps after which the wave could not grow by `headway`


def released_recurrent(
    model: RecurrentModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    init: Init,
    sample: Sample,
    guess: Guess | None = None,
    recurrences: int = 32,
    inner_recurrence: int = 4,
    threshold: float = 0.03,
    noise: float = 0.5,
    schedule: str = "harmonic",
    mixer: str = "linear",
    momentum: float = 0.1,
    headway: int = 1,
    max_wavefront: int = 128,
    freeze: str = "latent-diff",
    new_state: str = "fresh",
    stop_tokens: Sequence[int] = (),
    max_positions: int = 4096,
    max_steps: int = 4096,
) -> ReleasedResult:
    """Options as in :func:`~pdkernels.reference.recurrent_diffusion.recurrent_diffusion`, with the defaults of the released code.

    It always starts with a full prefill: without one, the released code takes the whole prompt as its first wave.

    Args:
        model, prompt: as there. A wave starts with one position, regardless of `headway`.
        max_new_tokens: stop once this many are frozen; the prompt's forward freezes the first.
        init: ``(step, positions) -> (T, E)``. Step 0 gives initial states, step s + 1 the noise of sampler step s (from 0).
        sample: ``(logits (R, V), positions) -> R tokens``. The released code redraws a token in every step; with the keyed
            draws of :func:`~pdkernels.reference.recurrent_sampling.choose` a position's noise does not change.
        guess: tokens after the last prediction where headway > 1. The released code draws them from [0, 65510).
        noise, schedule: "harmonic" or "constant".
        max_wavefront: 0 for no limit.
        freeze: one of `FREEZES`.
        new_state: "copied" takes the last `headway` states of the wave, if it has that many.
        stop_tokens: see above.
        max_positions: stop when the text and the draft are longer.
        max_steps: stop after the step with this number.

    Raises:
        ValueError: for an unknown name; where the states of three steps that "latent-acceleration-2" compares have no position in
            common (the wave is longer than a short prompt, or many rows froze at once): the released code fails there; and if
            "fixed" freezes while the wave cannot grow by `headway`: the released code then moves the cache, but not the states,
            and reads past its sequence in the next step.
    """
    op = "papers.released_recurrent"
    if freeze not in FREEZES:
        raise ValueError(f"{op}: freeze must be one of {FREEZES}, got {freeze!r}.")
    if schedule not in ("harmonic", "constant"):
        raise ValueError(f"{op}: schedule must be 'harmonic' or 'constant', got {schedule!r}.")
    past = model.new_past()
    logits = forward(model, prompt, past, recurrences, init)
    past.freeze(len(prompt))
    frozen = [*prompt, *sample(logits[-1:], [len(prompt)])]
    sequence = list(frozen)
    states = init(0, rows(len(prompt), 1))
    counts = dict.fromkeys(range(len(frozen)), recurrences)
    stable: dict[int, int] = {}  # by position: steps in which its token did not change

    # Without the cache, so from position 0 on: only the last row is read.
    old_e = model.prelude(torch.tensor(frozen), 0, model.new_past())
    memory = Memory(states)
    old_cursor = last_cut = 0
    trace: list[RecurrentStep] = []
    standing = 0
    while len(frozen) - len(prompt) < max_new_tokens and len(sequence) <= max_positions:
        step, cursor, width = len(trace), past.length, len(states)
        inputs = sequence[cursor : cursor + width]

        new_e = model.prelude(torch.tensor(inputs), cursor, past)
        if momentum > 0:
            matching = old_e[cursor - old_cursor :]
            e = new_e * (1 - momentum)
            e[: len(matching)] += matching * momentum
            old_e = e
        else:
            e = new_e

        if noise > 0:
            beta = torch.full((width, 1), noise, dtype=states.dtype)
            if schedule == "harmonic":
                beta = beta / (1 + torch.tensor([[counts.get(cursor + i, 0)] for i in range(width)]))
            random = init(step + 1, rows(cursor, width))
            if mixer == "sqrt":
                states = states * (1 - beta).clamp(min=0).sqrt() + beta.sqrt() * random
            else:
                states = states * (1 - beta) + beta * random
        states = refine(model, states, e, cursor, past, inner_recurrence)
        for position in range(cursor, cursor + width):
            counts[position] = counts.get(position, 0) + inner_recurrence
        predictions = sample(model.coda(states, cursor, past), range(cursor + 1, cursor + 1 + width))

        edited = frozen + predictions[:-1]
        for position, (token, edit) in enumerate(zip(sequence, edited, strict=True)):
            stable[position] = stable.get(position, 0) + (token == edit)
        guesses = guess(step, headway - 1) if guess is not None and headway > 1 else [0] * (headway - 1)
        sequence = frozen + predictions + guesses
        if new_state == "copied" and width >= headway:
            states = torch.cat([states, states[-headway:]])
        else:
            states = torch.cat([states, init(0, rows(cursor + width, headway))])
        grown = headway
        if max_wavefront > 0 and len(states) > max_wavefront:
            grown = max_wavefront - width
            states, sequence = states[:max_wavefront], sequence[: cursor + max_wavefront]
            standing += 1

        distance: list[float] = []
        advance, fixed = 0, False
        if freeze.startswith("latent"):
            distance = memory.distances(freeze, states, cursor, old_cursor)
            advance = max((i for i, value in enumerate(distance) if value < threshold), default=0)
            converged = any(value < threshold for value in distance)
        elif freeze == "token-stability":
            steady = [p for p in range(len(edited)) if stable[p] > recurrences // inner_recurrence]
            converged = bool(steady)
            advance = max(steady, default=cursor) - cursor
        else:
            converged = fixed = step > recurrences // inner_recurrence
            if fixed:
                if grown < headway:
                    raise ValueError(
                        f"{op}: max_wavefront must let the wave grow while freeze='fixed' freezes, got {max_wavefront}. "
                        f"It takes {1 + headway * (step + 1)}."
                    )
                advance = headway

        past.freeze(advance)
        states = states[advance:]
        cut = last_cut
        if fixed:
            frozen = frozen + predictions[:headway]
        elif converged:
            cut = cursor + advance + 1
            frozen = sequence[:cut]
        elif freeze == "token-stability":
            cut = 0
        trace.append(RecurrentStep(cursor, inputs, predictions, distance, advance))
        if step > recurrences:
            new = frozen[last_cut:cut] if freeze.startswith("latent") else frozen[-headway:]
            if any(token in stop_tokens for token in new):
                break
        if step > max_steps:
            break
        memory.keep(states, old_cursor)
        old_cursor, last_cut = cursor, cut
    return ReleasedResult(frozen[len(prompt) :], 1 + len(trace), trace, standing)


class Memory:
    """The states of the last two steps as the released code keeps and reads them."""

    def __init__(self, states: Tensor) -> None:
        self.previous, self.before = states, torch.zeros_like(states)
        self.delta = torch.zeros_like(states)
        self.before_cursor = 0  # of the step before the last

    def distances(self, freeze: str, states: Tensor, cursor: int, old_cursor: int) -> list[float]:
        """One per leading row that has something to compare with. The offset is the bug: `previous` was already cut."""
        matching = self.previous[cursor - old_cursor :]
        now = states[: len(matching)]
        if freeze == "latent-diff":
            return relative(now - matching, now)
        if freeze == "latent-acceleration-1":
            delta = now - matching
            count = min(len(delta), len(self.delta))
            acceleration = delta[:count] - self.delta[:count]  # by row number, not by position
            self.delta = delta
            return relative(acceleration, now[:count])
        # The intersection of three ranges of positions, each taken to start at its step's cursor before the cut.
        end = min(cursor + len(states), old_cursor + len(self.previous), self.before_cursor + len(self.before))
        # If it is empty, these are still the released code's slices: their ends count from the back.
        now, last = states[: end - cursor], self.previous[cursor - old_cursor : end - old_cursor]
        before = self.before[cursor - self.before_cursor : end - self.before_cursor]
        if len({len(now), len(last), len(before)} - {1}) > 1:
            raise ValueError(
                "papers.released_recurrent: the states of three steps must meet for freeze='latent-acceleration-2', got "
                f"{len(now)}, {len(last)} and {len(before)} rows, on which the released code fails too. Use another freeze."
            )
        return relative(now - 2 * last + before, now, 1e-6)

    def keep(self, states: Tensor, old_cursor: int) -> None:
        """Called at the end of a step, with the states after the cut and the cursor of the previous step."""
        self.before, self.previous, self.before_cursor = self.previous, states, old_cursor


def relative(difference: Tensor, states: Tensor, eps: float = 0.0) -> list[float]:
    """Norms of the rows of `difference` over those of `states`, all ``(R, E)``."""
    return (difference.norm(dim=-1) / (states.norm(dim=-1) + eps)).tolist()
