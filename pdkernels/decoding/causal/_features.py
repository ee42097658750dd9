"""What decoders share whose drafters read the hidden states of the target: the rows that wait for the drafter, and its guesses."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels._validation import check, refuse
from pdkernels.decoding._sampling import OWN
from pdkernels.decoding._session import Session
from pdkernels.decoding.causal._drafter import DrafterSteps
from pdkernels.decoding.steps import Steps


class FeatureSteps(DrafterSteps):
    """Features come with the verification. Those of accepted rows wait until the drafter reads them, all together."""

    continues = False  # the drafter reads features of the whole prompt
    room: int
    """Rows that may wait."""
    features: torch.Tensor
    """``(batch, room, hidden_size)``, what the drafter reads of the rows that it has not read yet."""
    fresh: torch.Tensor
    """``(batch,)``, how many there are."""
    most: int
    """No sequence has more of them."""
    _verified: torch.Tensor

    def allocate_features(self, session: Session, drafter: Any, room: int) -> None:
        self.taps, self.room, self.most = drafter.config.taps, room, 0
        width, device = drafter.config.body.hidden_size, self.cache.device
        self.features = torch.zeros(session.batch, room, width, dtype=drafter.dtype, device=device)
        self.fresh = torch.zeros_like(self.remaining)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.features, self.fresh

    def _read(self) -> Any:
        """The drafter reads all that is fresh."""
        raise NotImplementedError

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        if width is None:  # as many as a graph must be ready for
            self.most = self.slots
        super().step(width, ragged)

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity + self.spare, other_row)
        assert isinstance(other, FeatureSteps)
        self.most = max(self.most, other.most)

    def forward(self, draft: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        hidden, taps = self.model.tapped(draft, self.taps, cache=self.cache, counts=counts)
        self._verified = self.drafter.fused(taps) if self.slots > 1 else hidden
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def keep_features(self, accepted: torch.Tensor) -> torch.Tensor:
        """Adds the first `accepted` verified rows to those that wait; their places ``(batch, width)``."""
        width = self._verified.shape[1]
        if self.most + width > self.room:
            self._read()
        places = self.fresh[:, None] + self.slot[:width]
        self.features.scatter_(1, places[..., None].expand_as(self._verified), self._verified)
        self.fresh.add_(accepted)
        self.most += width
        return places

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The drafter's logits of its rows."""
        logits: torch.Tensor = self.drafter.logits(hidden)
        return logits

    def _guess(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The drafter's tokens ``(batch, n)`` for `positions`, from its rows, as the target's ids."""
        logits, vocabulary = self.logits_of(hidden), self.drafter.vocabulary
        if self.sampler.temperature == 0:
            found: torch.Tensor = vocabulary[self.sampler.sample(logits, positions, self.seeds, OWN).clamp(min=0)]
            return found
        # The noise of a sample belongs to the target's ids.
        whole = logits.new_full((*logits.shape[:-1], self.model.config.vocab_size), -torch.inf)
        whole[..., vocabulary] = logits
        return self.sampler.sample(whole, positions, self.seeds, OWN, self.banned).clamp(min=0)


def check_sizes(op: str, model: Any, drafter: Any, width: int) -> None:
    """Refuses a drafter for a target of other sizes; `width` is the hidden size that it reads."""
    config, sizes = drafter.config, model.config
    vocabulary, layers = config.body.vocab_size, max(config.taps)
    check(vocabulary == sizes.vocab_size, op, "drafter", f"be for {sizes.vocab_size} tokens, the model's", vocabulary)
    check(width == sizes.hidden_size, op, "drafter", f"be for a hidden size of {sizes.hidden_size}, the model's", width)
    check(layers <= sizes.layers, op, "drafter", f"read layers in 0 .. {sizes.layers}, the model's", layers)
    shares = drafter.embedding is None and not hasattr(model, "embed")
    refuse(shares, op, "the drafter shares the model's embedding, and the model has no `embed`")


def shared_head(op: str, model: Any) -> Any:
    """The matrix of the model's head, for a drafter without its own."""
    found = getattr(model, "head", None)
    found = getattr(model, "embedding", None) if found is None else found
    remedy = "Pass a drafter with lm_head.weight."
    refuse(found is None, op, "the drafter shares the model's head, and the model has no matrix to share", remedy)
    return found
