"""SDAR's modelling code: attention of a block and of its cache, and norms, which are the parts that it takes from CUDA libraries.

    from examples.backends import sdar
    sdar.stand_in()  # before `modeling_sdar` is imported where flash-attn is missing
    sdar.patch(modeling_sdar, model)

Source: Cheng et al., "SDAR: A Synergistic Diffusion-AutoRegression Paradigm for Scalable Sequence Generation".
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pdkernels as pd
from examples.backends.kernels import attention, use_linear, use_norm


def attend(q, k, v, causal=False, softmax_scale=None):
    """In place of `flash_attn_func`, of ``(batch, rows, heads, dim)``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, causal, softmax_scale).transpose(1, 2)


def stand_in():
    """Modules with the names that `modeling_sdar` imports from flash-attn."""
    names = ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm")
    for name in names:
        sys.modules.setdefault(name, ModuleType(name)).__spec__ = ModuleSpec(name, None)
    sys.modules[names[-1]].rms_norm_fn = lambda x, weight, bias=None, eps=1e-6: pd.add_rms_norm(
        x, None, weight, eps=eps
    )[0]


def patch(modeling, model):
    """`modeling`: the module that `model` comes from."""
    modeling.flash_attn_func = attend
    use_norm(modeling.SDARRMSNorm, "variance_epsilon")
    use_linear(model)
