"""Steps of layers with a state: the reference within the error budget, and bits that depend on the row alone.

How the reference compares with transformers is in tests/reference/test_reference_recurrent_state.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import recurrent_state as reference
from tests.harness.error_budget import assert_within_budget
from tests.ops.state_cases import DTYPES, LAYERS, Cache, Layer, bits, part, path_to, random_step, small


def to(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def check_steps(run: Any, seeds: range, name: str, dtype: torch.dtype, device: str = "cpu", most: int = 40) -> None:
    """Steps have the reference's effects, exactly where nothing is computed."""
    found: dict[str, list[tuple[torch.Tensor, ...]]] = {"out": [], "state": [], "update": []}
    for seed in seeds:
        cache, rows, options = random_step(seed, name, dtype, most)
        same, exact = cache.copy(), cache.copy(double=True)
        cache.to(device)
        out = cache.step([x.to(device) for x in rows], run, **{k: to(x, device) for k, x in options.items()}).cpu()
        cache.to("cpu")
        wanted = same.step(rows, reference, **options)
        truth = exact.step([x.double() for x in rows], reference, **options)
        assert torch.equal(cache.state_lengths, same.state_lengths) and torch.equal(cache.lengths, same.lengths)
        computed = [("out", out, wanted, truth), ("state", cache.state, same.state, exact.state)]
        for i, three in enumerate(zip(cache.pending, same.pending, exact.pending)):
            if cache.layer.op == "gated_delta_" and i == 1:
                computed.append(("update", *three))
            else:
                assert torch.equal(bits(three[0]), bits(three[1]))
        for what, *three in computed:
            assert three[0].shape == three[1].shape and three[0].dtype == three[1].dtype
            tolerance = 1e-4 if three[0].dtype == torch.float32 else 3e-2
            assert torch.allclose(three[0].double(), three[2], rtol=tolerance, atol=tolerance, equal_nan=True), seed
            found[what].append(tuple(x.flatten() for x in three))
    # Of all seeds together: a step has many values, but few gates.
    for what, values in found.items():
        if not values:
            continue
        actual, near, right = (torch.cat(one) for one in zip(*values))
        assert_within_budget(actual, right, near, name=f"{name} {what}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_within_the_error_budget(name: str, dtype: torch.dtype) -> None:
    check_steps(pd, range(25), name, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_the_split_into_steps(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name](3, dtype)
    rows, count = layer.rows(2, 90), 90
    whole = Cache(layer, 2, 8)
    wanted = whole.step(rows, keep=5)
    whole.commit([count, count])
    for ends in ([1, 2, 3, 10, 18, 26, 27], [40, 47], [70]):
        split, found, begin = Cache(layer, 2, 8), [], 0
        for end in [*ends, *range(ends[-1] + 8, count, 8), count]:
            keep = 6 if end - begin > 8 else None
            found.append(split.step(part(rows, begin, end), keep=keep))
            split.commit([end - begin] * 2)
            begin = end
        assert torch.equal(bits(torch.cat(found, 1)), bits(wanted))
        states = [cache.copy() for cache in (whole, split)]
        last = layer.rows(2, 1)
        for cache in states:
            cache.step(last)
        assert torch.equal(bits(states[0].state), bits(states[1].state))


@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_the_batch_or_the_threads(name: str) -> None:
    layer = LAYERS[name](5, heads=3, key_heads=1) if name != "conv" else LAYERS[name](5, channels=700)
    rows, before = layer.rows(4, 6), torch.get_num_threads()
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            cache = Cache(layer, 4, 6)
            out = [cache.step(rows)]
            cache.commit([3, 0, 6, 1])
            found.append([*out, cache.step(rows), cache.state])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(bits(a.nan_to_num()), bits(b.nan_to_num())) for a, b in zip(*found))
    for b in range(4):
        alone = Cache(layer, 1, 6)
        mine = [x[b : b + 1] for x in rows]
        assert torch.equal(bits(alone.step(mine)), bits(found[0][0][b : b + 1]))


@pytest.mark.parametrize("name", LAYERS)
def test_a_tree_is_its_paths(name: str) -> None:
    layer, parents = LAYERS[name](6), [-1, 0, 1, 0, 3, -1, 5, 2]
    rows = layer.rows(1, 8)
    start = Cache(layer, 1, 8)
    start.step(layer.rows(1, 3))
    start.commit([2])
    tree = start.copy()
    out = tree.step(rows, parents=torch.tensor([parents]))
    for row in range(8):
        path = path_to(parents, row)
        alone = start.copy()
        assert torch.equal(bits(alone.step([x[:, path] for x in rows])[:, -1]), bits(out[:, row]))
    path = path_to(parents, 7)
    tree.commit([len(path)], [[*path, 0, 0, 0, 0]])
    alone = start.copy()
    alone.step([x[:, path] for x in rows], keep=0)
    tree.step(layer.rows(1, 1))
    assert torch.equal(bits(tree.state), bits(alone.state))


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_without_accepted_rows_writes_no_state(name: str) -> None:
    layer = small(name)
    cache = Cache(layer, 2, 4)
    cache.step(layer.rows(2, 4))
    cache.commit([2, 2])
    cache.step(layer.rows(2, 4))
    before = cache.state.clone()
    cache.step(layer.rows(2, 3))  # the draft before is forgotten
    assert torch.equal(cache.state, before) and cache.state_lengths.tolist() == [2, 2]


def test_strided_rows_and_caches() -> None:
    """Slices of one projection, and a cache with rows between those in use, as models have them."""
    layer = LAYERS["delta"](1)
    k, v, g, beta, q = layer.rows(2, 5)
    one = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2), g, beta], -1)
    split = one.split([40, 40, 148, 4, 4], -1)
    strided = [split[1].unflatten(-1, (2, 20)), split[2].unflatten(-1, (4, 37)), split[3], split[4]]
    plain, wide = Cache(layer, 2, 6), Cache(layer, 4, 6)
    wide.state, wide.pending = wide.state[::2], [x[::2] for x in wide.pending]
    wide.state_lengths, wide.lengths, wide.pending_index = wide.state_lengths[::2], wide.lengths[::2], wide.pending_index[::2]  # fmt: skip
    for _ in range(2):
        a = plain.step([k, v, g, beta, q])
        b = wide.step([*strided, split[0].unflatten(-1, (2, 20))])
        assert torch.equal(a, b)
        for cache in (plain, wide):
            cache.commit([4, 2])
    assert torch.equal(plain.state, wide.state)


