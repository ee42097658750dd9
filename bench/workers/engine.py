"""What engines have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[int]
Clients = tuple[float, list[float], list[Tokens]]
"""The time until all have their `new` tokens, in ms, that to the first token of each, and the tokens."""
DRAFT = 10  # tokens that an engine's own lookup proposes


class Engine:
    """A method that an engine lacks stays NotImplementedError."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.clock = time.process_time if spec["threads"] == 1 else time.perf_counter
        self.setting: dict[str, Any] = spec.get("setting", {})

    def timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        start = self.clock()
        found = run()
        return 1e3 * (self.clock() - start), found

    def about(self) -> str:
        """Version, and what the build may use of the processor where it says so."""
        raise NotImplementedError

    def choices(self, tokens: Tokens) -> Tokens:
        """The greedy choice after each of the tokens, from an empty cache."""
        raise NotImplementedError("it gives no choices within a prompt")

    def begin(self, context: Tokens, batch: int) -> None:
        """Reads the context into the cache of each of `batch` sequences."""
        raise NotImplementedError

    def forward(self, tokens: Tokens) -> float:
        """The time to read the tokens after the context in each sequence and to choose after each; they are forgotten then."""
        raise NotImplementedError

    def prompt(self, tokens: Tokens) -> tuple[float, int]:
        """The time to read a prompt into an empty cache and to choose after its last token, and the choice."""
        raise NotImplementedError

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        """The time to continue a prompt by `new` tokens, and the tokens."""
        raise NotImplementedError

    def drafted(self, prompt: Tokens, new: int, how: str) -> tuple[float, Tokens, int | None]:
        """As `answer`, with drafts of the kind `how`, "none" and "lookup" among them; and the model's forwards, where they are known."""
        if how not in ("none", "lookup"):
            raise NotImplementedError(f"it has no drafts of the kind {how!r}")
        return *self.answer(prompt, new, how == "lookup"), None

    def in_pieces(self, prompt: Tokens, new: int, piece: int) -> tuple[float, Tokens]:
        """As `answer` without lookup, with the prompt read in pieces of `piece` tokens."""
        raise NotImplementedError("it reads prompts whole")

    def other_cache(self, prompt: Tokens, new: int) -> tuple[float, Tokens]:
        """As `answer` without lookup, with a cache in pages if `answer` has one that is whole, and the other way round."""
        raise NotImplementedError("it has one kind of cache")

    def clients(self, prompts: list[Tokens], new: int, lookup: bool) -> Clients:
        """A client for each prompt, all at once, greedy."""
        raise NotImplementedError("it has no clients here")

    def canvas(self, tokens: Tokens, candidates: int) -> float:
        """The time of a forward over a whole canvas, and of the choices at its last positions."""
        raise NotImplementedError("it has no models that see both directions")

    def denoise(self, prompt: Tokens, new: int, steps: int, mask: int) -> tuple[float, Tokens]:
        """The time of a step that fills an equal share of a canvas after the prompt, and the tokens."""
        raise NotImplementedError("it has no models that see both directions")

    def memory(self) -> float:
        """Peak of this process in MB."""
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
