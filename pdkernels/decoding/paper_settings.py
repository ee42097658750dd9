"""The settings with which the papers report their methods. Some of our defaults differ (docs/decoding.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PAPER_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Jacobi Forcing, section 4.2: blocks of 128 in all evaluations of a single block.
        "jacobi": {"block_size": 128},
        # Section 4.3 and appendices D and E, for H200 and B200. Section 4.2 has blocks of 128 on a B200. No pool size.
        "jacobi_multiblock": {"block_size": 64, "blocks": 2, "spawn_ratio": 0.85, "verification_size": 4},
        # SlowFast Sampling, section 4.2. No k_slow and k_fast.
        "slowfast": {"tau_min": 0.1, "tau_high": 0.85, "max_exploration": 8, "window": 2, "variance": 1.0},
        # Nemotron-Labs-Diffusion, figure 7 and table 10: 31 drafted tokens. It has no width of the quadratic mode.
        "linear_self_speculation": {"block_size": 32},
        # Section 6.1 for the block, table 9 for the threshold.
        "block_diffusion": {"block_size": 32, "threshold": 0.9},
        # Efficient parallel samplers, section 5: "conservative settings"; the filters are in the appendix.
        "recurrent_diffusion": {
            "inner_recurrence": 4,
            "threshold": 0.03,
            "noise": 0.0,
            "momentum": 0.1,
            "max_wavefront": 128,
            "temperature": 0.2,
            "top_p": 0.95,
        },
        # Section 5: the best of its baseline on GSM8K.
        "recurrent_self_speculation": {"block_size": 4, "draft_recurrences": 4, "temperature": 0.2, "top_p": 0.95},
        # Planned Diffusion, section 5, "decoding strategies" and "inference setup".
        "planned": {"steps_ratio": 1.0, "temperature": 0.2, "top_p": 0.95},
    }
)
"""The options of methods in their papers, by the name of the method, for `generate`. They were tuned on GPUs, for models
of billions of parameters: on a CPU, rows that a GPU computes for free cost time.

>>> from pdkernels.decoding import generate
>>> from pdkernels.models import load
>>> settings = PAPER_SETTINGS["jacobi_multiblock"]
>>> generate(load("tiny-jacobi"), "12 + 34 = ?", "jacobi_multiblock", max_new_tokens=9, **settings).stats.tokens
9
"""
