"""Pages of K and V for all requests of an engine: earlier texts by their tokens, and who waits for pages.

Source: PagedAttention (arXiv 2309.06180), section 4; a page is named by its tokens and the page before it, as in vLLM's
automatic prefix caching.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pdkernels._validation import refuse
from pdkernels.cache import PagePool
from pdkernels.cache.stored import row_width
from pdkernels.engine.metrics import EngineMetrics
from pdkernels.engine.prefixes import Prefixes
from pdkernels.models.protocols import lacking

PAGE = 64
"""Tokens of a page: with smaller ones attention on a CPU is slower."""
_SHORTEST = 16  # tokens that are cheaper to run than to look up

Name = tuple["Page | None", tuple[int, ...]]


@dataclass(eq=False)
class Page:
    """A page of an earlier text. Its rows depend on all tokens before it, so its name says these too."""

    number: int
    before: Page | None
    tokens: tuple[int, ...]
    after: list[Page] = field(default_factory=list)


class CachedPrefix(NamedTuple):
    """The pages of earlier texts that a text begins with."""

    pages: list[int]
    """Whole pages."""
    partial: int | None
    """One that begins with the next tokens, of which the first ones can be copied."""
    length: int
    """Tokens, of all of them."""


class Pages:
    """The pages of a pool: of requests, and of earlier texts, least recently used, up to `limit` tokens of them.

    A text shares the whole pages of its beginning with others, and copies the slots of the page in which it leaves
    them.
    """

    def __init__(self, pool: PagePool, limit: int) -> None:
        self.pool, self.limit, self.tokens = pool, limit, 0
        self.blocked: int | None = None
        """The number of the oldest request that has found too few pages: no younger one may begin before it."""
        self._cached: OrderedDict[Name, Page] = OrderedDict()  # the least recently used first
        self._first: list[Page] = []

    def find(self, text: list[int]) -> CachedPrefix:
        """The longest known beginning of a text."""
        size, pages, page, length = self.pool.page_size, list[int](), None, 0
        while len(text) - length >= size:
            name: Name = page, tuple(text[length : length + size])
            if name not in self._cached:
                break
            self._cached.move_to_end(name)
            page = self._cached[name]
            pages.append(page.number)
            length += size
        suffix, most, partial = text[length : length + size], 0, None
        for other in self._first if page is None else page.after:
            same = next(
                (n for n, (a, b) in enumerate(zip(suffix, other.tokens)) if a != b), min(len(suffix), len(other.tokens))
            )
            if same > most:
                most, partial = same, other
        if partial is not None:
            self._cached.move_to_end((partial.before, partial.tokens))
        if length + most < _SHORTEST:
            return CachedPrefix([], None, 0)
        return CachedPrefix(pages, None if partial is None else partial.number, length + most)

    def keep(self, text: list[int], pages: list[int]) -> None:
        """Remembers the pages of a text, the last one as far as it is written: those who hold it may write behind
        that."""
        size, before, text = self.pool.page_size, None, text[: self.limit]
        if len(text) < _SHORTEST:
            return
        for start in range(0, len(text), size):
            tokens = tuple(text[start : start + size])
            name: Name = before, tokens
            if name in self._cached:
                self._cached.move_to_end(name)
                before = self._cached[name]
                continue
            siblings = self._first if before is None else before.after
            for other in [
                sibling for sibling in siblings if not sibling.after and tokens[: len(sibling.tokens)] == sibling.tokens
            ]:
                self._forget(other)  # a shorter part of the same page
            if any(sibling.tokens[: len(tokens)] == tokens for sibling in siblings):
                return
            page = Page(pages[start // size], before, tokens)
            self.pool.hold([page.number])
            self._cached[name] = page
            siblings.append(page)
            self.tokens += len(tokens)
            before = page
        while self.tokens > self.limit and self._forget_oldest():
            pass

    def reclaim(self, count: int) -> bool:
        """Whether `count` pages are free, after forgetting as many earlier texts as it takes."""
        while self.pool.available < count:
            if not self._forget_oldest(free=True):
                return False
        return True

    def _forget_oldest(self, free: bool = False) -> bool:
        """Forgets the last page of the text used least recently; with `free`, of those that no request holds."""
        for page in self._cached.values():
            if not page.after and not (free and self.pool.holders(page.number) > 1):
                self._forget(page)
                return True
        return False

    def _forget(self, page: Page) -> None:
        del self._cached[page.before, page.tokens]
        (self._first if page.before is None else page.before.after).remove(page)
        self.tokens -= len(page.tokens)
        self.pool.release([page.number])


class Memory:
    """What the method_batches of an engine share: pages if the model's cache can have them (`new_pool`), else copies of
    earlier prompts.

    Args:
        model: whose K and V they are.
        kept: tokens of earlier prompts.
        tokens: of all pages.
        longest: tokens of the longest request; there is room for one in any case.
        by_default: whether `tokens` is only a wish, of which half of the memory that is free may be taken.
    """

    def __init__(self, model: Any, prefix_tokens: int, tokens: int, longest: int, by_default: bool) -> None:
        self.prefixes = Prefixes(prefix_tokens)
        self.shared_pages: Pages | None = None
        self.method_batches: list[Any] = []
        """Those with requests."""
        if not hasattr(model, "new_pool") or lacking(model, "new_cache", ("pool",)):
            refuse(not by_default, "Engine", "cache_tokens is for a model with pages of K and V", "Pass None.")
            return
        least = -(-longest // PAGE) + 1
        pages = max(least, -(-tokens // PAGE))
        if by_default:
            pages = max(least, min(pages, _free_bytes(model.device) // 2 // (_token_bytes(model) * PAGE)))
        self.shared_pages = Pages(model.new_pool(pages, PAGE), prefix_tokens)

    @property
    def pages(self) -> Pages:
        assert self.shared_pages is not None
        return self.shared_pages

    def before(self, number: int) -> bool:
        """Whether an older request than this one waits for pages."""
        return (
            self.shared_pages is not None
            and self.shared_pages.blocked is not None
            and self.shared_pages.blocked < number
        )

    def waiting(self, numbers: set[int]) -> None:
        """Says which requests wait."""
        if (
            self.shared_pages is not None
            and (blocked := self.shared_pages.blocked) is not None
            and blocked not in numbers
        ):
            self.shared_pages.blocked = None

    def youngest(self) -> tuple[Any, Any]:
        """The youngest request that can give up its pages, and its method_batch."""
        method_batches = [
            (method_batch, last) for method_batch in self.method_batches if (last := method_batch.last()) is not None
        ]
        return max(method_batches, key=lambda pair: pair[1].handle.number)

    def count(self, metrics: EngineMetrics) -> None:
        """Fills in what there is now."""
        metrics.kept_tokens = self.prefixes.tokens
        if self.shared_pages is not None:
            pool, metrics.kept_tokens = self.shared_pages.pool, self.shared_pages.tokens
            metrics.pages, metrics.shared_pages = pool.num_pages, pool.shared
            metrics.used_pages = pool.num_pages - pool.available


def _token_bytes(model: Any) -> int:
    config, dtype = model.config, getattr(model, "cache_dtype", None) or model.dtype
    width = row_width("Engine", config.head_dim, dtype)
    size: int = 2 * config.layers * config.kv_heads * width * dtype.itemsize
    return size


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)
