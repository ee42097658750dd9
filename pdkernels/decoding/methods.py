"""The registry of decoding methods: every fact about a method that its decoder does not state is in `METHODS`."""

from __future__ import annotations

from pdkernels.decoding import (
    autoregressive,
    block_diffusion,
    dllm_cache,
    dream,
    fast_dllm,
    fast_dllm_v2,
    jacobi,
    jacobi_multiblock,
    linear_self_speculation,
    llada,
    planned,
    quadratic_self_speculation,
    recurrent_adaptive,
    recurrent_diffusion,
    recurrent_self_speculation,
    recurrent_static,
    slowfast,
)
from pdkernels.decoding._method import Method
from pdkernels.models.capabilities import Capability
from pdkernels.models.protocols import (
    BlockCausalModel,
    BlockModel,
    BranchingModel,
    RecurrentPartsModel,
    RecurrentWaveModel,
    SelfSpeculativeModel,
)

_TRIMODE = ("tiny-trimode",)
_MASKS_AMONG_ROWS: frozenset[Capability] = frozenset({"causal", "block_causal"})
_RECURRENT: frozenset[Capability] = frozenset({"recurrent"})
_BIDIRECTIONAL: frozenset[Capability] = frozenset({"bidirectional"})

_ALL = (
    Method(
        "autoregressive",
        autoregressive.decode,
        title="token by token",
        lossless=True,
        steps=autoregressive.AutoregressiveSteps,
        models=("tiny-code", "tiny-jacobi", *_TRIMODE),
    ),
    Method(
        "jacobi",
        jacobi.decode,
        title="Jacobi",
        lossless=True,
        steps=jacobi.JacobiSteps,
        verifies_drafts=True,
        models=("tiny-jacobi", "tiny-code"),
        widths=(None,),
    ),
    Method(
        "jacobi_multiblock",
        jacobi_multiblock.decode,
        title="Jacobi, several blocks",
        requires=_MASKS_AMONG_ROWS,
        protocol=BranchingModel,
        lossless=True,
        verifies_drafts=True,
        models=("tiny-jacobi",),
        widths=(None,),
    ),
    Method(
        "linear_self_speculation",
        linear_self_speculation.decode,
        title="linear self-speculation",
        requires=_MASKS_AMONG_ROWS,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=linear_self_speculation.LinearSteps,
        verifies_drafts=True,
        models=_TRIMODE,
        widths=(4, 8, 16),
    ),
    Method(
        "quadratic_self_speculation",
        quadratic_self_speculation.decode,
        title="quadratic self-speculation",
        requires=_MASKS_AMONG_ROWS,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=quadratic_self_speculation.QuadraticSteps,
        verifies_drafts=True,
        models=_TRIMODE,
        widths=(4, 8, 16),
    ),
    Method(
        "block_diffusion",
        block_diffusion.decode,
        title="block diffusion",
        requires=_MASKS_AMONG_ROWS,
        protocol=BlockModel,
        steps=block_diffusion.BlockSteps,
        models=_TRIMODE,
        widths=(4, 8, 16),
    ),
    Method(
        "planned",
        planned.decode,
        "planned",
        frozenset({"plan_tokens"}),
        title="planned diffusion",
        models=("tiny-planned",),
        in_default_evaluation=False,
    ),
    Method("recurrent_static", recurrent_static.decode, "recurrent", _RECURRENT, title="fixed depth", lossless=True),
    Method(
        "recurrent_adaptive",
        recurrent_adaptive.decode,
        "recurrent",
        _RECURRENT,
        title="adaptive depth",
        protocol=RecurrentPartsModel,
    ),
    Method(
        "recurrent_self_speculation",
        recurrent_self_speculation.decode,
        "recurrent",
        _RECURRENT,
        title="self-speculation in depth",
        verifies_drafts=True,
    ),
    Method(
        "recurrent_diffusion",
        recurrent_diffusion.decode,
        "recurrent",
        _RECURRENT,
        title="parallel sampler",
        steps=recurrent_diffusion.WaveSteps,
        protocol=RecurrentWaveModel,
    ),
    Method("llada", llada.decode, "masked", _BIDIRECTIONAL, title="LLaDA", steps=llada.LladaSteps),
    Method("dream", dream.decode, "masked", _BIDIRECTIONAL, title="Dream"),
    Method("slowfast", slowfast.decode, "masked", _BIDIRECTIONAL, title="SlowFast"),
    Method("dllm_cache", dllm_cache.decode, "masked", _BIDIRECTIONAL, title="dLLM-Cache"),
    Method("fast_dllm", fast_dllm.decode, "masked", _BIDIRECTIONAL, title="Fast-dLLM", steps=fast_dllm.FastSteps),
    Method(
        "fast_dllm_v2",
        fast_dllm_v2.decode,
        title="Fast-dLLM v2",
        requires=frozenset({"block_causal"}),
        protocol=BlockCausalModel,
        models=_TRIMODE,
        in_default_evaluation=False,
    ),
)
METHODS = {method.name: method for method in _ALL}
