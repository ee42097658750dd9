"""The candidates of a comparison."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

from pdkernels import decoding
from pdkernels.decoding.methods import METHODS


def colours_of(wing: str, *colours: str) -> dict[str, str]:
    """A colour for each method of a wing, in the registry's order; grey after the last colour."""
    names = [name for name, method in METHODS.items() if method.wing == wing]
    return dict(zip_longest(names, colours[: len(names)], fillvalue="#bbbbbb"))


class Candidate(NamedTuple):
    """A model's name, a method, its width, and further options.

    The width is the `block_size`. None: the method has none, or the fastest width is still to be found.
    """

    model: str
    method: str
    width: int | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Method, width and settings.

        >>> Candidate("tiny-trimode", "linear_self_speculation", 8).label
        'linear_self_speculation, 8'
        >>> Candidate("tiny-recurrent", "recurrent_static", settings=(("recurrences", 4),)).label
        'recurrent_static, recurrences 4'
        """
        width = [] if self.width is None else [str(self.width)]
        return ", ".join([self.method, *width, *(f"{name} {value}" for name, value in self.settings)])

    @property
    def options(self) -> dict[str, Any]:
        """The options for `decoding.generate`."""
        width = {} if self.width is None else {"block_size": self.width}
        return {**width, **dict(self.settings)}

    @property
    def is_lossless(self) -> bool:
        """Whether it must emit the tokens of its model's baseline: lossless, with the default recurrences."""
        return decoding.is_lossless(self.method) and "recurrences" not in dict(self.settings)
