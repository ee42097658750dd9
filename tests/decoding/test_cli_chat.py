"""The commands that chat, on an untrained byte model: the terminal chat through a pipe, and the demo."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import pdkernels as pd
from pdkernels import cli, decoding, models
from pdkernels.cli import _chat as command
from pdkernels.cli import _demo
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig


class Chatty(ByteTokenizer):
    """Bytes, with a chat template of one character per message."""

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(f"<{message['role'][0]}>{message['content']}" for message in messages) + "<a>")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=257,
        hidden_size=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_positions=200,
    )
    model = Transformer(config, tokenizer=Chatty()).double().requires_grad_(False)
    load = models.load
    monkeypatch.setattr(models, "load", lambda name, **_: model if name == "tiny" else load(name))
    return model


def run(typed: str, *arguments: str) -> Result:
    environment = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": None, "COLUMNS": "120"}
    return CliRunner().invoke(cli.app, ["chat", *arguments], input=typed, env=environment)


def figures(result: Result) -> list[str]:
    return re.findall(r"^\d+ tokens, .*$", result.stdout, re.M)


def test_answers_come_from_the_whole_chat(tiny: Transformer) -> None:
    result = run("Hello\n\n  And?  \n/exit\nunread\n", "--model", "tiny", "--max-new-tokens", "20", "--system", "S")
    assert result.exit_code == 0, result.output
    usual = {"draft": "lookup", "block_size": "auto", "max_new_tokens": 20}
    first = decoding.generate(tiny, "<s>S<u>Hello<a>", "jacobi", **usual)
    second = decoding.generate(tiny, f"<s>S<u>Hello<a>{first.text}<u>And?<a>", max_new_tokens=20)
    jacobi = decoding.generate(tiny, f"<s>S<u>Hello<a>{first.text}<u>And?<a>", "jacobi", **usual)
    for question, answer in (("Hello", first), ("And?", second)):
        assert f"> {question}\n{command.visible(answer.text)}\n20 tokens, " in result.stdout
    assert "unread" not in result.stdout
    shown = [
        re.match(r"20 tokens, (\d+) forwards, (\d+\.\d\d) tokens/forward, [\d.]+ tokens/s$", line)
        for line in figures(result)
    ]
    assert [match and match.groups() for match in shown] == [
        (str(one.stats.forwards), f"{one.stats.tokens_per_forward:.2f}") for one in (first, jacobi)
    ]


def test_settings_of_a_draw_are_followed(tiny: Transformer) -> None:
    drawn = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    named = [word for name, value in drawn.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = run("Hello\n", "--model", "tiny", "--max-new-tokens", "12", *named)
    text = decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=12, **drawn).text
    assert f"> Hello\n{command.visible(text)}\n12 tokens, " in result.stdout, result.output


def test_a_chat_samples_as_the_authors_suggest_unless_it_is_told_how(
    tiny: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggestion = {"temperature": 1.5, "top_k": 40, "repetition_penalty": 1.2}
    monkeypatch.setattr(command, "settings", lambda model: suggestion)
    arguments = ["--model", "tiny", "--max-new-tokens", "12"]
    text = decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=12, **suggestion).text
    result = run("Hello\n", *arguments)
    assert f"> Hello\n{command.visible(text)}\n12 tokens, " in result.stdout, result.output
    assert "Sampling as the model's authors suggest" in result.stdout
    chosen = {**suggestion, "repetition_penalty": 1.7}
    text = decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=12, **chosen).text
    result = run("Hello\n", *arguments, "--option", "repetition_penalty=1.7")
    assert f"> Hello\n{command.visible(text)}\n12 tokens, " in result.stdout, result.output
    greedy = decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=12).text
    result = run("Hello\n", *arguments, "--temperature", "0")
    assert f"> Hello\n{command.visible(greedy)}\n12 tokens, " in result.stdout and "suggest" not in result.stdout


def test_reset_and_the_other_commands(tiny: Transformer) -> None:
    result = run("Hello\n/reset\nHello\n/what\n", "--model", "tiny", "--max-new-tokens", "6")
    answer = command.visible(decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=6).text)
    assert result.stdout.count(f"> Hello\n{answer}\n6 tokens") == 2
    assert result.stdout.count(command.COMMANDS) == 2 and "A new chat." in result.stdout


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_a_chat_ends_at_a_word(tiny: Transformer, word: str) -> None:
    result = run(f"{word}\nHello\n", "--model", "tiny", "--max-new-tokens", "6")
    assert result.exit_code == 0 and "Hello" not in result.stdout


def test_an_answer_ends_where_the_positions_do(tiny: Transformer) -> None:
    """And a chat without room for one gets an error in one sentence, and continues."""
    result = run(
        f"{'x' * 180}\nmore\n/reset\nshort\n{'y' * 300}\n/reset\nshort\n", "--model", "tiny", "--max-new-tokens", "30"
    )
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in figures(result)] == ["14", "30", "30"]
    sentence = "error: pdkernels.chat: the chat must leave room for an answer in 200 positions, got {} tokens. Start again with /reset."
    assert result.stderr.splitlines()[0] == sentence.format(200 + len("<u>more<a>"))
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize(("interrupts", "count"), [(1, 5), (2, 4)])
def test_an_interrupt_stops_the_answer_and_keeps_the_chat(tiny: Transformer, interrupts: int, count: int) -> None:
    """After the current forward; a second one at once."""
    forwards = 0

    def interrupt(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 8:  # of which the first three are those of the unseen answer
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)

    with tiny.register_forward_pre_hook(interrupt):
        result = run("Hello\nAnd?\n", "--model", "tiny", "--method", "autoregressive", "--max-new-tokens", "9")
    assert result.exit_code == 0, result.output
    part = decoding.generate(tiny, "<u>Hello<a>", max_new_tokens=count).text
    rest = decoding.generate(tiny, f"<u>Hello<a>{part}<u>And?<a>", max_new_tokens=9).text
    assert re.search(rf"^{count} tokens, stopped after \d+\.\d s$", result.stdout, re.M)
    assert f"> Hello\n{command.visible(part)}\n{count} tokens" in result.stdout
    assert f"> And?\n{command.visible(rest)}\n9 tokens" in result.stdout


def test_accepted_drafts_are_in_colour(tiny: Transformer) -> None:
    environment = {"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "120"}
    arguments = ["chat", "--model", "tiny", "--max-new-tokens", "40"]
    result = CliRunner().invoke(cli.app, arguments, input="abcabcabc\n", env=environment)
    assert decoding.generate(tiny, "<u>abcabcabc<a>", "jacobi", max_new_tokens=40, draft="lookup").stats.forwards < 40
    assert "accepted drafts" in result.stdout and result.stdout.count("\x1b[1;32m") > 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "tiny-code"], "pdkernels.chat: --model must have a chat template, got tiny-code."),
        (["--model", "tiny", "--draft", "none"], "pdkernels.chat: --draft must be one of 'model', 'lookup'"),
        (["--model", "tiny", "--method", "jacoby"], "method must name a decoding method, got 'jacoby'."),
        (
            ["--model", "tiny", "--method", "llada"],
            "pdkernels.chat: --method must fit the model (block_causal, causal)",
        ),
        (["--model", "tiny", "--temperature", "-1"], "temperature must be finite and at least 0"),
    ],
)
def test_errors(arguments: list[str], sentence: str) -> None:
    result = run("Hello\n", *arguments)
    assert result.exit_code == 2 and sentence in result.stderr and "Hello" not in result.stdout


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_a_tokenizer_without_a_chat_template(command: str, tiny: Transformer) -> None:
    tiny.tokenizer.chat_template = None  # as that of a file that only continues texts
    result = CliRunner().invoke(cli.app, [command, "--model", "tiny"], input="Hello\n")
    expected = (
        f"error: pdkernels.{command}: --model must have a chat template, got tiny. Use generate to continue a text.\n"
    )
    assert result.exit_code == 2 and result.stderr == expected


# ---- the demo


def demo(*arguments: str) -> Result:
    environment = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": None, "COLUMNS": "100"}
    return CliRunner().invoke(cli.app, ["demo", "--model", "tiny", "--rounds", "3", *arguments], env=environment)


def test_every_way_gives_the_same_tokens(tiny: Transformer) -> None:
    result = demo("--question", "abcabcabc", "--question", "x", "--max-new-tokens", "30")
    assert result.exit_code == 0, result.output
    assert "Where transformers can read the model's GGUF file" in result.stdout
    assert result.stdout.count("threads 1, batch 1, median of 3 rounds in turns, prompt included") == 2
    for question in ("abcabcabc", "x"):
        lookup: dict[str, Any] = {"draft": "lookup", "block_size": "auto"}
        answer = decoding.generate(tiny, f"<u>{question}<a>", "jacobi", max_new_tokens=30, **lookup)
        assert f"{question}\n{command.visible(answer.text)}\n" in result.stdout
        forwards = answer.stats.forwards
        assert re.search(rf"^ *jacobi, looked up +30 +{forwards} +{30 / forwards:.2f} .* yes *$", result.stdout, re.M)
    assert len(re.findall(r"^ *autoregressive +30 +30 +1\.00 .* 1\.00x +is greedy *$", result.stdout, re.M)) == 2
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_demo_says_what_the_weights_are(tiny: Transformer) -> None:
    result = demo("--question", "x", "--max-new-tokens", "4", "--rounds", "1")
    assert result.stdout.startswith("tiny: weights in float64, 0 MB\n"), result.output
    packed = pd.quantize(models.load("tiny-code"), "q8_0", skip="embedding")
    size = sum(parameter.nbytes for parameter in packed.parameters())
    size += sum(data.nbytes for part in packed.modules() if isinstance(part, pd.QuantizedWeight) for data in part.data)
    assert size > 1e6 and _demo._weights(packed) == f"weights in q8_0, {size / 1e6:,.0f} MB"


@pytest.mark.parametrize("given, packed", [([], None), (["--packed"], True), (["--no-packed"], False)])
@pytest.mark.parametrize("name", ["demo", "chat", "generate", "serve"])
def test_packed_reaches_the_loader(
    monkeypatch: pytest.MonkeyPatch, name: str, given: list[str], packed: bool | None
) -> None:
    asked: list[Any] = []

    def load(model: str, **options: Any) -> Any:
        asked.append(options.get("packed"))
        raise ValueError("pdkernels.models.load: enough")

    monkeypatch.setattr(models, "load", load)
    more = ["--prompt", "x"] if name == "generate" else []
    result = CliRunner().invoke(cli.app, [name, "--model", "tiny", *more, *given], input="x\n")
    assert result.exit_code == 2 and asked == [packed], result.output


@pytest.mark.parametrize("name", ["demo", "chat", "generate", "serve"])
def test_the_cache_s_dtype_reaches_the_loader(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Any] = []

    def load(model: str, **options: Any) -> Any:
        asked.append(options.get("cache_dtype"))
        raise ValueError("pdkernels.models.load: enough")

    monkeypatch.setattr(models, "load", load)
    more = ["--prompt", "x"] if name == "generate" else []
    arguments = [name, "--model", "tiny", *more, "--cache-dtype"]
    result = CliRunner().invoke(cli.app, [*arguments, "int8"], input="x\n")
    assert result.exit_code == 2 and asked == [torch.int8], result.output
    result = CliRunner().invoke(cli.app, [*arguments, "float16"], input="x\n")
    assert result.exit_code == 2 and asked == [torch.int8, torch.float16], result.output
    result = CliRunner().invoke(cli.app, [*arguments, "int4"], input="x\n")
    assert result.exit_code == 2 and len(asked) == 2 and "--cache-dtype must be int8 or float16" in result.output


def test_an_adapter_in_the_package_takes_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It makes another model, which is compared with its own greedy tokens."""
    for name, value in {"PACKAGED": ("tiny",), "packaged": lambda name: tmp_path / name, "ADAPTER": tmp_path}.items():
        monkeypatch.setattr(_demo, name, value)
    result = demo("--question", "abcabcabc", "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    assert re.search(r"^ *autoregressive, adapted +12 +12 +1\.00 .* is greedy *$", result.stdout, re.M)
    assert re.search(r"^ *jacobi, adapted +12 +\d+ .* yes *$", result.stdout, re.M)


@pytest.mark.parametrize("missing", ["", "transformers", "accelerate", "gguf"])
def test_transformers_takes_part_where_it_can_read_the_file(
    monkeypatch: pytest.MonkeyPatch, tiny: Transformer, missing: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(_demo, "_theirs", lambda file, ends: file)
    assert ("transformers" in _demo._competitors("model.gguf", tiny)) == (missing == "")


def test_other_tokens_are_reported_and_give_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _demo.Competitor(lambda prompt, most: _demo.Answer([65] * most, most, 1.0), _demo.GREEDY)
    found = _demo._competitors
    monkeypatch.setattr(_demo, "_competitors", lambda *model: found(*model) | {"transformers": wrong})
    result = demo("--question", "Hello", "--max-new-tokens", "8")
    assert result.exit_code == 1
    assert re.search(r"^ *transformers +8 +8 +1\.00 +1\.00 +8\.0 +1\.00x +no *$", result.stdout, re.M)


def test_the_median_of_rounds_in_turns() -> None:
    turns: list[str] = []

    def timed(name: str, seconds: list[float]) -> _demo.Competitor:
        clock = iter([9.0, *seconds])

        def answer(prompt: list[int], most: int) -> _demo.Answer:
            turns.append(name)
            return _demo.Answer([1] * most, most, next(clock))

        return _demo.Competitor(answer, "a")

    measured = _demo._measured({"a": timed("a", [3.0, 1.0, 2.0]), "b": timed("b", [5.0, 5.0, 8.0])}, [1], 4, 3)
    assert turns == ["a", "b"] * 4
    assert {name: answer.seconds for name, answer in measured.items()} == {"a": 2.0, "b": 5.0}
