"""``python -m pdkernels demo``: a pretrained model answers questions token by token, with drafts, and in
transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdkernels import decoding, models
from pdkernels._validation import check as demand
from pdkernels.cli import _flags as flags
from pdkernels.cli._terminal import LEGEND, PROMPT, Stream, errors_reported, load, needs_chats, use_threads, visible
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged
from pdkernels.models.checkpoints.zoo import WEIGHTS
from pdkernels.ops.quantized_linear import QuantizedWeight

QUESTIONS = (
    "Correct the grammar of this text and repeat it in full:\n\nHi team, please send me the report until friday. I has seen that "
    "there was some mistakes in the last one, so please check the numbers twice. The meeting are moved to monday at 10. Thank you "
    "very much for you're help, Anna",
    "Explain why the sky is blue.",
)
GREEDY = "autoregressive"
ADAPTER = WEIGHTS / "smollm2-jacobi"  # a LoRA trained by Jacobi Forcing, if there is one


class Answer(NamedTuple):
    """The answer of a competitor, and its cost."""

    tokens: list[int]
    forwards: int
    seconds: float


class Competitor(NamedTuple):
    """A function that answers ``(prompt, max_new_tokens)``; `greedy` names the competitor whose tokens it must emit."""

    answer: Callable[[list[int], int], Answer]
    greedy: str


def demo(
    model: Annotated[
        str, typer.Option(help="Name of a model with a chat template, a folder, or a .gguf file.")
    ] = PACKAGED[0],
    question: Annotated[
        list[str] | None,
        typer.Option(help="May be given several times; by default one whose answer quotes it, and one other."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per prompt; the median is shown.")] = 3,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = None,
    packed: flags.Packed = None,
    cache_dtype: flags.CacheDtype = None,
    threads: flags.Threads = None,
) -> None:
    """Answer questions in every lossless way; compare the cost.

    The ways take turns, so that other load on the machine affects all of them.
    """
    console, same = Console(highlight=False), True
    with errors_reported():
        language_model: Any = load("demo", model, device, dtype, packed, cache_dtype)
        needs_chats("demo", language_model.tokenizer, model)
        one_by_one = decoding.supports(GREEDY, language_model)
        demand(one_by_one, "demo", "--model", "decode token by token", model, "Use chat, or generate --method all.")
        use_threads(threads, [language_model])
        if isinstance(language_model, torch.nn.Module):
            console.print(f"{model}: {_weights(language_model)}", style="dim", soft_wrap=True, markup=False)
        competitors = _competitors(model, language_model)
        for text in question or QUESTIONS:
            prompt = language_model.tokenizer.encode_chat([{"role": "user", "content": text}])
            console.rule(style="dim")
            console.print(Text(visible(text), PROMPT), soft_wrap=True)
            stream = Stream(console, language_model.tokenizer)
            method, options = list(_DRAFTS.values())[-1]
            decoding.generate(
                language_model, prompt, method, max_new_tokens=max_new_tokens, on_tokens=stream, **options
            )
            stream.finish()
            answers = _measured(competitors, prompt, max_new_tokens, rounds)
            wrong = {
                name for name, known in competitors.items() if answers[name].tokens != answers[known.greedy].tokens
            }
            same = same and not wrong
            console.print(_table(competitors, answers, wrong, rounds))
    if console.color_system is not None:
        console.print(LEGEND)
    if "transformers" not in competitors:
        console.print(
            "Where transformers can read the model's GGUF file (with accelerate and gguf), there is a row for it.",
            style="dim",
            soft_wrap=True,
        )
    if not same:
        raise typer.Exit(1)


def _measured(
    competitors: dict[str, Competitor], prompt: list[int], max_new_tokens: int, rounds: int
) -> dict[str, Answer]:
    """The answer of each competitor with its median time, after a warm-up."""
    for known in competitors.values():
        known.answer(prompt, 2)
    runs = [{name: known.answer(prompt, max_new_tokens) for name, known in competitors.items()} for _ in range(rounds)]
    return {
        name: runs[0][name]._replace(seconds=statistics.median(run[name].seconds for run in runs))
        for name in competitors
    }


def _competitors(name: str, model: Any) -> dict[str, Competitor]:
    """All available competitors, by their names in the table."""
    competitors = {GREEDY: Competitor(_ours(model, GREEDY), GREEDY)}
    for label, (method, options) in _DRAFTS.items():
        competitors[label] = Competitor(_ours(model, method, **options), GREEDY)
    if name == PACKAGED[0] and ADAPTER.is_dir():
        # A different model, compared with its own greedy tokens.
        forced = models.load(name, adapter=ADAPTER)
        greedy_name = "autoregressive, adapted"
        jumps = Competitor(_ours(forced, "jacobi", draft="model"), greedy_name)
        competitors |= {greedy_name: Competitor(_ours(forced, GREEDY), greedy_name), "jacobi, adapted": jumps}
    file = packaged(name) if name in PACKAGED else Path(name)
    if file.suffix == ".gguf" and all(importlib.util.find_spec(name) for name in _NEEDED_BY_THEIRS):
        # It makes numbers of packed matrices, and so writes a text of its own.
        modules = model.modules() if isinstance(model, torch.nn.Module) else ()
        packed = any(isinstance(module, QuantizedWeight) for module in modules)
        competitors["transformers"] = Competitor(_theirs(file, model.end_tokens), "transformers" if packed else GREEDY)
    return competitors


_NEEDED_BY_THEIRS = ("transformers", "accelerate", "gguf")
"""What transformers reads a GGUF file with."""

_DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "jacobi, looked up": ("jacobi", {"draft": "lookup", "block_size": "auto"})
}
"""Methods that draft, and their options, by their names in the table; the last one is shown while it writes."""


def _ours(model: Any, name: str, **options: Any) -> Callable[[list[int], int], Answer]:
    method = decoding.find(name)

    def answer(prompt: list[int], max_new_tokens: int) -> Answer:
        result = decoding.generate(model, prompt, method, max_new_tokens=max_new_tokens, **options)
        return Answer(result.tokens.tolist(), result.stats.forwards, result.stats.seconds)

    return answer


def _theirs(file: Path, end_tokens: tuple[int, ...]) -> Callable[[list[int], int], Answer]:
    """The `generate` of transformers, greedy, on the same file in the same precision."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar would interrupt our output
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.eval()

    def answer(prompt: list[int], max_new_tokens: int) -> Answer:
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        with torch.inference_mode():
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(end_tokens),
                pad_token_id=end_tokens[0],
            )
        seconds = time.perf_counter() - started
        tokens = written[0, len(prompt) :].tolist()
        return Answer(tokens, len(tokens), seconds)

    return answer


