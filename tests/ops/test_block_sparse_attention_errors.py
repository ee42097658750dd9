"""What block_sparse_attention refuses, and its messages."""

from __future__ import annotations

import re

import pytest
import torch

import pdkernels as pd
from pdkernels import backends, masks
from tests.ops.attention_cases import BACKWARD, OP, backend, kernels, make_inputs, on_device, raw
from tests.support.errors import OF_AN_OP, kind_of

__all__ = ["backend", "kernels"]  # fixtures

MASK = masks.causal(40)
PLAN = MASK.plan(16, 32)
Q, K, V = make_inputs(40, 40, batch=2, heads=4, kv_heads=2, head_dim=16)[:3]

CASES = {
    "TypeError: q must be a tensor, got list": {"q": [1.0]},
    "q must have shape (batch, length, heads, head_dim), got (2, 40, 16)": {"q": Q[:, :, 0]},
    "TypeError: q must be float32, float16 or bfloat16, got torch.int32. Convert it with .to().": {
        "q": Q.int(),
        "k": K.int(),
        "v": V.int(),
    },
    "TypeError: k must be torch.float32 like q, got torch.float16. Convert it with .to().": {"k": K.half()},
    "TypeError: v must be torch.float32 like q, got torch.bfloat16.": {"v": V.bfloat16()},
    "v must be on cpu like q, got meta. Move it with .to('cpu').": {"v": V.to("meta")},
    "k must have a contiguous last dimension, got strides (1280, 32, 1, 2). Call .contiguous() on it.": {
        "k": K.transpose(2, 3).contiguous().transpose(2, 3)
    },
    "k must have the batch 2 and the head_dim 16 of q, got (1, 40, 2, 16)": {"k": K[:1], "v": V[:1]},
    "k must have the batch 2 and the head_dim 32 of q, got (2, 40, 2, 16)": {"q": Q.repeat(1, 1, 1, 2)},
    "v must have shape (2, 40, 2, 16) like k, got (2, 40, 1, 16)": {"v": V[:, :, :1]},
    "k must have a number of heads that divides the 3 of q, got 2": {"q": Q[:, :, :3]},
    "k must have a number of heads that divides the 4 of q, got 0": {"k": K[:, :, :0], "v": V[:, :, :0]},
    "head_dim must be a multiple of 8 in [16, 512], got 12. Pad all heads with zeros and pass the scale.": {
        "q": Q[..., :12],
        "k": K[..., :12],
        "v": V[..., :12],
    },
    "head_dim must be a multiple of 8 in [16, 512], got 0": {
        name: x[..., :0] for name, x in (("q", Q), ("k", K), ("v", V))
    },
    "head_dim must be a multiple of 8 in [16, 512], got 528": {
        name: x.repeat(1, 1, 1, 33) for name, x in (("q", Q), ("k", K), ("v", V))
    },
    "TypeError: plan must be a TilePlan, got SegmentMask. Call mask.plan(block_q, block_k, q.device).": {"plan": MASK},
    "TypeError: plan must be a TilePlan, got NoneType": {"plan": None},
    "plan must have 40 rows and 40 columns like q and k, got 39 and 39. Build the mask for these lengths; pack(..., length=n) pads one.": {
        "plan": masks.causal(39).plan(16, 32)
    },
    "plan must have 2 samples like q, got 3. Stack one plan for each sample, or pass a single plan that all samples share.": {
        "plan": masks.TilePlan.stack([PLAN] * 3)
    },
    "plan must be on cpu like q, got meta. Move it with plan.to('cpu').": {"plan": PLAN.to("meta")},
    "scale must be finite in float32, got inf": {"scale": float("inf")},
    "scale must be finite in float32, got nan": {"scale": float("nan")},
    "scale must be finite in float32, got 1e+39": {"scale": 1e39},
    "scale must be finite in float32, got -1000": {"scale": -(10**39)},
    "TypeError: scale must be a number, got str": {"scale": "1"},
    "backend must be one of auto, native, triton, reference, got 'fast'": {"backend": "fast"},
}


