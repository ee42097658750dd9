"""recurrence_inject and recurrence_exit: noise and embeddings to the last bit, norms and distances within the error budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import pdkernels as pd
from pdkernels.reference import recurrence as reference
from pdkernels.reference.philox import philox4x32
from tests.harness.error_budget import assert_within_budget
from tests.ops.implementations import NAMES, implementation
from tests.ops.recurrence_cases import DTYPES, INJECT_OPTIONS, SIZES, STYLES, Rows, bits, inject_options, make_rows


def inject(impl, rows: Rows, **options: object) -> Tensor:
    return impl.recurrence_inject(*rows.to(impl.device).inject_arguments(), **options).cpu()


def check_inject(impl, rows: Rows, **options: object) -> Tensor:
    actual, expected = inject(impl, rows, **options), reference.recurrence_inject(*rows.inject_arguments(), **options)
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    assert torch.equal(bits(actual), bits(expected)), (actual - expected).abs().max()
    return actual


# --- the distribution of a state --------------------------------------------------------------------------------------------------------


def test_quantile_is_the_normal_one_truncated_at_three() -> None:
    words = torch.arange(2**31, 2**32, 2**8 * 5)  # every fifth number that can be drawn, above 0
    drawn = reference.quantile(words).double()
    half = torch.special.ndtr(torch.tensor(3.0, dtype=torch.float64)) - 0.5
    exact = -torch.special.ndtri(0.5 - half * (2 * (words >> 8) + 1 - 2**24) * 2.0**-24)
    assert (drawn - exact).abs().max() < 1e-6
    assert drawn.max() <= 3 and drawn.min() > 0
    assert drawn.diff().min() > -1e-6, "not monotone"
    assert torch.equal(reference.quantile(2**32 - 1 - words), -reference.quantile(words)), "not odd"


@pytest.mark.parametrize("ends", [range(2**8), range(2**32 - 2**8, 2**32), range(2**31 - 300, 2**31 + 300)])
def test_quantile_at_the_ends(ends: range) -> None:
    drawn = reference.quantile(torch.tensor(ends))
    assert drawn.abs().max() <= 3 and (drawn != 0).all() and (drawn.diff() >= 0).all()


def test_a_state_is_philox_under_its_own_counter(impl) -> None:
    """Counter (component // 4, position, step, 1), key of the seed, word component % 4."""
    rows = make_rows(3, batch=1, rows=2, size=6)._replace(state=None, previous_embedding=None)
    rows.width[0], rows.cursor[0] = 2, 9
    seed = 0x1234_5678_9ABC_DEF0
    state = inject(impl, rows, seed=seed, init_std=1.0)[0, :, :6]
    for i in range(2):
        for component in range(6):
            counter = torch.tensor([component // 4, 9 + i, 0, 1])
            words = philox4x32(counter, torch.tensor([0x9ABC_DEF0, 0x1234_5678]))
            assert state[i, component] == reference.quantile(words)[component % 4]


def test_moments_of_a_state() -> None:
    state = reference.initial_state(torch.tensor(1), torch.arange(200), 5280).double()
    assert state.abs().max() <= 3 * 0.4**0.5
    assert (
        abs(state.mean()) < 3e-3 and abs(state.var() / 0.4 - 0.97334) < 3e-3
    )  # 0.97334: variance of the truncated distribution
    assert abs((state[:-1] * state[1:]).mean()) < 3e-3 and abs((state[:, :-1] * state[:, 1:]).mean()) < 3e-3


# --- recurrence_inject: always the bits of the reference ----------------------------------------------------------------------


@given(
    st.integers(0, 2**20),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from(SIZES[:4]),
    st.sampled_from(DTYPES),
    st.sampled_from(STYLES),
    st.booleans(),
)
@settings(max_examples=150)
def test_inject_equals_reference(
    impl, seed: int, batch: int, count: int, size: int, dtype: torch.dtype, style: str, wide: bool
) -> None:
    index_dtype = torch.int64 if wide else torch.int32
    rows = make_rows(
        seed,
        batch=batch,
        rows=count,
        size=size,
        dtype=dtype,
        style=style,
        index_dtype=index_dtype,
        first_step=seed % 5 == 0,
    )
    check_inject(impl, rows, **inject_options(seed))


@pytest.mark.parametrize("option", INJECT_OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option(impl, option: str, dtype: torch.dtype) -> None:
    rows = make_rows(11, batch=2, rows=6, size=40, dtype=dtype)
    rows.width.fill_(6), rows.advance.fill_(1)
    rows.recurrences[:] = 0
    rows.recurrences[:, :4] = torch.tensor([3, 1, 40, 7])
    usual = {"noise": 0.5, "momentum": 0.25, "horizon": 9}
    results = [check_inject(impl, rows, **{**usual, option: value}) for value in INJECT_OPTIONS[option]]
    assert not any(torch.equal(results[0], other) for other in results[1:]), "the option changes nothing"


def test_seeds_of_sequences(impl) -> None:
    """A sequence draws the states and the noise of its seed alone."""
    rows = make_rows(11, batch=1, rows=6, size=40)
    rows.width.fill_(6), rows.advance.fill_(1)
    both = Rows(*(torch.cat([t, t]) for t in rows))
    seeds = torch.tensor([2**40 + 1, -7])
    together = inject(impl, both, noise=0.5, seed=seeds.to(impl.device))
    assert not torch.equal(together[0], together[1])
    for b in range(2):
        assert torch.equal(bits(check_inject(impl, rows, noise=0.5, seed=int(seeds[b]))[0]), bits(together[b]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inject_of_huginns_size(impl, dtype: torch.dtype) -> None:
    check_inject(impl, make_rows(5, batch=1, rows=3, size=5280, dtype=dtype), noise=0.5, momentum=0.1)


def test_inject_takes_its_own_result_apart(impl) -> None:
    """The next step reads both halves of a result in place."""
    rows = make_rows(2, batch=2, rows=4, size=16)
    result = check_inject(impl, rows, momentum=0.3)
    again = rows._replace(state=result[..., :16], previous_embedding=result[..., 16:], advance=torch.tensor([1, 0]))
    again.width.fill_(4), again.recurrences.zero_()
    again.recurrences[:, :3] = 4
    check_inject(impl, again, momentum=0.3, noise=0.2)


def test_a_row_follows_its_position_when_rows_freeze(impl) -> None:
    """Where the published code fails: after a freeze, state and embedding still belong to the same positions."""
    state = torch.arange(1.0, 6.0).view(1, 5, 1).expand(1, 5, 4).contiguous()
    embedding = torch.zeros(1, 4, 4)
    numbers = [torch.tensor([n]) for n in (10, 4, 2, 5)]  # cursor, width, advance, step
    recurrences = torch.tensor([[8, 8, 4, 0, 0]])
    rows = Rows(state, embedding, 100 * state, state, recurrences, *numbers[:3], torch.tensor([0]), numbers[3])
    result = check_inject(impl, rows, momentum=0.5)[0]
    assert result[:3, 0].tolist() == [3.0, 4.0, 5.0] and result[:3, 4].tolist() == [150.0, 200.0, 250.0]
    first = reference.initial_state(torch.tensor(0), torch.tensor(13), 4)
    assert torch.equal(result[3, :4], first) and result[3, 4] == 0
    copied = check_inject(impl, rows, new_state="copied")[0]
    assert copied[3, 0] == 5.0


def test_noise_depends_on_position_and_step_alone(impl) -> None:
    """The same position in any row of any batch."""
    state = torch.zeros(2, 3, 8)
    recurrences = torch.ones(2, 3, dtype=torch.int64)
    two = torch.tensor([2, 2])
    rows = Rows(state, state, None, state, recurrences, torch.tensor([5, 6]), two, two - 2, two, torch.tensor([9, 9]))
    result = check_inject(impl, rows, noise=1.0, schedule="constant")
    assert torch.equal(result[0, 1], result[1, 0]) and not torch.equal(result[0, 0], result[0, 1])
    later = check_inject(impl, rows._replace(steps=torch.tensor([10, 9])), noise=1.0, schedule="constant")
    assert not torch.equal(later[0], result[0]) and torch.equal(later[1], result[1])


def drawn_by_hand(step: int, position: int, size: int) -> Tensor:
    """InitState of deviation 1 under seed 0, a component at a time."""
    key = torch.zeros(2, dtype=torch.int64)
    words = [philox4x32(torch.tensor([e // 4, position, step, 1]), key)[e % 4] for e in range(size)]
    return reference.quantile(torch.stack(words))


@pytest.mark.parametrize("mixer", ["linear", "sqrt"])
@pytest.mark.parametrize("step", [0, 3])
def test_line_7_of_both_algorithms_mixes_noise_into_new_rows(impl, step: int, mixer: str) -> None:
    """A row without a recurrence has the whole beta. Its state and its noise come from different counters, in step 0 too."""
    old = torch.linspace(-1, 1, 6)
    for before in (None, old.expand(1, 1, 6).contiguous()):
        numbers = [torch.tensor([n]) for n in (9, 2, 0, 0, step)]  # cursor, width, advance, its older one, step
        counts = torch.tensor([[0 if before is None else 8, 0]])
        rows = Rows(before, torch.zeros(1, 2, 6), before, old, counts, *numbers)
        options = {"noise": 0.25, "init_std": 1.0, "horizon": 32, "mixer": mixer}
        state = check_inject(impl, rows, **options)[0, :, :6]
        first = drawn_by_hand(0, 9, 6) if before is None else old
        for i, (z, beta) in enumerate([(first, 0.25 if before is None else 0.1875), (drawn_by_hand(0, 10, 6), 0.25)]):
            keep, share = ((1 - beta) ** 0.5, beta**0.5) if mixer == "sqrt" else (1 - beta, beta)
            expected = keep * z.double() + share * drawn_by_hand(1 + step, 9 + i, 6).double()
            assert torch.allclose(state[i].double(), expected, atol=1e-6)
        if before is not None:  # a copied state is mixed as well
            copied = check_inject(impl, rows, new_state="copied", **options)[0, 1, :6]
            assert torch.allclose(
                copied.double(), keep * old.double() + share * drawn_by_hand(1 + step, 10, 6).double(), atol=1e-6
            )


def test_state_and_noise_of_a_new_row_are_independent(impl) -> None:
    """Half and half of two independent vectors has half the variance; of one vector twice it would have all of it."""
    one = torch.ones(1, dtype=torch.int64)
    vectors = torch.zeros(1, 1, 4096)
    rows = Rows(None, vectors, None, vectors, torch.zeros(1, 1, dtype=torch.int64), one, one, 0 * one, 0 * one, 0 * one)
    variance = check_inject(impl, rows, noise=0.5, init_std=1.0)[..., :4096].double().var().item()
    assert abs(variance / 0.97334 - 0.5) < 0.04


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_noise_and_momentum_vectors_pass_unchanged(impl, dtype: torch.dtype) -> None:
    strange = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, 6e4, -1.5], dtype=dtype)
    rows = make_rows(4, batch=1, rows=2, size=8, dtype=dtype)
    rows.state[:], rows.embedding[:] = strange, strange.flip(0)
    rows.width[0], rows.advance[0], rows.recurrences[:] = 2, 0, 4
    result = check_inject(impl, rows)
    assert torch.equal(bits(result[0, 1]), bits(torch.cat([strange, strange.flip(0)])))
    for options in ({"noise": 0.5, "momentum": 0.5}, {"noise": 0.5, "mixer": "sqrt"}, {"noise": 3.0}):
        check_inject(impl, rows, **options)


@given(st.integers(0, 2**20))
@settings(max_examples=20)
def test_inject_of_a_batch_equals_its_sequences_alone(impl, seed: int) -> None:
    rows, options = make_rows(seed, batch=3, size=40), inject_options(seed)
    together = check_inject(impl, rows, **options)
    for b in range(3):
        assert torch.equal(bits(together[b : b + 1]), bits(inject(impl, rows.sequence(b), **options)))


# --- recurrence_exit -----------------------------------------------------------------------------------------------------------


def leave(impl, rows: Rows, **options: object) -> pd.RecurrenceExit:
    moved = {name: x.to(impl.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    return pd.RecurrenceExit(*(x.cpu() for x in impl.recurrence_exit(*rows.to(impl.device).exit_arguments(), **moved)))


def exit_options(rows: Rows, seed: int) -> dict[str, object]:
    older = {"older": rows.older, "older_advance": rows.older_advance} if seed % 2 and rows.state is not None else {}
    return {"threshold": 1.4, "min_recurrences": 1 + seed % 7, "eps": 10.0 ** -(seed % 3 * 3), **older}


def check_exit(impl, rows: Rows, **options: object) -> pd.RecurrenceExit:
    actual = leave(impl, rows, **options)
    exact_options = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()
    }
    same = pd.RecurrenceExit(*reference.recurrence_exit(*rows.exit_arguments(), **options))
    exact = pd.RecurrenceExit(*reference.recurrence_exit(*rows.to(torch.float64).exit_arguments(), **exact_options))
    assert_within_budget(actual.state, exact.state, same.state, name="state")
    # The distance is that of the states as stored, so it is computed from those.
    stored = distances(actual.state.double(), rows.to(torch.float64), **exact_options)
    roundoff = 2e-6 * (1 + stored.nan_to_num(0, 0, 0))
    close = (actual.distance.double() - stored).abs() <= roundoff
    assert (close | (actual.distance.double() == stored) | (actual.distance.isnan() & stored.isnan())).all(), (
        actual.distance,
        stored,
    )
    assert torch.equal(actual.converged, actual.distance.double() < options["threshold"])
    return actual


def distances(
    state: Tensor,
    rows: Rows,
    *,
    min_recurrences: int = 1,
    older: Tensor | None = None,
    older_advance: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Row by row, as the docs define it."""
    result = torch.full(state.shape[:2], torch.inf, dtype=torch.float64)
    for b in range(state.shape[0]):
        for i in range(int(rows.width[b])):
            before = i + int(rows.advance[b])
            if rows.state is None or rows.recurrences[b, i] < min_recurrences or before >= rows.state.shape[1]:
                continue
            change = state[b, i] - rows.state[b, before]
            if older is not None:
                first = before + int(older_advance[b])
                if first >= older.shape[1]:
                    continue
                change = state[b, i] - 2 * rows.state[b, before] + older[b, first]
            zero = (change == 0).all() and (state[b, i] == 0).all()
            result[b, i] = 0.0 if zero else change.norm() / state[b, i].norm()
    return result


@given(
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([33, 64, 200]),
    st.sampled_from(DTYPES),
    st.sampled_from(STYLES),
)
@settings(max_examples=80)
def test_exit_equals_reference(
    impl, seed: int, batch: int, count: int, size: int, dtype: torch.dtype, style: str
) -> None:
    rows = make_rows(seed, batch=batch, rows=count, size=size, dtype=dtype, style=style, first_step=seed % 6 == 0)
    check_exit(impl, rows, **exit_options(rows, seed))


@pytest.mark.parametrize("size", [1, 7, 5280, 12000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exit_of_odd_and_large_sizes(impl, size: int, dtype: torch.dtype) -> None:
    rows = make_rows(size + 1, batch=2, rows=3, size=size, dtype=dtype)
    rows.width.fill_(3)
    check_exit(impl, rows, **exit_options(rows, 1))


def test_what_counts_as_converged(impl) -> None:
    """By hand: unchanged, moved, new, nothing to compare with, after the wave."""
    state = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]])
    x = torch.ones(1, 5, 2)
    arguments = (
        x,
        torch.zeros_like(x),
        torch.ones(2),
        state,
        torch.tensor([[8, 4, 0, 4, 0]]),
        torch.tensor([4]),
        torch.tensor([1]),
    )
    result = pd.RecurrenceExit(
        *(t.cpu() for t in impl.recurrence_exit(*(t.to(impl.device) for t in arguments), threshold=0.03))
    )
    assert result.converged.tolist() == [[True, False, False, False, False]]
    assert result.distance[0, 1].item() == pytest.approx(2**0.5, rel=1e-5)
    assert result.distance[0, 2:].tolist() == [torch.inf] * 3  # new; no row 4 a step ago; after the wave
    assert (result.state[0, 4] == 0).all()


def test_zeros_are_converged_and_nan_never_is(impl) -> None:
    x = torch.zeros(1, 4, 5)
    x[0, 1], x[0, 2, 3], x[0, 3] = 1e30, torch.nan, torch.inf
    numbers = (torch.full((1, 4), 4), torch.tensor([4]), torch.tensor([0]))
    arguments = (x, torch.zeros_like(x), torch.ones(5), torch.zeros_like(x), *numbers)
    result = impl.recurrence_exit(*(t.to(impl.device) for t in arguments), threshold=1e9)
    assert result.distance[0, 0] == 0 and result.converged[0].tolist() == [True, True, False, False]
    assert result.distance[0, 2:].isnan().all()


@given(st.integers(0, 2**20))
@settings(max_examples=20)
def test_exit_of_a_batch_equals_its_sequences_alone(impl, seed: int) -> None:
    rows = make_rows(seed, batch=3, size=40)
    x, residual, weight, *rest = rows.exit_arguments()
    together = impl.recurrence_exit(*(t.to(impl.device) for t in (x, residual, weight, *rest)), threshold=1.0)
    for b in range(3):
        parts = [x[b : b + 1], residual[b : b + 1], weight, *(t[b : b + 1] for t in rest)]
        alone = impl.recurrence_exit(*(t.to(impl.device) for t in parts), threshold=1.0)
        assert all(torch.equal(a[b : b + 1], c) for a, c in zip(together, alone))


@given(st.integers(0, 2**20), st.sampled_from([5, 64, 1100]))
@settings(max_examples=8)
def test_results_do_not_depend_on_the_order_of_threads(seed: int, size: int) -> None:
    impl = implementation("cudasim")
    rows = make_rows(seed, size=size)
    results = []
    for order in impl.schedules():
        with order:
            check_inject(impl, rows, noise=0.5, momentum=0.1)
            results.append(leave(impl, rows, **exit_options(rows, seed)))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0]))


def test_results_do_not_depend_on_threads_or_runs() -> None:
    rows = make_rows(8, batch=3, rows=6, size=5280, dtype=torch.bfloat16)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(
                (
                    pd.recurrence_inject(*rows.inject_arguments(), noise=0.5),
                    *pd.recurrence_exit(*rows.exit_arguments(), threshold=1.0),
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0]))


# --- torch integration ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("first_step", [False, True])
def test_opcheck(first_step: bool) -> None:
    for device in [name for name in NAMES if name != "cudasim"]:
        rows = make_rows(3, size=8, first_step=first_step).to(torch.device(device))
        seeds = None if first_step else torch.arange(len(rows.width), device=device)
        options = (0, seeds, 0.5, "linear", 32, "linear", 0.1, 0.5, "fresh", False)
        torch.library.opcheck(torch.ops.pdkernels.recurrence_inject.default, (*rows.inject_arguments(), *options))
        older = (None, None) if first_step else (rows.older, rows.older_advance)
        torch.library.opcheck(
            torch.ops.pdkernels.recurrence_exit.default, (*rows.exit_arguments(), 0.03, *older, 1, 1e-6)
        )


def test_fullgraph_without_recompiles() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(rows: Rows) -> tuple[Tensor, ...]:
        result = pd.recurrence_inject(*rows.inject_arguments(), noise=0.5, momentum=0.1)
        return result, *pd.recurrence_exit(*rows.exit_arguments(), threshold=0.03)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seed, (batch, count) in enumerate([(2, 4), (3, 5), (2, 9), (4, 7)]):
        rows = make_rows(seed, batch=batch, rows=count, size=24)
        rows = rows._replace(recurrences=rows.recurrences.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(compiled(rows), step(rows)))
    assert counter.frame_count == 1


def test_float64_by_the_reference() -> None:
    """State arithmetic in float64 around the same drawn numbers; and reference and kernel agree in what they can both do."""
    rows = make_rows(6, size=24)
    options = {"noise": 0.5, "momentum": 0.1}
    exact = pd.recurrence_inject(*rows.to(torch.float64).inject_arguments(), **options, backend="reference")
    single = pd.recurrence_inject(*rows.inject_arguments(), **options)
    assert exact.dtype == torch.float64 and (exact - single).abs().max() < 1e-6
    result = pd.recurrence_exit(*rows.to(torch.float64).exit_arguments(), threshold=0.03, backend="reference")
    assert result.state.dtype == result.distance.dtype == torch.float64
