"""What `generate` takes and gives, method by method, for type checkers.

What follows the line of dashes `python -m docs.methods` writes out of the decoders' signatures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from pdkernels.decoding._method import Method
from pdkernels.decoding._prompts import Batch, Prompt
from pdkernels.decoding.result import DecodeResult, OnTokens
from pdkernels.models.sampler_head import SamplerHead

# ---------------------------------------------------------------------------------------------------------------------

One = DecodeResult[Tensor, str]
Many = DecodeResult[list[Tensor], list[str]]


class Request(TypedDict, total=False):
    max_new_tokens: int
    end_tokens: Sequence[int] | None
    on_tokens: OnTokens | None
    trace: bool
    overflow: Literal["error", "warn"]
    infill: bool


class Autoregressive(Request, total=False):
    temperature: float
    allow_mask_token: bool
    seed: int | Sequence[int]
    page_size: int | None


class Jacobi(Autoregressive, total=False):
    block_size: int | None
    window: int | None
    draft: Literal["model", "lookup"]


class JacobiMultiblock(Autoregressive, total=False):
    block_size: int
    blocks: int
    spawn_ratio: float
    pool_size: int
    verification_size: int


class LinearSelfSpeculation(Autoregressive, total=False):
    block_size: int
    threshold: float
    verification: Literal["compare", "rejection"]
    mask_token: int | None


class QuadraticSelfSpeculation(Autoregressive, total=False):
    block_size: int
    masks_per_group: int | None
    label_shift: int
    in_group: Literal["bidirectional", "causal"]
    ensemble_weight: float
    ensemble: Literal["probability", "logit"]
    mask_token: int | None


class BlockDiffusion(Autoregressive, total=False):
    block_size: int
    threshold: float | None
    steps_per_block: int | None
    refresh: Literal["causal", "bidirectional"]
    mask_token: int | None
    sampler: SamplerHead | None


class Planned(Request, total=False):
    sparse: bool
    steps_ratio: float
    order: Literal["entropy", "confidence", "margin"] | None
    threshold: float | None
    rule: Literal["threshold", "published"]
    schedule: Literal["published", "even"]
    length_scale: float
    unit: int | None
    cache: Literal["exact", "drop_finished", "published"]
    parser: Literal["last_number", "published"]
    on_bad_plan: Literal["stop", "raise"]
    max_rounds: int | None
    joiner: str | None
    temperature: float
    top_p: float
    top_k: int | None
    mask_token: int | None
    seed: int | Sequence[int]
    page_size: int | None


class RecurrentStatic(Request, total=False):
    recurrences: int | None
    temperature: float
    top_p: float | None
    min_p: float | None
    top_k: int | None
    seed: int | Sequence[int]
    page_size: int | None


class RecurrentAdaptive(RecurrentStatic, total=False):
    criterion: Literal["latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability"]
    threshold: float | None
    max_recurrences: int | None
    min_recurrences: int
    check_every: int
    first_check: int | None


class RecurrentSelfSpeculation(RecurrentStatic, total=False):
    block_size: int
    draft_recurrences: int


class RecurrentDiffusion(RecurrentStatic, total=False):
    inner_recurrence: int
    threshold: float
    exit: Literal["latent-diff", "fixed", "token-stability", "latent-acceleration"]
    noise: float
    schedule: Literal["linear", "root", "harmonic", "constant"] | None
    mixer: Literal["linear", "sqrt"]
    momentum: float
    headway: int
    max_wavefront: int
    rule: Literal["prefix", "last"]
    new_state: Literal["fresh", "copied"]
    guard: bool
    max_recurrences: int | None
    stability: int | None


class Llada(Request, total=False):
    block_size: int | None
    steps: int | None
    remasking: Literal["low_confidence", "random"]
    guidance: float
    no_end: bool
    late_end: bool
    temperature: float
    mask_token: int | None
    seed: int | Sequence[int]


class Dream(Request, total=False):
    steps: int | None
    algorithm: Literal["origin", "maskgit_plus", "topk_margin", "entropy"]
    eps: float
    temperature: float
    top_p: float
    top_k: int | None
    order_temperature: float
    mask_token: int | None
    seed: int | Sequence[int]


class Slowfast(Request, total=False):
    block_size: int | None
    max_exploration: int
    window: int
    variance: float
    tau_min: float
    tau_high: float
    k_slow: int
    k_fast: int
    cycle: Literal["last", "mean", "published"]
    drop_suffix: bool
    prompt_interval: int | None
    gen_interval: int
    transfer_ratio: float
    temperature: float
    mask_token: int | None
    seed: int | Sequence[int]


class DllmCache(Llada, total=False):
    prompt_interval: int
    gen_interval: int
    transfer_ratio: float
    baseline: Literal["last", "recomputed"]
    guidance_interval: int
    page_size: int | None


class FastDllm(Request, total=False):
    block_size: int
    cache: Literal["none", "prefix", "dual"]
    threshold: float | None
    factor: float | None
    steps: int | None
    temperature: float
    mask_token: int | None
    seed: int | Sequence[int]
    page_size: int | None


class FastDllmV2(Request, total=False):
    block_size: int
    small_block_size: int
    threshold: float
    block_cache: bool
    temperature: float
    top_p: float
    mask_token: int | None
    seed: int | Sequence[int]
    page_size: int | None


class Generate(Protocol):
    """The type of `pdkernels.decoding.generate`."""

    @overload
    def __call__(
        self,
        model: Any,
        prompt: Prompt,
        method: Literal["autoregressive"] = "autoregressive",
        **options: Unpack[Autoregressive],
    ) -> One: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Batch,
        method: Literal["autoregressive"] = "autoregressive",
        **options: Unpack[Autoregressive],
    ) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Literal["jacobi"], **options: Unpack[Jacobi]) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Literal["jacobi"], **options: Unpack[Jacobi]) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["jacobi_multiblock"], **options: Unpack[JacobiMultiblock]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["jacobi_multiblock"], **options: Unpack[JacobiMultiblock]
    ) -> Many: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Prompt,
        method: Literal["linear_self_speculation"],
        **options: Unpack[LinearSelfSpeculation],
    ) -> One: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Batch,
        method: Literal["linear_self_speculation"],
        **options: Unpack[LinearSelfSpeculation],
    ) -> Many: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Prompt,
        method: Literal["quadratic_self_speculation"],
        **options: Unpack[QuadraticSelfSpeculation],
    ) -> One: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Batch,
        method: Literal["quadratic_self_speculation"],
        **options: Unpack[QuadraticSelfSpeculation],
    ) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["block_diffusion"], **options: Unpack[BlockDiffusion]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["block_diffusion"], **options: Unpack[BlockDiffusion]
    ) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Literal["planned"], **options: Unpack[Planned]) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Literal["planned"], **options: Unpack[Planned]) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["recurrent_static"], **options: Unpack[RecurrentStatic]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["recurrent_static"], **options: Unpack[RecurrentStatic]
    ) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["recurrent_adaptive"], **options: Unpack[RecurrentAdaptive]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["recurrent_adaptive"], **options: Unpack[RecurrentAdaptive]
    ) -> Many: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Prompt,
        method: Literal["recurrent_self_speculation"],
        **options: Unpack[RecurrentSelfSpeculation],
    ) -> One: ...
    @overload
    def __call__(
        self,
        model: Any,
        prompt: Batch,
        method: Literal["recurrent_self_speculation"],
        **options: Unpack[RecurrentSelfSpeculation],
    ) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["recurrent_diffusion"], **options: Unpack[RecurrentDiffusion]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["recurrent_diffusion"], **options: Unpack[RecurrentDiffusion]
    ) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Literal["llada"], **options: Unpack[Llada]) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Literal["llada"], **options: Unpack[Llada]) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Literal["dream"], **options: Unpack[Dream]) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Literal["dream"], **options: Unpack[Dream]) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Literal["slowfast"], **options: Unpack[Slowfast]) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Literal["slowfast"], **options: Unpack[Slowfast]) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["dllm_cache"], **options: Unpack[DllmCache]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["dllm_cache"], **options: Unpack[DllmCache]
    ) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["fast_dllm"], **options: Unpack[FastDllm]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["fast_dllm"], **options: Unpack[FastDllm]
    ) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Prompt, method: Literal["fast_dllm_v2"], **options: Unpack[FastDllmV2]
    ) -> One: ...
    @overload
    def __call__(
        self, model: Any, prompt: Batch, method: Literal["fast_dllm_v2"], **options: Unpack[FastDllmV2]
    ) -> Many: ...
    @overload
    def __call__(self, model: Any, prompt: Prompt, method: Method, **options: Any) -> One: ...
    @overload
    def __call__(self, model: Any, prompt: Batch, method: Method, **options: Any) -> Many: ...
    @overload
    def __call__(
        self, model: Any, prompt: Mapping[str, Any], method: str | Method = ..., **options: Any
    ) -> DecodeResult[Any, Any]: ...
