"""The results of decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from typing import Generic, NamedTuple

import torch
from typing_extensions import TypeVar

from pdkernels._validation import sentence
from pdkernels.generation.replay import Source, write_page
from pdkernels.generation.traces import Trace

# on_tokens(batch index, new token ids, how many of them, from the front, were accepted drafts); a `ChunkTokens` instead
# of a list comes when its chunk is complete, possibly before earlier chunks of the text
OnTokens = Callable[[int, list[int], int], None]


class ChunkTokens(list[int]):
    """A finished chunk, including its two tags, as passed to `on_tokens`."""

    def __init__(self, ids: list[int], chunk: int) -> None:
        super().__init__(ids)
        self.chunk = chunk
        """Its number in the whole text, from 0 in text order."""


class PlanRound(NamedTuple):
    """One round of planned diffusion."""

    plan: list[int]
    """The plan's tokens, without the one that ended it."""
    topics: list[list[int]]
    """Topic of each item, without its number."""
    lengths: list[int]
    """Tokens of each chunk, without tags."""
    steps: int
    """Forwards that filled the chunks."""
    stop: str
    """The reason why the plan ended: "sync", "end", or "length" if there was no room for more."""


class PlanReport(NamedTuple):
    """Report on one sequence of planned diffusion."""

    rounds: list[PlanRound]
    reason: str
    """The reason why the text ended: "end" (token), "length", "rounds", or the fault of its last plan (`BAD_PLANS`)."""
    forwards: dict[str, int]
    """Forwards it took part in: "plan" (the prompt's included), "chunks", and "refresh", which adds finished chunks to
    the cache and starts the next plan."""
    rows: dict[str, int]
    """Tokens that went through the model in these forwards."""

    @property
    def critical_path(self) -> int:
        """Forwards on the critical path."""
        return sum(self.forwards.values())


class LogProbs(NamedTuple):
    """Log-probabilities of the n new tokens of a text, under the model's own distribution: before penalties,
    temperature and filters."""

    tokens: torch.Tensor
    """float ``(n,)``: of the tokens."""
    top_ids: torch.Tensor
    """int64 ``(n, k)``: the k most probable tokens of each place."""
    top: torch.Tensor
    """float ``(n, k)``: their log-probabilities."""


@dataclass(frozen=True)
class DecodeStats:
    """The cost of a generation.

    Attributes:
        method: name of the decoding method.
        forwards: forward passes of the model over the batch. The prompt's own forward counts.
        tokens: new tokens, all sequences together.
        tokens_per_forward: `tokens` over the forwards in which their sequences took part (a finished sequence takes
            part in none), so that the figure of a sequence is the same alone and in a batch; 1.0 is autoregressive.
        seconds: wall time from the first allocation to the last token on the host, without the time spent in
            `on_tokens`.
        accepted: per sequence, the draft tokens committed by each forward that verified a draft, the always right first
            one included; in block diffusion and masked diffusion the positions that each forward filled; in recurrent
            diffusion the tokens that each step froze. One list per sequence, also for a single prompt.
        trace: per sequence, one `TraceStep` (or the method's own form of it) per verified draft; None unless requested.
        recurrences: times that the core of a recurrent-depth model ran over the batch, whatever its rows; the prompt's
            count. None for a method that does not control them.
        plans: per sequence, what it planned and the outcome; None for methods without plans.
        forced: per sequence, the tokens that a grammar drafted because every text of it has them next; None without a
            grammar.
    """

    method: str
    forwards: int
    tokens: int
    tokens_per_forward: float
    seconds: float
    accepted: list[list[int]]
    trace: Trace | None = None
    recurrences: int | None = None
    plans: list[PlanReport] | None = None
    forced: list[int] | None = None

    @property
    def tokens_per_second(self) -> float:
        """`tokens` over `seconds`; 0.0 for a generation of no tokens."""
        return self.tokens / self.seconds if self.tokens else 0.0


Tokens = TypeVar("Tokens", bound=torch.Tensor | list[torch.Tensor], default=torch.Tensor | list[torch.Tensor])
Text = TypeVar("Text", bound=str | list[str], default=str | list[str])


@dataclass(frozen=True, eq=False)
class DecodeResult(Generic[Tokens, Text]):
    """New tokens, without the prompt. For one prompt it is a ``DecodeResult[Tensor, str]``, for a batch one of lists.
    A result equals only itself, as a module of torch does; compare `tokens` or `text`.

    Attributes:
        tokens: int64 ``(length,)`` on the CPU, or a list of those for a batch. An end token that stopped a
            sequence is its last token.
        text: the decoded tokens, special ones left out; None if the model has no tokenizer.
        stats: see `DecodeStats`.
        logprobs: see `LogProbs`, a list of those for a batch; None unless requested.
    """

    tokens: Tokens
    text: Text | None
    stats: DecodeStats
    logprobs: LogProbs | list[LogProbs] | None = None
    _source: Source | None = field(default=None, repr=False, compare=False)

    def save_html(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Writes a page that replays the generation step by step, for any browser; it loads nothing from elsewhere.

        Tokens have the colour of the step that wrote them. Accepted drafts are underlined, rejected ones and
        predictions that may still change are pale, masked positions are boxes, and chunks that were written in parallel
        are lanes. Below is a chart with a line per step.

        Args:
            path: of the page.
            title: its heading; None: the method.

        Raises:
            ValueError: a result of a generation without ``trace=True``.

        Example:
            >>> import tempfile, pathlib, pdkernels as pd
            >>> result = pd.decoding.generate(pd.models.load("tiny-trimode"), "17 + 25 = ?", "linear_self_speculation",
            ...                               max_new_tokens=24, trace=True)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     page = pathlib.Path(folder) / "run.html"
            ...     result.save_html(page)
            ...     page.read_text()[:15]
            '<!doctype html>'
        """
        op = "decoding.DecodeResult.save_html"
        remedy = "Call generate(..., trace=True)."
        stats = self.stats
        if self._source is None or stats.trace is None:
            raise ValueError(sentence(op, "the result has no trace to replay", remedy))
        topics = None if stats.plans is None else [plan.rounds for plan in stats.plans]
        summary = {"method": stats.method, "forwards": stats.forwards, "tokens": stats.tokens}
        summary |= {"tokens per forward": round(stats.tokens_per_forward, 2), "seconds": round(stats.seconds, 3)}
        write_page(path, title or stats.method, summary, self._source, stats.trace, topics)
