"""The command line at its doors: hostile arguments, odd terminals and pipes, and what it does when nothing is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from pdkernels import cli, decoding
from pdkernels._version import __version__
from pdkernels.batch import ledger, ray
from pdkernels.cli._doctor import thread_advice
from pdkernels.cli._terminal import visible


def run(*arguments: str, **environment: str | None) -> Result:
    environment = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": None, "COLUMNS": "120", **environment}
    return CliRunner().invoke(cli.app, list(arguments), env=environment)


SIZES = st.sampled_from(["0", "-1", "1", "2", "x", "1e9", "", "nan"])
NAMES = st.sampled_from(
    ["tiny-code", "tiny-masked", "tiny-cod", "", "a/b", ".", "jacobi", "llada", "autoregressive", "\x00"]
)
OPTIONS = {
    "generate": "--prompt --model --method --max-new-tokens --block-size --drafter --window --temperature --top-k --top-p --min-p --typical-p --presence-penalty --frequency-penalty --seed --page-size --option "
    "--stop --html --dtype --repetition-penalty",
    "batch": "--output --model --method --batch-size --column --seed --option --dtype --adapter --on-error --top-k --top-p --min-p --max-new-tokens",
    "methods": "",
}  # fmt: skip
WORDS = st.sampled_from(
    ["block_size=2", "block_size=", "=", "model=3", "progress=1", "x" * 300, "[", "{}", "-h", "\ud800"]
)


@st.composite
def argument_lists(draw: Any) -> list[str]:
    command = draw(st.sampled_from(list(OPTIONS)))
    found = [command]
    for option in draw(st.lists(st.sampled_from(OPTIONS[command].split() or ["--x"]), max_size=4)):
        found += [option, draw(SIZES | NAMES | WORDS)]
    found += draw(st.lists(NAMES | WORDS | st.just("--nonsense"), max_size=1))
    return found


@settings(max_examples=60, deadline=None)
@given(argument_lists())
def test_hostile_arguments_are_refused_in_a_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, arguments, input="", env={"COLUMNS": "120"})
    assert result.exit_code in (0, 1, 2), arguments
    assert isinstance(result.exception, (SystemExit, type(None))), (arguments, result.exception)
    if result.exit_code == 2:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, (arguments, result.stderr)


def test_the_version() -> None:
    assert run("--version").stdout == f"pdkernels {__version__}\n"


def test_a_misspelt_command() -> None:
    result = run("generat")
    assert result.exit_code == 2 and "Did you mean 'generate'?" in result.stderr and result.stderr.count("\n") == 1


def test_a_demo_needs_a_chat() -> None:
    result = run("demo", "--model", "tiny-trimode")
    assert result.exit_code == 2 and not result.stdout
    assert "pdkernels.demo: --model must have a chat template, got tiny-trimode." in result.stderr


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("tiny-code", "jacobi"),
        ("tiny-jacobi", "jacobi"),
        ("tiny-trimode", "linear_self_speculation"),
        ("tiny-masked", "llada"),
        ("tiny-recurrent", "jacobi"),
    ],
)
def test_the_usual_method(model: str, method: str) -> None:
    result = run("generate", "--model", model, "--prompt", "1 + 1 = 2\n1 + 1 = ", "--max-new-tokens", "8")
    found = cli.models.load(model)
    chosen, options = decoding.default_method(found, name=model)
    stats = decoding.generate(found, "1 + 1 = 2\n1 + 1 = ", decoding.find(chosen), max_new_tokens=8, **options).stats
    assert chosen == method
    assert re.search(rf"^ +{method} +{stats.forwards} +{stats.tokens} ", result.stdout, re.M), result.output


def test_shared_options_are_followed() -> None:
    model, texts = cli.models.load("tiny-code"), set()
    cases: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}]
    for filters in cases:
        named = [word for name, value in filters.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        hot = run("generate", "--prompt", "x", "--temperature", "3", "--seed", "5", "--max-new-tokens", "30", *named)
        text = decoding.generate(model, "x", max_new_tokens=30, temperature=3.0, seed=5, **filters).text
        assert f"x{visible(text)}\n" in hot.stdout
        texts.add(text)
    assert len(texts) == 4
    assert run("generate", "--prompt", "x", "--dtype", "bfloat16", "--max-new-tokens", "2").exit_code == 0
    refused = run("generate", "--prompt", "x", "--device", "cuda:99")
    assert refused.exit_code == 2 and "device must be one that torch finds" in refused.stderr


def test_batch_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_bytes(b"import o\n\xff\n")
    call = ["batch", str(prompts), "--output", str(out), "--max-new-tokens", "2"]
    result = run(*call)
    assert (
        result.exit_code == 1
        and "1 texts, and 1 prompts with an error in place of a text; 2 new tokens" in result.stderr
    )
    result = run(*call)
    assert result.exit_code == 2 and "output must be a new file" in result.stderr
    out.unlink()
    held = ledger.Ledger(out, {}, 1)
    result = run(*call)
    assert result.exit_code == 2 and "output must be written by one run at a time" in result.stderr
    held.close()
    assert run(*call, "--on-error", "stop").exit_code == 2
    assert run(*call, "--on-error", "never").exit_code == 2

    def dead(*_: Any, **__: Any) -> None:
        raise RuntimeError("pdkernels.integrations.generate_files: workers must stay alive, got death.")

    monkeypatch.setattr(ray, "_here", dead)
    result = run(*call)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1


def test_advice_about_threads() -> None:
    assert thread_advice(2, {1: 0.01, 2: 0.1}.__getitem__)[-1].startswith("Fewer threads are faster: pass --threads 1")
    assert not any("Fewer" in line for line in thread_advice(2, {1: 0.1, 2: 0.06}.__getitem__))
    before = torch.get_num_threads()
    assert run("doctor").exit_code == 0 and torch.get_num_threads() == before


def process(*arguments: str, **environment: str) -> list[str]:
    return [sys.executable, "-m", "pdkernels", *arguments]


PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | PLAIN)


def test_a_pipe_that_closes_early() -> None:
    with subprocess.Popen(process("methods", "jacobi", "llada"), **pipes) as one:
        assert one.stdout is not None and one.stderr is not None
        one.stdout.close()
        assert b"Traceback" not in one.stderr.read()


@pytest.mark.slow
def test_a_plain_locale() -> None:
    found = subprocess.run(process("generate", "--prompt", "x", "--max-new-tokens", "9"), check=False, **pipes)
    assert found.returncode == 0 and b"Traceback" not in found.stderr
