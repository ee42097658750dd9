"""The evaluation of recurrent-depth models: its candidates, memory as actually counted, pictures that show the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdkernels import decoding
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation import (
    Candidate,
    as_json,
    candidates,
    evaluate,
    extra_memory,
    make_task,
    plot_recurrent,
    plot_wave,
)
from pdkernels.evaluation.recurrent import _Live
from pdkernels.generation.traces import RecurrentStep
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig


def small_model() -> RecurrentDepth:
    torch.manual_seed(5)
    config = RecurrentDepthConfig(
        vocab_size=257,
        hidden_size=32,
        heads=2,
        head_dim=16,
        intermediate_size=24,
        prelude_layers=1,
        core_layers=1,
        coda_layers=1,
        mean_recurrence=3,
    )
    return RecurrentDepth(config, tokenizer=ByteTokenizer(), end_tokens=(256,)).requires_grad_(False)


STATIC = Candidate("small", "recurrent_static")


def with_options(method: str, **options: Any) -> Candidate:
    return Candidate("small", method, settings=tuple(options.items()))


# ---- candidates


def test_the_candidates_of_a_recurrent_model() -> None:
    found, skipped = candidates({"small": small_model()})
    assert skipped == [] and found[0] == STATIC and len(set(found)) == len(found)
    assert {candidate.method for candidate in found} == {
        name for name, known in METHODS.items() if known.wing == "recurrent"
    }
    for candidate in found:
        assert set(candidate.options) <= set(decoding.method_options(candidate.method))
        defaults = {name: decoding.default_option(candidate.method, name) for name in candidate.options}
        assert not candidate.options or candidate.options != defaults, "the default would compete twice"


def test_methods_go_with_their_models() -> None:
    config = TransformerConfig(
        vocab_size=257, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16
    )
    plain = Transformer(config, tokenizer=ByteTokenizer(), end_tokens=(256,))
    found, skipped = candidates({"small": small_model(), "plain": plain}, ["recurrent_diffusion", "jacobi"], [4])
    assert [candidate.label for candidate in found if candidate.model == "small"] == [
        "recurrent_static",
        "recurrent_diffusion",
        "jacobi, 4",
    ]
    assert [candidate.label for candidate in found if candidate.model == "plain"] == ["autoregressive", "jacobi, 4"]
    assert skipped == [
        "plain with recurrent_diffusion: that method is for models of another kind, such as tiny-recurrent"
    ]
    fitting = {name for name, known in METHODS.items() if known.wing == "causal" and "drafter" not in known.requires}
    assert {name for name in METHODS if decoding.supports(name, plain)} == fitting


def test_fewer_recurrences_promise_nothing() -> None:
    assert STATIC.is_lossless and not with_options("recurrent_static", recurrences=2).is_lossless
    assert not with_options("recurrent_diffusion").is_lossless


def test_figures_of_a_recurrent_model() -> None:
    task = make_task("sums", 3)._replace(limit=6)
    competing = [
        STATIC,
        with_options("recurrent_self_speculation", draft_recurrences=3),
        with_options("recurrent_diffusion", threshold=3.0),
    ]
    static, speculating, diffusing = evaluate({"small": small_model()}, competing, task, memory=True)
    assert static.baseline and static.verdict == "is greedy" and static.speedup == 1
    assert not speculating.lossless and speculating.tokens_per_cycle >= 1
    assert not diffusing.lossless and diffusing.verdict == f"{diffusing.identical} of 3" and diffusing.speedup > 0
    assert static.extra_memory > 0 and speculating.extra_memory > 0 and diffusing.extra_memory is None
    (row,) = [row for row in as_json([diffusing])["benchmarks"]]
    assert row["extra_info"]["settings"] == {"threshold": 3.0}


# ---- memory


def test_memory_counts_what_lives_at_once() -> None:
    with _Live() as live:
        first = torch.zeros(1000)  # 4000 bytes
        second = first.view(10, 100)  # a view without its own memory
        third = first + 1
        del third
        fourth = torch.zeros(500)
        del first, second, fourth
        torch.zeros(10)
    assert live.peak == 8000


def test_memory_grows_with_the_wavefront() -> None:
    model = small_model()
    options = {"max_new_tokens": 24, "end_tokens": (), "threshold": 1e-9, "max_recurrences": 48, "inner_recurrence": 2}
    small, large = (
        extra_memory(model, "a prompt", "recurrent_diffusion", max_wavefront=rows, **options) for rows in (2, 24)
    )
    cache = 2 * 3 * 2 * 16 * 4  # K and V of three layers, one position
    assert large - small >= (24 - 2) * (cache + 2 * 32 * 4), "the wave's rows need a cache and states"


# ---- pictures


def figures_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *rest, **more: (figures.append(self), save(self, *rest, **more))[1]
    )
    return figures


def row(method: str, speed: float, right: int, **settings: Any) -> dict[str, Any]:
    return {
        "task": "sums",
        "model": "small",
        "method": method,
        "tokens_per_second": speed,
        "right": right,
        "problems": 20,
        "speedup": speed / 50,
        "settings": settings,
        "extra_memory": 10**6,
    }


def test_the_picture_shows_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_of(monkeypatch)
    rows = [
        row("recurrent_static", 50, 16),
        row("recurrent_static", 200, 8, recurrences=2),
        row("recurrent_adaptive", 100, 16),
        row("recurrent_diffusion", 150, 16),
        row("recurrent_diffusion", 180, 12, inner_recurrence=2),
        row("recurrent_diffusion", 90, 15, max_wavefront=2),
        row("recurrent_diffusion", 120, 14, threshold=0.1),
        row("autoregressive", 1, 1),
    ]
    plot_recurrent(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")
    shares, speeds = figures[0].axes
    drawn = [line.get_xdata()[0] for line in shares.lines[1::2]]
    assert drawn == [5 * row["right"] for row in rows[:-1]]
    assert [bar.get_width() for bar in speeds.patches] == [row["speedup"] for row in rows[:-1]]
    names = [label.get_text() for label in shares.get_yticklabels()]
    assert names[0] == "small" and names[2] == "fixed depth, r = 2" and names[5] == "parallel sampler, r' = 2"
    with pytest.raises(
        ValueError, match="rows must hold figures of recurrent-depth methods on a task with answers, got none"
    ):
        plot_recurrent(rows[-1:], tmp_path / "nothing.png")


def test_the_wave_shows_every_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = figures_of(monkeypatch)
    trace = [
        RecurrentStep(cursor=7, tokens=[65], predictions=[66], distance=[float("inf")], frozen=0),
        RecurrentStep(cursor=7, tokens=[65, 66], predictions=[66, 10], distance=[0.01, float("inf")], frozen=1),
        RecurrentStep(cursor=8, tokens=[66, 10], predictions=[10, 68], distance=[0.5, 0.02], frozen=0),
    ]
    plot_wave(trace, tmp_path / "wave.png", tokenizer=ByteTokenizer(), threshold=0.03)
    axis = figures[0].axes[0]
    drawn = axis.images[0].get_array().filled(-1)
    assert drawn == pytest.approx(torch.tensor([[2, -1, -1], [0.01, 2, -1], [-1, 0.5, 0.02]]).numpy())
    assert [text.get_text() for text in axis.texts] == ["A", "A", "B", "B", "·"]
    with pytest.raises(ValueError, match="trace must hold steps, got an empty one"):
        plot_wave([], tmp_path / "nothing.png")
