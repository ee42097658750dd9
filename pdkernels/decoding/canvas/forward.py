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

    def restart(self) -> None:
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
