"""The scripts that train tiny models, run on models too small to learn anything: what they write, and what is kept when
they are stopped."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels.models import ByteTokenizer, RecurrentDepth, Transformer, TransformerConfig
from pdkernels.models.checkpoints.zoo import _load_tiny, save_tiny
from pdkernels.training import arithmetic, as_ids

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SIZES = dict(hidden_size=32, heads=2, head_dim=16, intermediate_size=48)
SMALL: dict[str, dict[str, Any]] = {
    "code": dict(steps=4, batch=2, context=32, long_share=0.5, warmup=2, start=None, fast=False, evaluate_every=3),
    "trimode": dict(steps=2, drafter_steps=3, sums=2, windows=1, look_every=2),
    "jacobi": dict(rounds=2, steps=2, block_size=8, sums=2, windows=2, count=2, replayed=1),
    "recurrent": dict(steps=4, sums=2, windows=1, context=32, warmup=2, evaluate_every=3, scored=1),
    "deep": dict(steps=4, short=2, rows=2, warmup=2, evaluate_every=3, scored=1),
    "hybrid": dict(steps=4, sums=2, look_every=2, fast=False),
    "masked": dict(steps=4, rows=3, sums=2, joint_weight=1.0, warmup=2, fast=False, look_every=3, scored=2),
}


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules, with small corpora and cheap evaluations; they start from small models."""
    found = {name: import_module(f"train_tiny_{name}") for name in SMALL}
    config = TransformerConfig(vocab_size=257, layers=2, kv_heads=1, **SIZES)
    monkeypatch.setattr(found["code"], "CONFIG", config)
    for name in ("recurrent", "deep"):
        monkeypatch.setattr(found[name], "CONFIG", replace(found[name].CONFIG, **SIZES))
    small = dict(SIZES, kv_heads=1, key_heads=2, value_heads=2, key_dim=8, value_dim=8)
    monkeypatch.setattr(found["hybrid"], "CONFIG", replace(found["hybrid"].CONFIG, **small))
    monkeypatch.setattr(found["hybrid"], "report", lambda *_, **__: "nothing learnt")
    sums = as_ids([(problem.prompt + problem.steps).encode() for problem in islice(arithmetic(0), 60)])
    files = [b"x = 1\n" * 200]
    source = as_ids(files)
    monkeypatch.setattr(found["code"], "corpus", lambda seed: (torch.cat([source, sums]), len(source), source))
    monkeypatch.setattr(found["code"], "solved_share", lambda *_: 0.5)
    for name in ("trimode", "jacobi", "recurrent"):
        monkeypatch.setattr(found[name], "standard_library", lambda: (files, files))
    monkeypatch.setattr(found["recurrent"], "SHOWN", (1,))
    for name in ("recurrent", "deep"):
        monkeypatch.setattr(found[name], "solved_share", lambda model, count, advance: advance(count) or 0.5)
    collect = found["jacobi"].collect_trajectories
    few = lambda *given, **more: collect(*given, **{**more, "max_new_tokens": 24})  # noqa: E731
    monkeypatch.setattr(found["jacobi"], "collect_trajectories", few)
    monkeypatch.setattr(found["trimode"], "own_texts", lambda *_: [(torch.arange(40), 5)] * 20)
    for name in ("trimode", "jacobi"):
        monkeypatch.setattr(found[name], "report", lambda *_, **__: "nothing learnt")
    monkeypatch.setattr(found["masked"], "CANVAS", 40)
    held_out = list(islice(arithmetic(0, held_out=True), 2))
    monkeypatch.setattr(found["masked"], "held_out_sums", lambda count: held_out[:count])
    torch.manual_seed(0)
    for vocab_size, mask in ((257, None), (258, 257)):
        model = Transformer(
            replace(config, vocab_size=vocab_size),
            tokenizer=ByteTokenizer(),
            end_tokens=ByteTokenizer.end_tokens,
            mask_token=mask,
        )
        save_tiny(model, tmp_path / f"start-{mask}.safetensors")
    return found


def options(name: str, folder: Path, output: Path) -> dict[str, Any]:
    start = folder / f"start-{257 if name == 'masked' else None}.safetensors"
    known = {} if name in ("code", "recurrent", "deep", "hybrid") else {"start": str(start)}
    return {"output": output, **SMALL[name], **known}


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C inside of a step."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []

    def clip_and_interrupt(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_interrupt)


