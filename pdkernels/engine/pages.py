"""What the requests of an engine share: pages of K and V with earlier texts, and who waits for pages.

Source: PagedAttention (arXiv 2309.06180), section 4.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, refuse, sentence
from pdkernels.cache.windowed_pool import PIECE, SPARE, most_pages
from pdkernels.engine.disk import Piece, PrefixFolder, Rows, Written, rows_of_states, states_of_rows
from pdkernels.engine.metrics import EngineMetrics
from pdkernels.engine.prefixes import Prefixes
from pdkernels.engine.scoring import Scoring
from pdkernels.engine.tree import PrefixTree, Root
from pdkernels.generation.session import Session
from pdkernels.models.architectures.caches import windows_of
from pdkernels.models.protocols import lacking

PAGE = 64
"""Tokens of a page: with smaller ones attention on a CPU is slower."""
_DRAFT = 64
"""Rows of the longest draft that pages of layers with windows are counted for; a method with a longer one needs more."""
_ALONE = 5.0
"""Seconds after which a request that finds too few pages, while no other has some, is refused. Only a thread that copies
a page for the folder may hold one then, for less."""


class Memory:
    """What the method_batches of an engine share: pages if the model's cache can have them (`new_pool`), else copies of
    earlier prompts.

    Args:
        model: whose K and V they are.
        kept: tokens of earlier prompts.
        tokens: of all pages.
        longest: tokens of the longest request; there is room for one in any case.
        running: requests of a batch at a time.
        by_default: whether `tokens` is only a wish, of which half of the memory that is free may be taken.
        folder: where pages of earlier texts are kept too; None: nowhere.
        folder_bytes: of its files.
    """

    def __init__(
        self,
        model: Any,
        prefix_tokens: int,
        tokens: int,
        longest: int,
        running: int,
        by_default: bool,
        folder: str | os.PathLike[str] | None = None,
        folder_bytes: int = 0,
    ) -> None:
        self.prefixes = Prefixes(prefix_tokens)
        self.shared_pages: PrefixTree | None = None
        self.folder: PrefixFolder | None = None
        self.method_batches: list[Any] = []
        """Those with requests."""
        self.scoring = Scoring()
        self._alone = -1, 0.0
        """The last request that has found too few pages, and since when no other has had any."""
        if not hasattr(model, "new_pool") or lacking(model, "new_cache", ("pool",)):
            refuse(not by_default, "Engine", "cache_tokens is for a model with pages of K and V", "Pass None.")
            refuse(folder is not None, "Engine", "prefix_dir is for a model with pages of K and V", "Pass None.")
            return
        least = -(-longest // PAGE) + 1
        pages = max(least, -(-tokens // PAGE))
        one_page = model.new_pool(1, PAGE)
        page_bytes = one_page.k[:, 0].nbytes + one_page.v[:, 0].nbytes
        self._row_bytes, self._device = page_bytes // PAGE, model.device
        room = _free_bytes(model.device) // 2 if by_default else sys.maxsize
        pages, windows = _sizes(model, page_bytes, pages, least, running, prefix_tokens > 0, room)
        self.shared_pages = PrefixTree(
            model.new_pool(pages, PAGE, window_pages=windows) if windows else model.new_pool(pages, PAGE),
            prefix_tokens,
            # A layer has 12 h^2 weights, and attention 2 h products for each row before.
            even=6 * model.config.hidden_size,
            state_rows=-(-_state_bytes(model) // (page_bytes // PAGE)),
        )
        if folder is not None:
            self.folder = PrefixFolder(folder, folder_bytes, model, self.shared_pages.pool)

    @staticmethod
    def root(session: Session) -> Root:
        """What the K and V of a request depend on besides its tokens, and the model, of which there is one here. Files
        are named by its `repr`, so that must say the same in every program."""
        adapter = session.adapters[0] if session.adapters else None
        return () if adapter is None else (adapter.digest,)

    def check_states(self, states: int, tokens: int) -> None:
        """Raises ValueError if further states of texts with so many tokens, whose K and V are in no pages, are too large, or
        would be copied from layers that have their last rows alone."""
        if self.shared_pages is None:
            return
        check(
            not self.shared_pages.groups,
            "Engine",
            "speculate",
            "be 0 with a model whose layers have windows",
            states - 1,
        )
        needed, room = states * tokens * self._row_bytes, _free_bytes(self._device) // 2
        expectation = f"need at most half of the free memory, {room / 1e9:.1f} GB, for its states of all texts"
        check(needed <= room, "Engine", "speculate", expectation, f"{states - 1}: {needed / 1e9:.1f} GB")

    def prepare(self, session: Session) -> list[Piece]:
        """Reads what the folder has of a prompt, in the thread of who submits it."""
        if self.folder is None:
            return []
        tree, root, text = self.pages, self.root(session), session.prompts[0][:-1]
        start = sum(len(page.tokens) for page in tree.whole(root, text))
        return self.folder.prepare(root, text, start, tree.state_rows > 0)

    def restore(self, session: Session, pieces: list[Piece], most: int) -> tuple[int, list[Piece]]:
        """Takes over what `prepare` has read, at most `most` tokens, but a page in any case: the copy holds up everybody.
        Returns its tokens, and the pieces that are left."""
        if self.folder is None or not pieces:
            return 0, []
        root, text = self.root(session), session.prompts[0][:-1]
        first = end = sum(len(page.tokens) for page in self.pages.whole(root, text))
        loaded, windows, states, taken = list[Rows](), list[Rows | None](), None, 0
        for piece in pieces:
            if loaded and piece.end - first > most:
                break
            taken += 1
            names = piece.name, piece.of_states, piece.of_windows
            rows, of_states, of_windows = (self.folder.take(name) for name in names)
            if piece.start == end and rows is not None:
                loaded.append(rows)
                windows.append(of_windows)
                end = piece.end
            if of_states is not None:
                states = piece.end, states_of_rows(of_states)
        restored = self.pages.restore(root, text, loaded, states, windows) if loaded else 0
        return restored, pieces[taken:] if restored else []

    def write(self, session: Session, text: list[int]) -> None:
        """Has a text that is kept written to the folder, some time later."""
        if self.folder is None:
            return
        root, tree, job, in_windows = self.root(session), self.pages, list[Written](), list[Written]()
        for piece, page in zip(self.folder.pieces(root, text), tree.path(root, text)):
            tokens = text[piece.start : piece.end]
            job.append(Written(piece.name, tokens, partial(tree.copy, page, len(tokens))))
            if piece.end in page.states:
                job.append(Written(piece.of_states, tokens, rows_of_states(page.states[piece.end].saved)))
            if page.windows:
                in_windows.append(Written(piece.of_windows, tokens, partial(tree.copy_windows, page, len(tokens))))
        self.folder.write(job)
        if in_windows:
            self.folder.write(in_windows[::-1])

    def close(self) -> None:
        """Waits until everything is written."""
        if self.folder is not None:
            self.folder.close()
            self.folder.join()

    @property
    def pages(self) -> PrefixTree:
        assert self.shared_pages is not None
        return self.shared_pages

    def before(self, number: int) -> bool:
        """Whether an older request than this one waits for pages."""
        return (
            self.shared_pages is not None
            and self.shared_pages.blocked is not None
            and self.shared_pages.blocked < number
        )

    def lacks(self, number: int) -> None:
        """Says that a request has found too few pages, so that it waits, and no younger one begins before it.

        Raises:
            MemoryError: no other request has pages, for some seconds, so that it would wait for ever.
        """
        tree, now = self.pages, time.monotonic()
        tree.blocked = number if tree.blocked is None else min(number, tree.blocked)
        if self._alone[0] != number or any(batch.busy for batch in self.method_batches):
            self._alone = number, now
        if now - self._alone[1] > _ALONE:
            fault = f"request {number} finds too few pages, and no other request has any to give back"
            raise MemoryError(sentence("Engine", fault, "Make a new engine."))

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
        if self.folder is not None:
            metrics.written_tokens, metrics.folder_bytes = self.folder.written, self.folder.bytes
        metrics.kept_tokens = self.prefixes.tokens
        if self.shared_pages is not None:
            pool, metrics.kept_tokens = self.shared_pages.pool, self.shared_pages.tokens
            metrics.forgotten_tokens, metrics.kept_states = self.shared_pages.forgotten, self.shared_pages.states
            metrics.pages, metrics.shared_pages = pool.num_pages, pool.shared
            metrics.used_pages, metrics.cache_bytes = pool.num_pages - pool.available, pool.nbytes
            groups = self.shared_pages.groups.values()
            metrics.window_pages = sum(group.num_pages for group in groups)
            metrics.used_window_pages = metrics.window_pages - sum(group.available for group in groups)


def _sizes(
    model: Any, page_bytes: int, pages: int, least: int, running: int, keeps: bool, room: int
) -> tuple[int, dict[int, int]]:
    """How many pages there are, at least `least` and at most `pages`, so that they take `room` bytes; and how many the
    layers with each window have, where these are fewer.

    A request holds a bounded number of those at a time: there are enough for `running` requests and the next one, and
    as many again for earlier texts, if the engine `keeps` some. For two requests, if the longest has no room otherwise.
    """
    sizes, fitting, config = list[int](), room // page_bytes, model.config
    if not lacking(model, "new_pool", ("window_pages",)):
        windows_by_layer = windows_of(config)
        layers, sizes = len(windows_by_layer), [window.size for window in windows_by_layer if window is not None]
    if not sizes:
        return max(least, min(pages, fitting)), {}
    full_bytes = window_bytes = page_bytes // layers
    if hasattr(config, "kind_heads"):  # of one window, so that all layers with it have pages of their own
        full, local, widest = (heads * width for heads, width in (*config.kind_heads, config.cache_heads))
        full_bytes, window_bytes = full_bytes * full // widest, full_bytes * local // widest
    for texts in ((running + 1) * (1 + keeps), running + 1, *([2] if fitting < least else [])):
        most = {size: most_pages(size, PIECE + _DRAFT, PAGE) * texts + SPARE for size in sizes}
        windows = {size: count for size, count in most.items() if count < pages}
        bytes_left = room - sum(windows[size] * window_bytes for size in sizes if size in windows)
        full_layers = layers - sum(size in windows for size in sizes)
        by_windows = bytes_left // (full_layers * full_bytes) if full_layers else pages
        if windows and bytes_left >= 0 and by_windows >= max(least, *windows.values()):
            return min(pages, by_windows), windows
    return max(least, min(pages, fitting)), {}


def _state_bytes(model: Any) -> int:
    """Of the recurrent states of a sequence, and the rows beside them."""
    cache = model.new_cache(1, 1)
    return sum(shape.nbytes(cache.pending) for shape in getattr(cache, "shapes", {}).values())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)
