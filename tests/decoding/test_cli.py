"""The command line, on an untrained byte model: its text is noise, control characters included."""

from __future__ import annotations

import errno
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from pdkernels import cli, decoding, evaluation, models
from pdkernels.cli._terminal import visible
from pdkernels.decoding import Method
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.session import Session
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.models.checkpoints.zoo import WEIGHTS
from tests.support.drafters import eagle_head
from tests.support.forks import forked
from tests.support.lora import random_adapter

load_tiny_code = models.load
GENERATE = ["generate", "--prompt", "def f(", "--max-new-tokens", "24"]


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=257, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, tied_head=False
    )
    model = Transformer(config, tokenizer=ByteTokenizer()).double().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_()
    load = models.load
    monkeypatch.setattr(models, "load", lambda name, **_: model if name == "tiny-code" else load(name))
    return model


def run(*arguments: str, **environment: str | None) -> Result:
    environment = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": None, "COLUMNS": "120", **environment}
    return CliRunner().invoke(cli.app, list(arguments), env=environment)


def test_one_method_and_its_table(noise: Transformer) -> None:
    result = run(*GENERATE, "--block-size", "5")
    assert result.exit_code == 0, result.output
    stats = decoding.generate(noise, "def f(", "jacobi", max_new_tokens=24, block_size=5).stats
    assert re.search(rf"^ +jacobi +{stats.forwards} +24 +{stats.tokens_per_forward:.2f} ", result.stdout, re.M)
    assert "def f(" in result.stdout and "identical" not in result.stdout


def test_a_page_that_replays_it(tmp_path: Path) -> None:
    page = tmp_path / "new folder/run.html"
    missing = run(*GENERATE, "--method", "jacobi", "--html", str(page))
    assert missing.exit_code == 2 and not page.parent.exists() and "def f(" not in missing.stdout
    assert "--html must lie in a folder that exists" in missing.stderr
    page.parent.mkdir()
    result = run(*GENERATE, "--method", "jacobi", "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "<h1>tiny-code, jacobi</h1>" in page.read_text(encoding="utf-8")
    result = run(*GENERATE, "--method", "jacobi", "--method", "autoregressive", "--html", str(page))
    assert result.exit_code != 0 and "--html must come with one --method, got jacobi, autoregressive" in result.stderr


def test_a_long_prompt_is_read_once(noise: Transformer) -> None:
    read = 0

    def listen(module: Transformer, arguments: tuple[torch.Tensor], options: object, output: object) -> None:
        nonlocal read
        read += arguments[0].numel()

    with noise.register_forward_hook(listen, with_kwargs=True):
        assert run("generate", "--prompt", "x" * 1000, "--max-new-tokens", "1").exit_code == 0
    assert 1000 <= read < 1200


def test_the_text_is_streamed_unbroken_and_harmless(noise: Transformer) -> None:
    result = run(*GENERATE, "--method", "autoregressive", "--max-new-tokens", "200", COLUMNS="40")
    text = decoding.generate(noise, "def f(", max_new_tokens=200).text
    assert "def f(" + visible(text) + "\n" in result.stdout
    assert any(ord(character) < 32 and character not in "\n\t" for character in text), "the noise must hold some"
    assert all(character.isprintable() or character in "\n\t" for character in result.stdout)


def test_no_character_steers_the_terminal() -> None:
    assert visible("a\x1b[2Jb\r\x07\x9b\n\té") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\té"


def test_a_planned_text_is_printed_without_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans(session: Session) -> None:
        session.emit(0, [1, 72, 105], 0)
        session.text_of = lambda tokens: bytes(tokens[1:]).decode()

    monkeypatch.setitem(METHODS, "plans", Method("plans", plans, "planned"))
    monkeypatch.setattr(Method, "supports", lambda *_: True)
    result = run(*GENERATE, "--method", "plans")
    assert result.exit_code == 0 and "def f(Hi\n" in result.stdout


def test_check_compares_with_greedy() -> None:
    result = run(*GENERATE, "--method", "autoregressive", "--method", "jacobi", "--check")
    assert result.exit_code == 0
    assert re.search(r"autoregressive .* is greedy", result.stdout)
    assert re.search(r"jacobi .* yes", result.stdout)
    assert re.search(r"jacobi .* yes", run(*GENERATE, "--check").stdout)


def test_the_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        METHODS, "quadratic_self_speculation", replace(METHODS["jacobi"], name="quadratic_self_speculation")
    )
    monkeypatch.setitem(METHODS, "fast_dllm_v2", Method("fast_dllm_v2", lambda session: session.record_first(0, 65)))
    result = run(
        *GENERATE, "--method", "quadratic_self_speculation", "--method", "fast_dllm_v2", "--check", COLUMNS="80"
    )
    table = result.stdout[result.stdout.index("method ") :]
    assert (
        "forwards" in table
        and "…" not in table
        and re.search(r"^ +quadratic_self_speculation +\d.* yes *$", table, re.M)
    ), table
    assert max(map(len, table.splitlines())) <= 80