# The steps are of the first stage or round, and of the second.
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("code", 2),
        ("trimode", 1),
        ("trimode", 4),
        ("jacobi", 3),
        ("recurrent", 2),
        ("deep", 3),
        ("hybrid", 2),
        ("masked", 1),
    ],
)
def test_a_resumed_training_is_one_that_was_never_stopped(
    name: str,
    at: int,
    scripts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, whole, parts = scripts[name], tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    script.main(**options(name, tmp_path, whole), score=False)
    parts.write_text("an older model")
    with monkeypatch.context() as patched:
        interrupt(patched, at)
        with pytest.raises(typer.Exit) as stopped:
            script.main(**options(name, tmp_path, parts), score=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert stopped.value.exit_code == 130 and "parts.resume.pt is kept, continue with --resume" in printed
    assert parts.read_text() == "an older model"
    # Draws and work in between must not matter.
    torch.manual_seed(99)
    script.main(**options(name, tmp_path, parts), resume=True, score=False)
    resumed, expected = load_file(parts), load_file(whole)
    assert resumed.keys() == expected.keys() and all(resumed[key].equal(expected[key]) for key in expected)
    assert not list(tmp_path.glob("*resume*")), "nothing is left to resume"


@pytest.mark.parametrize("name", SMALL)
def test_the_scripts_write_models_that_load(
    name: str, scripts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.safetensors"
    before = os.umask(0o022)
    try:
        scripts[name].main(**options(name, tmp_path, path))
    finally:
        os.umask(before)
    printed = capsys.readouterr().out
    assert "scoring" in printed and "0:00:0" in printed and f"{name}.safetensors" in printed
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    model = _load_tiny(path, None, "cpu")
    prompt = next(islice(arithmetic(0), 1)).prompt
    if name in ("recurrent", "deep"):
        assert isinstance(model, RecurrentDepth) and model.config.hidden_size == 32
        result = pd.decoding.generate(model, "1 + 2 = ?", "recurrent_diffusion", max_new_tokens=8)
        assert len(result.tokens) <= 8 and result.stats.recurrences >= 16
    elif name == "masked":
        start = _load_tiny(tmp_path / "start-257.safetensors", None, "cpu")
        assert model.config.predicts == "own" and model.mask_token == 257 and not model.has_adapter
        assert not torch.equal(model.embedding, start.embedding)
    else:
        assert model.has_adapter == (name == "trimode") and (model.mask_token == 257) == (name in ("trimode", "hybrid"))
        method = dict.fromkeys(("trimode", "hybrid"), "linear_self_speculation").get(name, "jacobi")
        greedy = pd.decoding.generate(model, prompt, max_new_tokens=20)
        found = pd.decoding.generate(model, prompt, pd.decoding.find(method), max_new_tokens=20)
        assert found.tokens.equal(greedy.tokens)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("code", ["--start", "nothing"], "--start: pdkernels.models.load: name_or_path must name a model"),
        (
            "trimode",
            ["--start", "nothing.safetensors"],
            "--start: pdkernels.models.load: name_or_path must be a file that exists, got 'nothing.safetensors'",
        ),
        ("jacobi", ["--start", "tiny-recurrent"], "--start must name a byte-level transformer, got tiny-recurrent."),
        ("masked", ["--start", "tiny-code"], "--start must name a model with a mask token, got tiny-code."),
        (
            "recurrent",
            ["--resume"],
            "--resume needs out.resume.pt, which is missing. Leave it out to start from scratch.",
        ),
    ],
)
def test_what_cannot_begin_is_one_sentence(
    name: str,
    arguments: list[str],
    sentence: str,
    scripts: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(scripts[name].main)
    answer = CliRunner().invoke(app, ["--output", "out.safetensors", *arguments])
    assert answer.exit_code == 2 and answer.stderr.startswith(f"error: {sentence}"), answer.output
    assert answer.stderr.count("\n") == 1 and not list(tmp_path.glob("out*"))


def test_other_options_and_broken_files_are_not_resumed(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options("recurrent", tmp_path, tmp_path / "out.safetensors")
    with monkeypatch.context() as patched:
        interrupt(patched, 1)
        with pytest.raises(typer.Exit):
            scripts["recurrent"].main(**given)
    with pytest.raises(typer.Exit):
        scripts["recurrent"].main(**{**given, "steps": 9}, resume=True)
    (tmp_path / "out.resume.pt").write_bytes(b"broken")
    with pytest.raises(typer.Exit):
        scripts["recurrent"].main(**given, resume=True)
    printed = " ".join(capsys.readouterr().err.split())
    assert "--resume continues with the options of the start, but --steps was 4, now 9." in printed
    assert "as a training wrote it, and it is damaged." in printed


def test_a_failing_write_leaves_the_older_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "model.safetensors", pd.models.load("tiny-code")
    save_tiny(model, path)
    before = path.read_bytes()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_tiny(model, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.safetensors"]


def test_the_adapter_is_trained_on_the_drafts_that_the_options_name(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = scripts["trimode"], []
    draw = script.draw_drafts

    def watched(logits: torch.Tensor, generator: torch.Generator, **drawn: float) -> torch.Tensor:
        seen.append((drawn, generator.get_state()))
        return draw(logits, generator, **drawn)

    monkeypatch.setattr(script, "draw_drafts", watched)
    for given in ({}, {"sampled_drafts": 0.25, "draft_temperature": 0.7}):
        script.main(**{**options("trimode", tmp_path, tmp_path / "x.safetensors"), "steps": 1, **given}, score=False)
    papers, ours = {"sampled_share": 0.9, "temperature": 1.0}, {"sampled_share": 0.25, "temperature": 0.7}
    assert [drawn for drawn, _ in seen] == [papers] * 3 + [ours] * 3
    states = [state for _, state in seen]
    assert states[0].equal(states[3]) and not states[0].equal(states[1])
