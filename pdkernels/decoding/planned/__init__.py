"""Decoders of models that plan: chunks of a text are written in parallel."""

from __future__ import annotations

from pdkernels.decoding.method import Method
from pdkernels.decoding.planned import planned

METHODS = (
    Method(
        "planned",
        planned.decode,
        "planned",
        frozenset({"plan_tokens"}),
        title="planned diffusion",
        models=("tiny-planned",),
        in_default_evaluation=False,
    ),
)
