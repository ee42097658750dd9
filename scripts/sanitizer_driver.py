"""Calls every op at small odd sizes, with good and with bad values, under a memory checker.

    compute-sanitizer --tool memcheck python scripts/sanitizer_driver.py
    python scripts/sanitizer_driver.py --device cpu        (the same calls without a checker)

Results of good calls are compared with the reference. Bad values must be refused (CPU) or leave their sequence alone (CUDA).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

# Every tensor has its own allocation, so that the checker knows where it ends.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import pdkernels as pd
from pdkernels import reference
from pdkernels.ops.library import OPS
from tests.ops import examples, kv_cases, recurrence_cases, speculative_cases, unmask_cases

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WILD = [-1, -(2**31), 2**31 - 1, 100]
REFUSED = object()
Run = Callable[[object, kv_cases.Case], None]


def attempt(bad: bool, call: Callable[[], object]) -> Any:
    """What `call` returns, or `REFUSED` if it refused bad arguments."""
    try:
        return call()
    except ValueError:
        assert bad, "good values were refused"
        return REFUSED


def assert_near(actual: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], tolerance: float = 0.1) -> None:
    for a, b in zip(actual, wanted):
        a, b = a.double().cpu(), b.double()
        assert a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True), (
            "not what the reference does"
        )


def spoil(rng: random.Random, tensors: list[torch.Tensor | None]) -> None:
    present = [t for t in tensors if t is not None and t.numel() > 0]
    for t in rng.sample(present, rng.randint(0, min(2, len(present)))):
        t.view(-1)[rng.randrange(t.numel())] = rng.choice(WILD)


def kv_case(rng: random.Random) -> kv_cases.Case:
    return kv_cases.make_case(
        rng.randrange(2**20),
        layers=rng.randint(1, 3),
        batch=rng.randint(1, 3),
        capacity=rng.randint(1, 24),
        heads=rng.randint(1, 3),
        head_dim=rng.choice([1, 3, 8, 16, 33]),
        v_head_dim=rng.choice([None, 6]),
        dtype=rng.choice(kv_cases.DTYPES),
        layout=rng.choice(kv_cases.LAYOUTS),
        page_size=rng.choice([None, 1, 3, 16]),
        index_dtype=rng.choice([torch.int32, torch.int64]),
        offset=rng.randint(0, 3),
    )


def run_kv(rng: random.Random, device: torch.device, bad: bool, call: Run) -> None:
    case = kv_case(rng)
    if bad:
        spoil(rng, [case.lengths, case.counts, case.source_index, case.block_table])
    actual = case.moved(device)
    attempt(bad, lambda: call(pd, actual))
    if not bad:
        expected = case.moved(torch.device("cpu"))
        call(reference.kv_cache, expected)
        assert all(torch.equal(a, b) for a, b in zip(actual.bytes(), expected.bytes())), "not what the reference does"


def append(ops: object, c: kv_cases.Case) -> None:
    ops.kv_append_(
        *([kv_cases.as_list(x) for x in (c.k, c.v, c.k_new, c.v_new)]),
        c.lengths,
        counts=c.counts,
        block_table=c.block_table,
    )


def commit(ops: object, c: kv_cases.Case) -> None:
    ops.kv_commit_(
        kv_cases.as_list(c.k), kv_cases.as_list(c.v), c.lengths, c.counts, c.source_index, block_table=c.block_table
    )


def trim(ops: object, c: kv_cases.Case) -> None:
    ops.kv_trim_(c.lengths, c.lengths // 2 if c.capacity % 2 else c.counts.clamp(max=c.lengths))


def run_verify(rng: random.Random, device: torch.device, bad: bool) -> None:
    batch, width = rng.randint(1, 3), rng.choice([1, 2, 5, 33, 70])
    shape = rng.choice([(batch, width), (batch, rng.randint(1, 5), width)])
    dtype = rng.choice([torch.int32, torch.int64])
    draft, predictions = torch.randint(0, 2, shape, dtype=dtype), torch.randint(0, 2, shape, dtype=dtype)
    lengths = torch.randint(0, width + 1, (batch,), dtype=dtype)
    if bad:
        spoil(rng, [draft, predictions, lengths])
    end_tokens, refill = torch.tensor([1], dtype=dtype), torch.full((batch, width), 7, dtype=dtype)
    options = {"draft_lengths": lengths, "end_tokens": end_tokens, "refill": refill}
    moved = {name: t.to(device) for name, t in options.items()}
    actual = attempt(bad, lambda: [t.cpu() for t in pd.verify_draft(draft.to(device), predictions.to(device), **moved)])
    if not bad:
        expected = reference.verify_draft.verify_draft(draft, predictions, **options)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected)), "not what the reference does"


def run_lengths(rng: random.Random, device: torch.device, bad: bool) -> None:
    batch, slots = rng.choice([1, 2, 300]), rng.choice([1, 2, 16])
    lengths = torch.randint(0, slots + 1, (batch,))
    accepted = (torch.rand(batch) * (lengths + 1)).long().minimum(lengths)
    if bad:
        spoil(rng, [lengths, accepted])
    numbers = torch.float64
    seen, balance = torch.rand(batch, 2, slots, dtype=numbers).sort(1).values, torch.rand(batch, dtype=numbers)
    plain = 1 + torch.rand(batch * slots, dtype=numbers).cumsum(0)
    costs = torch.stack([plain, plain + rng.random()])
    options = {"warmup_cost": 0.3, "sequence_cost": rng.choice([0.0, 0.1]), "padded": rng.random() < 0.5}
    here = [lengths, accepted, torch.randint(0, 20, (batch,)), seen, balance, torch.rand(batch) < 0.5, costs]
    there = [t.clone().to(device) for t in here]
    attempt(bad, lambda: pd.draft_lengths_(*there, **options))
    if not bad:
        reference.draft_lengths.draft_lengths_(*here, **options)
        assert torch.equal(there[0].cpu(), here[0]), "not what the reference does"


def run_record(rng: random.Random, device: torch.device, bad: bool) -> None:
    steps, batch, columns = rng.randint(1, 4), rng.choice([1, 2, 300]), rng.choice([1, 5, 33])
    entry = torch.randint(0, 2, (batch, columns))
    count = torch.tensor([rng.choice([-1, steps, 2**40]) if bad else rng.randrange(steps)])
    here = [torch.full((steps, batch, columns), -7), count, torch.tensor([True]), entry]
    there = [t.clone().to(device) for t in here]
    attempt(bad, lambda: pd.log_step_(*there))
    if not bad:
        reference.log_step.log_step_(*here)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here)), "not what the reference does"
    assert not bad or (there[0] == -7).all(), "a bad count was not left alone"


def run_lookup(rng: random.Random, device: torch.device, bad: bool) -> None:
    batch, slots, width = rng.randint(1, 3), rng.choice([1, 2, 16, 300]), rng.choice([1, 7, 70, 300])
    tokens, start = torch.randint(-1, 3, (batch, width)), rng.randrange(width)
    draft, lengths = torch.randint(0, 3, (batch, slots)), torch.randint(0, slots + 1, (batch,))
    ends = torch.randint(start, width, (batch,))
    if bad:
        spoil(rng, [draft, lengths, tokens, ends])
    here = [draft, lengths, tokens, ends]
    there = [t.clone().to(device) for t in here]
    attempt(bad, lambda: pd.lookup_draft_(*there, start=start))
    if not bad:
        reference.lookup_draft.lookup_draft_(*here, start)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here)), "not what the reference does"


def run_attention(rng: random.Random, device: torch.device, bad: bool, backward: bool) -> None:
    parts = [rng.randint(0, 50) for _ in range(4)]
    mask = rng.choice(
        [
            pd.masks.noise_aware_causal(parts[0], 8, parts[1] // 8),
            pd.masks.pack([pd.masks.causal(parts[0])], length=parts[0] + parts[1]),
            pd.masks.causal(parts[0], parts[1]),
            pd.masks.dual_stream(parts[0], 8)[parts[1] // 4 :, parts[2] // 4 :],
        ]
    )
    plan = mask.plan(rng.choice([16, 32, 48]), rng.choice([16, 32, 48]))
    if rng.random() < 0.5:
        plan = pd.masks.TilePlan.stack([plan, plan])
    dtype, head_dim = rng.choice([torch.float32, torch.float16, torch.bfloat16]), rng.choice([16, 24, 72])
    heads, kv_heads = rng.choice([(1, 1), (4, 2), (3, 1)])
    q, k, v = (
        torch.randn(2, n, h, head_dim).to(dtype)
        for n, h in ((mask.q_len, heads), (mask.kv_len, kv_heads), (mask.kv_len, kv_heads))
    )
    if bad:  # values of a plan come from the planner; a caller can only get shapes wrong
        k = k[:, :, :, :-8] if rng.random() < 0.5 else k[:1]
    leaves = [x.to(device).requires_grad_(backward) for x in (q, k, v)]
    out = attempt(bad, lambda: pd.block_sparse_attention(*leaves, plan.to(device)))
    assert (out is REFUSED) == bad, "bad values were taken"
    if bad:
        return
    expected = [x.double().requires_grad_(backward) for x in (q, k, v)]
    exact = reference.block_sparse_attention.block_sparse_attention(*expected, mask.dense())[0]
    results = [(out, exact)]
    if backward:
        grad = torch.randn(out.shape).to(dtype)
        results += zip(
            torch.autograd.grad(out, leaves, grad.to(device)), torch.autograd.grad(exact, expected, grad.double())
        )
    for actual, wanted in results:
        assert actual.numel() == 0 or (actual.double().cpu() - wanted).abs().max() < 0.2, "not what the reference does"


def run_speculative(rng: random.Random, device: torch.device, bad: bool, append: bool) -> None:
    small = (pd.masks.quadratic(rng.randint(1, 6)), pd.masks.candidates(3, 5), pd.masks.causal(rng.randint(0, 40)))
    mask = rng.choice(small)
    slots = rng.randint(0, 300)
    lengths = [rng.choice([0, slots, rng.randint(0, slots)]) for _ in range(rng.randint(1, 3))]
    heads, kv_heads = rng.choice([(1, 1), (4, 2), (3, 1)])
    case = speculative_cases.make_inputs(
        mask.q_len,
        lengths,
        slots=slots,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([16, 24, 72]),
        dtype=rng.choice(DTYPES),
    )
    # Without rows there is nothing to choose.
    rows = speculative_cases.Rows()
    if mask.q_len:
        rows = speculative_cases.make_rows(case, rng.choice(["counts", "sources", "both"]))
    if page_size := rng.choice([0, 1, 5, 16]):
        paged = (
            partial(speculative_cases.with_room, case, rows) if append else partial(speculative_cases.in_pages, case)
        )
        case = paged(page_size)
    plan = mask.plan(rng.choice([16, 32, 48]), rng.choice([16, 32, 48]))
    if rng.random() < 0.5:
        plan = pd.masks.TilePlan.stack([plan] * len(lengths))
    if bad and device.type == "cpu":
        spoil(rng, [case.lengths, case.block_table, *(rows if append else ())])
    elif bad:  # lengths are clamped on a GPU, valid pages are the caller's responsibility
        spoil(rng, [case.lengths, *(rows if append else ())])
        case = case._replace(block_table=None if case.block_table is None else case.block_table.clamp(min=0))
    *tensors, table = case.map(lambda x: x.to(device, copy=True))
    options = {name: None if x is None else x.to(device) for name, x in rows._asdict().items()} if append else {}
    call = pd.speculative_attention_append_ if append else pd.speculative_attention
    out = attempt(bad, lambda: call(*tensors, plan.to(device), block_table=table, **options))
    if not bad:
        if append:
            speculative_cases.assert_stored(tensors[3:5], case, rows)
        *tensors, table = case.to(torch.float64)
        exact = reference.speculative_attention.speculative_attention(*tensors, mask.dense(), block_table=table)[0]
        assert out.numel() == 0 or (out.double().cpu() - exact).abs().max() < 0.2, "not what the reference does"


def random_rows(rng: random.Random, bad: bool) -> recurrence_cases.Rows:
    rows = recurrence_cases.make_rows(
        rng.randrange(2**20),
        batch=rng.randint(1, 3),
        rows=rng.randint(1, 5),
        size=rng.choice([1, 7, 33, 64, 1100]),
        dtype=rng.choice(recurrence_cases.DTYPES),
        index_dtype=rng.choice([torch.int32, torch.int64]),
        style=rng.choice(recurrence_cases.STYLES),
        first_step=rng.random() < 0.2,
    )
    if bad:
        rows = rows._replace(recurrences=rows.recurrences.contiguous())
        spoil(rng, [rows.width, rows.advance, rows.cursor, rows.recurrences, rows.older_advance])
    return rows


def run_inject(rng: random.Random, device: torch.device, bad: bool) -> None:
    rows, options = random_rows(rng, bad), recurrence_cases.inject_options(rng.randrange(2**20))
    actual = attempt(bad, lambda: pd.recurrence_inject(*rows.to(device).inject_arguments(), **options).cpu())
    if not bad:
        expected = reference.recurrence.recurrence_inject(*rows.inject_arguments(), **options)
        assert torch.equal(recurrence_cases.bits(actual), recurrence_cases.bits(expected)), (
            "not what the reference does"
        )


def run_exit(rng: random.Random, device: torch.device, bad: bool) -> None:
    rows = random_rows(rng, bad)
    older = {} if rows.state is None else {"older": rows.older, "older_advance": rows.older_advance}
    options = {name: x.to(device) for name, x in older.items()} | {"threshold": 1.4}
    found = attempt(bad, lambda: pd.recurrence_exit(*rows.to(device).exit_arguments(), **options))
    if not bad:
        actual = [x.cpu() for x in found]
        state, distance, _ = reference.recurrence.recurrence_exit(*rows.exit_arguments(), threshold=1.4, **older)
        close = torch.allclose(actual[0].float(), state.float(), rtol=0.02, atol=1e-3) and torch.allclose(
            actual[1], distance, rtol=0.02, atol=0.02
        )
        assert close, "not what the reference does"


def run_advance(rng: random.Random, device: torch.device, bad: bool) -> None:
    dtype = rng.choice([torch.int32, torch.int64])
    case = recurrence_cases.make_advance(
        rng.randrange(2**20), batch=rng.randint(1, 3), capacity=rng.choice([1, 2, 6, 200]), dtype=dtype
    )
    if bad:
        spoil(rng, [case.wave.width, case.wave.cursor, case.wave.remaining, case.wave.tokens, case.wave.recurrences])
    wave, options = case.moved(device)
    attempt(bad, lambda: pd.recurrence_advance_(*wave, **options))
    if not bad:
        reference.recurrence.recurrence_advance_(
            *case.wave, **{**case.options, "max_wavefront": case.options["max_wavefront"] or 0}
        )
        assert all(torch.equal(a.cpu(), b) for a, b in zip(wave, case.wave)), "not what the reference does"


def run_unmask(rng: random.Random, device: torch.device, bad: bool) -> None:
    case = unmask_cases.make_case(
        rng.randrange(2**20),
        batch=rng.randint(1, 3),
        length=rng.choice([1, 2, 33, 300]),
        rule=rng.choice(unmask_cases.RULES),
        segments=rng.choice([None, 0, 1, 4]),
        dtype=rng.choice([torch.int32, torch.int64]),
    )
    if bad:
        spoil(rng, [case.tokens, case.ids, *(x for x in case.options.values() if isinstance(x, torch.Tensor))])
    tokens, ids = case.tokens.to(device, copy=True), case.ids.to(device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
    confidence = None if case.confidence is None else case.confidence.to(device)
    result = attempt(bad, lambda: pd.unmask_(tokens, ids, confidence, **options))
    if not bad:
        assert not unmask_cases.differs(
            unmask_cases.Outcome(*(x.cpu() for x in (tokens, *result))), unmask_cases.expected(case)
        )


def apart(rows: int, width: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Rows with a gap between them."""
    return torch.randn(rows, width + rng.choice([0, 3, 8])).to(dtype)[:, :width]


