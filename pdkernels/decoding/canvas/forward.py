"""Forwards over the canvases of masked-diffusion decoders: of all rows, or of those that changed."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.decoding.canvas.canvas import Canvas
from pdkernels.decoding.canvas.checks import check_alone
from pdkernels.generation.session import Session
from pdkernels.models.architectures.feature_cache import FeatureCache
from pdkernels.models.capabilities import rows_ahead

# Number of first forwards that compute the texts with and without the prompt, regardless of the guidance interval.
_ALWAYS_GUIDED = 5


class WholeCanvas:
    """A forward over the whole canvases: hidden states of all rows, without state for the next forward.

    With guidance the batch is doubled by copies with masked prompts.

    Attributes:
        first_row: positions of the first rows; None: 0.
        width: positions of a canvas.
        cache: of the model.
    """

    first_row: torch.Tensor | None = None

    def __init__(self, session: Session, canvas: Canvas, page_size: int | None = None) -> None:
        self._canvas = canvas
        self._copies = 2 if canvas.sampling.guidance else 1
        self.width = canvas.tokens.shape[1]
        self._prompt = canvas.given
        self._start(session, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        self._model, self.cache = session.model, session.new_cache(page_size, copies=self._copies)
        self._visible = self._canvas.totals.repeat(self._copies)
        self._starts = torch.zeros_like(self._visible)
        self._counts = session.ragged(self._visible)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """As `Steps.state`, after `restart`."""
        return self._visible.view(self._copies, -1).unbind()

    def restart(self, session: Session) -> None:
        """After `Canvas.restart`; texts may be of different lengths from now on."""
        self._visible.copy_(self._canvas.totals.repeat(self._copies))
        self._counts = self._visible

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, width, hidden_size)``. Without guidance the canvases are cut at `ends` ``(batch,)`` and at `width`;
        None: they are not."""
        visible, counts = self._visible, self._counts
        if ends is not None:
            visible = counts = ends.clamp(max=width)
        hidden: torch.Tensor = self._model.recompute(
            self._tokens()[:, :width], self.cache, self._starts, counts=counts, visible=visible
        )
        return hidden

    def _tokens(self) -> torch.Tensor:
        tokens = self._canvas.tokens
        if self._copies == 1:
            return tokens
        return torch.cat([tokens, tokens.masked_fill(self._prompt, self._canvas.mask_token)])


class KeptCanvas(WholeCanvas):
    """A forward that computes a few rows and reuses the others from a `FeatureCache`: hidden states of the rows that
    predict new positions.

    With a `guidance_interval` above 1 the canvases with masked prompts have their own cache, and a forward only at
    each interval and in the first five. In between, the hidden states of that forward come after the current ones.

    Its other `options` are those of the cache.
    """

    def __init__(
        self, session: Session, canvas: Canvas, page_size: int | None = None, guidance_interval: int = 1, **options: Any
    ) -> None:
        self._options, self._guidance_interval = options, guidance_interval
        super().__init__(session, canvas, page_size)

    def _start(self, session: Session, page_size: int | None) -> None:
        check_alone(session)
        model, caches = session.model, 1 if self._guidance_interval == 1 else self._copies
        self._together = self._copies // caches
        sizes = self._together * session.batch, session.longest, session.max_new_tokens
        self.cache, *self._free = (
            FeatureCache(model, *sizes, page_size=page_size, **self._options) for _ in range(caches)
        )
        self._prompt_lengths = self._canvas.prompt_lengths.repeat(self._together)
        self.first_row = self._canvas.prompt_lengths - rows_ahead(model)

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """``(batch, new positions, hidden_size)``. The canvases are cut at `ends` ``(batch,)``, after their prompts."""
        visible, before = None if ends is None else ends.repeat(self._together), self.cache.step
        tokens = self._tokens()
        hidden: torch.Tensor = self.cache.forward(tokens[: len(self._prompt_lengths)], self._prompt_lengths, visible)
        if not self._free:
            return hidden
        if before % self._guidance_interval == 0 or before < _ALWAYS_GUIDED:
            self._canvas.run_again()
            free = self._free[0].forward(tokens[len(hidden) :], self._prompt_lengths, visible)
            self._compared = torch.cat([hidden, free])
            return self._compared
        return torch.cat([hidden, self._compared])


