"""`anchored` against the masks of the projects that it supports, each written as a rule on pairs, on random packs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pdkernels as pd
from pdkernels import masks
from tests.support.errors import refused

PACKS = 1000


def pack(draw: random.Random, most: int = 60) -> Tensor:
    """Numbers of documents, then padding."""
    ids: list[int] = []
    for document in range(draw.randint(1, 6)):
        ids += [document] * draw.randint(1, most // 5)
    return torch.tensor(ids + [-1] * draw.choice([0, 0, draw.randint(1, 9)]))


def dflash(documents: Tensor, anchors: Tensor, block: int, window: int | None, non_causal: bool) -> Tensor:
    """speculators: queries are the blocks; keys are the base, then the blocks."""
    rows = torch.arange(len(anchors) * block)
    anchor, base = anchors[rows // block][:, None], torch.arange(len(documents))
    own = documents[anchor]
    before = (documents == own) & (own != -1) & (base < anchor)
    if window is not None:
        before &= base >= anchor - window
    same = rows[:, None] // block == rows // block
    return torch.cat([before, same if non_causal else same & (rows <= rows[:, None])], 1)


def test_dflash() -> None:
    draw = random.Random(0)
    for _ in range(PACKS):
        documents, block = pack(draw), draw.choice([1, 2, 3, 5, 8])
        chosen = sorted(draw.sample(range(len(documents)), draw.randint(1, min(12, len(documents)))))
        anchors = torch.tensor(chosen + [0] * draw.choice([0, 0, 3]))  # the rest repeats anchor 0
        window, non_causal = draw.choice([None, None, 1, 4, 9]), draw.random() < 0.5
        expected = dflash(documents, anchors, block, window, non_causal)
        mask = masks.anchored(documents, anchors, block, "full" if non_causal else "causal", window)
        assert mask.queries.shape == tuple(expected.shape)
        assert torch.equal(mask.queries.dense(), expected)
        assert torch.equal(mask.queries.plan(16, 16).dense(), expected)
        assert not mask[: mask.base_len].dense().any()


def peagle(documents: Tensor, anchors: Tensor, depths: Tensor) -> Tensor:
    """speculators: a row is a depth after an anchor; the base tokens are depth 0."""
    own = documents[anchors]
    same_document = (own[:, None] == own) & (own != -1)
    base = (depths == 0) & (anchors <= anchors[:, None])
    rollout = (anchors == anchors[:, None]) & (depths <= depths[:, None])
    return same_document & (base | rollout)


def test_peagle() -> None:
    draw = random.Random(1)
    for _ in range(PACKS):
        documents = pack(draw, 40)
        inside = (documents != -1).nonzero().flatten().tolist()
        # Depth by depth, as sampled: a deeper row exists only after the anchors that the previous depth kept.
        rows = [(anchor, 0) for anchor in range(len(documents))]
        kept = inside
        for depth in range(1, draw.randint(2, 6)):
            kept = sorted(draw.sample(kept, len(kept) * 2 // 3))
            rows += [(anchor, depth) for anchor in kept]
        anchors, depths = torch.tensor(rows).T
        expected = peagle(documents, anchors, depths)
        # The mask's order: the base, then the rows of each anchor by depth.
        order = torch.tensor(sorted(range(len(rows)), key=lambda i: (rows[i][1] > 0, rows[i])))
        first = order[len(documents) :]
        places, sizes = torch.unique_consecutive(anchors[first], return_counts=True)
        mask = masks.anchored(documents, places, sizes, inside="causal", inclusive=True, base="causal")
        assert torch.equal(mask.dense(), expected[order][:, order])
        assert torch.equal(mask.anchor_rows, anchors[first])
        assert torch.equal(mask.offsets + 1, depths[first])


def block_diffusion(clean: int, prompt: int, response: int, block: int, window: int | None) -> Tensor:
    """NeMo Automodel: noised rows of the response; keys are the clean sequence, then the noised response."""
    number = torch.arange(response) // block
    begin = prompt + number[:, None] * block
    base = torch.arange(clean)
    before = base < begin
    if window is not None:
        before = before & (base >= begin - window + 1)
    return torch.cat([before, number[:, None] == number], 1)


def test_automodel_of_diffusion_gemma() -> None:
    draw = random.Random(2)
    for _ in range(PACKS):
        prompt, response, block = draw.randint(0, 20), draw.randint(1, 30), draw.choice([1, 3, 4, 8])
        window = draw.choice([None, 1, 2, 6, 64])
        begins = torch.arange(0, response, block)
        mask = masks.anchored(
            [prompt + response],
            prompt + begins,
            (response - begins).clamp(max=block),
            window=None if window is None else window - 1,
        )
        expected = block_diffusion(prompt + response, prompt, response, block, window)
        assert torch.equal(mask.queries.dense(), expected)
        assert torch.equal(mask.queries.positions, torch.arange(prompt, prompt + response))
        if window is None:
            same = masks.dual_stream(prompt + response, block, prefix_len=prompt, order="clean_first")
            assert torch.equal(same[prompt + response :].dense(), expected)


def test_attention_and_gradients() -> None:
    """What a layer of a drafter computes, against attention with the dense mask."""
    torch.manual_seed(0)
    documents = torch.tensor([0] * 50 + [1] * 30 + [-1] * 10)
    mask = masks.anchored(documents, torch.tensor([7, 30, 55, 70, 0, 85]), 6, window=20).queries
    q, k, v = (torch.randn(2, rows, heads, 16, requires_grad=True) for rows, heads in zip((36, 126, 126), (4, 2, 2)))
    out = pd.block_sparse_attention(q, k, v, mask.plan(16, 32))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.dense(), enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    weight = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)


class Drafter(torch.nn.Module):
    """A layer as DFlash trains it: blocks of an anchor's token and masks read features of the target and themselves."""

    def __init__(self, hidden: int = 64, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary + 1, hidden)  # the last is the mask
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(3))
        self.q, self.kv = torch.nn.Linear(hidden, 64), torch.nn.Linear(hidden, 64)
        self.out, self.head = torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, vocabulary)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(hidden, 96), torch.nn.SiLU(), torch.nn.Linear(96, hidden))

    def forward(self, features: Tensor, tokens: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x = self.embedding(tokens)
        normed = self.norms[0](x)
        q = self.q(normed).unflatten(-1, (4, 16))
        k, v = self.kv(torch.cat([features, normed], 1)).unflatten(-1, (4, 16)).split(2, -2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return self.head(self.norms[2](x + self.mlp(self.norms[1](x))))


def test_training_steps_of_a_drafter() -> None:
    """Anchors are drawn anew in each step; losses and weights are those of training with the published mask."""
    torch.manual_seed(0)
    documents = torch.tensor([0] * 40 + [1] * 50 + [-1] * 6)
    texts, features, block = torch.randint(50, (2, 96)), torch.randn(2, 96, 64), 8
    ours, theirs = Drafter(), Drafter()
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for _ in range(4):
        anchors = torch.randperm(80)[:6].sort().values
        mask = masks.anchored(documents, anchors, block)
        plan, dense = mask.queries.plan(16, 32), dflash(documents, anchors, block, None, True)
        positions = anchors[:, None] + torch.arange(block)
        tokens = torch.full((2, 6, block), 50)
        tokens[:, :, 0] = texts[:, anchors]
        counted = (documents[positions] == documents[anchors][:, None]) & (torch.arange(block) > 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return pd.block_sparse_attention(q, k, v, plan)  # noqa: B023

        def attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)  # noqa: B023
            return found.transpose(1, 2)

        losses = []
        for model, attention, optimizer in zip((ours, theirs), (attend, attend_densely), optimizers):
            logits = model(features, tokens.flatten(1), attention).unflatten(1, (6, block))
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits[:, counted].flatten(0, 1), texts[:, positions[counted]].flatten()
                )
            )
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)