def run_rows(rng: random.Random, device: torch.device, bad: bool, op: str) -> None:
    dtype, rows, width = rng.choice(DTYPES), rng.randint(0, 5), 2 * rng.randint(1, 700)
    x, other = (apart(rows, width, dtype, rng) for _ in range(2))
    if bad:
        other = other[:, :-1]
    if op == "add_rms_norm":
        weights = [torch.ones(width - bad).to(dtype), torch.ones(width).to(dtype)]
        tensors, call = (x, x, *weights), lambda x, y, w, v, **o: pd.add_rms_norm(x, y, w, next_weight=v, **o)
    elif op in ("silu_and_mul", "gelu_and_mul"):
        tensors, call = (x[:, : width - bad],), lambda x, **o: [getattr(pd, op)(x, **o)]
    else:
        tensors, call = (x, other), pd.logit_divergence
    found = attempt(bad, lambda: call(*(t.to(device) for t in tensors)))
    if not bad:
        assert_near(found, call(*(t.double() for t in tensors), backend="reference"))


def run_apply_rope(rng: random.Random, device: torch.device, bad: bool) -> None:
    dtype, batch, rows = rng.choice(DTYPES), rng.randint(1, 3), rng.randint(1, 6)
    capacity, head_dim = 20, rng.choice([2, 8, 18])
    qkv = torch.randn(batch, rows, 4, head_dim).to(dtype)
    k, v = torch.zeros(2, batch, capacity, 1, head_dim).to(dtype)
    angles = torch.rand(capacity, head_dim)
    lengths = torch.randint(0, capacity - rows + 1, (batch,)) + (capacity if bad else 0)
    slots = torch.stack([torch.randperm(rows) - rng.randint(0, 1) for _ in range(batch)])
    slots = slots if rng.random() < 0.5 else None
    tensors = (qkv, angles.cos(), angles.sin(), k, v, lengths)
    on_device = [t.to(device, copy=True) for t in tensors]
    there = None if slots is None else slots.to(device)
    attempt(bad, lambda: pd.apply_rope_append_(on_device[0], None, *on_device[1:], slots=there))
    if not bad:
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        pd.apply_rope_append_(wide[0], None, *wide[1:], backend="reference", slots=slots)
        assert_near([on_device[0], *on_device[3:5]], [wide[0], *wide[3:5]])