@pytest.mark.parametrize("case", CASES)
def test_bad_call(backend: str, case: str) -> None:
    kind, text = kind_of(case)
    if backend == "cuda":
        pytest.skip("the same checks, on the CPU")
    with pytest.raises(kind) as raised:
        pd.block_sparse_attention(**{"q": Q, "k": K, "v": V, "plan": PLAN, "backend": backend, **CASES[case]})
    assert str(raised.value).startswith(f"pdkernels.block_sparse_attention: {text}")


TRACED = [
    case
    for case in CASES
    if CASES[case].keys() <= {"q", "k", "v", "plan"} and case != "TypeError: q must be a tensor, got list"
]


@pytest.mark.parametrize(
    "case", [case if n % 4 == 0 else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(TRACED)]
)
def test_bad_call_while_tracing(case: str) -> None:
    """Tracing runs the same checks."""
    _, text = kind_of(case)
    call = {"q": Q, "k": K, "v": V, "plan": PLAN, **CASES[case]}
    compiled = torch.compile(
        lambda: pd.block_sparse_attention(**call, backend="native"), fullgraph=True, backend="eager"
    )
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(text.partition(",")[0])):
        compiled()


def test_float64_belongs_to_the_reference(kernels: str) -> None:
    device, _ = on_device(kernels)
    q, k, v = (x.to(device).double() for x in (Q, K, V))
    text = (
        r"q must be float32, float16 or bfloat16 for the kernels, got torch.float64\. Pass backend='reference', which"
    )
    with pytest.raises(TypeError, match=text):
        pd.block_sparse_attention(q, k, v, PLAN.to(device))
    assert pd.block_sparse_attention(q, k, v, PLAN.to(device), backend="reference").dtype == torch.float64


def test_triton_is_for_gpus() -> None:
    if not pd.has_native():
        pytest.skip("needs the compiled library")
    text = r"backend must be one of auto, native, reference on cpu, got 'triton'\. Pass backend='native', the kernel of this op on cpu\."
    with pytest.raises(NotImplementedError, match=text):
        pd.block_sparse_attention(Q, K, V, PLAN, backend="triton")


