"""Decoders of masked-diffusion models: a canvas of masks is filled in any order."""

from __future__ import annotations

from pdkernels.decoding.masked import dllm_cache, dream, fast_dllm, llada, slowfast
from pdkernels.decoding.method import Method
from pdkernels.models.capabilities import Capability

_BIDIRECTIONAL: frozenset[Capability] = frozenset({"bidirectional"})

METHODS = (
    Method("llada", llada.decode, "masked", _BIDIRECTIONAL, title="LLaDA", steps=llada.LladaSteps),
    Method("dream", dream.decode, "masked", _BIDIRECTIONAL, title="Dream", steps=dream.DreamSteps),
    Method(
        "slowfast",
        slowfast.decode,
        "masked",
        _BIDIRECTIONAL,
        title="SlowFast",
        steps=slowfast.SlowFastSteps,
        # SlowFast Sampling, section 4.2. No k_slow and k_fast.
        paper_settings={"tau_min": 0.1, "tau_high": 0.85, "max_exploration": 8, "window": 2, "variance": 1.0},
    ),
    Method(
        "dllm_cache",
        dllm_cache.decode,
        "masked",
        _BIDIRECTIONAL,
        title="dLLM-Cache",
        steps=dllm_cache.CachedSteps,
        follows_adapters=False,
    ),
    Method("fast_dllm", fast_dllm.decode, "masked", _BIDIRECTIONAL, title="Fast-dLLM", steps=fast_dllm.FastSteps),
)
