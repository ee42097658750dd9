"""Models on two and four ranks: the results of one process, token for token and forward for forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pdkernels as pd
import pdkernels.distributed
from pdkernels.distributed import ShardedLogits, parallelize
from pdkernels.distributed.shards import Shards
from pdkernels.generation.sampler import Sampler
from pdkernels.ops.collectives import gathered, summed
from pdkernels.ops.vocabulary import VocabularyShard
from tests.distributed.ranks import COUNTS
from tests.support.errors import refused

PROMPTS = {
    "tiny-code": ["import o", "def f(self, x):\n    "],
    "tiny-jacobi": ["import os\n"],
    "tiny-trimode": ["482 + 967 = ?", "7 + 5 = ?"],
    "tiny-masked": ["482 + 967 = ?"],
    "tiny-planned": ["1x;1w;\n", "2r;5m;1u;\n"],
    "tiny-recurrent": ["482 + 967 = "],
}
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny-code", "autoregressive", {}),
    ("tiny-code", "autoregressive", {"temperature": 1.0, "seed": 3, "page_size": 8}),
    ("tiny-code", "jacobi", {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    ("tiny-jacobi", "jacobi", {}),
    ("tiny-jacobi", "jacobi_multiblock", {}),
    ("tiny-trimode", "autoregressive", {}),
    ("tiny-trimode", "linear_self_speculation", {}),
    (
        "tiny-trimode",
        "linear_self_speculation",
        {"temperature": 1.0, "seed": 5, "verification": "rejection", "top_k": 9, "min_p": 0.01},
    ),
    ("tiny-trimode", "quadratic_self_speculation", {}),
    ("tiny-trimode", "block_diffusion", {}),
    ("tiny-trimode", "block_diffusion", {"temperature": 1.0, "top_k": 9, "top_p": 0.9}),
    ("tiny-trimode", "fast_dllm_v2", {}),
    ("tiny-masked", "llada", {}),
    ("tiny-masked", "llada", {"guidance": 0.5}),
    ("tiny-masked", "dream", {"temperature": 1.0, "top_p": 0.9, "seed": 6}),
    ("tiny-masked", "slowfast", {}),
    ("tiny-masked", "dllm_cache", {}),
    ("tiny-masked", "dllm_cache", {"page_size": 8, "transfer_ratio": 0.5, "baseline": "recomputed"}),
    ("tiny-masked", "fast_dllm", {}),
    ("tiny-planned", "planned", {}),
    ("tiny-recurrent", "recurrent_static", {}),
    ("tiny-recurrent", "recurrent_adaptive", {}),
    ("tiny-recurrent", "recurrent_adaptive", {"criterion": "minp-kl"}),
    ("tiny-recurrent", "recurrent_self_speculation", {}),
    ("tiny-recurrent", "recurrent_diffusion", {}),
    (
        "tiny-recurrent",
        "recurrent_diffusion",
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "min_p": 0.01, "top_k": 100},
    ),
]


def length(method: str) -> int:
    """From texts that exercise every part of a method."""
    return 64 if method == "planned" else 7 if method.startswith("recurrent") else 16


def said(model: Any, calls: list[tuple[str, dict[str, Any]]], prompts: list[str]) -> list[Any]:
    results = []
    for method, options in calls:
        result = pd.decoding.generate(model, prompts, method, max_new_tokens=length(method), **options)
        stats = result.stats
        results.append(([x.tolist() for x in result.tokens], stats.forwards, stats.accepted))
    return results


def said_by_ranks(group: Any, name: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """And no logits are gathered on the way."""

    def gather(self: ShardedLogits) -> torch.Tensor:
        raise AssertionError("logits were gathered")

    known, ShardedLogits.full_tensor = ShardedLogits.full_tensor, gather  # type: ignore[method-assign]
    try:
        return said(parallelize(pd.models.load(name), group), calls, PROMPTS[name])
    finally:
        ShardedLogits.full_tensor = known  # type: ignore[method-assign]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", PROMPTS)
def test_all_methods_give_the_same(ranks, name: str, count: int) -> None:
    calls = [(method, options) for of, method, options in CALLS if of == name]
    expected = said(pd.models.load(name), calls, PROMPTS[name])
    for found in ranks.run(count, said_by_ranks, name, calls):
        for call, one, many in zip(calls, expected, found, strict=True):
            assert many == one, (count, call)


def logits_of(group: Any, name: str, tokens: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    model: Any = parallelize(pd.models.load(name, dtype=dtype), group)
    out = model(tokens)
    assert out.shape == (*tokens.shape, model.config.vocab_size) and out.dtype == dtype
    rows = torch.cat([model(tokens[i : i + 1]).full_tensor() for i in range(len(tokens))])
    return [out.full_tensor(), rows]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["tiny-trimode", "tiny-recurrent"])
def test_logits(ranks, name: str, count: int) -> None:
    """Close to those of one process; the same bits on all ranks, and for a row in any batch."""
    tokens = torch.randint(0, 256, (3, 150), generator=torch.Generator().manual_seed(0))
    model = pd.models.load(name)
    whole = model(tokens)
    everywhere = ranks.run(count, logits_of, name, tokens, torch.float32)
    assert (everywhere[0][0] - whole).abs().max() <= 3e-5
    assert all(torch.equal(x, everywhere[0][0]) for rank in everywhere for x in rank)


def test_logits_in_float64(ranks) -> None:
    tokens = torch.arange(20)[None]
    whole = pd.models.load("tiny-code", dtype=torch.float64)(tokens)
    found = ranks.run(2, logits_of, "tiny-code", tokens, torch.float64)[0][0]
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def step_traffic(group: Any, name: str, method: str) -> tuple[int, int]:
    """The traffic of one more step."""
    model, counts = parallelize(pd.models.load(name), group), []
    for tokens in (9, 8):
        with pd.distributed.count_communication() as traffic:
            pd.decoding.generate(model, "x = ", method, max_new_tokens=tokens, end_tokens=())
        counts.append((traffic.calls, traffic.bytes))
    (more, many), (fewer, less) = counts
    return more - fewer, many - less


@pytest.mark.parametrize("count", COUNTS)
def test_traffic_of_a_step(ranks, count: int) -> None:
    """Two sums per layer and one for the embedding, the best token, and the logit that is checked for NaN."""
    config = pd.models.load("tiny-code").config
    sums = 2 * config.layers + 1
    received = (count - 1) * (sums * config.hidden_size * 4 + 16 + 4)
    assert ranks.run(count, step_traffic, "tiny-code", "autoregressive") == [(sums + 2, received)] * count


def recurrent_traffic(group: Any, logits: torch.Tensor) -> list[tuple[int, int]]:
    """Of a divergence and of a nucleus."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    width = logits.shape[-1] // ranks
    local = logits[..., rank * width : (rank + 1) * width].clone()
    sliced = ShardedLogits(local, VocabularyShard(group, rank * width, width), logits.shape[-1])
    counts = []
    for ask in (
        lambda: pd.logit_divergence(sliced, sliced * 2),
        lambda: Sampler(1.0, top_p=0.5, top_p_rule="within").filtered(sliced),
    ):
        with pd.distributed.count_communication() as traffic:
            ask()
        counts.append((traffic.calls, traffic.bytes))
    return counts