def _weights(model: torch.nn.Module) -> str:
    """What the matrices of a model are, and the memory that its weights take."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    tensors = [*model.parameters(), *(data for module in packed for data in module.data)]
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / 1e6
    kinds = sorted({format for module in packed for format in module.formats}) or [
        str(tensors[0].dtype)[len("torch.") :]
    ]
    return f"weights in {' and '.join(kinds)}, {size:,.0f} MB"


def _table(competitors: dict[str, Competitor], answers: dict[str, Answer], wrong: set[str], rounds: int) -> Table:
    title = f"threads {torch.get_num_threads()}, batch 1, median of {rounds} rounds in turns, prompt included"
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=title, title_justify="left", title_style="dim")
    table.add_column("", no_wrap=True)
    for heading in ("tokens", "forwards", "tokens/\nforward", "seconds", "tokens/s", "\nspeed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\ntokens")
    base = answers["transformers" if "transformers" in answers else GREEDY]
    for name, (tokens, forwards, seconds) in answers.items():
        count = len(tokens)
        speed = (count / seconds) / (len(base.tokens) / base.seconds)
        is_greedy = competitors[name].greedy == name
        verdict = Text("no", "bold red") if name in wrong else Text("is greedy" if is_greedy else "yes")
        figures = (str(count), str(forwards), f"{count / forwards:.2f}", f"{seconds:.2f}", f"{count / seconds:.1f}")
        table.add_row(name, *figures, f"{speed:.2f}x", verdict)
    return table
