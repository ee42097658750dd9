"""The published code of recurrent-depth models (recurrent-pretraining): attention, products, norms and gates.

    from examples.backends import raven
    raven.patch(raven_modeling_minimal, model)

Source: Geiping et al., "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach".
"""

import pdkernels as pd
from examples.backends.kernels import attention, use_linear, use_norm


def attend(self, x, freqs_cis, block_idx, mask=None, past_key_values=None):
    """In place of `CausalSelfAttention.forward`, with the module's own cache and rotation."""
    if mask is not None:
        raise NotImplementedError("no mask")
    batch, rows, width = x.shape
    q, k, v = (part.unflatten(2, (-1, self.head_dim)) for part in self.Wqkv(x).split(self.chunks, dim=2))
    if self.config.qk_bias:
        q, k = (q + self.qk_bias[0]).to(q.dtype), (k + self.qk_bias[1]).to(q.dtype)
    q, k = self.rotate(q, k, freqs_cis=freqs_cis)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, block_idx)
    return self.proj(attention(q, k, v, causal=True).transpose(1, 2).reshape(batch, rows, width))


def patch(modeling, model):
    """`modeling`: the module that `model` comes from."""
    modeling.CausalSelfAttention.rotate = staticmethod(modeling.apply_rotary_emb_complex_like)
    modeling.CausalSelfAttention.forward = attend
    modeling.GatedMLP.forward = lambda self, x: self.proj(pd.silu_and_mul(self.fc(x)))
    use_norm(modeling.RMSNorm)
    use_linear(model)
