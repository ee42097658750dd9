"""JacobiForcing's decoders for Qwen2: attention, products and norms of the model that they run, which is that of transformers.

    from examples.backends import jacobi_forcing
    jacobi_forcing.patch(transformers.models.qwen2.modeling_qwen2, model)

Source: Hu et al., "Fast and Accurate Causal Parallel Decoding using Jacobi Forcing".
"""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from examples.backends.kernels import attention, use_linear, use_norm


def attend(module, q, k, v, mask=None, scaling=None, dropout=0.0, sliding_window=None, **_):
    """In place of transformers' attention functions: the queries are the last tokens of a text, and see those before them."""
    if mask is not None or dropout > 0 or sliding_window is not None:
        raise NotImplementedError("causal attention, without a mask, dropout or a window")
    return attention(q, k, v, causal=True, scale=scaling).transpose(1, 2), None


def patch(modeling, model):
    """`modeling`: the module that `model` comes from. A batch is one text, as these decoders have it: there is no padding."""
    AttentionInterface.register("pdkernels_causal", attend)
    AttentionMaskInterface.register("pdkernels_causal", lambda *_, **__: None)
    model.config._attn_implementation = "pdkernels_causal"
    use_norm(modeling.Qwen2RMSNorm, "variance_epsilon")
    use_linear(model)
