"""Philox4x32-10, the counter-based random numbers of this project.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.

A random word depends on where it is used, not on earlier random words: ``(seed, step, row, column)`` identifies
the decoding step, the row of the problem and the column in that row. No state is stored, all devices agree bit
for bit, and a sequence gets the same words alone and in a batch.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
WORD = 0xFFFFFFFF


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in 16-bit parts so that no int64 step overflows."""
    high_part = multiplier * (word >> 16)
    low_part = multiplier * (word & 0xFFFF)
    low_sum = ((high_part & 0xFFFF) << 16) + low_part
    return (high_part >> 16) + (low_sum >> 32), low_sum & WORD


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Ten rounds of Philox4x32.

    Args:
        counter: ``(..., 4)`` int64, words in 0 .. 2**32 - 1.
        key: ``(..., 2)`` int64, words in 0 .. 2**32 - 1; broadcasts against `counter`.

    Returns:
        ``(..., 4)`` int64, four random words in 0 .. 2**32 - 1.

    Example:
        >>> philox4x32(torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).tolist() == [
        ...     0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
        True
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def as_seeds(seed: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """int64, the low 64 bits of a number."""
    if isinstance(seed, torch.Tensor):
        return seed.to(device, torch.int64)
    return torch.tensor((seed + 2**63) % 2**64 - 2**63, device=device)


def key_of(seeds: torch.Tensor) -> torch.Tensor:
    """``(..., 2)``: low and high word of int64 `seeds` ``(...)``."""
    return torch.stack([seeds & WORD, (seeds >> 32) & WORD], dim=-1)


def random_words(seed: int | torch.Tensor, step: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The random word that is keyed by ``(seed, step, row, column)``.

    One call of Philox gives four words, shared by four adjacent columns: the word is number ``column % 4`` of
    ``philox4x32((column // 4, row, step, 0), (seed low, seed high))``.

    Args:
        seed: 64-bit integer, or an int64 tensor of them.
        seed, step, row, column: int64 tensors that broadcast; ``0 <= step, row < 2**32``, ``0 <= column < 2**34``.

    Returns:
        int64 of the broadcast shape, in 0 .. 2**32 - 1.

    Example:
        >>> zero = torch.tensor(0)
        >>> hex(random_words(0, zero, zero, torch.tensor(1)).item())
        '0xe169c58d'
    """
    seeds, step, row, column = torch.broadcast_tensors(as_seeds(seed, column.device), step, row, column)
    counter = torch.stack([column // 4, row, step, torch.zeros_like(column)], dim=-1)
    words = philox4x32(counter, key_of(seeds))
    return words.gather(-1, (column % 4).unsqueeze(-1)).squeeze(-1)
