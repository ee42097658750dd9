"""Quadratic self-speculation: one forward verifies a draft, and drafts the next one for every position where acceptance may stop.

Source: "Nemotron-Labs-Diffusion", appendix C. Equation 11 as printed gives the first token no masks and lets the
first mask of a group repeat the verifier's position; here, as in the released code, every draft token has a group, the
first (the anchor) included, and the verifier's token replaces the first mask.

A forward feeds the draft ``d_0 .. d_{S-1}`` (``d_0`` is the anchor, known to be right), each with M masks: token d_g at
position ``n + g``, its mask r at ``n + g + r``, n the length of the prefix. Rows of draft tokens are plain causal rows that
never see a mask; masks see the prefix, ``d_0 .. d_g`` and their own group (masks.quadratic).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autoregressive import Model
from .jacobi import accepted_length
from .masks import quadratic
from .sampling import OWN, DraftModel, distribution, draw, unadapted, without


class QuadraticStep(NamedTuple):
    draft: list[int]  # draft[0] is the anchor
    predictions: list[int]  # the verifier's token after each draft token
    accepted: int  # draft[:accepted] was committed; at least 1. The next draft comes from group accepted - 1


class QuadraticSelfSpeculationResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's forward counts
    trace: list[QuadraticStep]  # every forward but the prompt's


def quadratic_input(
    prefix: Sequence[int], draft: Sequence[int], mask_token: int, masks_per_group: int, in_group: str, layout: str
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """``(tokens, positions, mask, rank)`` of one forward over T tokens, the prefix among them (causal, before all others).

    `positions` int64 ``(T,)``, `mask` bool ``(T, T)``; `rank` int64 ``(T,)`` is the index in the group: 0 for clean tokens.

    >>> tokens, positions, mask, rank = quadratic_input([5], [6, 7], 9, 2, "bidirectional", "interleaved")
    >>> tokens, positions.tolist(), rank.tolist()
    ([5, 6, 9, 9, 7, 9, 9], [0, 1, 2, 3, 2, 3, 4], [0, 0, 1, 2, 0, 1, 2])
    """
    start, size = len(prefix), len(draft)
    tail, relative = quadratic(size, masks_per_group, in_group, layout)
    length = start + len(relative)
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:start, :start] = torch.ones(start, start, dtype=torch.bool).tril()
    mask[start:, :start] = True
    mask[start:, start:] = tail
    if layout == "interleaved":
        rank = [r for _ in draft for r in range(masks_per_group + 1)]
        tokens = [token for anchor in draft for token in (anchor, *[mask_token] * masks_per_group)]
    else:
        rank = [0] * size + [r for _ in draft for r in range(1, masks_per_group + 1)]
        tokens = [*draft, *[mask_token] * (size * masks_per_group)]
    positions = torch.cat([torch.arange(start), start + relative])
    return [*prefix, *tokens], positions, mask, torch.tensor([0] * start + rank)


def verifier(own: Tensor, diffusion: Tensor, weight: float, form: str) -> Tensor:
    """Logits ``(S, V)`` of the verifier from those of the draft tokens and of the first masks after them.

    "probability" is the paper's ``weight * p_AR + (1 - weight) * p_diff``, as logarithms; "logit" mixes logits, as the
    released code does. Lossless with respect to autoregressive decoding only at weight 1, which is `own` itself.
    """
    if weight == 1.0:
        return own
    if weight == 0.0:
        return diffusion.double()  # 0 times the -inf of an impossible token is NaN
    if form == "logit":
        return weight * own.double() + (1 - weight) * diffusion.double()
    return (weight * distribution(own, 1.0) + (1 - weight) * distribution(diffusion, 1.0)).log()


def quadratic_self_speculation(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int = 16,
    masks_per_group: int | None = None,
    label_shift: int = 0,
    in_group: str = "bidirectional",
    layout: str = "spec_first",
    ensemble_weight: float = 1.0,
    ensemble: str = "probability",
    temperature: float = 0.0,
    allow_mask_token: bool = False,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    draft_model: DraftModel | None = None,
) -> QuadraticSelfSpeculationResult:
    """Runs one forward per step, keeps the longest accepted prefix, and continues with the guesses of its last token's group.

    The draft shrinks to what `max_new_tokens` leaves; groups do not see later ones, so the others are unaffected. An end
    token takes effect as soon as it is known; the released code spends another forward on one of its own.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``.
        prompt: token ids, at least one. Its forward is a step whose draft is only the last prompt token.
        max_new_tokens: stop after exactly this many new tokens, or earlier after an end token.
        mask_token: id of the masks; never a guess; in the released code it can be.
        block_size: S, including the anchor. 1 is autoregressive decoding.
        masks_per_group: M, at least ``S - label_shift``, which is the default.
        label_shift: 0 if a mask's row predicts its own position (Nemotron-Labs-Diffusion), 1 if it predicts the next
            one. With 0 the first mask's guess is used only by the ensemble.
        in_group: "bidirectional" or "causal" attention among the masks of a group.
        layout: "spec_first" or "interleaved" order of the tokens; the result is the same.
        ensemble_weight: lambda in [0, 1], the weight of the autoregressive rows in the verifier. The prompt's forward uses
            only them.
        ensemble: "probability" (paper) or "logit" (released code), see :func:`verifier`.
        temperature: of guesses and verifier; applied to the ensemble (T above 0 has no rule in paper or code). The
            verifier's draw is emitted: at weight 1 the tokens are those of
            :func:`~pdkernels.reference.sampling.sampled_autoregressive`, seed for seed.
        allow_mask_token: whether a row that does not guess may produce the mask token, as in the released code.
        end_tokens: stop after one of these; it is kept as the last token.
        seed: of the draws, see sampling.py.
        draft_model: `model` with its drafting adapters, given the rows they act on: only mask rows. None: `model`.

    >>> chain = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[(positions + (tokens != 8)) % 8]
    >>> quadratic_self_speculation(chain, [0, 1], 6, mask_token=8, block_size=4)[:2]
    ([2, 3, 4, 5, 6, 7], 3)
    """
    op = "pdkernels.quadratic_self_speculation"
    masks = block_size - label_shift if masks_per_group is None else masks_per_group
    if masks < block_size - label_shift:
        raise ValueError(f"{op}: masks_per_group must be at least {block_size - label_shift}, got {masks}.")
    if label_shift == 1 and ensemble_weight != 1.0:
        raise ValueError(
            f"{op}: ensemble_weight must be 1 with label_shift=1, got {ensemble_weight}. "
            "No mask is about the verifier's position."
        )
    if ensemble not in ("probability", "logit"):
        raise ValueError(f"{op}: ensemble must be 'probability' or 'logit', got {ensemble!r}.")
    if max_new_tokens == 0:
        return QuadraticSelfSpeculationResult([], 0, [])
    runner = draft_model or unadapted(model)

    def step(prefix: list[int], draft: list[int], weight: float, forward: int) -> tuple[int, list[int], list[int]]:
        """Accepted length, the verifier's tokens, and the next draft."""
        tokens, positions, mask, rank = quadratic_input(prefix, draft, mask_token, masks, in_group, layout)
        logits = runner(torch.tensor([tokens]), positions[None], mask, rank > 0)[0]
        after = torch.arange(len(tokens)) >= len(prefix)
        own = logits[after & (rank == 0)]
        if not allow_mask_token:
            own = without(own, mask_token)
        # Either layout lists the groups in order, and the masks of a group in order.
        diffusion = without(logits[rank > 0], mask_token).unflatten(0, (len(draft), masks)) if masks else logits[:0]
        judge = verifier(own, diffusion[:, 0], weight, ensemble) if masks else own
        following = range(len(prefix) + 1, len(prefix) + 1 + len(draft))
        predictions = draw(judge, following, temperature, seed, OWN)
        accepted = accepted_length(draft, predictions, end_tokens)

        next_start = len(prefix) + accepted
        group = diffusion[accepted - 1][1 - label_shift : block_size - label_shift] if masks else logits[:0]
        guesses = draw(group, range(next_start + 1, next_start + block_size), temperature, seed, forward)
        return accepted, predictions, [predictions[accepted - 1], *guesses]

    prompt = list(prompt)
    _, _, draft = step(prompt[:-1], prompt[-1:], 1.0, 1)
    tokens = draft[:1]
    trace: list[QuadraticStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        # The anchor is already emitted; each accepted draft token and the one after them add one.
        draft = draft[: max_new_tokens - len(tokens)]
        accepted, predictions, following = step(prompt + tokens[:-1], draft, ensemble_weight, len(trace) + 2)
        trace.append(QuadraticStep(draft, predictions, accepted))
        tokens = tokens + draft[1:accepted]
        if tokens[-1] not in end_tokens:
            tokens.append(following[0])
        draft = following
    return QuadraticSelfSpeculationResult(tokens, 1 + len(trace), trace)
