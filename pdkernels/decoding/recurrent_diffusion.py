"""The diffusion-forcing sampler of recurrent-depth models: many positions at once, each a few recurrences behind the previous one.

Source: "Efficient parallel samplers for recurrent-depth models and their connection to diffusion language models", Algorithms 1
and 2, equations 1 to 3. The plain form is reference/recurrent_diffusion.py; both take the same steps, draw the same tokens and
freeze the same rows. Differences between the paper and its code are described there.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from pdkernels._validation import check, check_type
from pdkernels.decoding._recurrent import (
    NewState,
    Schedule,
    checked_core,
    checked_model,
    checked_recurrences,
    checked_sampling,
    prefill,
)
from pdkernels.decoding._recurrent_wave import Mixer, Rule, Wave, WaveOptions
from pdkernels.decoding._sampling import Seed, checked_flag, checked_name, checked_number, checked_size
from pdkernels.decoding._session import Session
from pdkernels.decoding.traces import RecurrentStep

_OP = "decoding.recurrent_diffusion"

Exit = Literal["latent-diff", "fixed", "token-stability", "latent-acceleration"]
_COMPARED = {"latent-diff": 1, "latent-acceleration": 2}  # earlier states that an exit test needs


def decode(
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
    guard: bool = True,
    init_scale: float = 1.0,
    kept_recurrences: int = 1,
    recurrences: int | None = None,
    max_recurrences: int | None = None,
    stability: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    seed: Seed = 0,
    page_size: int | None = None,
) -> int:
    """Fills `session` from a wave of positions: a step refines all of them, freezes those at the front that are ready, appends
    new ones.

    Args:
        inner_recurrence: recurrences of a step.
        threshold: a row is ready if its state moved by less than this since the last step, relative to its norm.
        exit: what makes a row ready: "latent-diff" that distance; "latent-acceleration" the second difference of three steps;
            "token-stability" a prediction that has stayed the same for `stability` steps; "fixed" its `recurrences` (Algorithm 1).
        noise: share of new noise that a step mixes into a state.
        schedule: how that share decays with a position's recurrences: "linear" (None), down to 0 after `recurrences`, "harmonic",
            "root", or "constant" not at all.
        mixer: "linear" or "sqrt", which keeps the variance.
        momentum: share of the last step's embedding in a row's embedding.
        headway: positions that a step appends.
        max_wavefront: most active positions. 1 is autoregressive decoding with adaptive exits.
        rule: "prefix" freezes rows before the first that is not ready, "last" all up to the last that is.
        new_state: a new row starts "fresh" from the state of its position or "copied" from that of the previous row.
        guard: freeze no row whose input changed in this step: its K and V belong to the old token.
        recurrences: of the prompt; None: those the model was trained for.
        max_recurrences: a row is ready at the latest after this many; None: 4 * `recurrences`; 0: never, if the model does not
            settle.
        stability: None: ``recurrences // inner_recurrence + 1``.
        kept_recurrences: as elsewhere; those of a step count from 0 in every step, as in the released code.
        seed: of states, noise, draws and guesses.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    model = checked_model(_OP, session)
    recurrences = checked_recurrences(_OP, "recurrences", model, recurrences)
    sampling = checked_sampling(_OP, session, temperature, top_p, min_p, top_k, seed)
    for name, size in (("inner_recurrence", inner_recurrence), ("headway", headway), ("max_wavefront", max_wavefront)):
        checked_size(_OP, name, size)
    checked_name(_OP, "exit", exit, get_args(Exit))
    headway = min(headway, max_wavefront, max(1, session.max_new_tokens))  # more does not fit in the wave
    if max_recurrences is not None:
        check_type(type(max_recurrences) is int, _OP, "max_recurrences", "be an int", type(max_recurrences).__name__)
        check(max_recurrences >= 0, _OP, "max_recurrences", "be at least 0", max_recurrences)
    most = 4 * recurrences if max_recurrences is None else max_recurrences
    if exit == "fixed":
        most = min(recurrences, most) if most > 0 else recurrences
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
        guard=checked_flag(_OP, "guard", guard),
        max_recurrences=most,
        stability=steady if exit == "token-stability" else 0,
        init_scale=init_scale,
        kept=core.kept,
    )
    check(noise != math.inf, _OP, "noise", "be finite", noise)
    if session.max_new_tokens == 0:
        return 0
    start = prefill(session, recurrences, sampling, page_size, core)
    return run(session, Wave(session, start, options, sampling), [int(active) for active in start.active])


def run(session: Session, wave: Wave, widths: list[int]) -> int:
    """Steps until all sequences have finished; `widths` is the host's copy of the wave's widths."""
    taken_part = session.batch
    cursors = [len(prompt) for prompt in session.prompts]
    session.stop_(widths, wave.width, wave.remaining)
    while (rows := max(widths)) > 0:
        if wave.tokens.is_cuda:  # so that shapes repeat
            rows = min(1 << (rows - 1).bit_length(), wave.room)
        inputs = wave.tokens[:, :rows].clone() if session.trace is not None else None
        predictions, distance = wave.step(rows, whole=min(widths) == rows)
        session.forwards += 1
        session.recurrences += wave.options.inner_recurrence

        # The one read of the device in a step.
        facts = torch.stack([wave.advance, wave.width], 1)
        if inputs is None:
            poll = torch.cat([facts, predictions], 1).tolist()
        else:  # fp64 holds them all exactly: distances, and integers up to 2**53
            poll = torch.cat([part.double() for part in (facts, predictions, inputs, distance)], 1).tolist()
        for sequence, row in enumerate(poll):
            if (width := widths[sequence]) == 0:
                continue
            frozen, widths[sequence] = int(row[0]), int(row[1])
            predicted, drafts, moved = (row[2 + part * rows :][:width] for part in range(3))
            predicted = [int(token) for token in predicted]
            if predicted[0] < 0:  # it would never settle
                session.fail_not_numbers(sequence)
            if session.trace is not None:
                drafts = [int(token) for token in drafts]
                session.trace[sequence].append(RecurrentStep(cursors[sequence], drafts, predicted, moved, frozen))
            session.accepted[sequence].append(frozen)
            cursors[sequence] += frozen
            taken_part += 1
            if frozen:  # all but the last of them were inputs of this step
                session.emit(sequence, predicted[:frozen], frozen - 1)
        session.stop_(widths, wave.width, wave.remaining)
    return taken_part
