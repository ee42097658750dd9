"""dLLM-Cache: most forwards recompute only a few rows and reuse the cached layer outputs of the others.

Source: "dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching", section 3, and its code.

Caches everything that the code caches, including the prompt's rows. The notes below say which part of that is dead work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .llada import unmask_by_quota
from .masked_model import MaskedTransformerReference
from .masked_sampling import Canvas, Forward, MaskedResult, by_position

BASELINES = ("last", "recomputed")
# Forwards that compute both texts of guidance, regardless of its interval.
ALWAYS_GUIDED = 5


def least_similar(v: Tensor, cached: Tensor, count: int) -> list[int]:
    """The `count` rows of v ``(T, K, D)`` least similar to those of `cached` by the cosine over K and D, in order.

    The first ones on ties; NaN is less than anything.

    >>> least_similar(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]), torch.tensor([1.0, 0.0]).expand(3, 1, 2), 2)
    [1, 2]
    """
    a, b = v.flatten(1), cached.flatten(1)
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-8)
    return sorted(cosine.nan_to_num(nan=-torch.inf).argsort(stable=True)[:count].tolist())


class FeatureCache:
    """Forwards over a canvas that cache K, V and the outputs of attention and feed-forward, per row and layer.

    Forward number f, from 1, recomputes the rows of the prompt if ``(f - 1) % prompt_interval == 0`` and those after it,
    the *new* rows, if ``(f - 1) % gen_interval == 0``; and all of them in the first layer. So forward 1 computes everything.
    Where the new rows are not due, a share of `transfer_ratio` of them is still computed: those whose V is least similar to the
    cached one. All other rows add their cached outputs.

    - The first layer is the current revision's rule; the older revision in SlowFast's code lacks it. For the prompt it is dead
      work in models that predict a row's own token: its embeddings never change, so its K and V do not either.
    - baseline="last", as published: V is compared with that of the previous forward and replaces it in all rows, for all readers.
      So slow changes never accumulate. baseline="recomputed": V is compared with what it was when its row was
      last computed, and that is what the others see until it is recomputed.
    - So with "last" a row that is not computed has a new V and an old K.
    - With a ratio of 0 V is not compared. A ratio that rounds down to no row still replaces it ("last").
    - The prompt's residual stream, and what is added to it, are read only by its own rows: a model that predicts a row's own
      token could keep only K and V. One that predicts the next token needs those of the prompt's last row.

    The code compares V in the model's dtype, which in bf16 makes most rows equal, and it keeps K before the rotation, which
    is equivalent.

    Args:
        prompt_length: rows before the generated ones.
        prompt_interval, gen_interval, transfer_ratio: K_p, K_r and rho, at least 1, at least 1, 0 .. 1.
        baseline: "last" or "recomputed".

    >>> from pdkernels.reference.masked_model import random_weights
    >>> model = MaskedTransformerReference(random_weights("llada"), heads=4, names="llada")
    >>> cache = FeatureCache(model, 2, prompt_interval=4, gen_interval=2, transfer_ratio=0.5)
    >>> cache([1, 2, 12, 12]).shape, cache.computed
    (torch.Size([4, 13]), [[0, 1, 2, 3], [0, 1, 2, 3]])
    >>> cache([1, 2, 12, 3]).shape, cache.computed
    (torch.Size([4, 13]), [[0, 1, 2, 3], [3]])
    """

    def __init__(
        self,
        model: MaskedTransformerReference,
        prompt_length: int,
        *,
        prompt_interval: int,
        gen_interval: int,
        transfer_ratio: float,
        baseline: str = "last",
    ) -> None:
        op = "pdkernels.FeatureCache"
        for name, value in (("prompt_interval", prompt_interval), ("gen_interval", gen_interval)):
            if value < 1:
                raise ValueError(f"{op}: {name} must be at least 1, got {value}.")
        if not 0 <= transfer_ratio <= 1:
            raise ValueError(f"{op}: transfer_ratio must be in 0 .. 1, got {transfer_ratio}.")
        if baseline not in BASELINES:
            raise ValueError(f"{op}: baseline must be 'last' or 'recomputed', got {baseline!r}.")
        self.model, self.prompt_length = model, prompt_length
        self.intervals, self.transfer_ratio, self.baseline = (prompt_interval, gen_interval), transfer_ratio, baseline
        self.forwards = 0
        self.computed: list[list[int]] = []  # rows that each layer of the last forward computed
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.attention: list[Tensor] = []
        self.feed_forward: list[Tensor] = []

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``(T, V)`` of the first T positions of the canvas; row p predicts position p.

        Rows after T keep their cached state and are not attended to; the first forward has all rows.
        """
        model, length = self.model, len(tokens)
        prompt, new = list(range(self.prompt_length)), list(range(self.prompt_length, length))
        due = [self.forwards % interval == 0 for interval in self.intervals]
        self.forwards += 1
        self.computed = []
        x = model.embed(torch.tensor(list(tokens), dtype=torch.int64))
        for layer in range(model.layers):
            prompt_due, new_due = (layer == 0 or flag for flag in due)
            if self.forwards == 1:
                shape = (length, model.kv_heads, model.head_dim)
                for cached in (self.k, self.v):
                    cached.append(x.new_zeros(shape))
                for cached in (self.attention, self.feed_forward):
                    cached.append(torch.zeros_like(x))
            k, v = self.k[layer], self.v[layer]
            chosen = new if new_due else []
            if not new_due and self.transfer_ratio > 0:
                fresh = model.qkv(layer, x[new], torch.tensor(new))[2]
                picked = least_similar(fresh, v[new], int(len(new) * self.transfer_ratio))
                chosen = [new[i] for i in picked]
                if self.baseline == "last":
                    v[new] = fresh
            rows = (prompt if prompt_due else []) + chosen
            q, k[rows], v[rows] = model.qkv(layer, x[rows], torch.tensor(rows, dtype=torch.int64))
            self.attention[layer][rows] = model.attend(layer, q, k[:length], v[:length])
            x = x + self.attention[layer][:length]
            self.feed_forward[layer][rows] = model.feed_forward(layer, x[rows])
            x = x + self.feed_forward[layer][:length]
            self.computed.append(rows)
        return by_position(model.logits(x), model.predicts)


