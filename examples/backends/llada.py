"""LLaDA's modelling code, under whatever sampler calls it: Fast-dLLM, dLLM-Cache and Slow-Fast sampling do.

from examples.backends import llada
llada.patch(modeling_llada, model)
"""

from examples.backends.kernels import attention, use_linear, use_norm


def attend(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    """In place of `LLaDABlock._scaled_dot_product_attention`, which never masks."""
    if attn_mask is not None or dropout_p > 0:
        raise NotImplementedError("neither a mask nor dropout")
    return attention(q, k, v)


def patch(modeling, model):
    """`modeling`: the module that `model` comes from."""
    modeling.LLaDABlock._scaled_dot_product_attention = attend
    use_norm(modeling.RMSLayerNorm)
    use_linear(model)
