"""Philox4x32-10, the counter-based random numbers of decoders and ops; the plain form is reference/philox.py.

A random word is a function of ``(seed, step, row, column)``, so no state is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _rounds(counter: tuple[Tensor, ...], seeds: Tensor | int) -> Tensor:
    """``(..., 4)``: the four words of each counter, whose words are 64-bit tensors of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(10):
        # The low 64 bits of the product are right even if int64 wraps; the mask removes the sign bits of the shift.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def random_words(seeds: Tensor | int, step: Tensor | int, rows: Tensor, columns: int, use: int = 0) -> Tensor:
    """Philox4x32-10 words of ``(seed, step, row, column)``: ``(*rows.shape, columns)`` int64 below 2**32.

    `seeds` and `step` broadcast against `rows`; `use` is the counter's fourth word. Equal to reference/philox.py.
    """
    if isinstance(seeds, Tensor):
        seeds = seeds[..., None]
    blocks = -(-columns // 4)
    c0 = torch.arange(blocks, device=rows.device).expand(*rows.shape, blocks)
    c1 = rows.to(torch.int64)[..., None].expand_as(c0)
    c2 = (torch.zeros_like(rows, dtype=torch.int64) + step)[..., None].expand_as(c0)
    return _rounds((c0, c1, c2, torch.full_like(c0, use)), seeds).flatten(-2)[..., :columns]


def uniforms(seeds: Tensor | int, step: Tensor | int, rows: Tensor, columns: int, use: int = 0) -> Tensor:
    """fp64 in (0, 1), ``(*rows.shape, columns)``."""
    return _unit(random_words(seeds, step, rows, columns, use))


def uniforms_at(seeds: Tensor | int, step: Tensor | int, rows: Tensor, columns: Tensor) -> Tensor:
    """The numbers of `uniforms` at one column per row: fp64 of the shape of `rows` and `columns`.

    `seeds` and `step` broadcast against them.

    >>> rows, columns = torch.tensor([5, 5]), torch.tensor([0, 6])
    >>> uniforms_at(7, 1, rows, columns).equal(uniforms(7, 1, torch.tensor(5), 7)[[0, 6]])
    True
    """
    c1, column = torch.broadcast_tensors(rows.to(torch.int64), columns.to(torch.int64))
    bits = _rounds((column // 4, c1, torch.zeros_like(c1) + step, torch.zeros_like(c1)), seeds)
    return _unit(bits.gather(-1, (column % 4)[..., None])[..., 0])


def _unit(bits: Tensor) -> Tensor:
    return (bits.double() + 0.5) / 2**32