def run_rotate_rows(rng: random.Random, device: torch.device, bad: bool) -> None:
    dtype, batch, rows = rng.choice(DTYPES), rng.randint(1, 3), rng.randint(1, 6)
    positions, head_dim = 20, rng.choice([2, 8, 18, 32])
    x, angles = torch.randn(batch, rows, rng.randint(1, 40), head_dim).to(dtype), torch.rand(positions, head_dim)
    at = torch.randint(0, positions, rng.choice([(rows,), (batch, rows)])) + (positions if bad else 0)
    style, turned = rng.choice(["half", "interleaved"]), x.to(device, copy=True)
    attempt(bad, lambda: pd.apply_rope_(turned, *(t.to(device) for t in (angles.cos(), angles.sin(), at)), style=style))
    wide = x.double()
    if not bad:
        pd.apply_rope_(wide, angles.cos().double(), angles.sin().double(), at, style=style, backend="reference")
    assert_near([turned], [wide])  # bad values leave all rows alone


def run_statistics(rng: random.Random, device: torch.device, bad: bool, head: bool) -> None:
    dtype, rows, width = rng.choice(DTYPES), rng.randint(1, 5), rng.choice([3, 700, 9001])
    x, weight = apart(rows, 16 if head else width, dtype, rng), apart(width if head else 1, 16, dtype, rng)
    index = torch.randint(-1, rows, (7,)) + (rows if bad else 0)
    options = {"temperature": rng.choice([0.0, 0.7]), "top_p": rng.choice([1.0, 0.8])}
    options |= {"suppress": [1], "top_k": 2, "distribution": "sampling"}
    call, tensors = (pd.linear_token_statistics, (x, weight)) if head else (pd.token_statistics, (x,))
    found = attempt(bad, lambda: call(*(t.to(device) for t in tensors), row_index=index.to(device), **options))
    if not bad:
        wanted = call(*(t.double() for t in tensors), row_index=index, backend="reference", **options)
        assert_near([found.logsumexp], [wanted.logsumexp], 0.2)
        assert found.ids.lt(width).all() and found.top_ids.lt(width).all()