def test_a_difference_is_reported_and_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(session: Session) -> None:
        session.forwards += 1
        session.record_first(0, 65)

    monkeypatch.setitem(METHODS, "wrong", Method("wrong", wrong, lossless=True))
    result = run(*GENERATE, "--method", "wrong", "--check")
    assert result.exit_code == 1
    assert re.search(r"wrong .* no", result.stdout)
    assert run(*GENERATE, "--method", "wrong").exit_code == 0


def test_all_methods() -> None:
    result = run(*GENERATE, "--method", "all", "--window", "6", "--seed", "3", "--page-size", "4", "--check")
    assert result.exit_code == 0, result.output
    for method in decoding.available():
        asks_more = "mask_token" in decoding.method_options(method) or not decoding.supports(method, None)
        assert (re.search(rf"^ +{method} +\d", result.stdout, re.M) is None) == asks_more


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour_only_where_it_is_wanted(environment: dict[str, str], coloured: bool) -> None:
    result = run(*GENERATE, "--max-new-tokens", "60", TERM="xterm-256color", **environment)
    assert (re.search(r"\x1b\[[0-9;]*3[0-9]", result.stdout) is not None) == coloured
    assert ("\x1b" in result.stdout) == bool(environment)
    assert ("accepted drafts" in result.stdout) == bool(environment)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--method", "jacoby"],
            "method must name a decoding method, got 'jacoby'. Did you mean 'jacobi'? Known: autoregressive, jacobi",
        ),
        (["--method", "planned"], "method must fit the model (block_causal, causal), got 'planned'"),
        (["--method", "block_diffusion"], "the model has no mask token. Pass mask_token"),
        (["--block-size", "0"], "--block-size must be at least 1, got 0."),
        (["--block-size", "4", "--window", "4"], "--block-size 4 and --window 4 exclude each other"),
        (["--max-new-tokens", "9999999999"], "--max-new-tokens must be at most 16777216, got 9999999999."),
        (["--overflow", "ignore"], "overflow must be one of 'error', 'warn', got 'ignore'"),
        (["--prompt", ""], "prompt must hold at least one token"),
        (["--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--max-new-tokens", "-1"], "Invalid value for '--max-new-tokens'"),
        (["--blok-size", "4"], "No such option: --blok-size"),
        (["--option", "blok_size=4"], "--option blok_size= is not an option of jacobi. Did you mean 'block_size'?"),
        (["--method", "autoregressive", "--window", "4"], "--window is not an option of autoregressive"),
        (["--model", "tiny-masked", "--window", "4"], "--window is not an option of llada"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (
            ["--block-size", "4", "--option", "block_size=8"],
            "--block-size is given twice, by --block-size and by --option",
        ),
        (["--dtype", "fp8"], "--dtype must be one of 'float64', 'float32', 'bfloat16', 'float16', got 'fp8'"),
        (
            ["--model", "Qwen/Qwen3-0.6B"],
            "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`, then name that folder.",
        ),
        (["--model", "no-such-model"], "--model must name a model or a local folder"),
        (["--prompt", "caf\udce9"], "text must hold only Unicode characters"),
        (
            ["--model", "tiny-masked", "--check"],
            "--check needs a model that decodes token by token; tiny-masked does not.",
        ),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], text: str) -> None:
    result = run(*GENERATE, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr and result.stderr.startswith("error: pdkernels") and result.stderr.count("\n") == 1
    assert not result.stdout


def test_advice_names_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they help."""
    monkeypatch.setattr(models, "load", load_tiny_code)
    result = run("generate", "--prompt", "def f(", "--max-new-tokens", "600", "--stop", ":")
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.endswith("Shorten the prompt, lower --max-new-tokens, or pass --overflow warn.\n")
    with pytest.warns(UserWarning, match="prompt must leave room"):
        result = run("generate", "--prompt", "def f(", "--max-new-tokens", "600", "--stop", ":", "--overflow", "warn")
    assert result.exit_code == 0 and "def f(" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate --prompt", "`pdkernels generate --help` lists what there is."),
        ("generate --prompt a --drafter nothing", "--drafter must name a model or a local folder, got 'nothing'"),
        ("generate --prompt a --method nothing", "--method must name a decoding method, got 'nothing'"),
        ("generate --prompt a --temperature -1", "--temperature must be finite and at least 0, got -1.0."),
        ("generate --prompt a --option draft=x", "--option draft= must be one of 'model', 'lookup', got 'x'."),
        ("generate --prompt a --window 0", "--window must be at least 1, got 0."),
        ("generate --prompt a --check --temperature 1", "--check compares with greedy decoding. Leave out the temperature."),
        ("generate --prompt a --threads 100000", "Invalid value for '--threads'"),
        ("generate --prompt a --option x=1", "The options: --block-size, --window, --option draft=, --option allow_mask_token=, --page-size, --temperature, --top-k,"),
        ("batch FILE --output OUT.csv", "--output must end in .jsonl or .parquet"),
        ("batch FILE --output OUT.jsonl --option progress=1", "--option progress= is not an option of a method."),
        ("batch FILE --output OUT.jsonl --option block_size=1", "It accepts: --option allow_mask_token=, --option page_size=, --temperature, --top-k, --top-p, --min-p, --typical-p, --seed."),
        ("batch FILE --output OUT.jsonl --max-new-tokens 9999", "lower --max-new-tokens, or pass --option overflow=warn."),
        ("serve --model tiny-code --option max_new_tokens=1", "max_new_tokens= is not an option of a method. Give --max-new-tokens."),
        ("serve --model tiny-code --option block_size=0", "--option block_size= must be at least 1, got 0."),
        ("serve --model tiny-code --allow-origin http://a/b", "--allow-origin must be SCHEME://HOST[:PORT], without a path, or *, got 'http://a/b'."),
        ("serve --model tiny-code --allow-origin localhost", "--allow-origin must be SCHEME://HOST[:PORT]"),
        ("serve --model tiny-code --allow-host http://a", "--allow-host must be HOST[:PORT] or *, got 'http://a'."),
        ("eval --problems 1 --sweep temperature=-1", "temperature must be finite and at least 0, got -1."),
        ("eval --sweep x", "--sweep must have the form option=value,value, got 'x'."),
    ],
)  # fmt: skip
def test_errors_name_what_was_typed(arguments: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    typed = arguments.replace("FILE", str(tmp_path / "prompts.txt")).replace("OUT", str(tmp_path / "texts"))
    result = run(*typed.split())
    assert result.exit_code == 2 and not result.stdout, result.output
    assert words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["generate --prompt a", "chat", "serve", "demo", "batch FILE --output OUT.jsonl"])
def test_devices_are_those_of_the_kernels(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    typed = command.replace("FILE", str(tmp_path / "prompts.txt")).replace("OUT", str(tmp_path / "texts"))
    result = run(*typed.split(), "--device", "meta")
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr == f"error: pdkernels.{typed.split()[0]}: --device must be cpu or cuda, got 'meta'.\n"


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_one_sentence(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    command = GENERATE if option == "--html" else ("eval", "--problems", "1", "--task", "sums", "--model", "tiny-code")
    result = run(*command, option, str(tmp_path / "a.html"))
    assert result.exit_code == 1
    words = f"{option} must be a file that can be written, got {tmp_path / 'a.html'} (No space left on device)."
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_what_is_refused_after_output_has_exit_code_1() -> None:
    """Exit code 2 promises that nothing was written."""

    def late(session: Session) -> None:
        raise ValueError("pdkernels.decoding.late: it must come earlier, got late.")

    METHODS["late"] = Method("late", late)
    try:
        first = run(*GENERATE, "--method", "late")
        second = run(*GENERATE, "--method", "autoregressive", "--method", "late")
    finally:
        del METHODS["late"]
    assert first.exit_code == 2 and not first.stdout
    assert second.exit_code == 1 and "def f(" in second.stdout
    assert first.stderr == second.stderr == "error: pdkernels.decoding.late: it must come earlier, got late.\n"


@pytest.mark.parametrize(
    "command", ["generate", "batch", "chat", "serve", "demo", "eval", "methods", "models", "doctor"]
)
def test_help_fits_80_columns_and_cuts_no_name(command: str) -> None:
    shown = run(command, "--help", COLUMNS="80").stdout
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert re.search(rf"^ +{command} +[A-Z][^.]*\.$", run("--help", COLUMNS="80").stdout, re.M)


def answer(columns: int, words: list[str], *lines: str) -> str:
    code = "\n".join(["import os, sys", f"os.environ['COLUMNS'] = '{columns}'", f"sys.orig_argv[:] = {words}", *lines])
    result = forked(code)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("words", [["-m", "pdkernels"], ["/usr/bin/pdkernels"]], ids=str)
def test_the_version_needs_no_torch(words: list[str]) -> None:
    command = ["python", *words, "--version"]
    assert answer(80, command, "sys.modules['torch'] = None", "import pdkernels") == run("--version").stdout


@pytest.mark.parametrize("columns", [45, 80, 200])
def test_the_help_needs_no_torch(columns: int) -> None:
    """It is the help of the whole command line, for any width of the terminal."""
    found = answer(columns, ["python", "-m", "pdkernels", "--help"], "sys.modules['torch'] = None", "import pdkernels")
    whole = ("import pdkernels.cli", "sys.argv[:] = ['pdkernels', '--help']", "pdkernels.cli.main()")
    assert found == answer(columns, ["python"], *whole)


def test_an_option_no_method_takes_is_an_error() -> None:
    result = run(*GENERATE, "--method", "autoregressive", "--block-size", "4")
    assert result.exit_code == 2 and "--block-size is not an option of autoregressive" in result.stderr


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: Session) -> None:
        raise ValueError("something else")

    monkeypatch.setitem(METHODS, "broken", Method("broken", broken, lossless=True))
    result = run(*GENERATE, "--method", "broken")
    assert isinstance(result.exception, ValueError) and str(result.exception) == "something else"


# ---- eval


EVAL = ["eval", "--model", "tiny-code", "--task", "source", "--problems", "2"]


def test_eval_shows_a_row_for_each_candidate() -> None:
    result = run(*EVAL, "--method", "jacobi", "--width", "4", "--width", "8", "--batch-size", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"^source: 2 prompts, batch size 2, threads 1 *$", result.stdout, re.M)
    assert re.search(r"^ +autoregressive +1\.00 +- +\d+ +1\.00x +is greedy *$", result.stdout, re.M)
    for width in (4, 8):
        assert re.search(rf"^ +jacobi, {width} +\d\.\d\d +\d\.\d\d +\d+ +\d\.\d\dx +yes *$", result.stdout, re.M)
    assert "exact" not in result.stdout and "skipped" not in result.stdout


def test_eval_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        METHODS, "quadratic_self_speculation", replace(METHODS["jacobi"], name="quadratic_self_speculation")
    )
    monkeypatch.setattr(evaluation.tasks, "_SUMS_LIMIT", 12)
    arguments = ["--task", "sums", "--method", "quadratic_self_speculation", "--width", "16"]
    result = run("eval", "--model", "tiny-code", *arguments, "--problems", "2", COLUMNS="80")
    assert re.search(r"^ +quadratic_self_speculation, 16 +0% +.* yes *$", result.stdout, re.M), result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80 and "interval" not in result.stdout
    wide = run("eval", "--model", "tiny-code", *arguments, "--problems", "2", COLUMNS="96")
    assert re.search(r"^ +quadratic_self_speculation, 16 +0% +0-66% .* yes *$", wide.stdout, re.M), wide.stdout


def test_eval_writes_figures_and_picture(tmp_path: Path) -> None:
    paths = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--method", "jacobi", "--width", "4", "--json", str(paths[0]), "--plot", str(paths[1])]
    assert run(*EVAL, *arguments).exit_code == 0
    rows = [benchmark["extra_info"] for benchmark in json.loads(paths[0].read_text())["benchmarks"]]
    assert [(row["candidate"], row["identical"], row["tokens"]) for row in rows] == [
        ("autoregressive", 2, 128),
        ("jacobi, 4", 2, 128),
    ]
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_eval_skips_models_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "available", lambda: ("tiny-code",))
    result = run("eval", "--task", "source", "--problems", "1", "--method", "linear_self_speculation")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:3] == [
        "skipped tiny-jacobi: it is not in this package; python examples/train_tiny_jacobi.py --output "
        f"{WEIGHTS / 'tiny-jacobi'}.safetensors makes it",
        "skipped tiny-trimode: it is not in this package; python examples/train_tiny_trimode.py --output "
        f"{WEIGHTS / 'tiny-trimode'}.safetensors makes it",
        "skipped tiny-code with linear_self_speculation: the model has no mask token; a tri-mode model such as tiny-trimode "
        "has one",
    ]
    assert "autoregressive" in result.stdout
    alone = run("eval", "--model", "tiny-trimode")
    assert alone.exit_code == 2 and "--model must name at least one model that exists, got none." in alone.stderr
    assert not alone.stdout


def test_eval_reports_a_wrong_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(session: Session) -> None:
        session.forwards += 1
        session.record_first(0, 65)

    monkeypatch.setitem(METHODS, "wrong", Method("wrong", wrong, lossless=True))
    result = run(*EVAL, "--method", "wrong", "--method", "jacobi", "--width", "4")
    assert result.exit_code == 1
    assert re.search(r"^ +wrong +- +- +- +- +no, 0 of 2 *$", result.stdout, re.M)
    assert re.search(r"^ +jacobi, 4 .* yes *$", result.stdout, re.M)
    assert "so its speed is not shown" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--model", "tiny-cod"],
            "--model must name a model or a local folder, got 'tiny-cod'. Did you mean 'tiny-code'? Models: tiny-code",
        ),
        (
            ["--method", "jacoby"],
            "method must name a decoding method, got 'jacoby'. Did you mean 'jacobi'? Known: autoregressive, jacobi",
        ),
        (["--task", "poems"], "pdkernels.eval: --task must be one of sums, source, chains, got 'poems'."),
        (["--plot", "picture.pdf"], "pdkernels.eval: --plot must be a path that ends in .png, got picture.pdf."),
        (["--json", f"{__file__}/figures.json"], "pdkernels.eval: --json must lie in a folder that exists, got "),
    ],
)
def test_errors_of_eval_are_one_sentence(arguments: list[str], text: str) -> None:
    result = run("eval", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr and result.stderr.startswith("error: pdkernels.") and result.stderr.count("\n") == 1


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(evaluation, "evaluate", None)
    result = run(*EVAL, "--plot", str(tmp_path / "picture.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr and result.stderr.count("\n") == 1


def test_models_and_doctor() -> None:
    shown = run("models", COLUMNS="200").stdout
    for name in models.available():
        model = models.load(name)
        usual = decoding.default_method(model, name=name)[0]
        size = sum(each.numel() for each in model.parameters()) / 1e6
        assert re.search(rf"^ +{name} +{size:.1f} M +\d+\.\d +{usual},", shown, re.M), shown
    assert run("doctor").stdout.startswith("pdkernels ")


def test_methods_and_their_options_in_the_decoders_words() -> None:
    listed = run("methods", COLUMNS="200").stdout
    for name, method in METHODS.items():
        assert re.search(rf"^ *{name} ", listed, re.M)
        printed = " ".join(run("methods", name, COLUMNS="1000").stdout.split())
        assert method.summary in printed
        assert all(f"{option} {' '.join(option.help.split())}" in printed for option in method.options.values())
    assert "NAMES must name a decoding method, got 'jacoby'" in run("methods", "jacoby").stderr
    printed = " ".join(run("generate", "--help", COLUMNS="1000").stdout.split())
    assert f"jacobi: {METHODS['jacobi'].options['window'].help.partition('.')[0]}" in printed


def test_a_wrong_variable_is_one_sentence() -> None:
    code = "import runpy, sys; sys.argv[1:] = ['doctor']; runpy.run_module('pdkernels', run_name='__main__')"
    result = forked(code, environment={"PDKERNELS_CPU_ISA": "mmx"})
    assert result.returncode == 2
    levels = "portable, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16 or amx"
    assert result.stderr == f"error: pdkernels: PDKERNELS_CPU_ISA must be {levels}, got 'mmx'.\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_sentence(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import pdkernels; import pdkernels.__main__"
    result = forked(code)
    assert result.returncode == 1
    assert result.stderr == "The pdkernels command line needs typer and rich: pip install typer rich\n"


def test_the_library_itself_needs_neither() -> None:
    code = "import sys, pdkernels; sys.exit(any(name in sys.modules for name in ('typer', 'rich')))"
    assert forked(code).returncode == 0


def test_only_a_picture_needs_matplotlib() -> None:
    code = "import sys, pdkernels.cli; sys.exit('matplotlib' in sys.modules)"
    assert forked(code).returncode == 0


def test_drafters_are_attached(noise: Transformer, tmp_path: Path) -> None:
    """The folder of a head, and a small model by name; each is the default method then, with lengths that pay."""
    head = eagle_head(noise, taps=(0, 1, 1), own_embedding=True).float()
    models.save_drafter(head, tmp_path / "head")
    for drafter, method in ((str(tmp_path / "head"), "eagle"), ("tiny-jacobi", "draft_model")):
        for more in ([], ["--block-size", "3"], ["--block-size", "auto"]):
            noise.drafters = {}
            result = run(*GENERATE, "--drafter", drafter, "--check", *more, XDG_CACHE_HOME=str(tmp_path))
            assert result.exit_code == 0, result.output
            assert re.search(rf"^ +{method} +\d+ +24 ", result.stdout, re.M) and "identical" in result.stdout
    noise.drafters = {}
    wrong = run(*GENERATE, "--drafter", str(tmp_path))
    assert wrong.exit_code == 2 and "config.json" in wrong.stderr
    wrong = run(*GENERATE, "--block-size", "most")
    assert wrong.exit_code == 2 and "--block-size must be a number or auto, got 'most'" in wrong.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_adapter_is_applied(command: str, noise: Transformer, tmp_path: Path) -> None:
    """The text is that of Python with the adapter, by every method, and `--check` compares with greedy decoding under it."""
    folder = str(random_adapter(noise, tmp_path / "poems", 4, 1, size=1.0))
    models.load_adapter(noise, "expected", folder)
    plain, expected = (
        decoding.generate(noise, "def f(", adapter=name, max_new_tokens=24).text for name in (None, "expected")
    )
    assert plain != expected
    if command == "generate":
        for method in ("autoregressive", "jacobi"):
            noise.adapters.pop(folder, None)
            result = run(*GENERATE, "--method", method, "--adapter", folder, "--check", COLUMNS="400")
            assert result.exit_code == 0 and "identical" in result.stdout, result.output
            assert visible(expected) in result.stdout and visible(plain) not in result.stdout
    words = [command, *(GENERATE[1:] if command == "generate" else ["--model", "tiny-code"])]
    noise.adapters.pop(folder, None)
    wrong = run(*words, "--adapter", str(tmp_path / "gone"))
    assert wrong.exit_code == 2 and "must be a folder that exists" in wrong.stderr