@pytest.mark.parametrize("name", LAYERS)
def test_bad_values_change_nothing(name: str) -> None:
    layer = small(name)
    for change, words in (
        ({"counts": numbers(5, 0)}, r"counts must be in \[0, 4\], got 5 for sequence 0"),
        ({"counts": numbers(0, -1)}, r"counts must be in \[0, 4\], got -1 for sequence 1"),
        ({"cache_rows": numbers(0, 2)}, r"cache_rows must be in \[0, 1\], got 2 for sequence 1"),
        ({"cache_rows": numbers(1, 1)}, "cache_rows must be different for each sequence"),
        ({"parents": torch.tensor([[-1, 0, 1, 2], [-1, 0, 2, 2]])}, r"parents must be in \[-1, 1\] for row 2, got 2 for sequence 1"),
        ({"lengths": numbers(3, 9)}, r"lengths must be in \[0, 5\], up to max_pending .*, got 9 for sequence 1"),
        ({"lengths": numbers(3, 2), "pending_index": numbers(0, 1, 5, 0, 0).expand(2, 5)}, r"pending_index must be in \[0, 4\], got 5"),
    ):  # fmt: skip
        cache, options = Cache(layer, 2, 5), dict(change)
        cache.step(layer.rows(2, 4))
        cache.commit([3, 2])
        cache.lengths.copy_(options.pop("lengths", cache.lengths))
        before = [x.clone() for x in cache.tensors()]
        with pytest.raises(ValueError, match=f"pdkernels.{layer.op}: {words}"):
            cache.step(layer.rows(2, 4), **options)
        assert all(torch.equal(x.nan_to_num(), old.nan_to_num()) for x, old in zip(cache.tensors(), before))


def wrong(layer: Layer, **options: Any) -> None:
    cache, rows = Cache(layer, 2, 4), layer.rows(2, 3)
    for name in ("state", "state_lengths", "lengths", "pending", "rows"):
        if name in options:
            change = options.pop(name)
            if name == "rows":
                rows = change(rows)
            else:
                setattr(cache, name, change(getattr(cache, name)))
    cache.step(rows, **options)


