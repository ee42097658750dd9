"""Who takes part in a comparison."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdkernels import decoding

# The option that says how many tokens a method drafts or fills in at once.
WIDTH_OPTIONS = {
    "jacobi": "block_size",
    "jacobi_multiblock": "block_size",
    "linear_self_speculation": "block_size",
    "quadratic_self_speculation": "block_size",
    "block_diffusion": "block_size",
}


class Candidate(NamedTuple):
    """A model's name, a method, its width, and further options of it.

    The width is that of a block or draft in tokens. None: the method has none, or it is to be found out.
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
        """What `decoding.generate` takes."""
        width = {} if self.width is None else {WIDTH_OPTIONS[self.method]: self.width}
        return {**width, **dict(self.settings)}

    @property
    def is_lossless(self) -> bool:
        """Whether it promises the tokens of its model's baseline: a lossless method that is not told to think less or more."""
        return decoding.is_lossless(self.method) and "recurrences" not in dict(self.settings)
