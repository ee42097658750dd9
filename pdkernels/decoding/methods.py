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
from pdkernels.models.protocols import (
    BlockCausalModel,
    BlockModel,
    BranchingModel,
    PlanningModel,
    RecurrentPartsModel,
    RecurrentWaveModel,
    SelfSpeculativeModel,
)

_TRIMODE = ("tiny-trimode",)

_ALL = (
    Method(
        "autoregressive",
        autoregressive.decode,
        also=("recurrent",),
        lossless=True,
        steps=autoregressive.AutoregressiveSteps,
        models=("tiny-code", "tiny-jacobi", *_TRIMODE),
    ),
    Method(
        "jacobi",
        jacobi.decode,
        also=("recurrent",),
        lossless=True,
        steps=jacobi.JacobiSteps,
        judges=True,
        models=("tiny-jacobi", "tiny-code"),
        widths=(None,),
    ),
    Method(
        "jacobi_multiblock",
        jacobi_multiblock.decode,
        protocol=BranchingModel,
        lossless=True,
        judges=True,
        models=("tiny-jacobi",),
        widths=(None,),
    ),
    Method(
        "linear_self_speculation",
        linear_self_speculation.decode,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=linear_self_speculation.LinearSteps,
        judges=True,
        models=_TRIMODE,
        widths=(4, 8, 16),
    ),
    Method(
        "quadratic_self_speculation",
        quadratic_self_speculation.decode,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=quadratic_self_speculation.QuadraticSteps,
        judges=True,
        models=_TRIMODE,
        widths=(4, 8, 16),
    ),
    Method("block_diffusion", block_diffusion.decode, protocol=BlockModel, models=_TRIMODE, widths=(16,)),
    Method(
        "planned",
        planned.decode,
        also=("masked",),
        protocol=PlanningModel,
        plans=True,
        models=("tiny-planned",),
        shown=False,
    ),
    Method("recurrent_static", recurrent_static.decode, "recurrent", lossless=True),
    Method("recurrent_adaptive", recurrent_adaptive.decode, "recurrent", protocol=RecurrentPartsModel),
    Method("recurrent_self_speculation", recurrent_self_speculation.decode, "recurrent", judges=True),
    Method("recurrent_diffusion", recurrent_diffusion.decode, "recurrent", protocol=RecurrentWaveModel),
    Method("llada", llada.decode, "masked"),
    Method("dream", dream.decode, "masked"),
    Method("slowfast", slowfast.decode, "masked"),
    Method("dllm_cache", dllm_cache.decode, "masked"),
    Method("fast_dllm", fast_dllm.decode, "masked"),
    Method("fast_dllm_v2", fast_dllm_v2.decode, protocol=BlockCausalModel, models=_TRIMODE, shown=False),
)
METHODS = {method.name: method for method in _ALL}
