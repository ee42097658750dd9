"""The arguments of the steps of layers with a state as named structures.

Fakes and Triton launchers take them whole. `python_bindings/recurrent_state.h` has the same structures in C++.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pdkernels._structures import part_of


class StepArguments(NamedTuple):
    """Arguments that the steps of all layers share; see `pdkernels.gated_delta_`."""

    state_lengths: Tensor
    lengths: Tensor
    counts: Tensor | None
    cache_rows: Tensor | None
    pending_index: Tensor | None
    parents: Tensor | None
    keep: int | None

    def kept(self, rows: int) -> int:
        """How many rows of each sequence can be pending behind a step of `rows` rows."""
        return rows if self.keep is None else min(self.keep, rows)


class DeltaArguments(NamedTuple):
    """The arguments of `gated_delta_`."""

    state: Tensor
    state_lengths: Tensor
    pending_k: Tensor
    pending_update: Tensor
    pending_g: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    lengths: Tensor
    counts: Tensor | None = None
    cache_rows: Tensor | None = None
    pending_index: Tensor | None = None
    parents: Tensor | None = None
    keep: int | None = None
    scale: float | None = None
    l2norm_eps: float | None = None
    A: Tensor | None = None
    dt_bias: Tensor | None = None
    sigmoid_beta: bool = False

    @property
    def step(self) -> StepArguments:
        return part_of(self, StepArguments)


class SelectiveArguments(NamedTuple):
    """The arguments of `selective_state_`."""

    state: Tensor
    state_lengths: Tensor
    pending_x: Tensor
    pending_B: Tensor
    pending_dt: Tensor | None
    x: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor | None
    A: Tensor
    lengths: Tensor
    counts: Tensor | None = None
    cache_rows: Tensor | None = None
    pending_index: Tensor | None = None
    parents: Tensor | None = None
    keep: int | None = None
    D: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None

    @property
    def step(self) -> StepArguments:
        return part_of(self, StepArguments)


class ConvArguments(NamedTuple):
    """The arguments of `short_conv_`."""

    state: Tensor
    state_lengths: Tensor
    pending: Tensor
    x: Tensor
    weight: Tensor
    lengths: Tensor
    counts: Tensor | None = None
    cache_rows: Tensor | None = None
    pending_index: Tensor | None = None
    parents: Tensor | None = None
    keep: int | None = None
    bias: Tensor | None = None
    activation: str = "none"

    @property
    def step(self) -> StepArguments:
        return part_of(self, StepArguments)
