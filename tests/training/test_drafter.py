"""The drafter's loss against the paper's equations written with sets and loops, in fp64; what it reads and what is trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.training import attach_drafter_, drafter_loss
from tests.harness.error_budget import assert_within_budget
from tests.support.errors import kind_of


def distribution(row: list[float], support: list[int], temperature: float) -> dict[int, float]:
    """Softmax over a support."""
    top = max(row[v] for v in support)
    weights = {v: math.exp((row[v] - top) / temperature) for v in support}
    return {v: weight / sum(weights.values()) for v, weight in weights.items()}


def best(row: list[float], count: int) -> set[int]:
    return set(sorted(range(len(row)), key=lambda v: -row[v])[:count])


def by_the_book(
    draft: Tensor, verifier: Tensor, accepted: list[int], temperature: float, top_k: int, eta: float
) -> tuple[float, float]:
    """Equations 6 to 8, and the mean over blocks that have a row."""
    matching, entropies, blocks = 0.0, 0.0, 0
    for zs, targets, count in zip(draft.tolist(), verifier.tolist(), accepted):
        rows = range(min(count + 1, len(zs)))
        if not rows:
            continue
        lk, ce, hits = 0.0, 0.0, 0
        for j in rows:
            support = [
                v for v in best(zs[j], top_k) | best(targets[j], top_k) if min(zs[j][v], targets[j][v]) > -math.inf
            ]
            if not support:
                continue
            p, q = distribution(targets[j], support, temperature), distribution(zs[j], support, temperature)
            share = math.exp(-eta * sum(min(p[v], q[v]) for v in support))
            divergence = sum(p[v] * math.log(p[v] / q[v]) for v in support)
            lk += share * divergence + (1 - share) * sum(abs(p[v] - q[v]) for v in support) / 2
            label = targets[j].index(max(targets[j]))
            if label in support:
                ce -= math.log(distribution(zs[j], support, 1.0)[label])
                hits += 1
        matching, entropies, blocks = matching + lk / len(rows), entropies + ce / max(hits, 1), blocks + 1
    return matching / max(blocks, 1), entropies / max(blocks, 1)


def draw(seed: int, *shape: int, spread: float = 4.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def close(actual: Tensor, expected: float) -> bool:
    return math.isclose(float(actual.detach()), expected, rel_tol=1e-10, abs_tol=1e-13)


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(0, 5),
    vocab=st.integers(1, 12),
    top_k=st.integers(1, 14),
    temperature=st.floats(0.3, 5.0),
    eta=st.floats(0.0, 2.0),
    weight=st.floats(0.0, 2.0),
    ruled_out=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
def test_equations(seed, width, vocab, top_k, temperature, eta, weight, ruled_out, data) -> None:
    accepted = data.draw(st.lists(st.integers(-1, width), max_size=4))
    draft, verifier = draw(seed, len(accepted), width, vocab)
    for logits in (draft, verifier):
        logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < ruled_out / 2] = -math.inf
    draft[torch.rand(draft.shape, generator=torch.Generator().manual_seed(seed + 1)) < ruled_out] = -math.inf
    draft.requires_grad_()
    counts = torch.tensor(accepted, dtype=torch.int32 if seed % 2 else torch.int64)
    loss = drafter_loss(draft, verifier, counts, temperature=temperature, top_k=top_k, eta=eta, ce_weight=weight)
    matching, entropy = by_the_book(draft.detach(), verifier, accepted, temperature, top_k, eta)
    assert close(loss.matching, matching) and close(loss.cross_entropy, entropy)
    assert close(loss.total, matching + weight * entropy)
    (gradient,) = torch.autograd.grad(loss.total, draft)
    assert gradient.isfinite().all()
    rows = torch.arange(width) <= counts[:, None]
    assert not gradient[~rows].any()
    # Adding a constant to a row changes no distribution.
    assert gradient.sum(-1).abs().max().item() < 1e-12 if gradient.numel() else True


def frozen_share(draft: Tensor, verifier: Tensor, accepted: Tensor) -> Tensor:
    """The loss whose gradient the stop-gradient leaves: lambda taken from a detached copy."""
    p, q = (verifier / 3).softmax(-1), (draft / 3).softmax(-1)
    share = torch.exp(-0.5 * torch.minimum(p, q.detach()).sum(-1)).detach()
    row = share * (p * (p / q).log()).sum(-1) + (1 - share) * (p - q).abs().sum(-1) / 2
    row = row - draft.log_softmax(-1).gather(-1, verifier.argmax(-1, keepdim=True))[..., 0]
    rows = torch.arange(draft.shape[1]) <= accepted[:, None]
    return ((row * rows).sum(-1) / rows.sum(-1)).mean()


def test_gradients_stop_at_the_share_and_at_the_verifier() -> None:
    draft, verifier = (tensor.requires_grad_() for tensor in draw(1, 3, 4, 9))
    accepted = torch.tensor([0, 2, 4])
    loss = drafter_loss(draft, verifier, accepted)
    loss.total.backward()
    assert verifier.grad is None
    (expected,) = torch.autograd.grad(frozen_share(draft, verifier.detach(), accepted), draft)
    torch.testing.assert_close(draft.grad, expected, rtol=1e-10, atol=1e-14)
    # With a constant share the gradients are those of the values.
    assert torch.autograd.gradcheck(lambda z: drafter_loss(z, verifier, accepted, eta=0.0, top_k=4).total, draft)
    assert torch.autograd.gradcheck(lambda z: drafter_loss(z, verifier, accepted, eta=1e9, top_k=4).total, draft)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_after_the_first_rejected_token_are_not_read(poison: float, dtype: torch.dtype) -> None:
    clean = [tensor.to(dtype) for tensor in draw(2, 4, 5, 30)]
    accepted = torch.tensor([0, 3, -1, 5])
    rows = torch.arange(5) <= accepted[:, None]
    results = []
    for value in (0.0, poison):
        draft, verifier = (tensor.masked_fill(~rows[..., None], value) for tensor in clean)
        draft.requires_grad_()
        loss = drafter_loss(draft, verifier, accepted, top_k=6)
        results.append((loss.total.detach(), torch.autograd.grad(loss.total, draft)[0]))
    assert results[0][0].dtype == torch.float32 and results[0][0] == results[1][0] and results[0][0] > 0
    assert torch.equal(results[0][1], results[1][1]) and results[1][1].dtype == dtype


def test_float32_is_as_exact_as_the_plain_form() -> None:
    """Against fp64, next to the form on the whole vocabulary."""
    draft, verifier = draw(3, 6, 7, 40)
    accepted = torch.tensor([0, 1, 6, 7, 3, 2])

    def gradient(loss: Any, dtype: torch.dtype) -> Tensor:
        z = draft.float().to(dtype).requires_grad_()
        return torch.autograd.grad(loss(z, verifier.float().to(dtype), accepted), z)[0]

    ours = gradient(lambda *arguments: drafter_loss(*arguments).total, torch.float32)
    assert_within_budget(
        ours, gradient(frozen_share, torch.float64), gradient(frozen_share, torch.float32), name="gradient"
    )


def test_extreme_distributions_stay_finite() -> None:
    draft = torch.tensor([[[1e4, 0.0, -1e4, 0.0], [-1e30, 1e30, 0.0, 0.0]]], requires_grad=True)
    verifier = torch.tensor([[[-1e4, 0.0, 1e4, 0.0], [1e4, 0.0, 0.0, 0.0]]])
    loss = drafter_loss(draft, verifier, torch.tensor([2]), top_k=2)
    assert all(part.isfinite() for part in loss) and torch.autograd.grad(loss.total, draft)[0].isfinite().all()


def test_a_label_outside_the_support_does_not_count() -> None:
    """The drafter excludes the verifier's best token in the second row: the cross-entropy is the first row's alone."""
    verifier = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]])
    draft = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf]]])
    loss = drafter_loss(draft, verifier, torch.tensor([2]))
    assert math.isclose(loss.cross_entropy.item(), math.log(3), rel_tol=1e-6)


def test_nothing_to_read_is_no_loss() -> None:
    for shape, accepted in (((0, 3, 5), []), ((2, 0, 5), [0, 0]), ((2, 3, 5), [-1, -1])):
        draft = torch.zeros(shape, requires_grad=True)
        loss = drafter_loss(draft, torch.ones(shape), torch.tensor(accepted, dtype=torch.int64))
        assert [float(part.detach()) for part in loss] == [0.0, 0.0, 0.0]
        assert not torch.autograd.grad(loss.total, draft)[0].any()


def test_nothing_waits_for_the_device_and_one_graph_serves_all() -> None:
    """Reading a value would break the graph, and a meta tensor has none."""
    meta = drafter_loss(
        torch.zeros(2, 3, 9, device="meta"),
        torch.zeros(2, 3, 9, device="meta"),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    )
    assert meta.total.shape == ()
    compiled = torch.compile(drafter_loss, fullgraph=True, dynamic=True, backend="eager")
    for blocks, width in ((2, 3), (4, 7), (5, 6)):
        draft, verifier = draw(4, blocks, width, 30)
        accepted = torch.arange(blocks)
        with torch.compiler.set_stance("fail_on_recompile" if blocks > 2 else "default"):
            total = compiled(draft, verifier, accepted, top_k=5).total
        assert torch.equal(total, drafter_loss(draft, verifier, accepted, top_k=5).total)


def model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=13, hidden_size=16, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=24
    )
    return Transformer(config, mask_token=12)


def test_a_fresh_adapter_changes_nothing_and_is_all_that_learns() -> None:
    ours = model()
    tokens = torch.arange(8)[None]
    before = ours(tokens).detach()
    parameters = attach_drafter_(ours, 4, scale=3.0, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens, adapted=True), before)
    ins, outs = parameters[::2], parameters[1::2]
    assert all(p.shape == (4, 32) for p in ins) and all(p.shape == (16, 4) and not p.any() for p in outs)
    assert 0.7 < torch.cat([p.detach().flatten() for p in ins]).std() / (3 / math.sqrt(32)) < 1.3
    assert not torch.equal(*ins), "layers have pairs of their own"
    assert [p for p in ours.parameters() if p.requires_grad] == parameters

    again = attach_drafter_(ours, 4)
    assert all(one is other for one, other in zip(again, parameters, strict=True)), "an adapter that is there is kept"
    with pytest.raises(ValueError, match="rank must be 4, that of the adapter the model has, got 5"):
        attach_drafter_(ours, 5)
    same = attach_drafter_(model(), 4, scale=3.0, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(one, other) for one, other in zip(same, parameters, strict=True))


def test_training_makes_drafts_longer() -> None:
    """A few steps on the model's own text; nothing but the adapter moves, so the text stays."""
    ours, size = model(3), 6
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    prompt = torch.tensor([3, 1, 4])
    options = {"max_new_tokens": 24, "end_tokens": []}
    greedy = generate(ours, prompt, **options).tokens
    text = torch.cat([prompt, greedy])
    optimizer = torch.optim.Adam(attach_drafter_(ours, 4, scale=4.0), lr=0.03)
    drafts = {"method": "linear_self_speculation", "block_size": size, **options}
    before = generate(ours, prompt, **drafts).stats.forwards

    # Every position of the text has a draft: ``[known token, masks]`` after a causal prefix. Rows predict text[start + 1
    # :].
    starts, position = torch.arange(3, 21)[:, None], torch.arange(len(text))
    inside = (position >= starts) & (position < starts + size)
    mask = (position <= position[:, None]) | inside[:, None] & inside[..., None]
    tokens = text.where(~inside | (position == starts), ours.mask_token)
    rows = starts + 1 + torch.arange(size - 1)
    verifier = ours(text[None])[0].detach()[rows - 1]
    for _ in range(30):
        draft = ours(tokens, mask=mask, adapted=inside, rows=rows)
        accepted = (draft.argmax(-1) == verifier.argmax(-1)).long().cumprod(-1).sum(-1)
        optimizer.zero_grad()
        drafter_loss(draft, verifier, accepted).total.backward()
        optimizer.step()
    result = generate(ours, prompt, **drafts)
    assert torch.equal(result.tokens, greedy)
    assert result.stats.forwards < before


