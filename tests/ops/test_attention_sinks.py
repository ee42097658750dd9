"""Attention sinks and heads wider than 256 in the attention ops: transformers' gpt-oss attention, under a dense mask, is the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from pdkernels._attention import AttentionArguments, SpeculativeArguments
from pdkernels.masks import SegmentMask
from pdkernels.reference.block_sparse_attention import block_sparse_attention as reference
from tests.harness.error_budget import assert_within_budget
from tests.harness.triton_interpreter import TRITON_FOUND, triton_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter computes products of bfloat16 wrongly.
IMPLEMENTATIONS = [("native", dtype) for dtype in DTYPES] + [("triton", torch.float16), ("triton", torch.float32)]
each_implementation = pytest.mark.parametrize("backend, dtype", IMPLEMENTATIONS, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def oracle(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, scale: float) -> Tensor:
    """gpt-oss, in float64."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    module = SimpleNamespace(sinks=sinks.double(), num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    hidden = torch.zeros(1, 1, *mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    return gpt_oss.eager_attention_forward(module, *heads_first, hidden, scale)[0]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(backend: str, given: AttentionArguments) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        if not TRITON_FOUND:
            pytest.skip("needs triton")
        from pdkernels.triton.block_sparse_attention import forward as launch

        moved = (x.to(triton_device()) if isinstance(x, Tensor) else x for x in given)
        out, lse = launch(AttentionArguments(*moved))
        return out.cpu(), lse.cpu()
    return torch.ops.pdkernels.block_sparse_attention(*given)


MASK = masks.noise_aware_causal(20, 8, 5)


@pytest.mark.covering
@each_implementation
@pytest.mark.parametrize("heads, head_dim", [((4, 2), 32), ((6, 2), 40), ((2, 1), 512), ((2, 2), 264)])
def test_forward(backend: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    n, scale = MASK.q_len, head_dim**-0.5
    q, k, v = (randn(i, 2, n, count, head_dim, dtype=dtype) for i, count in enumerate((heads[0], heads[1], heads[1])))
    sinks = 2 * randn(3, heads[0])
    sinks[0] = float("-inf")  # as without one
    out, lse = forward(backend, AttentionArguments(q, k, v, *MASK.plan(32, 32).arguments, scale, sinks))
    exact = oracle(q, k, v, sinks, MASK.dense(), scale)
    device = triton_device() if backend == "triton" else "cpu"  # where PyTorch's error is taken
    same, same_lse = reference(*(x.to(device) for x in (q, k, v, MASK.dense())), scale, sinks.to(device))
    assert_within_budget(out, exact, same, name="out")
    _, exact_lse = reference(*(x.double() for x in (q, k, v)), MASK.dense(), scale, sinks.double())
    assert_within_budget(lse, exact_lse, same_lse, name="lse")
    without = forward(backend, AttentionArguments(q, k, v, *MASK.plan(32, 32).arguments, scale))[0]
    assert torch.equal(out[:, :, 0], without[:, :, 0])
    assert not torch.equal(out[:, :, 1], without[:, :, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 320])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_gradients(dtype: torch.dtype, head_dim: int, size: float) -> None:
    """Of everything, also where a sink is most of a row, and where scores are large."""
    n = MASK.q_len
    q, k, v = (randn(i, 2, n, count, head_dim, dtype=dtype) * size**0.5 for i, count in enumerate((4, 2, 2)))
    sinks = size * randn(3, 4)
    grads = randn(4, 2, n, 4, head_dim, dtype=dtype), randn(5, 2, 4, n)

    def gradients(run: Any, to: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(to).requires_grad_() for x in (q, k, v)]
        leaves.append(sinks.to(torch.promote_types(to, torch.float32)).requires_grad_())
        out, lse = run(*leaves)
        return list(torch.autograd.grad((out, lse), leaves, (grads[0].to(to), grads[1].to(lse.dtype))))

    plan = MASK.plan(32, 32)
    actual = gradients(lambda q, k, v, s: pd.block_sparse_attention(q, k, v, plan, sinks=s, return_lse=True), dtype)
    exact, same = (
        gradients(lambda q, k, v, s: reference(q, k, v, MASK.dense(), None, s), to) for to in (torch.float64, dtype)
    )
    for name, *three in zip(("q", "k", "v"), actual, exact, same):
        assert_within_budget(*three, name=name)
    # Four numbers are too few for a budget of errors.
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert (actual[3] - exact[3]).abs().max() <= bound * exact[3].abs().max()


def test_the_gradient_of_gpt_oss() -> None:
    q, k, v = (randn(i, 1, MASK.q_len, count, 32) for i, count in enumerate((4, 2, 2)))
    leaves = [x.requires_grad_() for x in (q, k, v, randn(3, 4))]
    grad = randn(4, *q.shape)
    found = torch.autograd.grad(
        pd.block_sparse_attention(*leaves[:3], MASK.plan(32, 32), sinks=leaves[3]), leaves, grad
    )
    wanted = torch.autograd.grad(oracle(*leaves, MASK.dense(), 32**-0.5), leaves, grad.double())
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rows_that_see_a_sink_alone(backend: str) -> None:
    mask = masks.pack([masks.causal(30)], length=50)
    q, k, v = (randn(i, 1, 50, 2, 32).requires_grad_() for i in range(3))
    sinks = torch.tensor([1.5, float("-inf")], requires_grad=True)
    out, lse = pd.block_sparse_attention(q, k, v, mask.plan(16, 16), sinks=sinks, return_lse=True, backend=backend)
    assert (out[:, 30:] == 0).all()
    assert (lse[:, 0, 30:] == 1.5).all() and lse[:, 1, 30:].isneginf().all()
    (out.sum() * 0 + lse[:, 0].sum()).backward()
    assert (q.grad[:, 30:] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v, sinks))
    assert sinks.grad[0] > 20 and sinks.grad[1] == 0  # 20 rows have no other score


