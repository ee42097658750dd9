"""Decoders of recurrent-depth models, which choose how often the core runs for each token."""

from __future__ import annotations

from pdkernels.decoding.method import Method
from pdkernels.decoding.recurrent import (
    recurrent_adaptive,
    recurrent_diffusion,
    recurrent_self_speculation,
    recurrent_static,
)
from pdkernels.models.capabilities import Capability
from pdkernels.models.protocols import RecurrentPartsModel, RecurrentWaveModel

_RECURRENT: frozenset[Capability] = frozenset({"recurrent"})

_SAMPLING = {"temperature": 0.2, "top_p": 0.95}  # of all samplers of the paper, in its appendix

METHODS = (
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
        # Efficient parallel samplers, section 5: the best of its baseline on GSM8K.
        paper_settings={"block_size": 4, "draft_recurrences": 4, **_SAMPLING},
    ),
    Method(
        "recurrent_diffusion",
        recurrent_diffusion.decode,
        "recurrent",
        _RECURRENT,
        title="parallel sampler",
        steps=recurrent_diffusion.WaveSteps,
        protocol=RecurrentWaveModel,
        # Section 5, "conservative settings".
        paper_settings={
            "inner_recurrence": 4,
            "threshold": 0.03,
            "noise": 0.0,
            "momentum": 0.1,
            "max_wavefront": 128,
            **_SAMPLING,
        },
    ),
)
