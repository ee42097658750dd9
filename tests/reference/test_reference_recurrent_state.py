"""The states of recurrent layers against the functions of transformers, and against a replay from the beginning."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdkernels.reference import recurrent_state as reference

pytest.importorskip("transformers", reason="compares with its layers", minversion="5.20")

from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

BATCH, ROWS, PENDING = 2, 6, 8


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def empty(pending: list[torch.Tensor], *state: int) -> SimpleNamespace:
    """A cache of one layer, whose memory holds NaN: what was never written is never read."""
    nan = float("nan")
    return SimpleNamespace(
        state=torch.full((BATCH, *state), nan, dtype=torch.float64),
        pending=[torch.full((BATCH, PENDING, *x.shape[2:]), nan, dtype=torch.float64) for x in pending],
        state_lengths=torch.zeros(BATCH, dtype=torch.int64),
        lengths=torch.zeros(BATCH, dtype=torch.int64),
        pending_index=torch.full((BATCH, PENDING), -1),
    )


class Delta:
    """A gated delta layer on one cache, and transformers' function on all rows."""

    def __init__(self, module=qwen3_next, normalised: bool = True) -> None:
        self.module, self.normalised = module, normalised

    def inputs(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        q, k = (floats(BATCH, rows, 2, 5, seed=seed + i) for i in range(2))
        v, beta = floats(BATCH, rows, 4, 3, seed=seed), floats(BATCH, rows, 4, seed=seed).sigmoid()
        return [k, v, -floats(BATCH, rows, 4, seed=seed + 7).abs(), beta, q]

    def cache(self) -> SimpleNamespace:
        return empty(self.inputs(1)[:3], 4, 5, 3)

    def step(self, cache: SimpleNamespace, rows: list[torch.Tensor], **options) -> torch.Tensor:
        k, v, g, beta, q = rows
        return reference.gated_delta_(
            cache.state, cache.state_lengths, *cache.pending, q, k, v, g, beta, cache.lengths,
            pending_index=cache.pending_index, l2norm_eps=1e-6 if self.normalised else None, **options,
        )  # fmt: skip

    def transformers(self, rows: list[torch.Tensor]) -> torch.Tensor:
        k, v, g, beta, q = rows
        return self.module.torch_recurrent_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=self.normalised, output_final_state=True
        )


