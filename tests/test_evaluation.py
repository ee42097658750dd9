"""The comparison of decoding methods: what is counted, what is compared, what is timed, on small random byte models."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import report
from pdkernels import decoding
from pdkernels.decoding import Method
from pdkernels.decoding.causal import autoregressive
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation import Candidate, Row, Task, as_json, candidates, comparison, evaluate, make_task, plot, tasks
from pdkernels.evaluation.sweep import parse_sweep, sweep_candidates
from pdkernels.generation.session import Session
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.training import arithmetic, standard_library

GREEDY = Candidate("small", "autoregressive")


def small_model(mask_token: int | None = 257, pairs: bool = False) -> Transformer:
    """Random fp64 weights that never predict the mask token. `pairs`: ids 2i and 2i + 1 always have the same logit."""
    torch.manual_seed(3)
    config = TransformerConfig(
        vocab_size=258, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, tied_head=False
    )
    model = Transformer(config, tokenizer=ByteTokenizer(), end_tokens=(256,), mask_token=mask_token).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_()
        model.head[257] = 0
        if pairs:
            model.head[1:256:2] = model.head[0:256:2]
            model.head[256] = 0
    return model.requires_grad_(False)


@lru_cache
def source() -> Task:
    """Reads hundreds of files, hence only once."""
    return make_task("source", 4)


def small_task(problems: int = 3, limit: int = 12) -> Task:
    return source()._replace(prompts=source().prompts[:problems], limit=limit)


def rows_of(methods: list[Candidate], task: Task, model: Transformer | None = None, **options: Any) -> list[Row]:
    return evaluate({"small": model or small_model()}, [GREEDY, *methods], task, **options)


# ---- tasks


def test_sums_are_held_out_and_reproducible() -> None:
    task = make_task("sums", 30, seed=1)
    assert len(set(task.prompts)) == len(task.problems) == 30 and task.end_tokens is None
    assert task.prompts == [problem.prompt for problem in task.problems]
    assert make_task("sums", 7, seed=1).prompts == task.prompts[:7] and make_task("sums", 7).prompts != task.prompts[:7]
    trained_on = {problem.prompt for problem in islice(arithmetic(1), 3000)}
    assert not trained_on & {*task.prompts, *task.warm_up}
    assert len(task.warm_up) == 5 and not set(task.warm_up) & set(task.prompts)


def test_every_solution_fits_into_the_limit() -> None:
    assert (
        max(len(problem.steps) for problem in islice(arithmetic(0, held_out=True), 2000)) < make_task("sums", 1).limit
    )


def test_source_is_cut_out_of_held_out_files() -> None:
    task = make_task("source", 20)
    train, held_out = standard_library()
    held_out_text = "\0".join(text.decode("utf-8", errors="ignore") for text in held_out)
    assert task.problems is None and task.end_tokens == ()
    assert all(120 <= len(prompt.encode()) <= 128 and prompt in held_out_text for prompt in task.prompts)
    assert len(set(task.prompts)) == 20 and make_task("source", 5).prompts == task.prompts[:5]
    trained_on = b"\0".join(train)
    assert sum(prompt.encode() in trained_on for prompt in task.prompts) <= 1, "a licence may be in two files"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poems", 1), "pdkernels.evaluation.make_task: task must be one of sums, source, chains, got 'poems'."),
        (("sums", 0), "pdkernels.evaluation.make_task: problems must be at least 1, got 0."),
    ],
)
def test_tasks_that_do_not_exist(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_task(*arguments)
    assert str(caught.value) == message


# ---- candidates


def test_the_rows_of_the_trained_models() -> None:
    models = {"tiny-code": small_model(None), "tiny-jacobi": small_model(None), "tiny-trimode": small_model()}
    found, skipped = candidates(models)
    assert skipped == []
    speculation = [("linear_self_speculation", width) for width in (4, 8, 16)]
    speculation += [("quadratic_self_speculation", width) for width in (4, 8, 16)]
    assert [tuple(candidate)[:3] for candidate in found] == [
        ("tiny-code", "autoregressive", None),
        ("tiny-code", "jacobi", None),
        ("tiny-jacobi", "autoregressive", None),
        ("tiny-jacobi", "jacobi", None),
        ("tiny-jacobi", "jacobi_multiblock", None),
        ("tiny-trimode", "autoregressive", None),
        *(("tiny-trimode", *pair) for pair in speculation),
        *(("tiny-trimode", "block_diffusion", width) for width in (4, 8, 16)),
    ]


def test_other_models_run_what_they_can() -> None:
    models = {"plain": small_model(None), "tri-mode": small_model()}
    found, skipped = candidates(models, widths=[5])
    assert skipped == []
    assert {"autoregressive", "jacobi, 5", "jacobi_multiblock, 5"} <= {c.label for c in found if c.model == "plain"}
    able = [name for name in decoding.available() if decoding.supports(name, models["plain"])]
    assert [c.method for c in found if c.model == "plain"] == [n for n in able if not decoding.find(n).needs_mask_token]
    assert "fast_dllm_v2" in able and "llada" not in able
    assert [c.method for c in found if c.model == "tri-mode"] == able


def test_chosen_methods_and_widths() -> None:
    models = {"plain": small_model(None), "tri-mode": small_model()}
    found, skipped = candidates(models, ["linear_self_speculation", "jacobi", "jacobi"], [8, 2, 8])
    assert [c.label for c in found if c.model == "plain"] == ["autoregressive", "jacobi, 8", "jacobi, 2"]
    assert [c.label for c in found if c.model == "tri-mode"] == [
        "autoregressive",
        "linear_self_speculation, 8",
        "linear_self_speculation, 2",
        "jacobi, 8",
        "jacobi, 2",
    ]
    assert skipped == [
        "plain with linear_self_speculation: the model has no mask token; a tri-mode model such as tiny-trimode has one"
    ]
    with pytest.raises(ValueError, match="method must name a decoding method, got 'jacoby'"):
        candidates(models, ["jacoby"])
    with pytest.raises(ValueError, match=r"pdkernels.evaluation: width must be at least 1, got 0\."):
        candidates(models, widths=[0])


class Least:
    """A model with the members of `CausalModel` and no others."""

    capabilities = frozenset({"causal"})

    def __init__(self) -> None:
        self._inner = small_model(None)
        self.config, self.tokenizer, self.end_tokens = self._inner.config, self._inner.tokenizer, (256,)

    def new_cache(self, batch: int, capacity: int) -> Any:
        return self._inner.new_cache(batch, capacity)

    def __call__(self, tokens: torch.Tensor, *, cache: Any, counts: Any = None, rows: Any = None) -> torch.Tensor:
        return self._inner(tokens, cache=cache, counts=counts, rows=rows)


def test_a_model_may_have_the_members_of_its_protocol_alone() -> None:
    models = {"own": Least()}
    found, skipped = candidates(models, ["jacobi"], [4])
    assert skipped == [] and [c.label for c in found] == ["autoregressive", "jacobi, 4"]
    assert [row.verdict for row in evaluate(models, found, small_task(2))] == ["is greedy", "yes"]
    swept = sweep_candidates(models, [parse_sweep("window=3,5")])
    assert [c.label for c in swept] == ["autoregressive", "jacobi, window 3", "jacobi, window 5"]


def test_widths_reach_the_methods() -> None:
    for method in (name for name, known in METHODS.items() if known.widths):
        assert set(Candidate("small", method, 4).options) < set(decoding.method_options(method))


# ---- right answers


def writes(answers: dict[str, str]) -> Any:
    """A decoder that knows the answer to every prompt."""

    def decode(session: Session) -> None:
        session.forwards += 1
        for sequence, prompt in enumerate(session.prompts):
            text = answers[bytes(prompt).decode()]
            session.emit(sequence, [*text.encode(), ByteTokenizer.end_token][: session.max_new_tokens], 0)

    return decode


def test_an_answer_counts_if_it_is_exactly_right(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("sums", 8)
    right = [problem.steps for problem in task.problems]
    result = [problem.result for problem in task.problems]
    answers = [
        right[0],
        f"answer {result[1]}",
        right[2] + "and more",
        f"answer {result[3] + 1}\n",
        f"answer {result[4]}0\n",
        f"answer {result[5]}\nanswer {result[5] + 1}\n",
        f"the answer {result[6]}\n",
        "",
    ]
    known = {problem.prompt: problem.steps for problem in islice(arithmetic(0, held_out=True), 40)}
    known |= dict(zip(task.prompts, answers, strict=True))
    monkeypatch.setitem(METHODS, "autoregressive", Method("autoregressive", writes(known), lossless=True))
    (row,) = rows_of([], task)
    assert (row.right, row.problems, row.identical) == (2, 8, 8)
    (batched,) = rows_of([], task, batch_size=3)
    assert (batched.right, batched.problems, batched.identical) == (2, 8, 8)
    known |= dict(zip(task.prompts, right, strict=True))
    monkeypatch.setitem(METHODS, "autoregressive", Method("autoregressive", writes(known), lossless=True))
    assert rows_of([], task)[0].right == 8


def test_source_is_neither_right_nor_wrong() -> None:
    assert rows_of([], small_task())[0].right is None


# ---- the same tokens as greedy


def altered(change: Any) -> Any:
    """Greedy decoding whose tokens are changed afterwards, for the prompts that `change` picks."""

    def decode(session: Session) -> None:
        autoregressive.decode(session)
        for prompt, tokens in zip(session.prompts, session.tokens, strict=True):
            change(bytes(prompt).decode(errors="ignore"), tokens)

    return decode


def test_lossless_methods_are_identical_to_greedy() -> None:
    methods = ["jacobi", "jacobi_multiblock", "linear_self_speculation", "quadratic_self_speculation"]
    first, *rows = rows_of([Candidate("small", method, 4) for method in methods], small_task())
    assert first.verdict == "is greedy" and [row.method for row in rows] == methods
    for row in rows:
        assert row.lossless and not row.broken and row.identical == row.problems == 3 and row.verdict == "yes"
        assert row.tokens == first.tokens == 36 and row.speedup is not None and row.tokens_per_cycle >= 1


@pytest.mark.parametrize("kind", ["another token", "a token less", "a token more"])
def test_a_wrong_decoder_is_found_and_has_no_figures(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task()

    def change(prompt: str, tokens: list[int]) -> None:
        if prompt == task.prompts[1]:
            if kind == "another token":
                tokens[-1] = (tokens[-1] + 1) % 256
            elif kind == "a token less":
                tokens.pop()
            else:
                tokens.append(0)

    monkeypatch.setitem(METHODS, "wrong", Method("wrong", altered(change), lossless=True))
    _, row = rows_of([Candidate("small", "wrong")], task)
    assert row.broken and (row.identical, row.ties) == (2, 0) and row.verdict == "no, 2 of 3"
    costs = (row.tokens_per_forward, row.tokens_per_second, row.speedup, row.speedup_quartiles, row.tokens_per_cycle)
    assert costs == (None,) * 5 and row.accepted_per_cycle is None


def test_a_tie_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids 2i and 2i + 1 have the same logit; the first differing token decides, whatever follows."""
    task = small_task()

    def change(prompt: str, tokens: list[int]) -> None:
        if prompt != task.prompts[0]:
            tokens[-2] ^= 1
            tokens[-1] = (tokens[-1] + 7) % 256

    monkeypatch.setitem(METHODS, "tossing", Method("tossing", altered(change), lossless=True))
    _, row = rows_of([Candidate("small", "tossing")], task, small_model(pairs=True))
    assert not row.broken and (row.identical, row.ties) == (1, 2) and row.verdict == "yes, 2 tied"
    assert row.speedup is not None
    assert rows_of([Candidate("small", "tossing")], task)[1].broken, "without tied logits the same change is a fault"