def test_no_cuda_kernel_becomes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Triton is missing, a call on CUDA reports it."""
    monkeypatch.setitem(backends.CHOICES, "block_sparse_attention", {("reference", "cuda"): "reference"})
    with pytest.raises(
        NotImplementedError,
        match=r"one of reference on cuda, got 'auto'\. Install triton, or pass backend='reference'\.",
    ):
        backends.resolve("block_sparse_attention", "auto", torch.device("cuda"))


def test_a_gradient_is_not_differentiated_again(kernels: str) -> None:
    device, _ = on_device(kernels)
    q = Q.to(device, copy=True).requires_grad_()
    out = pd.block_sparse_attention(q, K.to(device), V.to(device), PLAN.to(device))
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="got a second derivative. Pass backend='reference'"):
        gradient.sum().backward()


def test_derivatives_by_functions_are_refused_and_not_dropped() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate q, k, v and sinks\."):
        torch.func.grad(lambda q: pd.block_sparse_attention(q, K, V, PLAN).sum())(Q)
    torch.func.grad(lambda q: pd.block_sparse_attention(q, K, V, PLAN, backend="reference").sum())(Q)


def replaced(arguments: tuple, index: int, value: object) -> tuple:
    return (*arguments[:index], value, *arguments[index + 1 :])


@pytest.mark.parametrize(
    "index, change, text",
    [
        (3, lambda x: x[:-1], "plan must have rows for 3 x 1 tiles of 32 x 48, got (3, 4)"),
        (3, lambda x: x[:, :3].contiguous(), "plan must have rows for 3 x 1 tiles of 32 x 48, got (4, 3)"),
        (3, lambda x: x[None, None], "plan must have rows for 3 x 1 tiles of 32 x 48, got (1, 1, 4, 4)"),
        (3, lambda x: x.long(), "plan must hold contiguous int32 tensors, got torch.int64 with strides (4, 1)"),
        (4, lambda x: x.flatten(), "plan must have lists of pairs, got"),
        (4, lambda x: x[:, :1].contiguous(), "plan must have lists of pairs, got"),
        (5, lambda x: x[:, :-1], "plan must hold contiguous int32 tensors"),
        (5, lambda x: x[:, :-1].contiguous(), "plan must have bitmaps of shape (any, 32, 2), got"),
        (6, lambda x: 33, "block_q must be a multiple of 16 in [16, 1024], got 33"),
        (7, lambda x: 0, "block_k must be a multiple of 16 in [16, 1024], got 0"),
    ],
)
def test_bad_raw_plan(kernels: str, index: int, change, text: str) -> None:
    """The raw op refuses what does not fit together, and its fake says why."""
    mask = masks.causal(70)[:, :40]
    forward, _ = raw(mask, make_inputs(70, 40), on_device(kernels)[0])
    bad = replaced(forward, index, change(forward[index]))
    with pytest.raises(RuntimeError if kernels == "native" else (ValueError, TypeError)):
        OP(*bad)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises((ValueError, TypeError), match=re.escape(text)),
    ):
        OP(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in bad))


@pytest.mark.parametrize(
    "index, value, text",
    [
        ((4, 3), 0, "plan must list every tile once in its order"),
        ((0, 0), -1, "plan must have ascending offsets inside its lists"),
        ((4, 1), 0, "plan must have ascending offsets inside its lists"),
        ((2, 2), 2**31 - 1, "plan must have ascending offsets inside its lists"),
    ],
)
def test_rows_of_wild_numbers(index: tuple[int, int], value: int, text: str) -> None:
    """A plan is trusted with addresses: on the CPU its numbers are looked at, in both directions and both passes."""
    if not pd.has_native():
        pytest.skip("needs the compiled library")
    forward, backward = raw(masks.causal(70), make_inputs(70, 70), "cpu")
    rows = forward[3].clone()
    rows[index] = value
    for op, arguments, at in ((OP, forward, 3), (BACKWARD, backward, 7)):
        with pytest.raises(OF_AN_OP, match=text):
            op(*replaced(arguments, at, rows))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "of_range, column, value, text",
    [
        (True, 0, -1, "plan must have ranges of whole tiles that exist"),
        (True, 1, 3, "plan must have ranges of whole tiles that exist"),  # ragged, with a third that is not
        (True, 0, 2**31 - 1, "plan must have ranges of whole tiles that exist"),
        (False, 0, 3, "plan must list tiles that exist"),
        (False, 0, -1, "plan must list tiles that exist"),
        (False, 1, 99, "plan must name bitmaps that exist"),
        (False, 1, -2, "plan must name bitmaps that exist"),
    ],
)
def test_lists_of_wild_numbers(transposed: bool, of_range: bool, column: int, value: int, text: str) -> None:
    if not pd.has_native():
        pytest.skip("needs the compiled library")
    mask = masks.full(70) if of_range else masks.causal(70)
    forward, _ = raw(mask, make_inputs(70, 70), "cpu")
    _, _, _, rows, lists, _, block_q, block_k, _ = forward
    begin, middle, end, _ = rows[-(-70 // block_q) if transposed else 0].tolist()
    assert begin < middle if of_range else middle < end
    wild = lists.clone()
    wild[begin if of_range else middle, column] = value
    with pytest.raises(OF_AN_OP, match=text):
        OP(*replaced(forward, 4, wild))


@pytest.mark.parametrize(
    "index, text",
    [(0, "grad_out must be torch.float32 of shape (2, 40, 4, 32) on cpu"), (3, "lse must be"), (1, "grad_lse must be")],
)
def test_bad_raw_gradient(kernels: str, index: int, text: str) -> None:
    if kernels == "cuda":
        pytest.skip("the same checks, on the CPU")
    _, backward = raw(masks.causal(40), make_inputs(40, 40), "cpu")
    bad = replaced(backward, index, backward[index][:1])
    with pytest.raises(RuntimeError):
        BACKWARD(*bad)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(ValueError, match=re.escape(text)),
    ):
        BACKWARD(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in bad))
