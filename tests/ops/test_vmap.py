"""torch.vmap: ops without written arguments run sample by sample, the others refuse it with an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdkernels.ops.library import OPS
from tests.ops.examples import PUBLIC, example, run, tensors_in
from tests.support.errors import refused

FUNCTIONAL = [op for op in PUBLIC if not OPS[op].mutated]


def mapped(op: str) -> tuple[str, list[Tensor]]:
    """An argument of the op, as two samples."""
    name = next(name for name, x in example(op).items() if isinstance(x, Tensor))
    return name, [example(op, seed)[name] for seed in (0, 1)]


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_samples_as_if_alone(op: str) -> None:
    name, samples = mapped(op)
    made = example(op)
    together = torch.vmap(lambda x: tuple(tensors_in(run(op, made | {name: x}))))(torch.stack(samples))
    for number, x in enumerate(samples):
        alone = tensors_in(run(op, made | {name: x}))
        assert len(alone) == len(together)
        assert all(torch.equal(one, all_of_them[number]) for one, all_of_them in zip(alone, together))


@pytest.mark.parametrize("op", [op for op in PUBLIC if OPS[op].mutated])
def test_what_is_written_is_refused(op: str) -> None:
    name = OPS[op].mutated[0]
    made = example(op)
    x = made[name]
    if not isinstance(x, Tensor):
        pytest.skip("a list of tensors")
    before = x.clone()
    with refused(rf"NotImplementedError: {op}: {name} cannot be written inside torch.vmap"):
        torch.vmap(lambda x: run(op, made | {name: x}))(x.expand(2, *x.shape).clone())
    assert torch.equal(x, before)
