"""Block diffusion: a block of mask tokens is filled in by confidence, then its rows in the past are recomputed.

Source: "Nemotron-Labs-Diffusion", section 3.2 (block-wise denoising by confidence), with what its released code adds: the
most confident slot is always committed, and the prompt and every finished block give the next block's first token.

There is no cache: every forward runs over the clean text and the block. The mask reproduces the state of a cache: past rows
attend to the tokens that they attended to when they were refreshed, and never to a mask token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autoregressive import Model
from .masks import Mask, block_causal
from .sampling import OWN, DraftModel, causal_logits, distribution, draw, never, unadapted, without


class DenoiseStep(NamedTuple):
    block: list[int]  # as the forward saw it: masked slots hold the mask token
    committed: dict[int, int]  # slot -> token


class BlockDiffusionResult(NamedTuple):
    tokens: list[int]  # new tokens only; an end token that stopped the generation is the last one
    forwards: int  # the prompt's, one per denoising step, one per refresh
    trace: list[DenoiseStep]


class Guesses(NamedTuple):
    """The result of one bidirectional forward for each slot of a block."""

    tokens: list[int]
    confidence: list[float]  # softmax of the plain logits at that token: without temperature and noise
    distributions: Tensor  # (B, V) fp64, what the tokens were drawn from


def denoise(
    model: DraftModel,
    history: Sequence[int],
    block: Sequence[int],
    mask: Mask,
    *,
    mask_token: int,
    temperature: float,
    seed: int,
    forward: int,
) -> Guesses:
    """One forward over `history` and `block`, adapters on the block; logits are unshifted: a row predicts its own position."""
    start = len(history)
    visible, positions = mask
    adapted = positions >= start
    logits = model(torch.tensor([[*history, *block]]), positions[None], visible, adapted)[0, start:]
    logits = without(logits, mask_token)
    tokens = draw(logits, range(start, start + len(block)), temperature, seed, forward)
    confidence = distribution(logits, 1.0)[range(len(block)), tokens].tolist()
    return Guesses(tokens, confidence, distribution(logits, temperature))


Sampler = Callable[[Tensor, list[int], list[bool]], Sequence[float]]
"""Scores of a block's guesses, from its logits ``(B, V)`` including the mask token's, its tokens, and which of them are masked."""


def judge(
    model: DraftModel,
    history: Sequence[int],
    block: list[int],
    mask: Mask,
    *,
    mask_token: int,
    active: list[bool],
    sampler: Sampler,
) -> Guesses:
    """One forward as in `denoise`, at temperature 0, with the sampler's scores as confidence."""
    start = len(history)
    visible, positions = mask
    logits = model(torch.tensor([[*history, *block]]), positions[None], visible, positions >= start)[0, start:]
    guessing = without(logits, mask_token)
    return Guesses(guessing.argmax(-1).tolist(), list(sampler(logits, block, active)), distribution(guessing, 0.0))


def confident(confidence: Sequence[float], slots: Iterable[int], threshold: float) -> list[int]:
    """The most confident of `slots` (the first on ties), and all slots whose confidence reaches `threshold`.

    >>> confident([0.9, 0.2, 0.5, 0.5], [1, 2, 3], 0.8), confident([0.9, 0.2, 0.5, 0.5], [1, 2, 3], 0.5)
    ([2], [2, 3])
    """
    slots = list(slots)
    best = most_confident(confidence, slots, 1)
    return [slot for slot in slots if slot in best or confidence[slot] >= threshold]


def most_confident(confidence: Sequence[float], slots: Iterable[int], count: int) -> list[int]:
    """The `count` most confident of `slots`, in order of position; the first ones on ties."""
    return sorted(sorted(slots, key=lambda slot: (-confidence[slot], slot))[:count])


def quotas(masks: int, steps: int) -> list[int]:
    """`masks` commits spread evenly over `steps` forwards, the remainder first; every forward commits at least one.

    >>> quotas(7, 3), quotas(2, 5)
    ([3, 2, 2], [1, 1])
    """
    steps = min(steps, masks)
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def is_complete(block: Sequence[int], slots: Sequence[int], count: int, end_tokens: Sequence[int]) -> bool:
    """True if nothing is masked (in `slots`) among the first `count` tokens, or before an end token among them."""
    for slot in range(count):
        if slot in slots:
            return False
        if block[slot] in end_tokens:
            return True
    return True


def cut_behind_end(tokens: Sequence[int], end_tokens: Sequence[int]) -> list[int]:
    """`tokens` up to and with the first end token.

    >>> cut_behind_end([4, 9, 5, 9], (9,)), cut_behind_end([4, 5], (9,))
    ([4, 9], [4, 5])
    """
    ends = [index for index, token in enumerate(tokens) if token in end_tokens]
    return list(tokens[: ends[0] + 1]) if ends else list(tokens)


