"""Every setting through `generate`, `chat` and `batch` of the command line: it arrives as from Python, or is refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pdkernels import cli, models
from pdkernels.batch.ray import REFUSED, generate_files
from pdkernels.cli._settings import ONE_TEXT, flag, read_settings
from pdkernels.decoding import sequence_seed
from pdkernels.generation.params import SETTINGS, SamplingParams
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from tests.harness.settings import EXAMPLES

COMMANDS = ("generate", "chat", "batch")
OBJECTS = ("functions", "grammar")
TYPED = [name for name, setting in SETTINGS.items() if setting.kind not in (*OBJECTS, "name")]


class Chatty(ByteTokenizer):
    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode(messages[-1]["content"])


class Arrived(Exception):
    """Ends a command at its first text."""


def as_typed(name: str) -> list[str]:
    """The example of a setting as it is typed."""
    setting, value = SETTINGS[name], EXAMPLES[name]
    if setting.kind in ("number", "integer"):
        return [flag(setting), str(value)]
    if setting.kind in ("integers", "strings"):
        return [word for item in value for word in (flag(setting), str(item))]
    return [flag(setting), json.dumps(value)]


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Settings of the first text, after those of the hidden one of `generate` and `chat`."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8}
    config = TransformerConfig(vocab_size=257, intermediate_size=8, **sizes)
    model = Transformer(config, tokenizer=Chatty()).requires_grad_(False)
    monkeypatch.setattr(models, "load", lambda *_, **__: model)
    module, seen = sys.modules["pdkernels.decoding.generate"], list[SamplingParams]()
    prepare = module.prepare  # type: ignore[attr-defined]

    def watched(model: Any, prompt: Any, method: Any, params: SamplingParams, *rest: Any) -> Any:
        seen.append(params)
        if len(seen) > 1 or prompt == ["Hello"]:
            raise Arrived
        return prepare(model, prompt, method, params, *rest)

    monkeypatch.setattr(module, "prepare", watched)
    return seen


def run(command: str, folder: Path, *arguments: str) -> Result:
    (folder / "p.txt").write_text("Hello\n")
    words = {"generate": ["--prompt", "Hello"], "batch": [str(folder / "p.txt"), "--output", str(folder / "o.jsonl")]}
    typed = [command, *words.get(command, []), "--model", "tiny-code", "--method", "autoregressive", *arguments]
    return CliRunner().invoke(cli.app, typed, input="Hello\n", env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", TYPED)
def test_a_setting_arrives_or_is_refused_by_name(
    command: str, name: str, arrived: list[SamplingParams], tmp_path: Path
) -> None:
    result = run(command, tmp_path, *as_typed(name))
    reason = (REFUSED if command == "batch" else ONE_TEXT).get(name)
    if reason is not None:
        words = f"error: pdkernels.{command}: {flag(SETTINGS[name])} cannot be followed here: {reason}.\n"
        assert result.exit_code == 2 and result.stderr == words and not arrived
        return
    assert isinstance(result.exception, Arrived), result.output
    usual: dict[str, Any] = {"max_new_tokens": 512} if command == "chat" else {}
    expected = SamplingParams(**{**usual, name: EXAMPLES[name]})
    if command == "batch":
        assert isinstance(expected.seed, int)
        expected = expected.replace(seed=[sequence_seed(expected.seed, 0)])
    assert arrived[-1] == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_objects_cannot_be_typed(command: str, arrived: list[SamplingParams], tmp_path: Path) -> None:
    for name, setting in SETTINGS.items():
        if setting.kind not in OBJECTS:
            continue
        result = run(command, tmp_path, "--option", f"{name}=x")
        words = f"pdkernels.{command}: --option {name}= needs an object of Python, which cannot be typed."
        assert result.exit_code == 2 and result.stderr == f"error: {words}\n" and not arrived


@pytest.mark.parametrize("command", COMMANDS)
def test_a_loaded_adapter_cannot_be_named(command: str, arrived: list[SamplingParams], tmp_path: Path) -> None:
    """`generate` and `chat` load one by `--adapter`, a folder; `batch` merges one."""
    result = run(command, tmp_path, "--option", "adapter=style")
    words = f"error: pdkernels.{command}: --option adapter= is not an option of a method."
    assert result.exit_code == 2 and result.stderr.startswith(words) and not arrived


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_grammar_has_options_of_its_own(command: str, arrived: list[SamplingParams], tmp_path: Path) -> None:
    result = run(command, tmp_path, "--regex", "[a-z ]+")
    assert isinstance(result.exception, Arrived), result.output
    grammar: Any = arrived[-1].grammar
    assert grammar.source == EXAMPLES["grammar"].source
    assert set(arrived[-1].asked) - {"max_new_tokens"} == {"grammar"}


@pytest.mark.parametrize("name", [name for name in TYPED if name != "max_new_tokens"])  # which every command has
def test_a_setting_as_an_assignment(name: str) -> None:
    settings, options = read_settings("chat", {}, [f"{name}={json.dumps(EXAMPLES[name])}", "x=2"], {}, {})
    assert options == {"x": 2} and SamplingParams(**settings) == SamplingParams(**{name: EXAMPLES[name]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--logit-bias", "{5: 2}"], "Invalid value for '--logit-bias': '{5: 2}' is not JSON."),
        (["--logit-bias", '{"x": 2}'], "--logit-bias must hold ints, got str."),
        (["--bad-words", "[[]]"], "--bad-words must hold no empty list, got one."),
        (["--top-p", "2"], "--top-p must be in 0 .. 1, got 2.0."),
        (["--end-token", "1", "--option", "end_tokens=[2]"], "is given twice, by --end-token and by --option."),
    ],
)
def test_what_is_wrong_is_named_as_it_was_typed(
    arguments: list[str], words: str, arrived: list[SamplingParams], tmp_path: Path
) -> None:
    for command in COMMANDS:
        result = run(command, tmp_path, *arguments)
        assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.output
    assert not arrived


@pytest.mark.parametrize("name", REFUSED)
def test_files_refuse_in_python_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Hello\n")
    with pytest.raises(NotImplementedError, match=rf"files of texts do not follow {name}: {REFUSED[name]}\."):
        generate_files(tmp_path / "p.txt", tmp_path / "o.jsonl", "tiny-code", **{name: EXAMPLES[name]})
    assert not (tmp_path / "o.jsonl.partial").exists()


def test_a_run_with_params_is_the_run_with_keywords(tmp_path: Path) -> None:
    """And the ledger of one is resumed by the other."""

    def stop(done: int, total: int) -> None:
        raise Arrived

    (tmp_path / "p.txt").write_text("def f(\nimport \n")
    settings: dict[str, Any] = {
        "temperature": 0.75,
        "logit_bias": {32: 2.0},
        "max_new_tokens": 6,
        "stop_strings": ["z"],
    }
    made = SamplingParams(**settings, seed=7)
    plain, out = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    generate_files(tmp_path / "p.txt", plain, "tiny-code", seed=7, **settings)
    with pytest.raises(Arrived):
        generate_files(tmp_path / "p.txt", out, "tiny-code", batch_size=1, progress=stop, seed=7, **settings)
    report = generate_files(tmp_path / "p.txt", out, "tiny-code", params=made)
    assert report.resumed == 1 and out.read_text() == plain.read_text()
