"""Random words for draft slots without a prediction, generated once per generation.

The tokens that fill a draft affect only the number of forwards, so they only have to be reproducible and cheap. The
words of all steps are generated before the first step and stay on the device: a step then indexes a tensor, holds no
generator state and can be captured in a graph.
"""

from __future__ import annotations

import torch

from pdkernels._philox import random_words


def filler_words(seeds: torch.Tensor, steps: int, slots: int) -> torch.Tensor:
    """Philox4x32-10 words of ``(seed, step, row 0, column)``: ``(*seeds.shape, steps, slots)`` int64 in 0 .. 2**32 -
    1."""
    numbers = torch.arange(steps, device=seeds.device).expand(*seeds.shape, steps)
    return random_words(seeds[..., None], numbers, torch.zeros_like(numbers), slots).contiguous()