@pytest.mark.parametrize(
    "options, kind, words",
    [
        ({"state": torch.Tensor.half}, TypeError, "state must be torch.float32, got torch.float16"),
        ({"state": lambda x: x[..., :-1]}, ValueError, r"state must have shape \(2, 2, 3, 5\)"),
        ({"state": lambda x: x.mT.contiguous().mT}, ValueError, "state must have a contiguous last dimension"),
        ({"lengths": lambda x: x[:1]}, ValueError, r"lengths must have shape \(2,\) like the batch, or cache_rows be given"),
        ({"lengths": torch.Tensor.float}, TypeError, "lengths must be an int32 or int64 tensor"),
        ({"pending": lambda x: [x[0][:, :3], *x[1:]]}, ValueError, "pending_k must have 4 rows like the other"),
        ({"pending": lambda x: [x[0], x[1].half(), *x[2:]]}, TypeError, "pending_update must be torch.float32"),
        ({"keep": 5}, ValueError, r"keep must be at most max_pending \(4\), got 5"),
        ({"keep": -1}, ValueError, "keep must be at least 0"),
        ({"keep": 1, "parents": torch.full((2, 3), -1)}, ValueError, r"parents must be in \[0, 0\] for row 1, got -1 for sequence 0"),
        ({"rows": lambda x: [torch.cat([r, r], 1) for r in x]}, ValueError, r"v must have at most max_pending \(4\) rows"),
        ({"rows": lambda x: [x[0].expand(-1, -1, 2, -1)[:, :, :0], *x[1:4], x[4][:, :, :0]]}, ValueError, "k"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        wrong(small("delta"), **options)


def test_options_that_would_say_nothing_are_refused() -> None:
    layer = small("lightning")
    cache, (x, B, C) = Cache(layer, 1, 2), layer.rows(1, 1)
    state = (cache.state, cache.state_lengths)
    with pytest.raises(ValueError, match="dt_bias and dt_softplus belong to dt, which is None"):
        pd.selective_state_(*state, *cache.pending, None, x, B, C, None, layer.A, cache.lengths, dt_softplus=True)
    with pytest.raises(TypeError, match="pending_dt must be a tensor where dt is given"):
        pd.selective_state_(*state, *cache.pending, None, x, B, C, x[..., 0], layer.A, cache.lengths)
    with pytest.raises(TypeError, match="dt_limit must be two numbers"):
        pd.selective_state_(*state, *cache.pending, None, x, B, C, None, layer.A, cache.lengths, dt_limit=1.0)
    delta = small("delta, plain")
    cache, rows = Cache(delta, 1, 2), delta.rows(1, 1)
    with pytest.raises(ValueError, match="dt_bias belongs to a decay that A makes"):
        cache.step(rows, dt_bias=delta.dt_bias)
    for options in ({"scale": 2**62}, {"l2norm_eps": 2**64}):
        with pytest.raises(ValueError, match="must be a float, or an int of at most 53 bits"):
            pd.gated_delta_(
                *cache.tensors()[:1], cache.state_lengths, *cache.pending, rows[-1], *rows[:4], cache.lengths, **options
            )
    conv = small("conv")
    conv.activation = "relu"
    with pytest.raises(ValueError, match="activation must be one of 'none', 'silu'"):
        Cache(conv, 1, 2).step(conv.rows(1, 1))


def test_commit_and_trim_are_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    done = 0
    for n in range(300):
        held = torch.randint(0, 6, (3,), generator=generator)
        lengths = (held + torch.randint(-1, 3, (3,), generator=generator)).clamp(min=0)
        counts = torch.randint(0, 5, (3,), generator=generator)
        source = torch.randint(0, 4, (3, 5), generator=generator) if n % 2 else None
        index = torch.full((3, 6), -1, dtype=torch.int32)
        layers = [held, held.int()[None].expand(2, 3)]
        outcomes = []
        for run in (pd, reference):
            mine = [lengths.clone(), index.clone()]
            try:
                run.state_commit_(*mine, layers, counts, source, advance=bool(n % 3))
                run.state_trim_(mine[0], mine[0] - (mine[0] > held).long(), layers)
            except ValueError as error:
                mine.append(str(error).partition(". ")[0].rstrip("."))
            outcomes.append(mine)
        a, b = outcomes
        assert len(a) == len(b) and torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2:] == b[2:]
        done += len(a) == 2
    assert 40 < done < 280


def test_compiled_steps_do_not_recompile() -> None:
    layer, counter = small("delta"), CompileCounter()
    cache = Cache(layer, 2, 7)

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(k, v, g, beta, q):
        return cache.step([k, v, g, beta, q])

    for count in (4, 6, 2):  # not the size of anything else at first
        rows = layer.rows(2, count)
        plain = cache.copy()
        assert torch.equal(step(*rows), plain.step(rows))
        assert torch.equal(cache.state.nan_to_num(), plain.state.nan_to_num())
        cache.commit([1, count])
    assert counter.frame_count == 1
