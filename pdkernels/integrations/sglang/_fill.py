"""The algorithm, a class of SGLang's kind."""

from __future__ import annotations

from typing import Any

from sglang.srt.dllm.algorithm.base import DllmAlgorithm
from torch import Tensor, where

from pdkernels._validation import check
from pdkernels.ops.token_statistics import token_statistics
from pdkernels.ops.unmask import unmask_


class Fill(DllmAlgorithm):  # type: ignore[misc]
    """A step fills the places whose guess is surer than the threshold, or as many as the factor allows, and at least one.

    Other than in SGLang's LowConfidence the mask token is never a guess.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        settings = config.algorithm_config
        names = {"threshold", "factor", "block_size"}
        check(
            settings.keys() <= names,
            "integrations.sglang",
            "algorithm_config",
            f"name {sorted(names)}",
            sorted(settings),
        )
        two_rules = "threshold" in settings and "factor" in settings
        check(not two_rules, "integrations.sglang", "algorithm_config", "name threshold or factor", sorted(settings))
        self.factor: float | None = settings.get("factor")
        self.threshold: float | None = None if "factor" in settings else settings.get("threshold", 0.95)

    def step(self, forward_batch: Any, full_logits: Tensor, states: list[Any]) -> list[bool]:
        """A block is done if this forward saw no mask token in it: then its keys and values are those of its text."""
        rows = forward_batch.batch_size, self.block_size
        tokens = forward_batch.input_ids.view(rows)
        open_ = tokens == self.mask_id
        if forward_batch.dllm_prompt_mask is not None:
            open_ &= ~forward_batch.dllm_prompt_mask
        guess = token_statistics(full_logits.view(*rows, -1), suppress=self.mask_id, top_k=1)
        # A place that is not open, in a prompt above all, has no candidate.
        ids = where(open_, guess.ids.to(tokens.dtype), -1)
        rule: dict[str, Any] = {"factor": self.factor, "threshold": self.threshold}
        unmask_(tokens, ids, guess.probs, mask_token=self.mask_id, strict=self.threshold is not None, **rule)
        return [not is_open for is_open in open_.any(1).tolist()]
