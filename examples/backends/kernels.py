"""What the patches share: attention, products and norms of PyTorch modules, in place of PyTorch's own."""

from functools import lru_cache

import torch

import pdkernels as pd


@lru_cache(maxsize=64)
def plan(rows, causal, device):
    return (pd.masks.causal if causal else pd.masks.full)(rows).plan(64, 64, device)


def attention(q, k, v, causal=False, scale=None):
    """Of ``(batch, heads, rows, dim)``, as PyTorch's; the last keys are those of the rows, and `causal` is about these. Fewer K heads
    than Q heads are shared among them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows, before = q.shape[1], k.shape[1] - q.shape[1]
    lengths = torch.full((len(q),), before, device=q.device)
    new = k[:, before:], v[:, before:]
    out = pd.speculative_attention(q, *new, k, v, lengths, plan(rows, causal, q.device), scale=scale)
    return out.transpose(1, 2)


def use_linear(model):
    """The products of a model's `nn.Linear` modules: a matrix is read once for all rows."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = lambda x, own=module: pd.linear(x, own.weight, own.bias)


def use_norm(kind, eps="eps"):
    """RMS norms of a class with a weight and no bias, in one pass."""
    kind.forward = lambda self, x: pd.add_rms_norm(x, None, self.weight, eps=getattr(self, eps))[0]