def guided_at_intervals(given: Forward, free: Forward, canvas: Canvas, guidance: float, interval: int) -> Forward:
    """Classifier-free guidance, ``c + w (c - u)``, whose difference ``c - u`` is reused in most forwards.

    Forward f, from 1, computes u, the logits of `free` where the whole prompt is masked, if ``(f - 1) % interval == 0`` or f is
    at most 5. The others add the last difference to their own c, row by row. With w = 0 u cancels out, and it is not
    computed. With an interval above 1 the forwards of u are counted too.

    >>> given, free = (lambda tokens, n=n: torch.full((1, 1), n * len(calls)) for n in (10.0, 1.0))
    >>> canvas, calls, guided = Canvas([1], 1, 9, ()), [], []
    >>> forward = guided_at_intervals(given, free, canvas, 1.0, 4)
    >>> for _ in range(10):
    ...     calls.append(0)
    ...     guided.append(forward([1, 9]).item() - 10 * len(calls))  # 9 times the number of the forward that computed u
    >>> guided
    [9.0, 18.0, 27.0, 36.0, 45.0, 45.0, 45.0, 45.0, 81.0, 81.0]
    """
    forwards, difference = 0, torch.empty(0)

    def both(tokens: Sequence[int]) -> Tensor:
        nonlocal forwards, difference
        c = given(tokens)
        if forwards % interval == 0 or forwards < ALWAYS_GUIDED:
            canvas.others += interval > 1  # else both texts are rows of one forward
            difference = c - free([canvas.mask_token] * canvas.start + list(tokens[canvas.start :]))
        forwards += 1
        return c + guidance * difference

    return both if guidance else given


@torch.no_grad()
def dllm_cache(
    model: MaskedTransformerReference,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    mask_token: int,
    prompt_interval: int = 25,
    gen_interval: int = 5,
    transfer_ratio: float = 0.25,
    baseline: str = "last",
    block_size: int | None = None,
    steps: int | None = None,
    remasking: str = "low_confidence",
    temperature: float = 0.0,
    guidance: float = 0.0,
    guidance_interval: int = 1,
    no_end: bool = False,
    late_end: bool = False,
    end_tokens: Sequence[int] = (),
    seed: int = 0,
) -> MaskedResult:
    """LLaDA's sampler with forwards through a :class:`FeatureCache` that keeps the whole generated region, not a block of it.

    Every forward counts for the intervals. With guidance each of the two texts has its own cache, which counts its own
    forwards: the text without the prompt is computed at every `guidance_interval`, see :func:`guided_at_intervals`.

    Arguments: those of :class:`FeatureCache` and of :func:`~pdkernels.reference.llada.llada`, and

    Args:
        guidance_interval: forwards from one difference between the two texts to the next, at least 1.

    >>> from pdkernels.reference.llada import llada
    >>> from pdkernels.reference.masked_model import random_weights
    >>> model = MaskedTransformerReference(random_weights("llada"), heads=4, names="llada")
    >>> options = {"mask_token": 12, "block_size": 4}
    >>> cached = dllm_cache(model, [1, 2], 8, prompt_interval=1, gen_interval=1, **options)
    >>> cached.tokens == llada(model, [1, 2], 8, **options).tokens
    True
    """
    if guidance_interval < 1:
        raise ValueError(f"pdkernels.dllm_cache: guidance_interval must be at least 1, got {guidance_interval}.")
    canvas = Canvas(prompt, max_new_tokens, mask_token, end_tokens)
    given, free = (
        FeatureCache(
            model,
            canvas.start,
            prompt_interval=prompt_interval,
            gen_interval=gen_interval,
            transfer_ratio=transfer_ratio,
            baseline=baseline,
        )
        for _ in range(2)
    )
    return unmask_by_quota(
        canvas,
        guided_at_intervals(given, free, canvas, guidance, guidance_interval),
        op="dllm_cache",
        block_size=block_size,
        steps=steps,
        remasking=remasking,
        temperature=temperature,
        no_end=no_end,
        late_end=late_end,
        seed=seed,
    )
