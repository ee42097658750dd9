"""What decoders share whose drafters read the hidden states of the target: the rows that wait for the drafter, and its
guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pdkernels._validation import check, refuse
from pdkernels.decoding.causal._drafter import DrafterSteps
from pdkernels.decoding.steps import Rows, Steps
from pdkernels.decoding.steps.drafts import UNWATCHED
from pdkernels.decoding.steps.lengths import Lengths
from pdkernels.generation.noise import OWN
from pdkernels.generation.session import Session


class FeatureSteps(DrafterSteps):
    """Features come with the verification. Those of accepted rows wait until the drafter reads them, all together.

    Where lengths are chosen, a step without a draft keeps nothing for the drafter, so it costs what decoding token by
    token does. Rows of such steps are missing in the drafter's cache, as if the text did not have them: drafts may be
    worse for it, the text is not. The step before a draft must keep its row, so the first draft after a pause comes a
    step later (`Lengths.ready`).
    """

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
    _taps_rows = True
    """Whether the step keeps features of some sequence."""

    def allocate_features(self, session: Session, drafter: Any, room: int) -> None:
        self.taps, self.room, self.most = drafter.config.taps, room, 0
        width, device = drafter.config.body.hidden_size, self.cache.device
        self.features = torch.zeros(session.batch, room, width, dtype=drafter.dtype, device=device)
        self.fresh = torch.zeros_like(self.remaining)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return *super().state, self.features, self.fresh

    @property
    def reads_rows(self) -> bool:
        return self.slots > 1 and self._taps_rows

    def _read(self) -> Any:
        """The drafter reads all that is fresh."""
        raise NotImplementedError

    def step(self, width: int | None = None, ragged: bool = True) -> None:
        mixed = self.lengths is not None and len(self.fresh) > 1  # some sequences may not be ready
        super().step(self._ready_width(width), ragged or mixed)

    def rounds(self, session: Session, rows: Rows, replays: Sequence[Callable[[], None]] = ()) -> list[Rows]:
        watched = self.is_watched(session, replays) or session.grammar is not None
        if self.lengths is None or watched or len(rows) > 1 or rows[0].pending > 1:
            return super().rounds(session, rows, replays)
        return self._plain_rounds(self.lengths) or super().rounds(session, rows, replays)

    def _plain_rounds(self, lengths: Lengths) -> list[Rows]:
        """Runs the steps of one sequence until a draft pays, a few at most, as one op; none: they must run part by
        part."""
        if self.greedy is None or not self.sampler.greedy:
            return []
        pending, before = self.entry.pending, [tensor.clone() for tensor in lengths.state]
        steps = lengths.pause_(pending, self.remaining, UNWATCHED)
        next_length, tokens = pending.clone(), self.entry.draft.tolist()
        pending.fill_(1)
        entries = self.greedy.run(steps)
        if entries is None:
            for tensor, value in zip(lengths.state, before, strict=True):
                tensor.copy_(value)
            return []
        self._taps_rows = False
        torch.minimum(next_length, self.remaining, out=pending)
        read = tokens
        for entry in entries:
            read, tokens = tokens, self._as_verified(entry, tokens)
        entries[-1][0][self.entry.column("pending")] = int(pending)
        self.accept(torch.tensor(read, device=pending.device), torch.ones_like(pending), self.entry.draft)
        return [self.entry.rows(entry) for entry in entries]

    def _as_verified(self, entry: list[list[int]], tokens: list[list[int]]) -> list[list[int]]:
        """Completes an entry after a step of known tokens alone; returns the next ones."""
        draft, verified, predictions, checked = map(self.entry.column, ("draft", "verified", "predictions", "checked"))
        for row, (token,) in zip(entry, tokens, strict=True):
            row[verified], row[predictions], row[checked] = token, row[draft], 1
        return [[row[draft]] for row in entry]

    def _ready_width(self, width: int | None) -> int | None:
        """The rows of a step that should have `width`: one where no sequence is ready for a draft. None: a graph, for
        all of them."""
        if width is None:  # as many as a graph must be ready for
            self.most = self.slots
        if self.lengths is None or self.slots == 1:
            return width
        pending, ready = self.entry.pending, self.lengths.ready
        tapped, self._taps_rows = self._taps_rows, width is None or width > 1
        if self._taps_rows:
            drafting = pending > 1
            if self._forced is None:
                pending.copy_(torch.where(drafting & ~ready, 1, pending))
            ready.copy_(drafting)
        else:
            ready.zero_()
        return width if tapped or width is None or self._forced is not None else 1

    def admit(self, row: int, other: Steps, length: int, capacity: int, other_row: int = 0) -> None:
        super().admit(row, other, length, capacity + self.spare, other_row)
        assert isinstance(other, FeatureSteps)
        self._taps_rows = self._taps_rows or other._taps_rows
        self.most = max(self.most, other.most)

    def forward(self, draft: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        if not self.reads_rows:
            hidden: torch.Tensor = self.model.hidden(draft, cache=self.cache, counts=counts)
        else:
            hidden, taps = self.model.tapped(draft, self.taps, cache=self.cache, counts=counts)
            self._verified = self.drafter.fused(taps)
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def keep_features(self, accepted: torch.Tensor) -> torch.Tensor:
        """Adds the first `accepted` verified rows to those that wait; their places ``(batch, width)``."""
        if self.lengths is not None:
            accepted = accepted * self.lengths.ready
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
        return self._drawn(self.logits_of(hidden), positions)

    def _drawn(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens ``(batch, n)`` that the drafter draws from its logits."""
        vocabulary = self.drafter.vocabulary
        if self.sampler.temperature == 0:
            guesses: torch.Tensor = vocabulary[self.sampler.sample(logits, positions, self.seeds, OWN).clamp(min=0)]
            return guesses
        # The noise of a sample belongs to the target's ids.
        full_logits = logits.new_full((*logits.shape[:-1], self.model.config.vocab_size), -torch.inf)
        full_logits[..., vocabulary] = logits
        return self.sampler.sample(full_logits, positions, self.seeds, OWN, self.banned).clamp(min=0)


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
    matrix = getattr(model, "head", None)
    matrix = getattr(model, "embedding", None) if matrix is None else matrix
    remedy = "Pass a drafter with lm_head.weight."
    refuse(matrix is None, op, "the drafter shares the model's head, and the model has no matrix to share", remedy)
    return matrix