ZEROS = torch.zeros(2, 3, 5)
COUNTS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "text, call",
    {
        "draft_logits must have shape (blocks, k, vocab), got (3, 5)": lambda: drafter_loss(ZEROS[0], ZEROS[0], COUNTS),
        "verifier_logits must have shape (2, 3, 5), got (2, 2, 5)": lambda: drafter_loss(ZEROS, ZEROS[:, :2], COUNTS),
        "accepted must have shape (2,), got (1,)": lambda: drafter_loss(ZEROS, ZEROS, COUNTS[:1]),
        "TypeError: accepted must be int32 or int64, got torch.float32": lambda: drafter_loss(
            ZEROS, ZEROS, COUNTS.float()
        ),
        "TypeError: draft_logits must be floating, got torch.int64": lambda: drafter_loss(ZEROS.long(), ZEROS, COUNTS),
        "temperature must be positive, got 0.0": lambda: drafter_loss(ZEROS, ZEROS, COUNTS, temperature=0.0),
        "top_k must be at least 1, got 0": lambda: drafter_loss(ZEROS, ZEROS, COUNTS, top_k=0),
        "TypeError: top_k must be an int, got float": lambda: drafter_loss(ZEROS, ZEROS, COUNTS, top_k=2.5),
        "rank must be at least 1, got 0": lambda: attach_drafter_(model(), 0),
        "TypeError: rank must be an int, got float": lambda: attach_drafter_(model(), 1.0),
    }.items(),
)
def test_errors(call: Any, text: str) -> None:
    error, text = kind_of(text)
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value) and str(caught.value).startswith("pdkernels.training.")