def run_feature_rows(rng: random.Random, device: torch.device, bad: bool, op: str) -> None:
    dtype, batch, rows, width = rng.choice(DTYPES), rng.randint(1, 3), rng.randint(1, 9), rng.choice([1, 16, 70])
    x, cached = torch.randn(2, batch, rows, width).to(dtype)
    chosen = rng.randint(0, rows)
    index = torch.stack([torch.randperm(rows)[:chosen].sort().values for _ in range(batch)]) + (rows if bad else 0)
    if op == "gather_rows":
        call, tensors = pd.gather_rows, (x, index)
    elif op == "add_cached_rows_":
        call, tensors = pd.add_cached_rows_, (x, cached, torch.randn(batch, chosen, width).to(dtype), index)
    else:
        starts = torch.randint(0, 4, (batch,)) + (99 if bad else 0)
        call = partial(pd.select_stale_rows_, max_selected=chosen)
        tensors = (x[:, :, None], torch.randn(batch, rows + 4, 1, width).to(dtype), starts)
    wanted = call(*(t.clone() for t in tensors), backend="reference") if not bad else None
    found = attempt(bad, lambda: call(*(t.clone().to(device) for t in tensors)))
    if not bad and op != "select_stale_rows_":
        assert_near([found], [wanted])


def run_example(rng: random.Random, device: torch.device, bad: bool, op: str) -> None:
    """An op without its own run: the call in its definition, with corrupted numbers."""
    arguments = examples.example(op, rng.randrange(2**20), dtype=rng.choice(DTYPES))
    if bad:
        spoil(rng, [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.dtype == torch.int64])
    there = {name: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    found = attempt(bad, lambda: examples.run(op, there))
    if not bad:
        wanted = examples.tensors_in(examples.run(op, arguments, backend="reference"))
        assert_near(examples.tensors_in(found), wanted)
        assert_near(*([given[name] for name in OPS[op].mutated] for given in (there, arguments)))


RUNS: dict[str, Callable[[random.Random, torch.device, bool], None]] = {
    **{op: partial(run_rows, op=op) for op in ("add_rms_norm", "logit_divergence", "silu_and_mul", "gelu_and_mul")},
    **{op: partial(run_feature_rows, op=op) for op in ("add_cached_rows_", "gather_rows", "select_stale_rows_")},
    "block_sparse_attention": partial(run_attention, backward=False),
    "block_sparse_attention_backward": partial(run_attention, backward=True),
    "speculative_attention": partial(run_speculative, append=False),
    "speculative_attention_append_": partial(run_speculative, append=True),
    "kv_append_": partial(run_kv, call=append),
    "kv_commit_": partial(run_kv, call=commit),
    "kv_trim_": partial(run_kv, call=trim),
    "linear_token_statistics": partial(run_statistics, head=True),
    "token_statistics": partial(run_statistics, head=False),
    "draft_lengths_": run_lengths,
    "log_step_": run_record,
    "lookup_draft_": run_lookup,
    "recurrence_advance_": run_advance,
    "recurrence_exit": run_exit,
    "recurrence_inject": run_inject,
    "apply_rope_": run_rotate_rows,
    "apply_rope_append_": run_apply_rope,
    "unmask_": run_unmask,
    "verify_draft": run_verify,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=60, help="of each op, half of them with bad values")
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=list(OPS), metavar="OP", help="these alone")
    parser.add_argument("--list", action="store_true", help="the ops, nothing else")
    options = parser.parse_args()
    if options.list:
        print("\n".join(OPS))
        return
    kv_cases.GUARD = 0  # padding around the tests' buffers, which would hide accesses just outside them
    torch.manual_seed(0)
    wrong = []
    for op in options.op:
        run = RUNS.get(op, partial(run_example, op=op))
        rng = random.Random(op)
        try:
            for index in range(options.calls):
                run(rng, torch.device(options.device), index % 2 == 1)
            print(f"{op}: {options.calls} calls on {options.device}", flush=True)
        except (AssertionError, RuntimeError):  # the other ops are checked too
            wrong.append(op)
            print(f"{op}: WRONG after {index} calls\n{traceback.format_exc()}", flush=True)
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
