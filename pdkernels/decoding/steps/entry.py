"""The result of a step for the host: named columns of one table, so that a single copy reads all of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch

# The columns that the loops of `run` and `DeviceLoop` read, for every method.
_ALWAYS: dict[str, int | None] = {"pending": None, "accepted": None}


class Row:
    """One sequence's entry on the host: an int for a column, a list of ints for a block.

    >>> row = Entry(1, torch.device("cpu"), draft=2).rows()[0]
    >>> row.pending, row.draft
    (0, [0, 0])
    """

    __slots__ = ("_places", "_values")

    def __init__(self, places: Mapping[str, int | slice], values: list[int]) -> None:
        self._places, self._values = places, values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[self._places[name]]
        except KeyError:
            raise AttributeError(f"an entry has {', '.join(self._places)}, but not {name}") from None


Rows = list[Row]


class Entry:
    """An int64 table ``(batch, columns)`` whose columns are declared by name, once.

    The device writes `entry.name`, the host reads `row.name` of the rows that `rows` returns. Every entry has two
    columns:

    - `pending`: the size of a sequence's next round (tokens of a draft, rows of a wave, 1 for a canvas); 0 once it is
      done;
    - `accepted`: what its last round made final; -1 if its logits gave no choice, which also ends the sequence.

    Args:
        columns: a width makes a block ``(batch, width)``, None a column ``(batch,)``.

    >>> entry = Entry(2, torch.device("cpu"), known=None, draft=3)
    >>> entry.draft[1] = torch.tensor([4, 5, 6])
    >>> entry.rows()[1].draft, entry.table.shape
    ([4, 5, 6], torch.Size([2, 6]))
    """

    def __init__(self, batch: int, device: torch.device, **columns: int | None) -> None:
        self._places: dict[str, int | slice] = {}
        end = 0
        for name, width in (_ALWAYS | columns).items():
            self._places[name] = end if width is None else slice(end, end + width)
            end += 1 if width is None else width
        self.seen: Rows = []
        """As last read: before a step that is what it is, since who changes it reads it (`RunningBatch`, `run`)."""
        self.table = torch.zeros(batch, end, dtype=torch.int64, device=device)
        for name, place in self._places.items():
            self.__dict__[name] = self.table[:, place]

    def __getattr__(self, name: str) -> torch.Tensor:
        raise AttributeError(f"an entry has {', '.join(self._places)}, but not {name}")

    def column(self, name: str) -> int:
        """The first column of a name in the table."""
        place = self._places[name]
        return place.start if isinstance(place, slice) else place

    def table_of(self, name: str) -> torch.Tensor:
        """One column, as a table ``(batch, 1)``."""
        place = self._places[name]
        assert isinstance(place, int)
        return self.table[:, place : place + 1]

    def rows(self, values: list[list[int]] | None = None) -> Rows:
        """The entry on the host; `values`: an earlier one, as logged. Without them it waits for the device."""
        rows = [Row(self._places, row) for row in (self.table.tolist() if values is None else values)]
        if values is None:
            self.seen = rows
        return rows


def unfinished(tokens: list[int], mask_token: int, ends: tuple[int, ...]) -> list[int | None]:
    """`tokens` up to the first of the end tokens, with None for masks, none of them at the end.

    >>> unfinished([9, 4, 9, 5, 9, 2, 9], mask_token=9, ends=(2,))
    [None, 4, None, 5]
    """
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    text = [None if token == mask_token else token for token in tokens[:end]]
    while text and text[-1] is None:
        text.pop()
    return text


def float_of(bits: int) -> float:
    """The fp64 value of an int64, whose bits it has in an entry.

    >>> float_of(torch.tensor(0.75, dtype=torch.float64).view(torch.int64).item())
    0.75
    """
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
