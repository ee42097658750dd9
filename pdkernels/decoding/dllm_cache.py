"""LLaDA's sampler on a feature cache: most of its forwards compute few rows of few layers.

Source: "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", and the released code. The plain
form is reference/dllm_cache.py; both take the same forwards, draw the same tokens and fill the same positions. What a
forward computes says `pdkernels.models.feature_cache`.
"""

from __future__ import annotations

from typing import get_args

from pdkernels._validation import check
from pdkernels.decoding._masked import KeptCanvas
from pdkernels.decoding._sampling import Seed, checked_name, checked_number, checked_size
from pdkernels.decoding._session import Session
from pdkernels.decoding.llada import Remasking, begin, fill
from pdkernels.models.feature_cache import Baseline

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
    temperature: float = 0.0,
    mask_token: int | None = None,
    seed: Seed = 0,
    page_size: int | None = None,
) -> int:
    """Fill `session` block by block, in a block wherever the model is surest. What a place holds is never judged again.

    Args:
        prompt_interval: forwards from one refresh of the prompt to the next (K_p). 1 for this and the next is `llada`.
        gen_interval: forwards from one refresh of the new places to the next (K_r).
        transfer_ratio: share of the new places that each layer computes in between, those whose values moved most (rho).
        baseline: "last": moved since the forward before, as published; "recomputed": since the place was computed last.
        guidance_interval: forwards from one forward of the text without the prompt to the next (the code's cfg_interval); the
            first five forwards have one each. In between, the last difference that the prompt made guides.
        block_size, steps, remasking, guidance, no_end, late_end, temperature: as in `llada`.

    The texts with and without the prompt that `guidance` compares have a cache each, which counts its own forwards.

    The first layer is computed for all new places in each forward, as in the current revision of the code. That would have it
    computed for the prompt as well, which gives K and V that it has already.

    Returns:
        Forwards that the sequences took part in, all together.
    """
    for name, size in (
        ("prompt_interval", prompt_interval),
        ("gen_interval", gen_interval),
        ("guidance_interval", guidance_interval),
    ):
        checked_size(_OP, name, size)
    checked_number(_OP, "transfer_ratio", transfer_ratio, 1.0)
    checked_name(_OP, "baseline", baseline, get_args(Baseline))
    canvas, blocks = begin(
        _OP,
        session,
        block_size=block_size,
        steps=steps,
        remasking=remasking,
        guidance=guidance,
        no_end=no_end,
        late_end=late_end,
        temperature=temperature,
        mask_token=mask_token,
        seed=seed,
    )
    check(guidance > 0 or guidance_interval == 1, _OP, "guidance_interval", "be 1 without guidance", guidance_interval)
    if not blocks:
        return canvas.finish()
    forward = KeptCanvas(
        session,
        canvas,
        page_size,
        guidance_interval,
        prompt_interval=prompt_interval,
        gen_interval=gen_interval,
        transfer_ratio=transfer_ratio,
        baseline=baseline,
    )
    return fill(canvas, forward, blocks, steps, remasking == "random")