def speculative(backend: str, *tensors: Any, mask: SegmentMask, **options: Any) -> tuple[Tensor, Tensor]:
    plan = mask.plan(16, 32)
    if backend == "triton":
        if not TRITON_FOUND:
            pytest.skip("needs triton")
        from pdkernels.triton.speculative_attention import forward as launch

        given = SpeculativeArguments(*tensors, *plan.arguments, tensors[0].shape[-1] ** -0.5, **options)
        moved = (x.to(triton_device()) if isinstance(x, Tensor) else x for x in given)
        out, lse = launch(SpeculativeArguments(*moved))
        return out.cpu(), lse.cpu()
    return pd.speculative_attention(*tensors, plan, **options, return_lse=True)


@pytest.mark.covering
@each_implementation
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "mask, head_dim, slots", [(masks.causal(1), 32, 600), (masks.quadratic(3), 40, 600), (masks.causal(9), 512, 300)]
)
def test_speculative(
    backend: str, dtype: torch.dtype, mask: SegmentMask, head_dim: int, slots: int, page_size: int
) -> None:
    """Prefixes of one split and of several, in which a sink counts once; an empty one."""
    new, lengths = mask.q_len, torch.tensor([slots - 5, 0, 37])
    q, k, v = (randn(i, 3, new, count, head_dim, dtype=dtype) for i, count in enumerate((4, 2, 2)))
    k_cache, v_cache = (randn(i, 3, slots, 2, head_dim, dtype=dtype) for i in (3, 4))
    sinks = 2 * randn(5, 4)
    options: dict[str, Any] = {"sinks": sinks}
    caches = k_cache, v_cache
    if page_size:
        pages = -(-slots // page_size)
        order = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(6)).view(3, pages)
        padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - slots)) for x in caches)
        caches = tuple(x.reshape(3 * pages, page_size, 2, head_dim)[order.flatten().argsort()] for x in padded)
        options["block_table"] = order.to(torch.int32)
    out, lse = speculative(backend, q, k, v, *caches, lengths, mask=mask, **options)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (
            torch.cat([old[b : b + 1, :length], x[b : b + 1]], 1) for old, x in ((k_cache, k), (v_cache, v))
        )
        dense = torch.cat([torch.ones(new, length, dtype=torch.bool), mask.dense()], 1)
        exact = oracle(q[b : b + 1], keys, values, sinks, dense, head_dim**-0.5)
        device = triton_device() if backend == "triton" else "cpu"  # where PyTorch's error is taken
        same, same_lse = reference(*(x.to(device) for x in (q[b : b + 1], keys, values, dense)), None, sinks.to(device))
        assert_within_budget(out[b : b + 1], exact, same, name="out")
        doubles = (x.double() for x in (q[b : b + 1], keys, values))
        assert_within_budget(lse[b : b + 1], reference(*doubles, dense, None, sinks.double())[1], same_lse, name="lse")