def block_diffusion(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    block_size: int = 32,
    threshold: float | None = 0.9,
    steps_per_block: int | None = None,
    refresh: str = "causal",
    temperature: float = 0.0,
    allow_mask_token: bool = False,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
    sampler: Sampler | None = None,
) -> BlockDiffusionResult:
    """Block after block, counted from the end of the prompt; a block is `block_size` wide even if fewer tokens are needed.

    refresh="causal" (Nemotron-Labs-Diffusion): the finished block runs through the model causally. Its past rows are
    those of autoregressive decoding, and its last row predicts the first token of the next block. refresh="bidirectional" (models
    with a block-causal past): attention is bidirectional in the finished block, and the next block is all masks. The prompt
    is causal in both cases.

    A block is denoised until nothing is masked in the part that will be kept: the released code stops at an end token without a
    mask before it; here `max_new_tokens` has the same effect. The last block needs no refresh. The mask token is never a
    guess; in the released code it can be.

    Args:
        model: callable ``(tokens (1, T), positions (1, T), mask (T, T) bool) -> logits (1, T, V)``.
        prompt: token ids, at least one.
        max_new_tokens: stop after exactly this many new tokens, or earlier after an end token.
        mask_token: id of masked slots.
        block_size: tokens per block.
        threshold: commit every slot whose confidence reaches it (``>=``), and always the best one. None: commit the most
            confident ones by the quotas of `steps_per_block`.
        steps_per_block: forwards per block if `threshold` is None; as many as there are masks by default.
        refresh: "causal" or "bidirectional".
        temperature: of the candidates. Slots are chosen by the confidence at temperature 1.
        allow_mask_token: whether a row that does not guess may produce the mask token, as in the released code.
        end_tokens: stop after one of these; it is kept as the last token.
        seed: of sampling, see sampling.py.
        sampler: scores that replace the confidence; slots after an end token are then not filled.

    >>> chain = lambda tokens, positions, mask: torch.eye(9, dtype=torch.float64)[(positions + (tokens != 8)) % 8] * 20
    >>> block_diffusion(chain, [0, 1], 6, mask_token=8, block_size=4)[:2]
    ([2, 3, 4, 5, 6, 7], 4)
    """
    op = "pdkernels.block_diffusion"
    if refresh not in ("causal", "bidirectional"):
        raise ValueError(f"{op}: refresh must be 'causal' or 'bidirectional', got {refresh!r}.")
    if threshold is not None and steps_per_block is not None:
        raise ValueError(
            f"{op}: steps_per_block must be None with a threshold, got {steps_per_block}. Pass threshold=None."
        )
    plain = unadapted(model)
    if not allow_mask_token:
        model = never(model, mask_token)
    prompt = list(prompt)
    tokens: list[int] = []
    trace: list[DenoiseStep] = []
    forwards = 0
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in end_tokens):
        history = prompt + tokens
        start = len(history)
        block = [mask_token] * block_size
        forwards += 1  # of the prompt, or the refresh of the last block
        if refresh == "causal":
            block[:1] = draw(causal_logits(model, history)[-1:], [start], temperature, seed, OWN)
        slots = list(range(refresh == "causal", block_size))
        causal_rows = start if refresh == "causal" else len(prompt)
        mask = block_causal(start + block_size, block_size, causal_rows)
        left = quotas(len(slots), steps_per_block or len(slots)) if slots else []
        count = min(block_size, max_new_tokens - len(tokens))
        while not is_complete(block, slots, count, end_tokens):
            forwards += 1
            able = slots
            if sampler is None:
                guesses = denoise(
                    plain,
                    history,
                    block,
                    mask,
                    mask_token=mask_token,
                    temperature=temperature,
                    seed=seed,
                    forward=forwards,
                )
            else:
                end = len(cut_behind_end(block, end_tokens))
                able = [slot for slot in slots if slot < end]
                active = [index in able for index in range(block_size)]
                guesses = judge(plain, history, block, mask, mask_token=mask_token, active=active, sampler=sampler)
            if threshold is None:
                chosen = most_confident(guesses.confidence, able, left.pop(0))
            else:
                chosen = confident(guesses.confidence, able, threshold)
            trace.append(DenoiseStep(list(block), {slot: guesses.tokens[slot] for slot in chosen}))
            for slot in chosen:
                block[slot] = guesses.tokens[slot]
            slots = [slot for slot in slots if slot not in chosen]
        tokens += cut_behind_end(block[:count], end_tokens)
    return BlockDiffusionResult(tokens, forwards, trace)
