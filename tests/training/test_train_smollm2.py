"""The scripts that train adapters of SmolLM2, on a random checkpoint that is too small to learn anything."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file

import pdkernels as pd
from pdkernels.models import Transformer
from pdkernels.models.checkpoints.packaged import packaged
from tests.models.test_zoo import write
from tests.support.checkpoints import LLAMA, random_checkpoint

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, head_dim=16, intermediate_size=24)
    fields = {**LLAMA, **sizes, "tie_word_embeddings": True}
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", fields, random_checkpoint(fields, dtype=torch.float32))
    return tmp_path / "model"


def chats(model: Transformer, count: int, longest: int, seed: int, *, held_out: bool = False) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed + held_out)
    return torch.randint(model.config.vocab_size, (count, 5), generator=generator).tolist()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {name: import_module(f"train_smollm2_{name}") for name in ("drafter", "jacobi")}
    for module in found.values():
        monkeypatch.setattr(module, "prompts", chats)
    return found


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C inside of a step."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []

    def clip_and_interrupt(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_interrupt)


SMALL: dict[str, dict[str, Any]] = {
    "drafter": dict(answer=12, masks=3, look_every=3),
    "jacobi": dict(answer=16, block_size=4, look_every=3),
}


def options(name: str, folder: Path, output: Path) -> dict[str, Any]:
    sizes = dict(steps=4, count=2, texts=5, held_out=3, rank=2)
    return {"start": str(folder), "output": output, "lr": 0.05, **sizes, **SMALL[name]}


@pytest.mark.parametrize("name", SMALL)
def test_a_resumed_training_is_one_that_was_never_stopped(
    name: str,
    scripts: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, whole, parts = scripts[name].main, tmp_path / "whole", tmp_path / "parts"
    main(**options(name, folder, whole))
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "3 of 3 answers are those of greedy decoding" in printed
        and f"{name} 3: " in printed
        and "held out: " in printed
    )

    with monkeypatch.context() as patched:
        interrupt(patched, 2)
        with pytest.raises(typer.Exit) as stopped:
            main(**options(name, folder, parts), score=False)
    assert stopped.value.exit_code == 130 and not parts.exists()
    torch.manual_seed(99)
    main(**options(name, folder, parts), resume=True, score=False)
    names = ["adapter_config.json", "adapter_model.safetensors", "mask_token.safetensors"]
    names = names if name == "drafter" else names[:2]
    assert sorted(os.listdir(whole)) == sorted(os.listdir(parts)) == names and not list(tmp_path.glob("*resume*"))
    assert {stat.S_IMODE(file.stat().st_mode) & 0o444 for file in whole.iterdir()} == {0o444}
    for file in names[1:]:
        resumed, expected = load_file(parts / file), load_file(whole / file)
        assert resumed.keys() == expected.keys() and all(resumed[key].equal(expected[key]) for key in expected)
        assert all(tensor.dtype == torch.bfloat16 for tensor in resumed.values())

    base, tokens = pd.models.load(folder), torch.tensor([[3, 1, 4, 1, 5]])
    if name == "jacobi":
        changed = pd.models.load(folder, adapter=whole)
        assert not changed(tokens).equal(base(tokens)) and not changed.has_adapter
        return
    model = pd.models.load(folder, drafter=whole)
    assert model.has_adapter and model.mask_token == base.config.vocab_size
    torch.testing.assert_close(model(tokens)[..., :-1], base(tokens), rtol=0, atol=0)
    assert not model(tokens, adapted=True)[..., :-1].equal(base(tokens))


def test_a_training_continues_with_its_drafter(scripts: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    scripts["drafter"].main(**options("drafter", folder, first), score=False)
    longer = {**options("drafter", folder, second), "steps": 1, "lr": 0.0, "drafter": str(first)}
    scripts["drafter"].main(**longer, score=False)
    for file in ("adapter_model.safetensors", "mask_token.safetensors"):
        before, after = load_file(first / file), load_file(second / file)
        assert all(before[name].equal(after[name]) for name in before)


def test_the_drafter_is_trained_on_sampled_drafts_and_judged_on_greedy_ones(
    scripts: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = scripts["drafter"], []
    draw = script.draw_drafts

    def watched(logits: torch.Tensor, generator: torch.Generator | None, **drawn: float) -> torch.Tensor:
        seen.append((generator is not None, drawn["sampled_share"], drawn["temperature"]))
        return draw(logits, generator, **drawn)

    monkeypatch.setattr(script, "draw_drafts", watched)
    script.main(**options("drafter", folder, tmp_path / "out"), score=False)
    assert seen.count((True, 0.9, 1.0)) == 4 * 2 and set(seen) == {(True, 0.9, 1.0), (False, 0.0, 1.0)}


def test_models_that_no_drafter_is_for(scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for start, sentence in (
        ("tiny-recurrent", "--start must name a transformer, got tiny-recurrent."),
        ("tiny-trimode", "--start must name a model without a mask token, got tiny-trimode."),
        ("nothing", "--start: pdkernels.models.load: name_or_path must name a model"),
    ):
        with pytest.raises(typer.Exit):
            scripts["drafter"].main(start=start)
        assert f"error: {sentence}" in " ".join(capsys.readouterr().err.split())


def test_drafts_are_those_of_the_decoder(scripts: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """What training counts as accepted is what quadratic self-speculation accepts from the same position."""
    script, masks, output = scripts["drafter"], 3, tmp_path / "drafter"
    script.main(**{**options("drafter", folder, output), "lr": 0.3, "steps": 12}, score=False)
    model = pd.models.load(folder, drafter=output)
    plain = pd.models.load(folder)
    plain.attach_adapter_([(layer.adapter_in, layer.adapter_out) for layer in model.layers])
    lengths = set()
    for chat in chats(plain, 6, 5, 7):
        answer = pd.decoding.generate(model, chat, max_new_tokens=40).tokens
        text = script.Text(torch.cat([torch.tensor(chat), answer]), len(chat))
        drafted = script.draft(plain, model.embedding[-1], text, script.read(plain, text), masks)
        assert drafted.logits.shape == (len(answer) + 1 - masks, masks, plain.config.vocab_size)
        steps = pd.decoding.generate(
            model,
            chat,
            "quadratic_self_speculation",
            max_new_tokens=40,
            block_size=masks + 1,
            trace=True,
            **script.OPTIONS,
        ).stats.trace[0]
        position = 0
        for step in steps:
            if position < len(drafted.accepted) and len(step.draft) == masks + 1:
                assert step.draft[1:] == drafted.logits[position].argmax(-1).tolist()
                assert step.accepted == drafted.accepted[position] + 1
                lengths.add(step.accepted)
            position += step.accepted
    assert len(lengths) > 1


def test_nothing_is_answered_twice(tmp_path: Path) -> None:
    module, file, chats = import_module("smollm2_texts"), tmp_path / "kept.pt", [[1, 2], [3], [4, 5], [6]]
    kept = module.Kept(file, chats[:3], longest=8)
    for batch in kept.missing(2):
        kept.add((torch.tensor(chat), len(chat)) for chat in batch)
    assert [length for _, length in kept.items] == [2, 1, 2]
    more = module.Kept(file, chats, longest=8)
    assert len(more.items) == 3 and list(next(more.missing(2))) == [[6]]
    assert len(module.Kept(file, chats[:2], longest=8).items) == 2
    assert module.Kept(file, chats, longest=9).items == [] and module.Kept(file, chats[1:], longest=8).items == []


def test_texts_come_once_per_pass(scripts: dict[str, Any]) -> None:
    seen = [index for number in range(7) for index in scripts["drafter"].turn(number, 3, 7, 5)]
    assert [sorted(seen[first : first + 7]) for first in (0, 7, 14)] == [list(range(7))] * 3
    assert seen[:7] != seen[7:14]


def test_functions_with_a_docstring() -> None:
    module = import_module("smollm2_texts")
    files = [
        b"def one(x):\n    'First.'\n    return x\n\nclass A:\n    def two(self):\n        'Second.\\n\\nMore.'\n        return 2\n"
    ]
    assert list(module.functions(files))[1] == (
        "two(self)",
        "Second.",
        "def two(self):\n    'Second.\\n\\nMore.'\n    return 2",
    )


@pytest.mark.slow
def test_questions_for_training_and_held_out_ones_are_about_different_functions() -> None:
    module = import_module("smollm2_texts")
    known, unseen = set(module.questions(0)), set(module.questions(0, held_out=True))
    assert len(known) > 1000 and len(unseen) > 40 and not known & unseen
    assert module.questions(0, held_out=True) == module.questions(0, held_out=True)


@pytest.mark.slow
def test_the_shipped_drafter() -> None:
    """It drafts what SmolLM2 writes, and does not change what it writes."""
    try:
        packaged("smollm2-135m-instruct")
    except ImportError as error:
        pytest.skip(str(error))
    base = pd.models.load("smollm2-135m-instruct")
    model = pd.models.load("smollm2-135m-instruct", drafter="smollm2-drafter")
    options: dict[str, Any] = {"label_shift": 1, "in_group": "causal", "max_new_tokens": 40}
    tokens, forwards = 0, 0
    for question in import_module("smollm2_texts").questions(0, held_out=True)[:6]:
        chat = [{"role": "user", "content": question}]
        greedy = pd.decoding.generate(base, chat, max_new_tokens=40)
        found = pd.decoding.generate(model, chat, "quadratic_self_speculation", block_size=2, **options)
        assert found.tokens.equal(greedy.tokens)
        tokens, forwards = tokens + found.stats.tokens, forwards + found.stats.forwards
    assert tokens > 1.2 * forwards
