"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineMetrics:
    """What an engine has done since it started, and what it holds now. Times are sums over finished requests, in
    seconds."""

    waiting: int = 0
    """Requests that have not joined a batch."""
    running: int = 0
    """Requests in a batch, and those whose log-probabilities are computed."""
    batches: int = 0
    """Batches that are allocated: one for each method with its options."""
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Finished requests by their reason (`FinishReason`); "error" counts those that failed."""
    prompt_tokens: int = 0
    """Tokens of the prompts that have joined."""
    reused_tokens: int = 0
    """Those among them whose K and V were known from an earlier text."""
    new_tokens: int = 0
    """Tokens of finished requests."""
    accepted_tokens: int = 0
    """Those among them that were drafted and accepted."""
    forwards: int = 0
    """Forwards that finished requests took part in, summed over the requests."""
    steps: int = 0
    """Steps of all batches."""
    preemptions: int = 0
    """How often a request gave its pages to an older one."""
    recomputed_tokens: int = 0
    """Tokens whose K and V were computed once more after that."""
    pages: int = 0
    """Pages that all requests share; 0 for a model without pages."""
    used_pages: int = 0
    """Those of requests and of earlier texts."""
    shared_pages: int = 0
    """Those of several of them."""
    window_pages: int = 0
    """Pages of layers with windows that share them apart, all groups together; 0: `pages` are of all layers."""
    used_window_pages: int = 0
    """Those of requests and of earlier texts."""
    cache_bytes: int = 0
    """Of all pages."""
    kept_tokens: int = 0
    """Tokens of earlier texts whose K and V are kept."""
    kept_states: int = 0
    """Recurrent states of earlier texts that are kept."""
    forgotten_tokens: int = 0
    """Tokens of earlier texts whose K and V were kept and are no more."""
    restored_tokens: int = 0
    """Tokens of earlier texts whose K and V came from the folder for them."""
    written_tokens: int = 0
    """Tokens whose K and V were written there."""
    folder_bytes: int = 0
    """Of its files."""
    waited: float = 0.0
    """From `submit` until the request joined."""
    to_first_token: float = 0.0
    """From `submit`."""
    total: float = 0.0
    """From `submit` to the last token."""

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of finished requests for each forward that their sequences took part in; 0 before the first."""
        return self.new_tokens / self.forwards if self.forwards else 0.0
