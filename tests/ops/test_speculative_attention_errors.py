"""What speculative_attention refuses, and its messages."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import SpeculativeArguments
from tests.ops.attention_cases import backend, kernels, on_device
from tests.ops.speculative_cases import OP, in_pages, make_inputs, raw
from tests.support.errors import OF_AN_OP, kind_of

module: Any = importlib.import_module("pdkernels.ops.speculative_attention")

__all__ = ["backend", "kernels"]  # fixtures

MASK = masks.causal(20)
PLAN = MASK.plan(16, 32)
GOOD = make_inputs(20, [24, 7], slots=24, heads=4, kv_heads=2, head_dim=16)
PAGED = in_pages(GOOD, 4)
Q, K_NEW, V_NEW, K_CACHE, V_CACHE, LENGTHS, _ = GOOD
NAMES = ("q", "k_new", "v_new", "k_cache", "v_cache", "lengths", "block_table")

TRACED = {
    "q must have shape (batch, new, heads, head_dim), got (2, 20, 16)": {"q": Q[:, :, 0]},
    "k_cache must have shape (batch, slots, heads, head_dim), got (1, 2, 24, 2, 16). Pass one layer of a stacked cache.": {
        "k_cache": K_CACHE[None],
        "v_cache": V_CACHE[None],
    },
    "v_cache must have shape (num_pages, page_size, heads, head_dim), got": {
        **PAGED._asdict(),
        "v_cache": PAGED.v_cache[..., 0],
    },
    "TypeError: q must be float32, float16 or bfloat16, got torch.int32. Convert it with .to().": {
        name: x.int() for name, x in zip(NAMES[:5], GOOD)
    },
    "TypeError: k_new must be torch.float32 like q, got torch.float16. Convert it with .to().": {"k_new": K_NEW.half()},
    "TypeError: v_cache must be torch.float32 like q, got torch.bfloat16.": {"v_cache": V_CACHE.bfloat16()},
    "v_new must be on cpu like q, got meta. Move it with .to('cpu').": {"v_new": V_NEW.to("meta")},
    "k_new must have a contiguous last dimension, got strides (640, 32, 1, 2). Call .contiguous() on it.": {
        "k_new": K_NEW.transpose(2, 3).contiguous().transpose(2, 3)
    },
    "v_cache must have a contiguous last dimension, got strides (768, 32, 1, 2). A cache is not copied: allocate it so.": {
        "v_cache": V_CACHE.transpose(2, 3).contiguous().transpose(2, 3)
    },
    "k_new must have the batch 2, the 20 tokens and the head_dim 16 of q, got (2, 19, 2, 16)": {
        "k_new": K_NEW[:, 1:],
        "v_new": V_NEW[:, 1:],
    },
    "k_new must have the batch 2, the 20 tokens and the head_dim 16 of q, got (1, 20, 2, 16)": {"k_new": K_NEW[:1]},
    "v_new must have shape (2, 20, 2, 16) like k_new, got (2, 20, 1, 16)": {"v_new": V_NEW[:, :, :1]},
    "k_new must have a number of heads that divides the 3 of q, got 2": {"q": Q[:, :, :3]},
    "head_dim must be a multiple of 8 in [16, 512], got 12. Pad all heads with zeros and pass the scale.": {
        name: x[..., :12] for name, x in zip(NAMES[:5], GOOD)
    },
    "head_dim must be a multiple of 8 in [16, 512], got 0": {name: x[..., :0] for name, x in zip(NAMES[:5], GOOD)},
    "k_cache must have 2 heads of 16 like k_new, got (2, 24, 1, 16)": {
        "k_cache": K_CACHE[:, :, :1],
        "v_cache": V_CACHE[:, :, :1],
    },
    "v_cache must have shape (2, 24, 2, 16) like k_cache, got (2, 23, 2, 16)": {"v_cache": V_CACHE[:, 1:]},
    "k_cache must have the batch 2 of q, got (15, 4, 2, 16). Pass the block_table of a paged cache.": {
        "k_cache": PAGED.k_cache,
        "v_cache": PAGED.v_cache,
    },
    "TypeError: lengths must be an int32 or int64 tensor, got torch.float32.": {"lengths": LENGTHS.float()},
    "lengths must have shape (2), got (1,)": {"lengths": LENGTHS[:1]},
    "lengths must have shape (2), got ()": {"lengths": LENGTHS[0]},
    "lengths must be on cpu, got meta.": {"lengths": LENGTHS.to("meta")},
    "TypeError: block_table must be an int32 or int64 tensor, got torch.int16.": {
        **PAGED._asdict(),
        "block_table": PAGED.block_table.short(),
    },
    "block_table must have shape (2, any), got (1, 6)": {**PAGED._asdict(), "block_table": PAGED.block_table[:1]},
    "k_cache must have a page size of at least 1, got 0": {
        **PAGED._asdict(),
        "k_cache": PAGED.k_cache[:, :0],
        "v_cache": PAGED.v_cache[:, :0],
    },
    "plan must have 20 rows and 20 columns, one for each new token, got 20 and 44. Build the mask for the new tokens alone: all of them see the whole prefix.": {
        "plan": masks.causal(20, 44).plan(16, 32)
    },
    "plan must have 2 samples like q, got 3. Stack one plan for each sample, or pass a single plan that all samples share.": {
        "plan": masks.TilePlan.stack([PLAN] * 3)
    },
    "plan must be on cpu like q, got meta. Move it with plan.to('cpu').": {"plan": PLAN.to("meta")},
}
# Values are known when a kernel runs, and types are checked in Python.
CASES = TRACED | {
    "TypeError: q must be a tensor, got list": {"q": [1.0]},
    "TypeError: k_cache must be a tensor, got NoneType": {"k_cache": None},
    "TypeError: lengths must be an int32 or int64 tensor, got list. Convert it with .to(torch.int64).": {
        "lengths": [24, 7]
    },
    "TypeError: plan must be a TilePlan, got SegmentMask. Call mask.plan(block_q, block_k, q.device).": {"plan": MASK},
    "TypeError: plan must be a TilePlan, got NoneType": {"plan": None},
    "scale must be finite in float32, got inf": {"scale": float("inf")},
    "scale must be finite in float32, got 1e+39": {"scale": 1e39},
    "TypeError: scale must be a number, got str": {"scale": "1"},
    "backend must be one of auto, native, triton, reference, got 'fast'": {"backend": "fast"},
    "lengths must be in [0, 24], got 30 for sequence 1. The cache holds 24 rows per sequence.": {
        "lengths": torch.tensor([24, 30])
    },
    "lengths must be in [0, 24], got -1 for sequence 0.": {"lengths": torch.tensor([-1, 3])},
    "lengths must be in [0, 24], got 25 for sequence 0. The cache holds 24 rows per sequence.": {
        **PAGED._asdict(),
        "lengths": torch.tensor([25, 0]),
    },
    f"block_table[1, 2] must be in [0, 14], got {-(2**20)} for sequence 1. Every page of the prefix must exist.": {
        **PAGED._asdict(),
        "lengths": torch.tensor([24, 9]),
    },
    "block_table[0, 0] must be in [0, 14], got 15 for sequence 0.": {
        **PAGED._asdict(),
        "block_table": torch.full_like(PAGED.block_table, 15),
    },
}


def arguments_of(case: str) -> dict[str, object]:
    return {**dict(zip(NAMES, GOOD)), "plan": PLAN, **CASES[case]}


@pytest.mark.parametrize("case", CASES)
def test_bad_call(backend: str, case: str) -> None:
    kind, text = kind_of(case)
    if backend == "cuda":
        pytest.skip("the same checks, on the CPU")
    with pytest.raises(kind) as raised:
        pd.speculative_attention(**{"backend": backend, **arguments_of(case)})
    assert str(raised.value).startswith(f"pdkernels.speculative_attention: {text}")


@pytest.mark.parametrize(
    "case", [case if n % 4 == 0 else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(TRACED)]
)
def test_bad_call_while_tracing(case: str) -> None:
    """Tracing runs the same checks."""
    call = arguments_of(case)
    compiled = torch.compile(
        lambda: pd.speculative_attention(**call, backend="native"), fullgraph=True, backend="eager"
    )
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(kind_of(case)[1].partition(",")[0])):
        compiled()


def test_values_past_a_length_may_be_anything(backend: str) -> None:
    """Pages that hold no token of a prefix need not exist."""
    device, name = on_device(backend)
    *tensors, table = PAGED.map(lambda x: x.to(device))
    assert (table < 0).any()
    pd.speculative_attention(*tensors, PLAN.to(device), block_table=table, backend=name)


def test_float64_belongs_to_the_reference(kernels: str) -> None:
    device, _ = on_device(kernels)
    *tensors, _ = GOOD.to(torch.float64).map(lambda x: x.to(device))
    text = (
        r"q must be float32, float16 or bfloat16 for the kernels, got torch.float64\. Pass backend='reference', which"
    )
    with pytest.raises(TypeError, match=text):
        pd.speculative_attention(*tensors, PLAN.to(device))
    assert pd.speculative_attention(*tensors, PLAN.to(device), backend="reference").dtype == torch.float64


def test_triton_is_for_gpus() -> None:
    if not pd.has_native():
        pytest.skip("needs the compiled library")
    text = r"backend must be one of auto, native, reference on cpu, got 'triton'\. Pass backend='native', the kernel of this op on cpu\."
    with pytest.raises(NotImplementedError, match=text):
        pd.speculative_attention(*GOOD[:6], PLAN, backend="triton")


@pytest.mark.parametrize("number", range(5))
def test_it_has_no_gradient(kernels: str, number: int) -> None:
    device, _ = on_device(kernels)
    tensors = [x.to(device, copy=True) for x in GOOD[:6]]
    tensors[number].requires_grad_()
    text = r"its inputs must not require gradients, got one that does\. Train with block_sparse_attention, or call it under torch\.no_grad\(\)\."
    with pytest.raises(NotImplementedError, match=text):
        pd.speculative_attention(*tensors, PLAN.to(device))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not pd.speculative_attention(*tensors, PLAN.to(device)).requires_grad


def on_fake_gpu(**changed: object) -> None:
    """The message of a call with these caches on a GPU, which need not exist."""
    *good, block_q, block_k, scale, _ = raw(GOOD, MASK, "cpu")
    with FakeTensorMode():
        tensors = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in good]
        for name, strides in changed.items():
            tensors[NAMES.index(name)] = torch.empty_strided(K_CACHE.shape, strides, device="cuda")
        module.results(module.OP, SpeculativeArguments(*tensors, block_q, block_k, scale))


def test_wide_caches_are_not_copied_on_a_gpu() -> None:
    on_fake_gpu()
    on_fake_gpu(k_cache=(16, 2**23 - 1, 32, 1))
    text = re.escape(
        "v_cache must have less than 8388608 elements from token to token on CUDA, got strides (16, 8388608, 32, 1)."
    )
    with pytest.raises(ValueError, match=text):
        on_fake_gpu(v_cache=(16, 2**23, 32, 1))


def test_debug_checks_look_at_values_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU lengths are clamped; with PDKERNELS_DEBUG_CHECKS=1 they are read back and refused."""
    pytest.importorskip("triton")
    arguments = list(raw(GOOD, MASK, "cpu"))
    arguments[5] = torch.tensor([24, 30])
    monkeypatch.setattr(module, "DEBUG_CHECKS", True)
    with pytest.raises(
        ValueError, match=r"lengths must be in \[0, 24\], got 30 for sequence 1\. The cache holds 24 rows"
    ):
        module.by_triton(module.OP, SpeculativeArguments(*arguments))


