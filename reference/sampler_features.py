"""The input of the trained sampler of block diffusion for every position of a block.

Source: the sampler of the SGLang fork of "Nemotron-Labs-Diffusion" (python/sglang/srt/dllm/algorithm/learned_sampler_model.py), whose
checkpoints fix the order. The paper names the parts: probabilities, margin, entropy and embeddings of the best tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sampler_features(logits: Tensor, tokens: Tensor, active: Tensor, table: Tensor) -> Tensor:
    """Computed position by position, number by number.

    Args:
        logits: ``(batch, size, vocab)`` of the block's rows as the model returns them, the mask token's included.
        tokens: ``(batch, size)`` the block as the forward saw it.
        active: ``(batch, size)`` bool: masks that may be filled.
        table: ``(ids, width)`` a vector for every token; higher ids use the last one.

    Returns:
        ``(batch, size, 16 + 4 * width)``, dtype of the logits, at least float32.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    batch, size, vocab = logits.shape
    rows = []
    for sequence in range(batch):
        count = float(active[sequence].sum())
        for index in range(size):
            law = logits[sequence, index].softmax(-1)
            probs, ids = law.sort(descending=True, stable=True)
            best = [float(value) for value in probs[:5]] + [0.0] * max(0, 5 - vocab)
            vectors = [table[min(int(token), len(table) - 1)] for token in (tokens[sequence, index], *ids[:3])]
            vectors += [torch.zeros_like(vectors[0])] * (4 - len(vectors))
            entropy = -sum(value * torch.log(torch.tensor(value + 1e-10, dtype=logits.dtype)) for value in best)
            numbers = [*best, best[0], best[0] - best[1], sum(best[:3]), float(entropy), float(active[sequence, index])]
            numbers += [0.0, count / size]
            last = [float(torch.tensor(best[0] + 1e-10).double().log()), 1 - sum(value**2 for value in best)]
            last += [index / max(size - 1, 1), float(torch.tensor(count + 1.0).double().log())]
            scalars, ends = (torch.tensor(values, dtype=logits.dtype) for values in (numbers, last))
            rows.append(torch.cat([scalars, *(vector.to(logits.dtype) for vector in vectors), ends]))
    return torch.stack(rows).view(batch, size, -1)
