"""The scripts that train adapters of SmolLM2, on a random checkpoint that is too small to learn anything."""

from __future__ import annotations

import os
import signal
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
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("train_smollm2_drafter")
    monkeypatch.setattr(module, "prompts", chats)
    return module


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C inside of a step."""
    clip, seen = torch.nn.utils.clip_grad_norm_, []

    def clip_and_interrupt(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_interrupt)


def options(folder: Path, output: Path) -> dict[str, Any]:
    sizes = dict(steps=4, count=2, texts=5, held_out=3, answer=12, masks=3, rank=2, look_every=3)
    return {"start": str(folder), "output": output, "lr": 0.05, **sizes}


def test_a_training_and_what_loads(
    script: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    script.main(**options(folder, whole))
    told = " ".join(capsys.readouterr().out.split())
    assert "3 of 3 answers are those of greedy decoding" in told and "drafter 3: " in told

    with monkeypatch.context() as patched:
        interrupt(patched, 2)
        with pytest.raises(typer.Exit) as stopped:
            script.main(**options(folder, parts), score=False)
    assert stopped.value.exit_code == 130 and not parts.exists()
    torch.manual_seed(99)
    script.main(**options(folder, parts), resume=True, score=False)
    names = ["adapter_config.json", "adapter_model.safetensors", "mask_token.safetensors"]
    assert sorted(os.listdir(whole)) == sorted(os.listdir(parts)) == names and not list(tmp_path.glob("*resume*"))
    for name in names[1:]:
        resumed, expected = load_file(parts / name), load_file(whole / name)
        assert resumed.keys() == expected.keys() and all(resumed[key].equal(expected[key]) for key in expected)

    base, model = pd.models.load(folder), pd.models.load(folder, drafter=whole)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert model.has_adapter and model.mask_token == base.config.vocab_size
    torch.testing.assert_close(model(tokens)[..., :-1], base(tokens), rtol=0, atol=0)
    assert not model(tokens, adapted=True)[..., :-1].equal(base(tokens)), "it learnt something"


def test_drafts_are_those_of_the_decoder(script: Any, folder: Path, tmp_path: Path) -> None:
    """What training counts as accepted is what quadratic self-speculation accepts from the same place."""
    masks, output = 3, tmp_path / "drafter"
    script.main(**{**options(folder, output), "lr": 0.3, "steps": 12}, score=False)
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
        place = 0
        for step in steps:
            if place < len(drafted.accepted) and len(step.draft) == masks + 1:
                assert step.draft[1:] == drafted.logits[place].argmax(-1).tolist()
                assert step.accepted == drafted.accepted[place] + 1
                lengths.add(step.accepted)
            place += step.accepted
    assert len(lengths) > 1


def test_texts_come_once_per_pass(script: Any) -> None:
    seen = [index for number in range(7) for index in script.turn(number, 3, 7, 5)]
    assert [sorted(seen[first : first + 7]) for first in (0, 7, 14)] == [list(range(7))] * 3
    assert seen[:7] != seen[7:14]


def test_questions_are_about_different_functions() -> None:
    module = import_module("smollm2_texts")
    files = [
        b"def one(x):\n    'First.'\n    return x\n\nclass A:\n    def two(self):\n        'Second.\\n\\nMore.'\n        return 2\n"
    ]
    assert list(module.functions(files))[1] == (
        "two(self)",
        "Second.",
        "def two(self):\n    'Second.\\n\\nMore.'\n    return 2",
    )
    known, unseen = set(module.questions(0)), set(module.questions(0, held_out=True))
    assert len(known) > 1000 and len(unseen) > 40 and not known & unseen
    assert module.questions(0, held_out=True) == module.questions(0, held_out=True)
