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
)
