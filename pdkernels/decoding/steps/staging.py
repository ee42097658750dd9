"""Where the prompt of a request runs before the request joins a batch: steps of batch 1, whose prompt can run in
pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pdkernels._validation import sentence
from pdkernels.cache import PagePool
from pdkernels.cache.hybrid import SavedStates
from pdkernels.decoding.steps.contract import Steps
from pdkernels.decoding.steps.entry import Rows
from pdkernels.generation.noise import latents
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.session import Session, inference
from pdkernels.generation.shared_prompts import continued


class _Continued:
    """A model that is told that the cache already holds the first `known` tokens of what it gets next.

    A forward that cannot continue them runs the whole of it and writes their rows anew; not where they are in pages
    that others may hold.
    """

    def __init__(self, model: Any) -> None:
        self.inner, self.cached, self.shared = model, 0, False

    @property
    def model_itself(self) -> Any:
        """The model without what is between it and a request."""
        return getattr(self.inner, "model_itself", self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("forward", "hidden", "tapped"):  # the other ways to run it
            self._check_own()
        return getattr(self.inner, name)

    def _check_own(self) -> None:
        fault = "this method runs a whole prompt in a way of its own, over tokens in pages that other requests hold"
        if self.cached and self.shared:
            raise NotImplementedError(sentence("decoding.steps", fault, "Its steps must say `continues = False`."))

    def __call__(
        self,
        tokens: torch.Tensor,
        *,
        cache: Any,
        counts: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        logits: torch.Tensor
        # A method that masks or adapts its prompt, or reads its rows, runs the whole of it.
        active = {name: value for name, value in options.items() if value is not None and value is not False}
        runs_all = self.cached == 0 or bool(active) or rows is None or int(rows.min()) < self.cached
        if runs_all:
            self._check_own()
        cached, self.cached = self.cached, 0
        if runs_all:
            logits = self.inner(tokens, cache=cache, counts=counts, rows=rows, **options)
            return logits
        assert rows is not None
        return continued(self.inner, tokens, cache, counts, rows, torch.full_like(cache.lengths, cached), cached)


class Staging:
    """Steps of batch 1 for one request after another.

    Args:
        kind: the steps of a method.
        largest: a session of one prompt with the largest sizes.
        **options: of the method.
    """

    @inference()
    def __init__(self, kind: type[Steps], largest: Session, **options: Any) -> None:
        self._model = _Continued(largest.model)
        model, largest.model = largest.model, self._model
        self.steps = kind(largest, **options)
        largest.model = model
        # A canvas has no rows that stay, and states of a recurrent-depth model depend on the seed.
        self.in_pieces = kind.continues and not self.steps.keeps_pages and not latents(model, self.steps.seeds)
        """Whether a prompt can run in pieces."""
        self._sampler = getattr(self.steps, "sampler", None)
        self.cached = 0
        """Tokens of the next prompt whose K and V are in the cache."""

    def adapt(self, session: Session) -> None:
        """Says which adapter the next prompt runs with."""
        if hasattr(self.steps.cache, "adapt_"):
            self.steps.cache.adapt_(session.adapters * self.steps.cache.batch if session.adapters else [])

    @inference()
    def adopt(self, cache: Any, length: int) -> None:
        """Takes over the first `length` tokens of the next prompt from a cache of batch 1."""
        self.steps.cache.copy_row_(0, cache, 0, length)
        self.cached = length

    @property
    def pool(self) -> PagePool | None:
        """Where its cache takes its pages from; None: they are its own."""
        pool: PagePool | None = getattr(self.steps.cache, "shared_pool", None)
        return pool

    def room(self, session: Session, length: int) -> int:
        """Tokens that a sequence on a pool must have pages for, before a step after `length` tokens: all, if it cannot
        leave."""
        steps, capacity = self.steps, self._capacity(session)
        return min(length + steps.slots, capacity) if steps.resumes else capacity

    def _capacity(self, session: Session) -> int:
        steps = self.steps
        return min(session.longest + session.max_new_tokens + steps.spare, int(steps.cache.capacity))

    def need(self, session: Session) -> dict[int, int]:
        """Pages that a sequence on a `WindowedPool` may hold at a time in the layers with each window."""
        cache = self.steps.cache
        need: dict[int, int] = cache.need(self._capacity(session)) if hasattr(cache, "need") else {}
        return need

    @inference()
    def slide(self, cache: Any, row: int, session: Session, length: int, first: int) -> None:
        """Prepares layers with windows of a cache for the rows of a sequence from `first` on, and a step after `length`
        tokens: pages in front of the windows are given back, and those that are written to taken."""
        slots = max(self.steps.slots, self.steps.spare)
        cache.slide_(row, first, min(length + slots, self._capacity(session)))

    @inference()
    def begin(
        self,
        pages: Sequence[int],
        partial: int | None,
        text: list[int],
        prompt: int,
        room: int,
        states: SavedStates | None = None,
        windows: Mapping[int, Sequence[int]] | None = None,
        need: Mapping[int, int] | None = None,
    ) -> None:
        """Takes over the first rows of the next text, from pages of the pool.

        Args:
            pages: whole ones, which others hold too.
            partial: one of which only the first tokens are taken over, by a copy; None: no other.
            text: the tokens of all these rows.
            prompt: tokens of the prompt, which `text` may go beyond.
            room: tokens to have pages for; the pool has enough of them.
            states: recurrent ones, after all these rows.
            windows: of the layers with each window, the pages of all these rows, of the last one its first tokens.
            need: pages that the sequence may hold there at a time.
        """
        pool, cache = self.pool, self.steps.cache
        assert pool is not None
        cache.hold_row_(0, pages)
        if need:
            cache.hold_windows_(0, windows or {}, len(text), need)
        cache.resize_row_(0, room)
        copied = len(text) - len(pages) * pool.page_size
        if partial is not None:
            pool.copy_slots_(cache.pages(0)[len(pages)], partial, copied)
        self.cached = len(text)
        cache.lengths.fill_(self.cached)
        if states is not None:
            cache.load_states_(0, states)
        if hasattr(cache, "tell_"):
            cache.tell_(0, text, prompt)

    @inference()
    def drop(self) -> None:
        """Forgets the next prompt."""
        self.cached = 0
        if self.pool is not None:
            self.steps.cache.resize_row_(0, 0)

    @inference()
    def resume(self, text: list[int], prompt: int, state: Sequence[torch.Tensor]) -> None:
        """Makes the sequence of `text`, whose rows are in the cache, what it was when it left: with its rows of
        `Steps.state`."""
        cache, self.cached = self.steps.cache, 0
        cache.lengths.fill_(len(text))
        if hasattr(cache, "tell_"):
            cache.tell_(0, text, prompt)
        for tensor, row in zip(self.steps.state, state, strict=True):
            tensor[0].copy_(row)

    @inference()
    def run(self, prompt: list[int], count: int) -> None:
        """Runs the next `count` tokens of the next prompt; the last token of a prompt is left to `start`."""
        count = min(count, len(prompt) - 1 - self.cached)
        if count < 1:
            return
        cache = self.steps.cache
        if hasattr(cache, "slide_"):
            cache.slide_(0, self.cached, self.cached + count)
        tokens = torch.tensor([prompt[self.cached : self.cached + count]], device=cache.device)
        cache.lengths.fill_(self.cached)
        self._model.inner(tokens, cache=cache, rows=torch.tensor([[count - 1]], device=cache.device))
        # A commit also moves what a model keeps beside the cache.
        cache.commit_(torch.tensor([count], device=cache.device))
        self.cached += count

    @inference()
    def start(self, session: Session, seed: torch.Tensor, sampler: Sampler | None = None) -> Rows:
        """Runs the rest of the prompt, and returns the first entry, drawn by `sampler`; None: by that of the
        options."""
        if hasattr(cache := self.steps.cache, "slide_"):
            # A whole prompt that is longer than a piece leaves its last rows alone there.
            at_once = self.cached == 0 and session.longest > cache.piece
            first = max(0, session.longest - cache.drafts) if at_once else self.cached
            self.slide(cache, 0, session, session.longest, first)
        self._model.cached, self._model.shared, self.cached = self.cached, self.pool is not None, 0
        self.adapt(session)
        if self._sampler is not None:
            self.steps.sampler = sampler or self._sampler
        self.steps.reseed(seed)
        if hasattr(self.steps.cache, "tell_"):
            self.steps.cache.tell_(0, [], session.longest)  # not the pieces, nor an earlier prompt, that it has
        try:
            self.steps.start(session)
        finally:
            self._model.cached = 0
        return self.steps.entry.rows()
