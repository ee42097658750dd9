"""Linear self-speculation: one model drafts a block by diffusion, then verifies it autoregressively.

Source: "Nemotron-Labs-Diffusion", section 3.3, the loop of the released code. The paper appends k masks to the prefix and
lists only the k draft tokens in the verify pass; the code's block, used here, is the last verified token and k = B - 1
masks, and the verify pass feeds that token again: a cycle yields 1 to B tokens either way.

A cycle takes two forwards, and yields at least one token. Two tokens take two forwards without drafts, so the last two of a
text are not drafted. The draft pass is bidirectional in the block, with adapters if there are any; only its draft is
kept. The verify pass is causal and without adapters, so the cache is the same as in autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autoregressive import Model
from .block_diffusion import confident, denoise
from .jacobi import accepted_length
from .masks import block_causal
from .sampling import OWN, DraftModel, causal_logits, distribution, draw, never, unadapted, uniforms


class LinearStep(NamedTuple):
    draft: list[int]  # the verified part; draft[0] is the seed token, known to be right
    predictions: list[int]  # the verifier's token after each draft token
    accepted: int  # draft[:accepted] is kept; at least 1
    forwards: int  # draft passes of this cycle, and the verify pass


class LinearSelfSpeculationResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's forward counts
    trace: list[LinearStep]


def linear_self_speculation(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int = 32,
    threshold: float = 0.0,
    temperature: float = 0.0,
    allow_mask_token: bool = False,
    verification: str = "compare",
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    draft_model: DraftModel | None = None,
) -> LinearSelfSpeculationResult:
    """Drafts a block, verifies it, and keeps the longest accepted prefix and the verifier's token after it.

    The draft block is always `block_size` wide, as in training, but no more of it is verified than `max_new_tokens` leaves.
    The last two tokens have a forward each and no draft, unless a draft decides what is sampled (`verification`). A shorter
    generation is therefore the beginning of a longer one, at every temperature.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``; it reads the prompt and
            verifies.
        prompt: token ids, at least one.
        max_new_tokens: stop after exactly this many new tokens, or earlier after an end token.
        mask_token: id of masked slots; never a guess; in the released code it can be.
        block_size: seed token and masks. 1 is autoregressive decoding: nothing to draft, one forward per token.
        threshold: 0 fills the block in one draft pass. Above, a pass fills the slots whose confidence reaches it (and always the
            best one) and drafting continues until no mask is left in what will be verified, up to a drafted end token.
        temperature: of draft and verifier.
        verification: "compare" draws the verifier's own token for every slot and accepts a draft token that equals it: the
            tokens are those of :func:`~pdkernels.reference.sampling.sampled_autoregressive`, seed for seed. "rejection"
            accepts draft token x with probability ``min(1, p(x) / q(x))`` and replaces a rejected one by a draw from
            ``max(p - q, 0)``: the same distribution, more accepted. It needs draft tokens that were drawn independently of each
            other, that is, threshold 0. At temperature 0 both are the same.
        allow_mask_token: whether a row that does not guess may produce the mask token, as in the released code.
        end_tokens: stop after one of these; it is kept as the last token.
        seed: of the draws, see sampling.py.
        draft_model: `model` with its drafting adapters, given the rows they act on: all rows of the block. None: `model`.

    >>> chain = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[(positions + (tokens != 8)) % 8]
    >>> linear_self_speculation(chain, [0, 1], 6, mask_token=8, block_size=4)[:2]
    ([2, 3, 4, 5, 6, 7], 4)
    """
    op = "pdkernels.linear_self_speculation"
    if verification not in ("compare", "rejection"):
        raise ValueError(f"{op}: verification must be 'compare' or 'rejection', got {verification!r}.")
    if verification == "rejection" and threshold != 0:
        raise ValueError(
            f"{op}: threshold must be 0 with verification='rejection', got {threshold}. A slot filled in a later pass depends "
            "on slots filled before, also on later ones; use verification='compare'."
        )
    rejection = verification == "rejection" and temperature > 0
    drafter = draft_model or unadapted(model)
    if not allow_mask_token:
        model = never(model, mask_token)
    prompt = list(prompt)
    if max_new_tokens == 0:
        return LinearSelfSpeculationResult([], 0, [])

    tokens = draw(causal_logits(model, prompt)[-1:], [len(prompt)], temperature, seed, OWN)
    forwards = 1
    trace: list[LinearStep] = []
    while tokens[-1] not in end_tokens and len(tokens) < max_new_tokens:
        prefix = prompt + tokens[:-1]
        start, before = len(prefix), forwards

        left = max_new_tokens - len(tokens)
        drafts = left > 2 or rejection
        block = [tokens[-1]] + [mask_token] * (block_size - 1)
        slots = list(range(1, block_size))
        width = needed = min(left if drafts else 1, block_size)
        if rejection:
            needed = block_size  # the token after the known one is tested against its guess, however few are left
        while any(slot < needed for slot in slots):
            forwards += 1
            mask = block_causal(start + block_size, block_size, prefix_len=start)
            guesses = denoise(
                drafter,
                prefix,
                block,
                mask,
                mask_token=mask_token,
                temperature=temperature,
                seed=seed,
                forward=forwards,
            )
            chosen = confident(guesses.confidence, slots, threshold)
            for slot in chosen:
                block[slot] = guesses.tokens[slot]
            slots = [slot for slot in slots if slot not in chosen]
            ends = [slot for slot in range(1, needed) if slot not in slots and block[slot] in end_tokens]
            needed = min([needed, *ends])

        # The seed token is already emitted; each accepted draft token and the one after them add one.
        draft = block[:width]
        forwards += 1
        logits = causal_logits(model, prefix + draft)[start:]
        positions = range(start + 1, start + 1 + len(draft))
        predictions = draw(logits, positions, temperature, seed, OWN)
        if rejection:
            tested = min(len(draft), block_size - 1)  # the last row of a whole block has no guess to test
            if tested:
                p, q = distribution(logits[:tested], temperature), guesses.distributions[1 : tested + 1]
                predictions[:tested] = verdicts(p, q, block[1 : tested + 1], positions[:tested], seed, forwards)

        accepted = accepted_length(draft, predictions, end_tokens)
        trace.append(LinearStep(draft, predictions, accepted, forwards - before))
        tokens = tokens + draft[1:accepted]
        if tokens[-1] not in end_tokens:
            tokens.append(predictions[accepted - 1])
    return LinearSelfSpeculationResult(tokens, forwards, trace)


def verdicts(
    p: Tensor, q: Tensor, guesses: Sequence[int], positions: Sequence[int], seed: int, forward: int
) -> list[int]:
    """The tokens at `positions`: a guess with probability ``min(1, p / q)``, else a draw from ``max(p - q, 0)``.

    Such a token is distributed as p if the guess is distributed as q (Leviathan et al., "Fast inference from transformers via
    speculative decoding", 2023). A rejected guess is never drawn again (there p < q), so equality with the guess means
    acceptance.

    Args:
        p, q: ``(R, V)`` fp64 probabilities of verifier and draft.
        guesses: R tokens with ``q[row, guess] > 0``.
        positions: of the guesses.
        forward: number of the verify pass. The test of position x uses the number ``(seed, forward, x, 0)``, the draw step 0.
    """
    u = uniforms(seed, forward, torch.tensor(list(positions), dtype=torch.int64), torch.tensor(0))
    others = draw((p - q).clamp(min=0).log(), positions, 1.0, seed, OWN)
    return [
        guess if u[row] * q[row, guess] < p[row, guess] else other
        for row, (guess, other) in enumerate(zip(guesses, others))
    ]