def replaced(arguments: tuple, number: int, value: object) -> tuple:
    return (*arguments[:number], value, *arguments[number + 1 :])


@pytest.mark.parametrize(
    "number, change, text",
    [
        (6, lambda x: x[:-1], "plan must have rows for 3 x 2 tiles of 32 x 48, got (4, 4)"),
        (6, lambda x: x.long(), "plan must hold contiguous int32 tensors, got torch.int64 with strides (4, 1)"),
        (7, lambda x: x.flatten(), "plan must have lists of pairs, got"),
        (8, lambda x: x[:, :-1].contiguous(), "plan must have bitmaps of shape (any, 32, 2), got"),
        (9, lambda x: 33, "block_q must be a multiple of 16 in [16, 1024], got 33"),
        (10, lambda x: 0, "block_k must be a multiple of 16 in [16, 1024], got 0"),
    ],
)
def test_bad_raw_plan(kernels: str, number: int, change, text: str) -> None:
    """The raw op refuses what does not fit together, and its fake says why."""
    arguments = raw(make_inputs(70, [9]), masks.causal(70), on_device(kernels)[0])
    bad = replaced(arguments, number, change(arguments[number]))
    with pytest.raises(RuntimeError if kernels == "native" else (ValueError, TypeError)):
        OP(*bad)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises((ValueError, TypeError), match=re.escape(text)),
    ):
        OP(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in bad))


@pytest.mark.parametrize(
    "number, change, text",
    [
        (6, lambda x: x + torch.tensor([100, 100, 100, 0]).int(), "plan must have ascending offsets inside its lists"),
        (6, lambda x: x * 2 + 1, "plan must list every tile once in its order"),
        (7, lambda x: x + torch.tensor([9, 0]).int(), "plan must list tiles that exist"),
        (7, lambda x: x + torch.tensor([0, 9]).int(), "plan must name bitmaps that exist"),
    ],
)
def test_a_plan_of_wild_numbers(number: int, change, text: str) -> None:
    """Kernels derive addresses from a plan: on the CPU its numbers are checked."""
    if not pd.has_native():
        pytest.skip("needs the compiled library")
    arguments = raw(make_inputs(70, [9]), masks.causal(70), "cpu")
    with pytest.raises(OF_AN_OP, match=text):
        OP(*replaced(arguments, number, change(arguments[number])))
