"""Every op in a CUDA graph: captured once, replayed with other data, the same bits as a call; and no call waits for the device.

Without a GPU the calls run on a pretended one, where a replay is one more call: that holds the cases right, not the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels.ops._library import SCHEMAS
from tests.harness.pretended_gpu import pretended_gpu

HAS_GPU = torch.cuda.is_available()
Tensors = dict[str, Tensor]
Draw = Callable[..., Tensor]
NOISE_AWARE, QUADRATIC = pd.masks.noise_aware_causal(40, 8, 5), pd.masks.quadratic(3)
BF16 = torch.bfloat16


def results(found: object) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found if isinstance(x, Tensor)]


class Case:
    """What an op is given, drawn anew for each seed, and the call. Tensors it writes to are results too."""

    def __init__(
        self,
        make: Callable[[torch.Generator], Tensors],
        call: Callable[[Tensors], object],
        writes: tuple[str, ...] = (),
    ) -> None:
        self.make, self.call, self.writes = make, call, writes

    def tensors(self, seed: int) -> Tensors:
        return {name: x.cuda() for name, x in self.make(torch.Generator().manual_seed(seed)).items()}

    def run(self, t: Tensors) -> list[Tensor]:
        found = self.call(t)
        return results(() if found is None else found) + [t[name] for name in self.writes]


def normal(dtype: torch.dtype = BF16, **shapes: tuple[int, ...]) -> Callable[[torch.Generator], Tensors]:
    return lambda g: {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def whole(high: int, **shapes: tuple[int, ...]) -> Callable[[torch.Generator], Tensors]:
    return lambda g: {name: torch.randint(0, high, shape, generator=g) for name, shape in shapes.items()}


def both(*makers: Callable[[torch.Generator], Tensors]) -> Callable[[torch.Generator], Tensors]:
    return lambda g: {name: x for make in makers for name, x in make(g).items()}


def chosen(g: torch.Generator) -> Tensors:
    """Four of twelve rows for two sequences."""
    return {"index": torch.stack([torch.randperm(12, generator=g)[:4].sort().values for _ in range(2)])}


def gradients(t: Tensors) -> tuple[Tensor, ...]:
    leaves = [t[name].detach().requires_grad_() for name in "qkv"]
    out = pd.block_sparse_attention(*leaves, NOISE_AWARE.plan(32, 32, "cuda"))
    return torch.autograd.grad(out, leaves, t["grad"])


L = NOISE_AWARE.q_len
QKV = {"q": (2, L, 4, 32), "k": (2, L, 2, 32), "v": (2, L, 2, 32)}
N = QUADRATIC.q_len
STEP = {"q": (2, N, 4, 32), "k_new": (2, N, 2, 32), "v_new": (2, N, 2, 32), "k": (2, 64, 2, 32), "v": (2, 64, 2, 32)}
CACHE = {"k": (3, 2, 64, 2, 16), "v": (3, 2, 64, 2, 16)}
WAVE = {"state": (2, 6, 64), "embedding": (2, 6, 64), "previous": (2, 6, 64)}


def wave_numbers(g: torch.Generator) -> Tensors:
    names = {
        "recurrences": (0, 9, (2, 6)),
        "cursor": (0, 9, (2,)),
        "width": (1, 7, (2,)),
        "steps": (0, 9, (2,)),
        "remaining": (9, 20, (2,)),
    }
    drawn = {name: torch.randint(low, high, shape, generator=g) for name, (low, high, shape) in names.items()}
    return drawn | {"advance": torch.zeros(2, dtype=torch.int64), "stable": torch.zeros(2, 6, dtype=torch.int64)}


def canvas(g: torch.Generator) -> Tensors:
    tokens = torch.randint(0, 50, (2, 40), generator=g).masked_fill(torch.rand(2, 40, generator=g) < 0.6, 99)
    return {
        "tokens": tokens,
        "ids": torch.randint(0, 50, (2, 40), generator=g),
        "confidence": torch.rand(2, 40, generator=g),
    }


CASES = {
    "block_sparse_attention": Case(
        normal(**QKV), lambda t: pd.block_sparse_attention(*t.values(), NOISE_AWARE.plan(32, 32, "cuda"))
    ),
    "block_sparse_attention_backward": Case(normal(**QKV, grad=QKV["q"]), gradients),
    "speculative_attention": Case(
        both(normal(**STEP), whole(65, lengths=(2,))),
        lambda t: pd.speculative_attention(*t.values(), QUADRATIC.plan(16, 16, "cuda")),
    ),
    "speculative_attention_append_": Case(
        both(normal(**STEP), whole(65 - N, lengths=(2,))),
        lambda t: pd.speculative_attention_append_(*t.values(), QUADRATIC.plan(16, 16, "cuda")),
        ("k", "v"),
    ),
    "kv_append_": Case(
        both(
            normal(**CACHE, k_new=(3, 2, 5, 2, 16), v_new=(3, 2, 5, 2, 16)),
            whole(50, lengths=(2,)),
            whole(6, counts=(2,)),
        ),
        lambda t: pd.kv_append_(t["k"], t["v"], t["k_new"], t["v_new"], t["lengths"], counts=t["counts"]),
        ("k", "v", "lengths"),
    ),
    "kv_commit_": Case(
        both(normal(**CACHE), whole(50, lengths=(2,)), whole(5, counts=(2,)), chosen),
        lambda t: pd.kv_commit_(t["k"], t["v"], t["lengths"], t["counts"], t["index"]),
        ("k", "v", "lengths"),
    ),
    "kv_trim_": Case(
        lambda g: {"lengths": torch.randint(9, 20, (3,), generator=g), "new": torch.randint(0, 9, (3,), generator=g)},
        lambda t: pd.kv_trim_(t["lengths"], t["new"]),
        ("lengths",),
    ),
    "verify_draft": Case(
        whole(2, draft=(3, 9), predictions=(3, 9)), lambda t: pd.verify_draft(t["draft"], t["predictions"])
    ),
    "recurrence_inject": Case(
        both(normal(**WAVE), wave_numbers),
        lambda t: pd.recurrence_inject(
            *(t[n] for n in (*WAVE, "recurrences", "cursor", "width", "advance", "steps")), noise=0.5, momentum=0.1
        ),
    ),
    "recurrence_exit": Case(
        both(normal(x=(2, 6, 64), residual=(2, 6, 64), weight=(64,), before=(2, 6, 64)), wave_numbers),
        lambda t: pd.recurrence_exit(
            *(t[n] for n in ("x", "residual", "weight", "before", "recurrences", "width", "advance")), threshold=1.4
        ),
    ),
    "recurrence_advance_": Case(
        both(whole(9, tokens=(2, 7), predictions=(2, 6)), wave_numbers),
        lambda t: pd.recurrence_advance_(
            *(
                t[n]
                for n in (
                    "tokens",
                    "predictions",
                    "recurrences",
                    "stable",
                    "width",
                    "cursor",
                    "advance",
                    "steps",
                    "remaining",
                )
            ),
            settled=t["predictions"] > 3,
            inner_recurrence=4,
        ),
        ("tokens", "recurrences", "stable", "width", "cursor", "advance", "steps", "remaining"),
    ),
    "add_rms_norm": Case(
        normal(x=(5, 64), residual=(5, 64), weight=(64,)),
        lambda t: pd.add_rms_norm(*t.values(), next_weight=t["weight"]),
    ),
    "silu_and_mul": Case(normal(x=(5, 128)), lambda t: pd.silu_and_mul(t["x"])),
    "apply_rope_append_": Case(
        both(
            normal(qkv=(2, 3, 6, 16), k=(2, 20, 2, 16), v=(2, 20, 2, 16)),
            normal(torch.float32, cos=(20, 16), sin=(20, 16)),
            whole(17, lengths=(2,)),
        ),
        lambda t: pd.apply_rope_append_(t["qkv"], None, t["cos"], t["sin"], t["k"], t["v"], t["lengths"]),
        ("qkv", "k", "v"),
    ),
    "apply_rope_": Case(
        both(normal(x=(2, 3, 6, 16)), normal(torch.float32, cos=(20, 16), sin=(20, 16)), whole(20, positions=(2, 3))),
        lambda t: pd.apply_rope_(*t.values()),
        ("x",),
    ),
    "logit_divergence": Case(normal(now=(3, 900), then=(3, 900)), lambda t: pd.logit_divergence(*t.values())),
    "unmask_": Case(canvas, lambda t: pd.unmask_(*t.values(), mask_token=99, quota=3), ("tokens",)),
    "select_stale_rows_": Case(
        both(normal(v=(2, 12, 2, 8), cache=(2, 20, 2, 8)), whole(8, starts=(2,))),
        lambda t: pd.select_stale_rows_(*t.values(), count=4),
        ("cache",),
    ),
    "gather_rows": Case(both(normal(x=(2, 12, 16)), chosen), lambda t: pd.gather_rows(*t.values())),
    "add_cached_rows_": Case(
        both(normal(x=(2, 12, 16), cached=(2, 12, 16), rows=(2, 4, 16)), chosen),
        lambda t: pd.add_cached_rows_(*t.values()),
        ("cached",),
    ),
    "log_step_": Case(
        lambda g: {
            "log": torch.zeros(4, 2, 3, dtype=torch.int64),
            "count": torch.ones(1, dtype=torch.int64),
            "more": torch.zeros(1, dtype=torch.bool),
            "entry": torch.randint(0, 9, (2, 3), generator=g),
        },
        lambda t: pd.log_step_(*t.values()),
        ("log", "count", "more"),
    ),
    "token_statistics": Case(
        normal(logits=(3, 900)), lambda t: pd.token_statistics(t["logits"], temperature=0.7, top_p=0.9)
    ),
    "linear_token_statistics": Case(
        normal(x=(3, 32), head=(300, 32)), lambda t: pd.linear_token_statistics(*t.values(), temperature=0.7)
    ),
}


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(case: Case, t: Tensors) -> tuple[list[Tensor], Callable[[], object]]:
    """What a replay writes to, and the replay."""
    if not HAS_GPU:
        found = case.run(t)
        return found, lambda: [a.copy_(b) for a, b in zip(found, case.run(t)) if a is not b]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and loaded by their first call
        case.run({name: x.clone() for name, x in t.items()})
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run(t)
    return found, graph.replay


def test_no_op_is_left_out() -> None:
    assert set(CASES) == set(SCHEMAS)


@pytest.fixture
def gpu() -> Iterator[None]:
    if HAS_GPU:
        yield
        return
    with pretended_gpu():
        yield


@pytest.mark.parametrize("op", CASES)
def test_capture_and_replay_with_other_data(op: str, gpu: None) -> None:
    if op.endswith("_backward") and not HAS_GPU:
        pytest.skip("no backward pass on a pretended GPU")
    case = CASES[op]
    held = case.tensors(1)
    found, replay = captured(case, held)
    for seed in (2, 3, 2):
        fresh = case.tensors(seed)
        for name, x in fresh.items():
            held[name].copy_(x)
        replay()
        wanted = case.run(fresh)
        assert len(found) == len(wanted) > 0
        for a, b in zip(found, wanted):
            assert torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize("op", CASES)
def test_a_captured_op_asks_the_host_nothing(op: str) -> None:
    case = CASES[op]
    first, second = case.tensors(1), case.tensors(2)
    case.run(first)
    with no_sync():
        case.run(second)