def test_masks_made_in_other_ways_are_equal() -> None:
    made = masks.anchored([3, 2], [1, 4], [2, 1])
    by_hand = masks.SegmentMask(made.segments, made.positions)
    assert made == by_hand and hash(made) == hash(by_hand) and made.queries == by_hand[5:]
    assert made != masks.anchored([3, 2], [1, 3], [2, 1]) and made.segments[-1].kind == "block"
    assert made == masks.anchored(torch.tensor([5, 5, 5, 0, 0], dtype=torch.int32), torch.tensor([1, 4]), [2, 1])
    assert repr(made) == "AnchoredMask(8 x 8: 4 context, 2 block)"


def test_masks_of_steps_evict_no_other_plan() -> None:
    kept = masks.causal(48).plan(16, 16)
    for anchor in range(200):
        masks.anchored([200], [anchor], 2).plan(16, 16)
    assert masks.causal(48).plan(16, 16) is kept


@pytest.mark.parametrize(
    "sentence, make",
    {
        r"masks.anchored: anchors must lie in \[0, 4\), got -1 at index 1\.": lambda: masks.anchored([4], [2, -1], 2),
        r"anchors must lie in \[0, 4\), got 4 at index 0\.": lambda: masks.anchored([4], [4], 2),
        r"documents must be in one piece each, got 0 at index 2\.": lambda: masks.anchored(
            torch.tensor([0, 1, 0]), [0], 2
        ),
        r"documents must be numbers of documents, or -1, got -2 at index 1\.": lambda: masks.anchored(
            torch.tensor([0, -2]), [0], 2
        ),
        r"documents must be 0 or more, got -3\.": lambda: masks.anchored([-3], [], 2),
        r"TypeError: documents must be int32 or int64, got torch.float32\.": lambda: masks.anchored(
            torch.ones(3), [0], 2
        ),
        r"documents must have one dimension, got \(1, 3\)\.": lambda: masks.anchored(
            torch.zeros(1, 3, dtype=torch.int64), [0], 2
        ),
        r"block must be 0 or more, got -1 at index 1\.": lambda: masks.anchored([4], [0, 1], [2, -1]),
        r"block must be 0 or more, got -1\.": lambda: masks.anchored([4], [0, 1], -1),
        r"block must have an entry for each of 2 anchors, got 1\.": lambda: masks.anchored([4], [0, 1], [2]),
        r"block must make a mask of less than 2\*\*31 tokens, got 4294967298\.": lambda: masks.anchored(
            [4], [0, 1], [2**31 - 1, 2**31 - 1]
        ),
        r"inside must be one of 'full', 'causal', got 'none'\.": lambda: masks.anchored([4], [0], 2, "none"),
        r"base must be one of 'none', 'causal', got 'full'\.": lambda: masks.anchored([4], [0], 2, base="full"),
        r"window must be 0 or more, got -1\.": lambda: masks.anchored([4], [0], 2, window=-1),
        r"TypeError: inclusive must be a bool, got int\.": lambda: masks.anchored([4], [0], 2, inclusive=1),
    }.items(),
)
def test_errors(make, sentence: str) -> None:
    with refused(sentence):
        make()
