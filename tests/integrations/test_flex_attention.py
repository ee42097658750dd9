"""The drop-in `flex_attention` against torch's own."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

from pdkernels import masks
from pdkernels.integrations import flex_attention as module
from pdkernels.integrations.flex_attention import flex_attention, from_block_mask
from tests.support.errors import refused

LENGTHS = torch.tensor([20, 50])


def draw(q_heads: int = 4, kv_heads: int = 4, batch: int = 2, q_len: int = 50, kv_len: int = 50) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.randn(batch, heads, length, 16) for heads, length in sizes]


def block_mask(mask_mod, batch: int | None = None, q_len: int = 50, kv_len: int = 50) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, q_len, kv_len, device="cpu", BLOCK_SIZE=16)


def causal(b, h, q, k):
    return q >= k


@pytest.mark.covering
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        block_mask(causal),
        block_mask(lambda b, h, q, k: (k <= q) & (k < LENGTHS[b]), batch=2),
        block_mask(lambda b, h, q, k: q >= k + 7),  # the first rows see nothing
    ],
    ids=["none", "causal", "batch", "blind rows"],
)
def test_results_of_torch(heads: tuple[int, int], scale: float | None, mask: BlockMask | None) -> None:
    q, k, v = draw(*heads)
    options = {"block_mask": mask, "scale": scale, "enable_gqa": heads[0] != heads[1]}
    out, lse = flex_attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = torchs(q, k, v, return_aux=AuxRequest(lse=True), **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse.lse, rtol=0, atol=2e-6)
    assert torch.equal(flex_attention(q, k, v, **options), out)
    again, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    assert torch.equal(again, out) and torch.equal(aux.lse, lse) and aux.max_scores is None
    assert flex_attention(q, k, v, return_aux=AuxRequest(), **options)[1].lse is None


def test_keys_without_a_batch() -> None:
    q, k, v = draw()
    mask = block_mask(lambda b, h, q, k: (k <= q) & (k < LENGTHS[b]), batch=2)
    for some in ([k[:1], v[:1]], [k[:1], v[:1].clone()]):
        torch.testing.assert_close(
            flex_attention(q, *some, block_mask=mask), torchs(q, *some, block_mask=mask), rtol=0, atol=2e-6
        )


def test_gradients() -> None:
    """torch has no backward pass on the CPU: against dense attention."""
    q, k, v = (x.requires_grad_() for x in draw(4, 2, q_len=20))
    mask = block_mask(lambda b, h, q, k: q + 30 >= k, q_len=20)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    dense = masks.causal(20, 50).dense()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    weight = torch.randn_like(out)
    for mine, other in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)


def test_masks_and_plans_of_ours() -> None:
    q, k, v = draw()
    expected = flex_attention(q, k, v, block_mask=block_mask(causal))
    for mask in (masks.causal(50), masks.causal(50).plan(16, 16), from_block_mask(block_mask(causal))):
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, rtol=0, atol=2e-6)


def test_plans_are_kept_as_long_as_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BlockMask] = []
    monkeypatch.setattr(module, "from_block_mask", lambda mask: made.append(mask) or from_block_mask(mask))
    q, k, v = draw(q_len=48, kv_len=48)
    module._plans.clear()
    mask = block_mask(causal, q_len=48, kv_len=48)
    for _ in range(3):
        first = flex_attention(q, k, v, block_mask=mask)
    assert len(made) == 1
    mask.full_kv_num_blocks.zero_()  # the triangle's tiles only
    second = flex_attention(q, k, v, block_mask=mask)
    assert len(made) == 2 and not torch.equal(first, second)
    row = torch.arange(48)
    dense = (row[:, None] >= row) & (row[:, None] // 16 == row // 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(second, expected, rtol=0, atol=2e-6)
    made.clear()
    assert len(module._plans) == 1
    del mask
    gc.collect()
    assert len(module._plans) == 0


def test_compiled() -> None:
    q, k, v = draw()
    mask = block_mask(causal)
    whole = torch.compile(
        lambda q, k, v, plan: flex_attention(q, k, v, block_mask=plan), fullgraph=True, backend="aot_eager"
    )
    broken = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), backend="aot_eager")
    expected = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(whole(q, k, v, from_block_mask(mask)), expected)
    assert torch.equal(broken(q, k, v), expected)


def softcap(score, b, h, q, k):
    return 20 * torch.tanh(score / 20)


@pytest.mark.parametrize(
    "sentence, options",
    {
        r"NotImplementedError: score_mod must be None, got softcap\. Fold it": {"score_mod": softcap},
        r"NotImplementedError: kernel_options must be None, got dict\.": {"kernel_options": {"BLOCK_M": 64}},
        r"NotImplementedError: return_aux must not ask for the maximal scores": {
            "return_aux": AuxRequest(max_scores=True)
        },
        r"return_lse must be False with return_aux": {"return_lse": True, "return_aux": AuxRequest(lse=True)},
        r"key must have the 4 heads of query, got 2\. Or give enable_gqa=True\.": {"enable_gqa": False},
        r"TypeError: block_mask must be a BlockMask, got Tensor\.": {"block_mask": torch.ones(50, 50)},
        r"plan must have 50 rows and 50 columns": {"block_mask": block_mask(causal, kv_len=40)},
        r"block_mask must have one head, got 2": {
            "block_mask": create_block_mask(lambda b, h, q, k: k <= q + h, None, 2, 50, 50, device="cpu", BLOCK_SIZE=16)
        },
    }.items(),
)
def test_refused(options, sentence: str) -> None:
    q, k, v = draw(4, 2)
    with refused(sentence):
        flex_attention(q, k, v, **{"enable_gqa": True, **options})