@pytest.mark.parametrize("count", COUNTS)
def test_traffic_of_the_recurrent_methods(ranks, count: int) -> None:
    """Five numbers a row twice; the sums of a softmax, the 64 first tokens with their ids, and how many equals each rank has."""
    logits = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)) * 4
    flat = logits / 40  # half the mass takes some 500 tokens: 64 are asked for first, then 512
    row = 3 * (count - 1)
    nucleus = (4, row * (16 + 64 * 16 + 8))
    wider = (5, nucleus[1] + row * 512 * 16)
    assert ranks.run(count, recurrent_traffic, logits) == [[(2, row * 80), nucleus]] * count
    assert ranks.run(count, recurrent_traffic, flat)[0][1] == wider


def memory(group: Any, name: str) -> tuple[int, int]:
    model = parallelize(pd.models.load(name), group)
    cache = model.new_cache(2, 16)
    return sum(p.numel() for p in model.parameters()), cache.k[0].numel()


@pytest.mark.parametrize("count", COUNTS)
def test_memory_of_a_rank(ranks, count: int) -> None:
    model = pd.models.load("tiny-trimode")
    config, rows = model.config, {2: [132, 126], 4: [68, 68, 68, 54]}
    adapter = sum(p.numel() for name, p in model.named_parameters() if name.endswith("adapter_out"))
    norms = (2 * config.layers + 1) * config.hidden_size
    inner = sum(p.numel() for p in model.parameters()) - norms - adapter - config.vocab_size * config.hidden_size
    keys = sum(layer.qkv.numel() for layer in model.layers) // 4  # with four ranks two hold each of the two heads
    parts = (inner + keys * 2 * (count == 4)) // count if count == 2 else (inner - 2 * keys) // 4 + keys
    heads = max(config.kv_heads // count, 1)
    for rank, found in enumerate(ranks.run(count, memory, "tiny-trimode")):
        assert found == (parts + norms + adapter + rows[count][rank] * config.hidden_size, 2 * 16 * heads * 64)


SMALL = dict(vocab_size=40, hidden_size=16, layers=1, heads=4, kv_heads=4, head_dim=8, intermediate_size=24)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(heads=6, kv_heads=6), "heads must be divisible by the 4 ranks, got 6"),
        (dict(heads=12, kv_heads=3), "kv_heads must divide the 4 ranks, or be divisible by them, got 3"),
        (dict(intermediate_size=30), "intermediate_size must be divisible by the 4 ranks, got 30"),
        (dict(vocab_size=12), "vocab_size must give each of 4 ranks a multiple of 4 rows, got 12"),
    ],
)
def test_sizes_that_cannot_be_cut(changes: dict[str, int], sentence: str) -> None:
    with refused(f"distributed.parallelize: {sentence}"):
        Shards(pd.models.TransformerConfig(**{**SMALL, **changes}), 0, 4)


