"""Planned diffusion's code, whose model is Dream's: attention of blocks that do not see each other, products and norms.

    from examples.backends import planned_diffusion
    planned_diffusion.patch(modeling_dream, model)

Source: Israel et al., "Planned Diffusion".
"""

from unittest import mock

import torch

from examples.backends.kernels import attention, use_linear, use_norm

PLAIN = torch.nn.functional.scaled_dot_product_attention


def attend(q, k, v, attn_mask=None, dropout_p=0.0):
    """In place of PyTorch's, of one text. The rows of a block see the same keys, and only those are read; a causal prompt stays PyTorch's."""
    if dropout_p > 0 or attn_mask is None or len(q) > 1:
        raise NotImplementedError("one text, with a mask and without dropout")
    seen, block = torch.unique(attn_mask[0, 0] == 0, dim=0, return_inverse=True)
    if len(seen) > 8:
        return PLAIN(q, k, v, attn_mask=attn_mask, enable_gqa=True)
    out = torch.empty_like(q)
    for number, keys in enumerate(seen):
        rows = (block == number).nonzero()[:, 0]
        out[:, :, rows] = attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
    return out


def patch(modeling, model):
    """`modeling`: the module that `model` comes from."""
    own = modeling.DreamSdpaAttention.forward
    ours = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend)
    modeling.DreamSdpaAttention.forward = lambda self, *args, **options: ours(own)(self, *args, **options)
    modeling.repeat_kv = lambda x, times: x
    use_norm(modeling.DreamRMSNorm, "variance_epsilon")
    use_linear(model)
