"""Hidden states of named layers, which drafters read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdkernels._validation import check, check_type


class Tapped(NamedTuple):
    """The result of a forward with taps."""

    hidden: Tensor
    """``(batch, T, hidden_size)``, for `logits`."""
    features: Tensor
    """``(batch, T, taps, hidden_size)``, the inputs of the tapped layers."""

    @classmethod
    def of(cls, hidden: Tensor, states: Mapping[int, Tensor | None], taps: Sequence[int]) -> Tapped:
        """In the order of `taps`, from the `states` by their layer."""
        tapped = [state for tap in taps if (state := states[tap]) is not None]
        return cls(hidden, torch.stack(tapped, -2))


def checked_taps(op: str, taps: Sequence[int], layers: int, *, last: bool = True) -> tuple[int, ...]:
    """The taps of a model, which counts its `layers` from 0; `last`: whether what the last layer returns can be tapped
    too."""
    check_type(isinstance(taps, Sequence), op, "taps", "be a sequence of ints", type(taps).__name__)
    check(len(taps) > 0, op, "taps", "name a layer", tuple(taps))
    highest = layers if last else layers - 1
    for tap in taps:
        check_type(type(tap) is int, op, "taps", "be ints", type(tap).__name__)
        check(0 <= tap <= highest, op, "taps", f"be in 0 .. {highest}, for a model of {layers} layers", tap)
    return tuple(taps)