class KeptRows:
    """Forwards over canvases that join and leave, each with a `KeptCanvas` cache of its own: it is refreshed after so many
    forwards of the sequence, so that no forward serves several of them.

    Attributes:
        first_row: as `WholeCanvas` has it.
        taking: sequences that take the next forward.
        ran: the forwards that each of them took in it.
        batch, block_table: of the whole, as a cache has them.
    """

    block_table = None
    state: tuple[torch.Tensor, ...] = ()

    def __init__(
        self, session: Session, canvas: Canvas, page_size: int | None = None, guidance_interval: int = 1, **options: Any
    ) -> None:
        check_alone(session)
        self._canvas, self._interval = canvas, guidance_interval
        self._model = getattr(session.model, "model_itself", session.model)
        self._copies = 2 if canvas.sampling.guidance else 1
        self._together = self._copies if guidance_interval == 1 else 1
        self._sizes = self._together, session.longest, session.max_new_tokens
        self._options = {"page_size": page_size, **options}
        # A sequence takes its cache with its first forward: prompts have none of their own.
        self._caches: list[list[FeatureCache]] = [[] for _ in range(session.batch)]
        FeatureCache(self._model, self._together, 1, 1, **self._options)  # refuses what it does not take
        self._compared: list[torch.Tensor] = [torch.empty(0)] * session.batch
        self._ahead, self.batch = rows_ahead(self._model), session.batch
        self.taking, self.ran = [True] * session.batch, [1] * session.batch
        self.cache = self

    @property
    def first_row(self) -> torch.Tensor:
        return self._canvas.prompt_lengths - self._ahead

    def restart(self, session: Session) -> None:
        """After `Canvas.restart`."""
        for row in range(self.batch):
            self.copy_row_(row, self, row, 0)

    def copy_row_(self, row: int, other: KeptRows, other_row: int, length: int) -> None:
        """Another sequence takes a row, before its first forward, which computes everything. What does not fit into memory
        fails here, and alone."""
        if other is not self and not self._caches[row]:
            self._caches[row] = self._allocated()
        for cache in self._caches[row]:
            cache.step = 0

    def _allocated(self) -> list[FeatureCache]:
        return [FeatureCache(self._model, *self._sizes, **self._options) for _ in range(self._copies // self._together)]

    def __call__(self, ends: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
        """As `KeptCanvas`, of the sequences of `taking`; rows of the others are 0."""
        rows = [self._of(row, ends) if takes else [] for row, takes in enumerate(self.taking)]
        idle = torch.zeros_like(next(own for own in rows if own)[0])
        streams = max(map(len, rows))
        # What a step compares is the last of its streams: those with and without the prompt.
        padded = [own[:1] * (streams - len(own)) + own if own else [idle] * streams for own in rows]
        return torch.cat([hidden for stream in zip(*padded, strict=True) for hidden in stream])

    def _of(self, row: int, ends: torch.Tensor | None) -> list[torch.Tensor]:
        """The streams of one sequence, ``(1, new positions, hidden_size)`` each."""
        self._caches[row] = self._caches[row] or self._allocated()
        cache, *free = self._caches[row]
        canvas, before = self._canvas, cache.step
        tokens, lengths = canvas.tokens[row : row + 1], canvas.prompt_lengths[row : row + 1]
        texts = [tokens]
        if self._copies > 1:
            texts.append(tokens.masked_fill(canvas.given[row : row + 1], canvas.mask_token))
        together = torch.cat(texts[: self._together])
        visible = None if ends is None else ends[row : row + 1].repeat(self._together)
        self.ran[row] = 1
        hidden = cache.forward(together, lengths.repeat(self._together), visible)
        if not free:
            return list(hidden.split(1))
        if before % self._interval == 0 or before < _ALWAYS_GUIDED:
            self.ran[row] = 2
            other = free[0].forward(texts[1], lengths, visible)
            self._compared[row] = torch.cat([hidden, other])
            return [hidden, other]
        return [hidden, *self._compared[row].split(1)]