class Selective:
    def inputs(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        x, dt = floats(BATCH, rows, 4, 3, seed=seed), floats(BATCH, rows, 4, seed=seed + 1)
        B, C = (floats(BATCH, rows, 2, 5, seed=seed + i) for i in range(2))
        return [x, B, dt, C]

    def cache(self) -> SimpleNamespace:
        return empty(self.inputs(1)[:3], 4, 5, 3)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"A": -floats(4).abs(), "D": floats(4, seed=1), "dt_bias": floats(4, seed=2)}

    def step(self, cache: SimpleNamespace, rows: list[torch.Tensor], **options) -> torch.Tensor:
        x, B, dt, C = rows
        weights = self.weights()
        return reference.selective_state_(
            cache.state, cache.state_lengths, *cache.pending, x, B, C, dt, weights.pop("A"), cache.lengths,
            pending_index=cache.pending_index, dt_softplus=True, **weights, **options,
        )  # fmt: skip

    def transformers(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, B, dt, C = rows
        weights, state = self.weights(), torch.zeros(BATCH, 4, 3, 5, dtype=torch.float64)
        wide = {name: weight[:, None].expand(-1, 3) for name, weight in weights.items() if name != "A"}
        A = weights["A"][:, None, None].expand(-1, 3, 5)
        out = [
            mamba2.mamba2_selective_state_update(
                state, x[:, t], dt[:, t, :, None].expand(-1, -1, 3), A, B[:, t], C[:, t], dt_softplus=True, **wide
            )
            for t in range(x.shape[1])
        ]
        return torch.stack(out, 1), state.mT


class Always(torch.nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.x


class Lightning:
    def inputs(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        return [floats(BATCH, rows, 4, 3, seed=seed + i) for i in range(3)]

    def cache(self) -> SimpleNamespace:
        return empty(self.inputs(1)[:2], 4, 3, 3)

    def layer(self) -> minimax.MiniMaxLightningAttention:
        config = minimax.MiniMaxConfig(
            hidden_size=12, num_attention_heads=4, num_key_value_heads=4, head_dim=3, num_hidden_layers=3, block_size=4,
            layer_types=["linear_attention"] * 3,
        )  # fmt: skip
        return minimax.MiniMaxLightningAttention(config, 1)

    def step(self, cache: SimpleNamespace, rows: list[torch.Tensor], **options) -> torch.Tensor:
        v, k, q = rows
        slopes = self.layer().slope_rate.flatten().double()
        return reference.selective_state_(
            cache.state, cache.state_lengths, *cache.pending, None, v, k, q, None, -slopes, cache.lengths,
            pending_index=cache.pending_index, **options,
        )  # fmt: skip

    def transformers(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer of MiniMax with everything around its recurrence made the identity."""
        layer = self.layer().double()
        layer.act_fn, layer.norm, layer.out_proj = (torch.nn.Identity() for _ in range(3))
        layer.output_gate = Always(torch.full((1,), 100.0, dtype=torch.float64))  # a sigmoid of 1
        layer.qkv_proj = Always(torch.cat([rows[2], rows[1], rows[0]], -1).flatten(2))
        out, state = layer(torch.zeros(*rows[0].shape[:2], 12, dtype=torch.float64), None, None)
        return out.unflatten(-1, (4, 3)), state


class Conv:
    def __init__(self, activation: str = "silu", bias: bool = True) -> None:
        self.activation, self.bias = activation, bias

    def inputs(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        return [floats(BATCH, rows, 5, seed=seed)]

    def cache(self) -> SimpleNamespace:
        return empty(self.inputs(1), 3, 5)

    def step(self, cache: SimpleNamespace, rows: list[torch.Tensor], **options) -> torch.Tensor:
        return reference.short_conv_(
            cache.state, cache.state_lengths, *cache.pending, *rows, floats(5, 4), cache.lengths,
            bias=floats(5) if self.bias else None, pending_index=cache.pending_index, activation=self.activation, **options,
        )  # fmt: skip

    def transformers(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = rows
        activation = None if self.activation == "none" else self.activation
        bias = floats(5) if self.bias else None
        out = mamba2.causal_conv1d_fn(x.mT, floats(5, 4), bias, activation=activation).mT
        return out, torch.cat([torch.zeros(BATCH, 3, 5, dtype=x.dtype), x], 1)[:, -3:]


LAYERS = {
    "qwen3_next": Delta(),
    "qwen3_5": Delta(qwen3_5),
    "olmo_hybrid": Delta(olmo),
    "delta, no norm": Delta(normalised=False),
    "mamba2": Selective(),
    "minimax": Lightning(),
    "mamba conv": Conv(),
    "lfm2 conv": Conv("none", bias=False),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Delta | Selective | Lightning | Conv:
    return LAYERS[request.param]


def part(rows: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    return [x[:, begin:end] for x in rows]


def commit(cache: SimpleNamespace, *counts: int, source: list[list[int]] | None = None) -> None:
    index = None if source is None else torch.tensor(source)
    reference.state_commit_(cache.lengths, cache.pending_index, cache.state_lengths, numbers(*counts), index)


def settled(layer, cache: SimpleNamespace) -> torch.Tensor:
    """The state once all accepted rows are in it."""
    layer.step(cache, layer.inputs(1, seed=99))
    assert torch.equal(cache.state_lengths, cache.lengths)
    return cache.state


def test_the_rows_are_those_of_transformers(layer) -> None:
    rows = layer.inputs(ROWS)
    wanted, state = layer.transformers(rows)
    cache = layer.cache()
    # Some transformers functions compute in float32 whatever they are given.
    assert torch.allclose(layer.step(cache, rows).double(), wanted.double(), rtol=1e-4, atol=1e-5)
    assert cache.state.isnan().all()  # a step writes no state of rows that nobody has accepted
    commit(cache, ROWS, ROWS)
    assert torch.allclose(settled(layer, cache), state.double(), rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_however_the_rows_are_split(layer) -> None:
    rows = layer.inputs(12)
    whole, cache = layer.cache(), layer.cache()
    wanted = layer.step(whole, rows, keep=3)
    commit(whole, 12, 12)
    found = []
    for begin, end in ((0, 1), (1, 6), (6, 7), (7, 12)):
        found.append(layer.step(cache, part(rows, begin, end)))
        commit(cache, end - begin, end - begin)
    assert torch.equal(torch.cat(found, 1), wanted)
    assert torch.equal(settled(layer, cache), settled(layer, whole))


def test_rejected_rows_leave_no_trace(layer) -> None:
    rows, draft = layer.inputs(5), layer.inputs(ROWS, seed=50)
    plain, cache = layer.cache(), layer.cache()
    layer.step(plain, part(rows, 0, 2))
    commit(plain, 2, 2)
    wanted = layer.step(plain, part(rows, 2, 5))
    mixed = [torch.cat([a[:, :2], b], 1) for a, b in zip(rows, draft)]
    layer.step(cache, mixed)
    commit(cache, 2, 2)
    layer.step(cache, draft)  # nothing of this draft is accepted
    assert torch.equal(layer.step(cache, part(rows, 2, 5)), wanted)


def test_a_branch_of_a_tree_is_its_rows_in_order(layer) -> None:
    """Rows 0, 1, 2 are a path; 3 follows 0, 4 follows 3, 5 has no row before it."""
    rows = layer.inputs(ROWS)
    parents = torch.tensor([[-1, 0, 1, 0, 3, -1]]).expand(BATCH, -1)
    cache = layer.cache()
    out = layer.step(cache, rows, parents=parents)
    for path in ([0, 1, 2], [0, 3, 4], [5]):
        alone = layer.step(layer.cache(), [x[:, path] for x in rows])
        assert torch.equal(out[:, path], alone)
    commit(cache, 3, 3, source=[[0, 3, 4]] * BATCH)
    plain = layer.cache()
    layer.step(plain, [x[:, [0, 3, 4]] for x in rows])
    commit(plain, 3, 3)
    assert torch.equal(settled(layer, cache), settled(layer, plain))


def test_trim_back_into_the_pending_rows(layer) -> None:
    rows = layer.inputs(12)
    cache, plain = layer.cache(), layer.cache()
    layer.step(cache, rows, keep=5)  # 7 rows are in the state
    commit(cache, 12, 12)
    reference.state_trim_(cache.lengths, numbers(9, 7), cache.state_lengths)
    layer.step(plain, rows, counts=numbers(9, 7), keep=0)
    commit(plain, 9, 7)
    assert torch.equal(settled(layer, cache), settled(layer, plain))
    with pytest.raises(ValueError, match=r"state_trim_: new_lengths must be in \[9, 9\], got 8 for sequence 0"):
        reference.state_trim_(cache.lengths, numbers(8, 7), cache.state_lengths)


def test_ragged_counts_and_rows_of_a_cache(layer) -> None:
    """Sequence 0 of the call is row 1 of the cache; the other row has no new rows, and keeps its pending ones."""
    rows = layer.inputs(ROWS)
    cache, alone = layer.cache(), layer.cache()
    layer.step(cache, rows)
    commit(cache, 4, 2)
    before = [x.clone() for x in (cache.state, *cache.pending)]
    out = layer.step(cache, [x[:1] for x in rows], counts=numbers(3), cache_rows=numbers(1))
    assert all(
        torch.equal(x[0].nan_to_num(), old[0].nan_to_num()) for x, old in zip((cache.state, *cache.pending), before)
    )
    assert cache.state_lengths.tolist() == [0, 2] and not out[:, 3:].any()
    layer.step(alone, rows)
    commit(alone, 0, 2)
    swapped = [x.flip(0) for x in rows]
    assert torch.equal(layer.step(alone, swapped, counts=numbers(0, 3))[1, :3], out[0, :3])


def test_two_commits_of_one_draft() -> None:
    layer, rows = Delta(), Delta().inputs(ROWS)
    once, twice = layer.cache(), layer.cache()
    for cache in (once, twice):
        layer.step(cache, rows)
    commit(once, 3, 3, source=[[0, 2, 5]] * BATCH)
    commit(twice, 2, 2, source=[[0, 2]] * BATCH)
    commit(twice, 1, 1, source=[[3]] * BATCH)  # counted from the new length, as for keys and values
    assert torch.equal(settled(layer, once), settled(layer, twice))


def test_mixed_caches_leave_the_lengths_to_the_keys() -> None:
    layer = Delta()
    cache = layer.cache()
    layer.step(cache, layer.inputs(ROWS))
    counts, index = numbers(2, 1), torch.tensor([[4, 1], [3, 0]])
    reference.state_commit_(
        cache.lengths,
        cache.pending_index,
        [cache.state_lengths, cache.state_lengths[None]],
        counts,
        index,
        advance=False,
    )
    assert cache.lengths.tolist() == [0, 0] and cache.pending_index[:, :2].tolist() == [[4, 1], [3, -1]]


def test_the_gates_of_qwen() -> None:
    rows = Delta().inputs(ROWS)
    k, v, _, _, q = rows
    a, b, A_log, dt_bias = floats(BATCH, ROWS, 4), floats(BATCH, ROWS, 4, seed=3), floats(4), floats(4, seed=1)
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    one, two = Delta().cache(), Delta().cache()
    wanted = Delta().step(one, [k, v, g, b.sigmoid(), q])
    found = Delta().step(two, [k, v, a, b, q], A=-A_log.exp(), dt_bias=dt_bias, sigmoid_beta=True)
    assert torch.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"counts": numbers(7, 0)}, r"counts must be in \[0, 6\], got 7 for sequence 0"),
        ({"cache_rows": numbers(0, 2)}, r"cache_rows must be in \[0, 1\], got 2 for sequence 1"),
        ({"cache_rows": numbers(1, 1)}, "cache_rows must be different for each sequence, got 1 for sequence 1"),
        ({"parents": torch.tensor([[0] * ROWS] * 2)}, r"parents must be in \[-1, -1\] for row 0, got 0 for sequence 0"),
        ({"rows": 9}, r"counts must be at most max_pending \(8\), or keep be given, got 9 for sequence 0"),
        ({"lengths": numbers(0, 9)}, r"lengths must be in \[0, 8\], up to .*, got 9 for sequence 1"),
        ({"state_lengths": numbers(1, 0)}, r"lengths must be in \[1, 9\], up to .*, got 0 for sequence 0"),
        ({"lengths": numbers(0, 1)}, r"pending_index must be in \[0, 7\], got -1 for sequence 1"),
    ],
)
def test_values_are_checked_before_anything_is_written(layer, change: dict, words: str) -> None:
    cache, options = layer.cache(), dict(change)
    rows = layer.inputs(options.pop("rows", ROWS))
    for name in ("lengths", "state_lengths"):
        if name in options:
            setattr(cache, name, options.pop(name))
    with pytest.raises(ValueError, match=words):
        layer.step(cache, rows, **options)
    assert all(x.isnan().all() for x in (cache.state, *cache.pending))


@pytest.mark.parametrize(
    "counts, source, words",
    [
        ((0, 9), None, r"lengths \+ counts must be in \[4, 12\], got 13 for sequence 1"),
        ((2, 1), [[0, 2], [8, 0]], r"source_index must be in \[0, 7\] for row 0, got 8 for sequence 1"),
        ((3, 0), [[0, 1], [0, 1]], r"counts must be in \[0, 2\], got 3 for sequence 0"),
        ((-1, 0), None, r"counts must be in \[0, .*\], got -1 for sequence 0"),
    ],
)
def test_bad_commits_change_nothing(counts, source, words: str) -> None:
    lengths, index = numbers(4, 4), torch.full((2, PENDING), -1)
    with pytest.raises(ValueError, match=words):
        source_index = None if source is None else torch.tensor(source)
        reference.state_commit_(lengths, index, numbers(4, 4), numbers(*counts), source_index)
    assert lengths.tolist() == [4, 4] and (index == -1).all()


def test_a_commit_keeps_what_is_settled() -> None:
    """A prompt of 10 rows of which 7 are in the state: a commit of fewer, or of others, would need another state."""
    lengths, index, held = numbers(0, 0), torch.full((2, PENDING), -1), numbers(7, 7)
    with pytest.raises(ValueError, match=r"lengths \+ counts must be in \[7, 15\], got 6 for sequence 0"):
        reference.state_commit_(lengths, index, held, numbers(6, 7))
    with pytest.raises(ValueError, match=r"source_index must be in \[1, 1\] for row 1, got 2 for sequence 0"):
        reference.state_commit_(lengths, index, held, numbers(9, 0), torch.tensor([[0, 2, *range(2, 9)]] * 2))
    with pytest.raises(ValueError, match=r"state_lengths must be the same for all layers, got 8 for sequence 0"):
        reference.state_commit_(lengths, index, [held, numbers(8, 7)], numbers(9, 0))
    reference.state_commit_(lengths, index, held, numbers(9, 7))
    assert lengths.tolist() == [9, 7] and index[:, :3].tolist() == [[0, 1, -1], [-1, -1, -1]]