def test_block_diffusion_promises_nothing() -> None:
    _, row = rows_of([Candidate("small", "block_diffusion", 4)], small_task())
    assert not row.lossless and not row.broken and row.identical < 3 and row.verdict == f"{row.identical} of 3"
    assert row.speedup is not None and row.tokens_per_cycle is None and row.ties == 0


# ---- figures


@pytest.mark.parametrize("batch_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 5))])
def test_figures_of_forwards_and_cycles(batch_size: int) -> None:
    model, task = small_model(), small_task(limit=15)
    competing = [
        Candidate("small", "linear_self_speculation", 4),
        Candidate("small", "quadratic_self_speculation", 3),
        Candidate("small", "jacobi", 5),
    ]
    for row in rows_of(competing, task, model, batch_size=batch_size):
        tokens = forwards = cycles = drafted = undrafted = 0
        for number, prompt in enumerate(task.prompts):
            options = Candidate("small", row.method, row.width).options
            options["seed"] = decoding.sequence_seed(0, number % batch_size)
            stats = decoding.generate(
                model, prompt, row.method, max_new_tokens=15, end_tokens=(), trace=True, **options
            ).stats
            tokens, forwards, cycles = tokens + stats.tokens, forwards + stats.forwards, cycles + len(stats.trace[0])
            drafted += sum(step.accepted - 1 for step in stats.trace[0])
            undrafted += sum(len(step.draft) == 1 for step in stats.trace[0])
        assert (row.batch_size, row.tokens) == (batch_size, tokens)
        assert row.tokens_per_forward == pytest.approx(tokens / forwards)
        if row.method == "autoregressive":
            assert row.tokens_per_cycle is row.accepted_per_cycle is None
            continue
        assert row.tokens_per_cycle == pytest.approx((tokens - 3) / cycles)
        assert row.accepted_per_cycle == pytest.approx(drafted / cycles)
        if row.method == "linear_self_speculation":
            assert forwards == 3 + 2 * cycles - undrafted


class Timed:
    """In place of `comparison._run`: sets how long each generation took, and records which candidate ran what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, int | None], list[float]]) -> None:
        self.calls: list[tuple[str, int | None, tuple[str, ...]]] = []
        self.seconds = {key: iter(values) for key, values in seconds.items()}
        self.run = comparison._run
        monkeypatch.setattr(comparison, "_run", self)

    def __call__(self, models: Any, candidate: Candidate, task: Task, prompts: list[str]) -> decoding.DecodeResult:
        self.calls.append((candidate.method, candidate.width, tuple(prompts)))
        result = self.run(models, candidate, task, prompts)
        taken = next(self.seconds.get((candidate.method, candidate.width), iter(())), 1.0)
        return decoding.DecodeResult(result.tokens, result.text, replace(result.stats, seconds=taken))


def test_speed_is_the_median_against_greedy_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down for a while: both do, and the ratio stays."""
    unseen = 99.0
    Timed(monkeypatch, {("autoregressive", None): [unseen, 1, 1, 10, 1], ("jacobi", 4): [unseen, 0.5, 0.25, 5, 2]})
    greedy, row = rows_of([Candidate("small", "jacobi", 4)], small_task(4))
    assert (greedy.speedup, greedy.speedup_quartiles) == (1, (1, 1))
    assert row.speedup == 2 and row.speedup_quartiles == (1.625, 2.5) and row.seconds == [0.5, 0.25, 5, 2]
    assert row.tokens_per_second == pytest.approx(48 / 7.75) and greedy.tokens_per_second == pytest.approx(48 / 13)


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, task = Timed(monkeypatch, {}), small_task(4)
    shares: list[float] = []
    rows_of(
        [Candidate("small", "jacobi", 4), Candidate("small", "jacobi", 8)],
        task,
        batch_size=2,
        progress=lambda what, share: shares.append(share),
    )
    warm_up, a, b = tuple(task.warm_up[:2]), tuple(task.prompts[:2]), tuple(task.prompts[2:])
    greedy, four, eight = ("autoregressive", None), ("jacobi", 4), ("jacobi", 8)
    assert timed.calls == [
        *((*who, warm_up) for who in (greedy, four, eight)),
        *((*who, a) for who in (greedy, four, eight)),
        *((*who, b) for who in (four, eight, greedy)),
    ]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1


def test_the_fastest_width_is_found_on_prompts_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[tuple[str, int | None], list[float]] = {("jacobi", width): [9] + [2] * 4 for width in (4, 8, 32)}
    seconds["jacobi", 16] = [99] + [1] * 4  # slow only at first
    timed, task = Timed(monkeypatch, seconds), small_task()
    _, row = rows_of([Candidate("small", "jacobi")], task)
    assert row.width == 16 and row.label == "jacobi, 16"
    tried = [prompts for method, width, prompts in timed.calls if method == "jacobi" and width != 16]
    assert {prompt for prompts in tried for prompt in prompts} <= set(task.warm_up)


def test_what_cannot_be_compared() -> None:
    model = small_model()
    with pytest.raises(
        ValueError, match=r"pdkernels.evaluation: competing must begin with autoregressive for small, got jacobi, 4\."
    ):
        evaluate({"small": model}, [Candidate("small", "jacobi", 4)], small_task())
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        rows_of([], small_task(), batch_size=0)
    model.tokenizer = None
    with pytest.raises(ValueError, match="models must have tokenizers, got none in small. A checkpoint's folder needs"):
        rows_of([], small_task(), model)


# ---- output


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A sum and a piece of source, with a broken method among the candidates."""
    monkeypatch.setattr(tasks, "_SUMS_LIMIT", 12)
    monkeypatch.setitem(METHODS, "wrong", Method("wrong", altered(lambda prompt, tokens: tokens.pop()), lossless=True))
    competing = [Candidate("small", "jacobi", 4), Candidate("small", "wrong"), Candidate("small", "block_diffusion", 4)]
    return [*rows_of(competing, make_task("sums", 2)), *rows_of(competing, small_task(2))]


def test_json_is_what_the_report_reads(measured: list[Row], tmp_path: Path) -> None:
    written = as_json(measured, ["tiny-jacobi: absent"])
    (tmp_path / "evaluation.json").write_text(json.dumps(written))
    assert written["skipped"] == ["tiny-jacobi: absent"]
    rows = report.load(tmp_path)
    assert len(rows) == 8
    for row, original in zip(rows, measured, strict=True):
        assert row["op"] == "evaluation" and row["group"] == f"evaluation, {original.task}"
        for name in (
            "task",
            "model",
            "method",
            "width",
            "problems",
            "batch_size",
            "tokens",
            "right",
            "identical",
            "ties",
            "lossless",
            "tokens_per_forward",
            "tokens_per_second",
            "speedup",
            "tokens_per_cycle",
            "accepted_per_cycle",
        ):
            assert row[name] == getattr(original, name)
        assert {"device", "threads", "python", "torch", "pdkernels"} <= row.keys()
        assert row["candidate"] == original.label and row["max_us"] >= row["iqr_us"] >= 0
    sums, source = (report.TABLES[f"evaluation {task}"](rows).splitlines() for task in ("sums", "source"))
    assert "exact match" in sums[0] and "exact match" not in source[0]
    assert [line.split(" | ")[0] for line in source[2:6]] == [
        "| small: autoregressive",
        "| small: jacobi, 4",
        "| small: wrong",
        "| small: block_diffusion, 4",
    ]
    assert sums[4].endswith("| 0% (0% to 66%) | - | - | - | - | - | no, 0 of 2 |") and " yes |" in sums[3]
    assert report.TABLES["evaluation sums"]([]) == report.TABLES["evaluation picture"]([]) == "not measured"
    assert "images/bench_evaluation.png" in report.TABLES["evaluation picture"](rows)


def test_the_picture_is_drawn(measured: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *rest, **more: (figures.append(self), save(self, *rest, **more))[1]
    )
    rows = [benchmark["extra_info"] for benchmark in as_json(measured)["benchmarks"]]
    plot(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG\r\n")
    (figure,) = figures
    assert len(figure.axes) == 5  # what is right, forwards and speed on sums; on source text nothing is right or wrong
    kept = [row for row in rows if row["speedup"] is not None]
    for title, name in (("tokens per forward", "tokens_per_forward"), ("speed", "speedup")):
        panels = [axis for axis in figure.axes if axis.get_title(loc="left").startswith(title)]
        drawn = [bar.get_width() for axis in panels for bar in axis.patches]
        assert drawn == [row[name] for row in kept] and len(drawn) == 6
    shares = [line.get_xdata()[0] for line in figure.axes[0].lines[1::2]]
    assert shares == [100 * row["right"] / row["problems"] for row in kept if row["task"] == "sums"]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["small", "token by token", "Jacobi, 4", "block diffusion, 4"]
    with pytest.raises(ValueError, match="rows must hold figures to draw, got none"):
        plot([row for row in rows if row["method"] == "wrong"], tmp_path / "nothing.png")
