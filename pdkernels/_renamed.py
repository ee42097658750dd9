"""Former names. For one release they raise an error that names the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

_OPS = {
    "silu_gate": "silu_and_mul",
    "rotate_": "apply_rope_",
    "rotate_append_": "apply_rope_append_",
    "logit_drift": "logit_divergence",
    "LogitDrift": "LogitDivergence",
    "value_drift_select_": "select_stale_rows_",
    "record_step_": "log_step_",
}

# Module -> former name -> current one.
RENAMED: dict[str, dict[str, str]] = {
    "pdkernels": _OPS,
    "pdkernels.ops": _OPS | {"sandwich": "transformer_ops", "record_step": "log_step"},
    "pdkernels.decoding": {"suits": "supports"},
    "pdkernels.evaluation": {
        "Contender": "Candidate",
        "contenders": "candidates",
        "contender": "candidate",
        "contest": "comparison",
    },
    "pdkernels.models": {"between": "fused"},
}

# Options of decoding methods.
RENAMED_OPTIONS = {"draft_len": "block_size"}

# (method, former option) -> what replaces it.
MOVED_OPTIONS = {
    ("recurrent_diffusion", "published"): "The steps of the released code are pdkernels.reference.recurrent_published."
}


def renamed(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module that has former names."""

    def missing(name: str) -> NoReturn:
        present = RENAMED[module].get(name)
        hint = f". It is {module}.{present} now." if present else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return missing
