"""Random words for draft slots that nothing has predicted yet, drawn once per generation.

Which tokens fill a draft decides only how many forwards a generation needs, so they have to be reproducible and
cheap, nothing more. The words of all steps are drawn before the first step and stay on the device: a step then
indexes a tensor, holds no generator state and can be captured in a graph. Arithmetic as in reference/philox.py, here
on whole tables with wrapping 64-bit products; tests demand the same bits from both.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF


def filler_words(seed: int, steps: int, slots: int, device: torch.device) -> torch.Tensor:
    """Philox4x32-10 words of ``(seed, step, row 0, column)``: ``(steps, slots)`` int64 in 0 .. 2**32 - 1."""
    blocks = -(-slots // 4)
    c0 = torch.arange(blocks, device=device).expand(steps, blocks)
    c1 = c3 = torch.zeros_like(c0)
    c2 = torch.arange(steps, device=device)[:, None].expand(steps, blocks)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # The product's low 64 bits are right even when int64 wraps; the mask removes the sign the shift brings in.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32 & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1).flatten(1)[:, :slots].contiguous()
