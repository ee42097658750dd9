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
        # Planned Diffusion, section 5, "decoding strategies" and "inference setup".
        paper_settings={"steps_ratio": 1.0, "temperature": 0.2, "top_p": 0.95},
    ),
)
