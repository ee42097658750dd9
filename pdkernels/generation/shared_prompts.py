"""Several texts of one prompt: its rows are computed once, and copied into the cache of each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def continued(
    model: Any, tokens: Tensor, cache: Any, counts: Tensor | None, rows: Tensor, before: Tensor, shortest: int
) -> Tensor:
    """The logits of `rows` of a forward over whole prompts into an empty cache, which holds the first `before`
    ``(batch,)`` tokens of each, at least `shortest`. Rows do not depend on how a text is split into forwards. The
    caller commits whole prompts."""
    place = before[:, None] + torch.arange(tokens.shape[1] - shortest, device=tokens.device)
    suffix = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    counts = torch.full_like(before, tokens.shape[1]) if counts is None else counts
    cache.lengths.copy_(before)
    logits: Tensor = model(suffix, cache=cache, counts=counts - before, rows=rows - before[:, None])
    cache.lengths.zero_()
    return logits


class SharedPrompts:
    """A wrapper of a causal model for a batch in which every prompt is there `count` times in a row.

    In the first forward, over the prompts, all tokens but the last of a prompt go through the model once, into a cache
    of their own. Their K and V are copied, and the texts continue from there: each has its own last row, which the
    first token is drawn from. A first forward that is none over causal rows is run as it is: with a mask, or with
    states that depend on the text's seed.
    """

    def __init__(self, model: Any, prompts: Sequence[list[int]], count: int) -> None:
        self.model, self._prompts, self._count = model, prompts, count
        self._fresh = False

    @property
    def model_itself(self) -> Any:
        """The model that is wrapped."""
        return getattr(self.model, "model_itself", self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_cache(self, batch: int, capacity: int, **options: Any) -> Any:
        self._fresh = batch == len(self._prompts) * self._count
        return self.model.new_cache(batch, capacity, **options)

    def __call__(
        self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None, rows: Tensor | None = None, **options: Any
    ) -> Tensor:
        active = {name: value for name, value in options.items() if value is not None and value is not False}
        if self._fresh and rows is not None and not active and hasattr(cache, "copy_row_"):
            self._fresh = False
            return self._continued(tokens, cache, counts, rows)
        self._fresh = False
        chosen = {"counts": counts} if rows is None else {"counts": counts, "rows": rows}
        logits: Tensor = self.model(tokens, cache=cache, **chosen, **options)
        return logits

    def hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        self._fresh = False
        hidden: Tensor = self.model.hidden(tokens, **options)
        return hidden

    def _continued(self, tokens: Tensor, cache: Any, counts: Tensor | None, rows: Tensor) -> Tensor:
        shared = [len(prompt) - 1 for prompt in self._prompts]
        width, device = max(shared), tokens.device
        cached = torch.tensor(shared, device="cpu").to(device, non_blocking=True)
        if width > 0:
            # Of the kind that the texts' cache copies: with the last rows alone where that has no others.
            new_cache = getattr(cache, "another", None) or self.model.new_cache
            prompt_cache = new_cache(len(shared), width)
            if getattr(cache, "adapters", None) is not None:
                prompt_cache.adapt_(cache.adapters[:: self._count])
            last = (cached - 1).clamp(min=0)[:, None]
            self.model(tokens[:: self._count, :width].contiguous(), cache=prompt_cache, counts=cached, rows=last)
            for sequence in range(len(tokens)):
                prompt = sequence // self._count
                cache.copy_row_(sequence, prompt_cache, prompt, shared[prompt])
        return continued(self.model, tokens, cache, counts, rows, cached.repeat_interleave(self._count), min(shared))