def test_several_splits_of_the_cpu() -> None:
    """A split of the CPU has 4,096 positions."""
    q, k, v = (randn(i, 1, 1, count, 16) for i, count in enumerate((4, 2, 2)))
    k_cache, v_cache = (randn(i, 1, 9000, 2, 16) for i in (3, 4))
    sinks = torch.tensor([8.0, 0.0, -3.0, 12.0])
    out = speculative("native", q, k, v, k_cache, v_cache, torch.tensor([8990]), mask=masks.causal(1), sinks=sinks)[0]
    keys, values = (torch.cat([old[:, :8990], x], 1) for old, x in ((k_cache, k), (v_cache, v)))
    wanted = oracle(q, keys, values, sinks, torch.ones(1, 8991, dtype=torch.bool), 0.25)
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 512])
def test_a_row_has_the_same_bits_cached_or_new_alone_or_packed(dtype: torch.dtype, head_dim: int) -> None:
    length, n = 100, 12
    q, k, v = (randn(i, 1, length + n, count, head_dim, dtype=dtype) for i, count in enumerate((4, 2, 2)))
    sinks = randn(3, 4)

    def rows(first: int, count: int) -> Tensor:
        own = slice(first, first + count)
        given = (q[:, own], k[:, own], v[:, own], k, v, torch.tensor([first]))
        return speculative("native", *given, mask=masks.causal(count), sinks=sinks)[0]

    together = rows(length, n)
    assert torch.equal(together, torch.cat([rows(length + i, 1) for i in range(n)], 1))
    packed = pd.speculative_attention(
        *(x[0, length:] for x in (q, k, v)), k, v, torch.tensor([length]), masks.causal(n).plan(16, 32),
        cu_seqlens=torch.tensor([0, n]), sinks=sinks,
    )  # fmt: skip
    assert torch.equal(packed, together[0])


def test_sinks_that_do_not_fit() -> None:
    q, k, v = (torch.zeros(1, 16, heads, 16) for heads in (4, 2, 2))
    plan = masks.causal(16).plan(16, 16)
    lengths = torch.zeros(1, dtype=torch.int64)
    for call in (
        lambda sinks: pd.block_sparse_attention(q, k, v, plan, sinks=sinks),
        lambda sinks: pd.speculative_attention(q, k, v, k, v, lengths, plan, sinks=sinks),
        lambda sinks: pd.speculative_attention_append_(q, k, v, k.clone(), v.clone(), lengths, plan, sinks=sinks),
    ):
        with pytest.raises(ValueError, match=r"sinks must have shape \(4,\), one for each query head, got \(2,\)"):
            call(torch.zeros(2))
        with pytest.raises(TypeError, match="sinks must be of a floating-point dtype, got torch.int64"):
            call(torch.zeros(4, dtype=torch.int64))
        with pytest.raises(TypeError, match="sinks must be a tensor, got list"):
            call([0.0] * 4)
        call(torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("head_dim, refused", [(512, True), (256, False)])
def test_gradients_that_need_more_shared_memory_than_there_is(
    head_dim: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 with heads of 512 takes 132,096 bytes; sm_86, 89 and 120 have 101,376."""
    pytest.importorskip("triton", reason="needs triton")
    from pdkernels.triton.block_sparse_attention import _check_shared_memory

    facts = SimpleNamespace(shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    q: Any = SimpleNamespace(shape=(1, 8, 2, head_dim), device=torch.device("cuda", 0), element_size=lambda: 4)
    if refused:
        with pytest.raises(NotImplementedError, match="head_dim must be smaller for gradients in float32"):
            _check_shared_memory(q)
        facts.shared_memory_per_block_optin = 166912  # sm_80
    _check_shared_memory(q)