def refusals(group: Any) -> list[str]:
    model = parallelize(pd.models.load("tiny-code"), group)
    found = []
    for call in (
        lambda: model(torch.tensor([[3, 257]])),
        lambda: model(torch.tensor([[-1]])),
        lambda: parallelize(model, group),
        lambda: parallelize(torch.nn.Linear(1, 1), group),
        lambda: parallelize(model, "cpu"),
        lambda: model.requires_grad_(True)(torch.tensor([[3]])),
        lambda: model.new_cache(1 + dist.get_rank(group), 8),
        lambda: model(torch.tensor([[3]])).add_(1),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
            call()
        found.append(str(raised.value))
        model.requires_grad_(False)
    return found


def test_refusals(ranks) -> None:
    sentences = [
        "Transformer: tokens must hold ids in [0, 257), got 3..257",
        "Transformer: tokens must hold ids in [0, 257), got -1..-1",
        "distributed.parallelize: model must be a whole model, got one that is parallel already",
        "distributed.parallelize: model must be a Transformer or RecurrentDepth, got Linear",
        "distributed.parallelize: model must be a whole model, got one that is parallel already",
        "distributed.parallelize: model must run without gradients, got parameters that need one",
        "Transformer.new_cache: batch and capacity must be called with the same sizes on every rank, got [[1, 8, 0, 4], [2, 8, 0, 4]]",
        "distributed: logits must not be changed by add_, got a slice",
    ]
    for found in ranks.run(2, refusals):
        for sentence, message in zip(sentences, found, strict=True):
            assert sentence in message


def asked(group: Any, x: torch.Tensor) -> list[bool]:
    """Whether operations on logits in slices give the results of one process."""
    first, end = Shards(
        pd.models.TransformerConfig(**SMALL), dist.get_rank(group), dist.get_world_size(group)
    ).vocabulary

    def sliced() -> ShardedLogits:
        return ShardedLogits(x[..., first:end].clone(), VocabularyShard(group, first, end - first), x.shape[-1])

    ids, column = torch.tensor([[[0], [39], [8]], [[20], [11], [19]]]), x.amax(-1, keepdim=True) - 1

    def banned(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., 39] = -torch.inf
        return logits

    questions = [
        lambda y: y.argmax(-1),
        lambda y: y.argmax(-1, keepdim=True),
        lambda y: y.argmax(),
        lambda y: y.gather(-1, ids),
        lambda y: y.amax(-1, keepdim=True),
        lambda y: y.topk(7, -1).values,
        lambda y: y.topk(7, -1).indices[0, 0],  # a row without ties
        lambda y: y.logsumexp(-1, keepdim=True),
        lambda y: torch.softmax(y.double() / 0.7, -1),
        lambda y: y.masked_fill(y < column, -torch.inf),
        lambda y: torch.where(torch.arange(40) > 7, y, y * 2),
        lambda y: y[:, 1:] + 1.5 * (y[:, :2] - y[:, 1:]),
        lambda y: y[0],
        lambda y: y[0, 1, 3:9],
        lambda y: y.split(1)[1],
        lambda y: y.sort(-1, descending=True).values,
        lambda y: banned(y).argmax(-1),
        lambda y: torch.cat([y, y]),
        lambda y: y.isnan(),
        lambda y: y.cumsum(-1),
        lambda y: Sampler(0.8, top_p=0.7, top_p_rule="within").filtered(y),
        lambda y: Sampler(1.0, 11, 0.9, 0.05, top_p_rule="within").filtered(y * 3),
        lambda y: torch.stack(pd.logit_divergence(y[:, 0], y[:, 1])[1:]),
        lambda y: torch.stack(pd.logit_divergence(banned(y)[:, 0], banned(y)[:, 2], min_p=0.3)[1:]),
        lambda y: torch.stack(pd.logit_divergence(y, banned(y))[1:]),
        lambda y: torch.stack(pd.logit_divergence(y)[1:]),
        lambda y: pd.logit_divergence(y).argmax,
    ]
    same = []
    for question in questions:
        one, many = question(x.clone()), question(sliced())
        if isinstance(many, ShardedLogits):
            assert many.shape == one.shape and many.dtype == one.dtype
            many = many.full_tensor()
        same.append(torch.allclose(one, many, rtol=1e-6, atol=1e-6, equal_nan=True))
    return same


@pytest.mark.parametrize("count", COUNTS)
def test_operations_on_logits_in_slices(ranks, count: int) -> None:
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(8))
    x[0, 1], x[1, 0] = 0, x[1, 0].round()
    assert all(all(found) for found in ranks.run(count, asked, x)), ranks.run(count, asked, x)
    x[1, 2, 30] = torch.nan
    assert ranks.run(2, asked, x)[0][0]


def sums(group: Any) -> bool:
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(300, 257, generator=generator)
    together = summed(x.clone(), group)
    alone = torch.cat([summed(row.clone(), group) for row in x.split(40)])
    half = summed(x.bfloat16(), group)
    parts = gathered(x, group)
    in_order, rounded = parts[0], parts[0].bfloat16().float()
    for part in parts[1:]:
        in_order, rounded = in_order + part, rounded + part.bfloat16().float()
    return torch.equal(together, alone) and torch.equal(together, in_order) and torch.equal(half, rounded.bfloat16())


@pytest.mark.parametrize("count", COUNTS)
def test_sums_have_one_order(ranks, count: int) -> None:
    """For 300 rows they are exchanged in parts, for 40 rows not."""
    assert ranks.run(count, sums) == [True] * count
