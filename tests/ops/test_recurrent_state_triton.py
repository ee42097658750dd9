"""The Triton form of the steps: interpreted where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdkernels._recurrent_state import ConvArguments, DeltaArguments, SelectiveArguments
from pdkernels.reference import recurrent_state as reference
from tests.harness.triton_interpreter import requires_triton, triton_device
from tests.ops.state_cases import DTYPES, LAYERS, Cache, bits, part, path_to, small
from tests.ops.test_recurrent_state import check_steps, numbers

pytestmark = requires_triton
DEVICE = str(triton_device())
OTHERS = ("delta, plain", "lightning")  # forms of kernels that the rest have too
OF_EACH_KERNEL = [pytest.param(name, marks=pytest.mark.slow if name in OTHERS else ()) for name in LAYERS]


@pytest.fixture
def ops() -> Any:
    """The functions that launch the kernels, with the arguments of the public ones."""
    from pdkernels.triton import recurrent_state as kernels

    def selective(*given: Any, dt_limit: tuple[float, float] = (0.0, float("inf")), **options: Any) -> Any:
        return kernels.selective_state_(SelectiveArguments(*given, dt_min=dt_limit[0], dt_max=dt_limit[1], **options))

    return SimpleNamespace(
        gated_delta_=lambda *given, **options: kernels.gated_delta_(DeltaArguments(*given, **options)),
        selective_state_=selective,
        short_conv_=lambda *given, **options: kernels.short_conv_(ConvArguments(*given, **options)),
        state_commit_=lambda lengths, index, held, *given, **options: kernels.state_commit_(lengths, index, [*held], *given, **options),
        state_trim_=lambda lengths, wanted, held: kernels.state_trim_(lengths, wanted, [*held]),
    )  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_within_the_error_budget(ops: Any, name: str) -> None:
    check_steps(ops, range(3), name, torch.float32, DEVICE, most=5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_many_steps_are_within_the_error_budget(ops: Any, name: str, dtype: torch.dtype) -> None:
    check_steps(ops, range(12), name, dtype, DEVICE, most=9)


@pytest.mark.parametrize("name", OF_EACH_KERNEL)
def test_bits_depend_on_the_row_alone(ops: Any, name: str) -> None:
    layer = small(name, 2)
    rows = layer.rows(2, 12)
    whole, split, found = Cache(layer, 2, 5, DEVICE), Cache(layer, 2, 5, DEVICE), []
    wanted = whole.step(rows, ops, keep=2)
    for begin, end in ((0, 1), (1, 6), (6, 7), (7, 12)):
        found.append(split.step(part(rows, begin, end), ops))
        split.commit([end - begin] * 2)
    assert torch.equal(bits(torch.cat(found, 1)), bits(wanted))
    whole.commit([12, 12])
    last = layer.rows(2, 1)
    assert torch.equal(bits(whole.step(last, ops)), bits(split.step(last, ops)))
    assert torch.equal(bits(whole.state), bits(split.state))


@pytest.mark.parametrize("name", OF_EACH_KERNEL)
def test_a_tree_is_its_paths(ops: Any, name: str) -> None:
    layer, parents = small(name, 3), [-1, 0, 0, 2, -1, 1, 3]
    rows = layer.rows(1, 7)
    empty = Cache(layer, 1, 7, DEVICE)
    later = empty.copy()
    later.step(layer.rows(1, 2), ops)
    later.commit([2])
    for start in (empty, later):
        out = start.copy().step(rows, ops, parents=torch.tensor([parents], device=DEVICE))
        for row in range(7) if start is later else (4, 6):
            path = path_to(parents, row)
            assert torch.equal(start.copy().step([x[:, path] for x in rows], ops)[:, -1], out[:, row])


@pytest.mark.parametrize("name", OF_EACH_KERNEL)
def test_a_sequence_with_bad_values_is_left_alone(ops: Any, name: str) -> None:
    layer = small(name, 4)
    good = Cache(layer, 2, 4, DEVICE)
    good.step(layer.rows(2, 3), ops)
    good.commit([2, 2])
    rows = layer.rows(2, 3)
    wanted = good.copy()
    right = wanted.step(rows, ops)
    for change in (
        {"counts": numbers(3, 4)},
        {"counts": numbers(3, -1)},
        {"cache_rows": numbers(0, 2)},
        {"cache_rows": numbers(0, -1)},
        {"parents": torch.tensor([[-1, 0, 1], [-1, 1, 1]])},
        {"parents": torch.tensor([[-1, 0, 1], [-2, 0, 1]])},
        {"pending_index": numbers(0, 1, 0, 0, 0, 4, 0, 0).view(2, 4)},
        {"lengths": numbers(2, -1)},
        {"lengths": numbers(2, 5)},
        {"state_lengths": numbers(0, -1)},
    ):
        cache, options = good.copy(), {key: x.to(DEVICE) for key, x in change.items()}
        for key in ("lengths", "state_lengths"):
            getattr(cache, key).copy_(options.pop(key, getattr(cache, key)))
        before = [x.clone() for x in cache.tensors()]
        out = cache.step(rows, ops, **options)
        assert torch.equal(out[:1], right[:1]) and not out[1].any(), change
        for x, old, other in zip(cache.tensors(), before, wanted.tensors()):
            assert torch.equal(x[1].nan_to_num(), old[1].nan_to_num()), change
            assert torch.equal(x[0].nan_to_num(), other[0].nan_to_num()), change


def test_commit_and_trim(ops: Any) -> None:
    """Sequences that the reference accepts are changed alike, and the others not at all."""
    generator = torch.Generator().manual_seed(1)
    done = 0
    for n in range(40):
        held = torch.randint(0, 6, (1,), generator=generator)
        lengths = (held + torch.randint(-2, 4, (1,), generator=generator)).clamp(min=0)
        counts = torch.randint(-1, 5, (1,), generator=generator)
        source = torch.randint(0, 4, (1, 4), generator=generator) if n % 2 else None
        wanted = lengths + torch.randint(-2, 1, (1,), generator=generator)
        mine = [lengths.clone(), torch.full((1, 6), -1)]
        theirs = [x.to(DEVICE) for x in mine]
        layers = [held, held[None].expand(2, 1)]
        for op, given, options in (
            ("state_commit_", (mine[1], layers, counts, source), {"advance": bool(n % 3)}),
            ("state_trim_", (wanted, layers), {}),
        ):
            on_device = [
                [one.to(DEVICE) for one in x] if isinstance(x, list) else None if x is None else x.to(DEVICE)
                for x in given
            ]
            on_device[:1] = [theirs[1]] if op == "state_commit_" else on_device[:1]
            try:
                getattr(reference, op)(mine[0], *given, **options)
                done += 1
            except ValueError:
                pass
            getattr(ops, op)(theirs[0], *on_device, **options)
            assert torch.equal(theirs[0].cpu(), mine[0]) and torch.equal(theirs[1].cpu(), mine[1])
    assert 20 < done < 70
