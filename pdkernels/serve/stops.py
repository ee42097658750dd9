"""Stop strings in a stream: they end a text and are not part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopCut:
    """Passes text on up to a stop string, and holds back what may become one.

    >>> cut = StopCut(["END", "\\n\\n"])
    >>> [cut.feed(text) for text in ("one", " E", "N", "t\\n", "\\nmore")], cut.flush()
    (['one', ' ', '', 'ENt', ''], '')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self._over = tuple(stops), "", False
        self.found: str | None = None
        """The string that ended the text."""

    def feed(self, text: str) -> str:
        """What of the text so far is certain, and new."""
        if self._over:
            return ""
        self._held += text
        # The one that is complete first, whatever the pieces are.
        endings = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if endings:
            self._over = True
            _, at, self.found = min(endings)
            certain, self._held = self._held[:at], ""
            return certain
        longest = max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )
        certain = self._held[: len(self._held) - longest]
        self._held = self._held[len(certain) :]
        return certain

    @property
    def held(self) -> str:
        """What is held back."""
        return self._held

    def flush(self) -> str:
        """What was held back, once no more comes."""
        rest, self._held = self._held, ""
        return rest
