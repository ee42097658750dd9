"""Decoders of causal models: autoregressive, by Jacobi iteration, by self-speculation, in blocks."""

from __future__ import annotations

from pdkernels.decoding.causal import (
    autoregressive,
    block_diffusion,
    dflash,
    draft_model,
    eagle,
    fast_dllm_v2,
    jacobi,
    jacobi_multiblock,
    linear_self_speculation,
    mtp,
    quadratic_self_speculation,
    suffix,
)
from pdkernels.decoding.method import Method
from pdkernels.models.capabilities import Capability
from pdkernels.models.protocols import BlockCausalModel, BlockModel, BranchingModel, SelfSpeculativeModel, TappedModel

_TRI_MODE = ("tiny-trimode",)
_MASKS_AMONG_ROWS: frozenset[Capability] = frozenset({"causal", "block_causal"})
_DRAFTED: frozenset[Capability] = frozenset({"causal", "drafter"})

METHODS = (
    Method(
        "autoregressive",
        autoregressive.decode,
        title="token by token",
        lossless=True,
        steps=autoregressive.AutoregressiveSteps,
        models=("tiny-code", "tiny-jacobi", *_TRI_MODE),
    ),
    Method(
        "jacobi",
        jacobi.decode,
        title="Jacobi",
        lossless=True,
        steps=jacobi.JacobiSteps,
        verifies_drafts=True,
        models=("tiny-jacobi", "tiny-code"),
        widths=(None,),
        paper_settings={"block_size": 128},  # Jacobi Forcing, section 4.2
    ),
    Method(
        "jacobi_multiblock",
        jacobi_multiblock.decode,
        title="Jacobi, several blocks",
        requires=_MASKS_AMONG_ROWS,
        protocol=BranchingModel,
        lossless=True,
        verifies_drafts=True,
        models=("tiny-jacobi",),
        widths=(None,),
        # Section 4.3, appendices D and E, for H200 and B200 (section 4.2 has blocks of 128 on a B200). No size of the pool.
        paper_settings={"block_size": 64, "blocks": 2, "spawn_ratio": 0.85, "verification_size": 4},
    ),
    Method("suffix", suffix.decode, title="suffixes", lossless=True, verifies_drafts=True, in_default_evaluation=False),
    Method(
        "draft_model",
        draft_model.decode,
        title="a small model drafts",
        requires=_DRAFTED,
        lossless=True,
        steps=draft_model.DraftModelSteps,
        verifies_drafts=True,
        in_default_evaluation=False,
    ),
    Method(
        "eagle",
        eagle.decode,
        title="EAGLE-3",
        requires=_DRAFTED,
        protocol=TappedModel,
        lossless=True,
        steps=eagle.EagleSteps,
        verifies_drafts=True,
        in_default_evaluation=False,
    ),
    Method(
        "dflash",
        dflash.decode,
        title="DFlash",
        requires=_DRAFTED,
        protocol=TappedModel,
        lossless=True,
        steps=dflash.DFlashSteps,
        verifies_drafts=True,
        in_default_evaluation=False,
    ),
    Method(
        "mtp",
        mtp.decode,
        title="multi-token prediction",
        requires=_DRAFTED,
        protocol=TappedModel,
        lossless=True,
        steps=mtp.MtpSteps,
        verifies_drafts=True,
        in_default_evaluation=False,
    ),
    Method(
        "linear_self_speculation",
        linear_self_speculation.decode,
        title="linear self-speculation",
        requires=_MASKS_AMONG_ROWS,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=linear_self_speculation.LinearSteps,
        verifies_drafts=True,
        models=_TRI_MODE,
        widths=(4, 8, 16),
        # Nemotron-Labs-Diffusion, figure 7; 31 drafted tokens in table 10. No width of the quadratic mode.
        paper_settings={"block_size": 32},
    ),
    Method(
        "quadratic_self_speculation",
        quadratic_self_speculation.decode,
        title="quadratic self-speculation",
        requires=_MASKS_AMONG_ROWS,
        protocol=SelfSpeculativeModel,
        lossless=True,
        steps=quadratic_self_speculation.QuadraticSteps,
        verifies_drafts=True,
        models=_TRI_MODE,
        widths=(4, 8, 16),
    ),
    Method(
        "block_diffusion",
        block_diffusion.decode,
        title="block diffusion",
        requires=_MASKS_AMONG_ROWS,
        protocol=BlockModel,
        steps=block_diffusion.BlockSteps,
        models=_TRI_MODE,
        widths=(4, 8, 16),
        paper_settings={"block_size": 32, "threshold": 0.9},  # section 6.1, table 9
    ),
    Method(
        "fast_dllm_v2",
        fast_dllm_v2.decode,
        title="Fast-dLLM v2",
        requires=frozenset({"block_causal"}),
        protocol=BlockCausalModel,
        steps=fast_dllm_v2.FastV2Steps,
        models=_TRI_MODE,
        in_default_evaluation=False,
    ),
)
