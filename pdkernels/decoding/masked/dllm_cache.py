"""LLaDA's sampler on a feature cache: most of its forwards compute few rows of few layers.

Source: "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", and the released code. The
plain form is reference/dllm_cache.py; both take the same forwards, draw the same tokens and fill the same positions.
What a forward computes is described in `pdkernels.models.architectures.feature_cache`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from pdkernels._validation import check
from pdkernels.decoding.canvas.canvas import Canvas, Window
from pdkernels.decoding.canvas.forward import KeptCanvas, KeptRows
from pdkernels.decoding.masked.llada import LladaSteps, Remasking, begin, fill
from pdkernels.decoding.steps import with_defaults
from pdkernels.generation.noise import checked_name, checked_number, checked_size
from pdkernels.generation.session import Session
from pdkernels.models.architectures.feature_cache import Baseline

_OP = "decoding.dllm_cache"


def decode(
    session: Session,
    *,
    prompt_interval: int = 25,
    gen_interval: int = 5,
    transfer_ratio: float = 0.25,
    baseline: Baseline = "last",
    block_size: int | None = None,
    steps: int | None = None,
    remasking: Remasking = "low_confidence",
    guidance: float = 0.0,
    guidance_interval: int = 1,
    no_end: bool = False,
    late_end: bool = False,
    mask_token: int | None = None,
    page_size: int | None = None,
) -> int:
    """Fills `session` block by block, the most confident positions of a block first. A filled position is never
    revised.

    Args:
        prompt_interval: forwards from one refresh of the prompt to the next (K_p). 1 here and in `gen_interval` is
            `llada`.
        gen_interval: forwards from one refresh of the new positions to the next (K_r).
        transfer_ratio: share of the new positions that each layer recomputes in between: those whose V changed most
            (rho).
        baseline: what that change is measured from: "last", the previous forward, as published; "recomputed", the
            forward that last computed the position.
        guidance_interval: forwards from one unconditional forward to the next (the code's cfg_interval); each of the
            first five forwards has one. In between, the last difference between both is reused.
        block_size, steps, remasking, guidance, no_end, late_end, temperature: as in `llada`.

    The texts with and without the prompt that `guidance` compares have a cache each, which counts its own forwards.

    The first layer is computed for all new positions in each forward, as in the current revision of the code, which
    also computes it for the prompt, with the same K and V as before.

    Returns:
        Forwards that the sequences took part in, summed.
    """
    refresh = Refresh(prompt_interval, gen_interval, transfer_ratio, baseline, guidance_interval, page_size)
    options = {"block_size": block_size, "steps": steps, "remasking": remasking, "guidance": guidance}
    options |= {"no_end": no_end, "late_end": late_end, "mask_token": mask_token}
    canvas, blocks = _begin(session, refresh, options)
    if not blocks:
        return canvas.finish()
    return fill(canvas, KeptCanvas(session, canvas, **refresh._asdict()), blocks, steps, remasking == "random")


class Refresh(NamedTuple):
    """The options of `KeptCanvas`."""

    prompt_interval: int
    gen_interval: int
    transfer_ratio: float
    baseline: Baseline
    guidance_interval: int
    page_size: int | None


def _begin(session: Session, refresh: Refresh, options: dict[str, Any]) -> tuple[Canvas, list[Window]]:
    """The canvas of `decode`, whose options are checked, and the blocks of its positions. `options` are those of
    `llada`."""
    for name in ("prompt_interval", "gen_interval", "guidance_interval"):
        checked_size(_OP, name, getattr(refresh, name))
    checked_number(_OP, "transfer_ratio", refresh.transfer_ratio, 1.0)
    checked_name(_OP, "baseline", refresh.baseline, get_args(Baseline))
    canvas, blocks = begin(_OP, session, **options)
    interval = refresh.guidance_interval
    check(options["guidance"] > 0 or interval == 1, _OP, "guidance_interval", "be 1 without guidance", interval)
    return canvas, blocks


class CachedSteps(LladaSteps):
    """`decode` in steps, where each sequence has forwards of its own: their caches are refreshed at different times."""

    needs_host = "feature caches, which are refreshed at different times"

    def __init__(self, session: Session, **options: Any) -> None:
        chosen = with_defaults(decode, options)
        refresh = Refresh(*map(chosen.pop, Refresh._fields))
        canvas, blocks = _begin(session, refresh, chosen)
        self.kept = KeptRows(session, canvas, **refresh._asdict())
        self._build_blocks(session, canvas, self.kept, blocks, chosen["steps"], chosen["remasking"])

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        self.kept.taking = self._read()
        super().step()
        self._tell_forwards(self.kept.ran)
