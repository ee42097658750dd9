"""The trained sampler of block diffusion: its features, its network, and the released files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.models import SamplerConfig, SamplerHead, load_sampler, sampler_features, save_sampler, semantic_table
from pdkernels.reference.sampler_features import sampler_features as plain_features

SMALL = SamplerConfig(semantics=4, width=16, feed_forward=24, layers=2, heads=2)


def table(ids: int, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(ids, width, generator=torch.Generator().manual_seed(seed))


def small_head(config: SamplerConfig = SMALL, ids: int = 20) -> SamplerHead:
    torch.manual_seed(0)
    return SamplerHead(config, table(ids, config.semantics)).requires_grad_(False)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(2, 12), st.integers(0, 99))
def test_features_are_the_plain_ones(batch: int, size: int, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, size, vocab, generator=generator)
    tokens = torch.randint(vocab + 2, (batch, size), generator=generator)
    active = torch.rand(batch, size, generator=generator) < 0.6
    vectors = table(vocab, 3, seed)
    found = sampler_features(pd.token_statistics(logits, top_k=min(5, vocab)), tokens, active, vectors)
    torch.testing.assert_close(found, plain_features(logits, tokens, active, vectors), rtol=1e-5, atol=1e-5)


def test_the_worked_example() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log().expand(1, 4, 5)
    active = torch.tensor([[False, True, True, False]])
    vectors = table(5, 32)
    found = sampler_features(pd.token_statistics(logits), torch.tensor([[3, 4, 4, 9]]), active, vectors)
    assert found.shape == (1, 4, 144)
    row = found[0, 1]
    expected = [0.5, 0.25, 0.125, 0.0625, 0.0625, 0.5, 0.25, 0.875, 1.2997, 1, 0, 0.5]
    assert row[:12].tolist() == pytest.approx(expected, abs=1e-4)
    assert row[140:].tolist() == pytest.approx([-0.6931, 0.6640625, 1 / 3, 1.0986], abs=1e-4)
    assert row[12:44].equal(vectors[4]) and found[0, 3, 12:44].equal(vectors[4]), (
        "ids above the table take its last row"
    )
    assert row[44:140].equal(vectors[:3].flatten())
    assert found[0, 0, 9] == 0 and found[0, 3, 142] == 1


def test_names_of_tokens_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, vectors = torch.randn(2, 5, 11, generator=generator), table(11)
    tokens, active = torch.randint(11, (2, 5), generator=generator), torch.ones(2, 5, dtype=torch.bool)
    order = torch.randperm(11, generator=generator)
    other = order.argsort()
    expected = sampler_features(pd.token_statistics(logits), tokens, active, vectors)
    found = sampler_features(pd.token_statistics(logits[..., order]), other[tokens], active, vectors[order])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (SamplerConfig(), 1_216_897),
        (SamplerConfig(width=384, feed_forward=768), 4_793_089),
        (SamplerConfig(width=384, feed_forward=768, pre_encoder=True), 4_941_697),
        (SamplerConfig(width=384, feed_forward=1536), 7_155_457),
        (SamplerConfig(width=384, feed_forward=384), 3_611_905),
    ],
)
def test_the_released_sizes(config: SamplerConfig, parameters: int) -> None:
    head = SamplerHead(config, torch.zeros(2, 32))
    assert sum(parameter.numel() for parameter in head.parameters()) == parameters


def test_a_position_sees_the_whole_block_only_with_attention() -> None:
    features = torch.randn(1, 6, SMALL.features, generator=torch.Generator().manual_seed(2))
    changed = features.clone()
    changed[0, 5] += 1
    for kind, moves in (("attention", True), ("pointwise", False)):
        head = small_head(SamplerConfig(semantics=4, width=16, feed_forward=24, layers=3, heads=2, kind=kind))  # type: ignore[arg-type]
        assert bool((head(features)[0, :5] != head(features * 1)[0, :5]).any()) is False
        assert bool((head(features)[0, :5] != head(changed)[0, :5]).any()) is moves


def test_positions_are_distinguished() -> None:
    features = torch.randn(1, 1, SMALL.features, generator=torch.Generator().manual_seed(2)).expand(1, 4, -1).clone()
    assert small_head()(features).std() < 1e-6, "equal rows without any order are equal"
    features[0, 0] += 1
    scores = small_head()(features)[0, 1:]
    assert scores.sort().values.diff().min() > 1e-5, "the distance to another row matters"


def test_a_block_alone_is_the_block_in_a_batch() -> None:
    features = torch.randn(5, 8, SMALL.features, generator=torch.Generator().manual_seed(3))
    head = small_head()
    with torch.inference_mode():
        together = head(features)
        assert all(head(features[i : i + 1]).equal(together[i : i + 1]) for i in range(5))
    with torch.enable_grad():
        torch.testing.assert_close(head(features), together, rtol=1e-5, atol=1e-5)


def test_what_never_varied_counts_as_nothing() -> None:
    head = small_head()
    head.std[10] = 0
    normal = head.normalised(torch.zeros(1, 1, SMALL.features))
    assert normal[0, 0, 10] == 0 and normal.isfinite().all()


def test_components_are_ordered_and_have_a_sign() -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(30, 5, generator=generator) * torch.tensor([5.0, 1, 3, 0.1, 2]) + 7
    found = semantic_table(embedding, 8).float()
    assert found.shape == (30, 8) and found[:, 5:].abs().max() == 0
    spread = found[:, :5].std(0)
    assert spread.equal(spread.sort(descending=True).values) and found.mean(0).abs().max() < 0.01
    torch.testing.assert_close(semantic_table(-embedding, 8).float().abs(), found.abs())
    assert (found[:, :5].gather(0, found[:, :5].abs().argmax(0, keepdim=True)) > 0).all()
    whole = torch.cdist(embedding, embedding)
    torch.testing.assert_close(torch.cdist(found, found), whole, rtol=0.01, atol=0.02)


CONFIGS = [
    SMALL,
    SamplerConfig(semantics=4, width=16, feed_forward=24, layers=1, heads=4, pre_encoder=True),
    SamplerConfig(semantics=4, width=16, feed_forward=24, layers=1, heads=8, norm_heads=False),
    SamplerConfig(semantics=4, feed_forward=12, layers=3, kind="pointwise"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "pre-encoder", "without norms", "pointwise"])
def test_a_head_is_written_and_read(config: SamplerConfig, tmp_path: Path) -> None:
    head = small_head(config)
    head.mean.normal_()
    save_sampler(head, tmp_path)
    again = load_sampler(tmp_path)
    features = torch.randn(2, 4, config.features)
    assert again(features).equal(head(features)) and again.mean.equal(head.mean)
    assert again.config.kind == config.kind and again.config.features == config.features
    half = load_sampler(tmp_path, dtype=torch.float16)
    assert half.dtype == torch.float16 and (half(features).float() - head(features)).abs().max() < 0.05


def test_the_released_names() -> None:
    names = {name for name in SamplerHead(SamplerConfig(pre_encoder=True), torch.zeros(2, 32)).state_dict()}
    layer = {"norm1", "attn.qkv", "attn.proj", "attn.q_norm", "attn.k_norm", "norm2", "ff.0", "ff.3"}
    parts = {f"layers.{i}.{part}" for i in range(4) for part in layer} | {"norm", "head"}
    parts |= {f"input_proj.{i}" for i in (0, 2, 4)}
    assert names == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")} | {"mean", "std", "table"}
    pointwise = SamplerHead(SamplerConfig(kind="pointwise", layers=3), torch.zeros(2, 32)).state_dict()
    assert {name for name in pointwise if "net" in name} == {
        f"net.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")
    }


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_sampler(small_head(), tmp_path)
    path = tmp_path / "checkpoint.pt"
    kept = torch.load(path, weights_only=True)
    for change, said in (
        ({"feat_mean": None}, "checkpoint.pt must hold state_dict, feat_mean and feat_std"),
        ({"feat_mean": torch.zeros(19)}, "feat_mean must have 16"),
        ({"feat_std": torch.zeros(5)}, "feat_std"),
        (
            {"state_dict": {**kept["state_dict"], "more": torch.zeros(1)}},
            "checkpoint.pt: more must have shape none, got",
        ),
        ({"state_dict": {**kept["state_dict"], "head.weight": torch.zeros(2, 2)}}, "head.weight must have shape"),
        ({"state_dict": {}}, "checkpoint.pt must hold layers.0.ff.0.weight"),
    ):
        changed = {name: value for name, value in {**kept, **change}.items() if value is not None}
        torch.save(changed, path)
        with pytest.raises(ValueError, match=said):
            load_sampler(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


def test_nothing_in_the_files_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_sampler(small_head(), tmp_path)
    torch.save({"state_dict": Harmful()}, tmp_path / "checkpoint.pt")
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported"):
        load_sampler(tmp_path)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: SamplerConfig(width=10, heads=4), "width must be an even number for each of the heads"),
        (lambda: SamplerConfig(layers=0), "layers must be at least 1"),
        (lambda: SamplerConfig(kind="other"), "kind must be 'attention' or 'pointwise'"),  # type: ignore[arg-type]
        (lambda: SamplerHead(SMALL, torch.zeros(3, 5)), r"table must have shape \(ids, 4\)"),
        (lambda: semantic_table(torch.zeros(3)), r"embedding must have shape \(ids, hidden\)"),
    ],
)
def test_errors_name_what_is_wrong(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]
