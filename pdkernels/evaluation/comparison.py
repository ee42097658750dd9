"""Runs candidates on the same prompts, and compares their answers before it reports costs. See `docs/evaluation.md`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from pdkernels import decoding
from pdkernels._validation import check
from pdkernels.decoding.method import WINGS, Wing
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.candidate import Candidate
from pdkernels.evaluation.machine import facts
from pdkernels.evaluation.masked import masked_candidates
from pdkernels.evaluation.ranks import in_order, is_first, of_first, own_numbers
from pdkernels.evaluation.recurrent import extra_memory, recurrent_candidates, with_full_wave
from pdkernels.evaluation.tasks import Task
from pdkernels.generation.result import DecodeResult
from pdkernels.models.capabilities import capabilities

_OP = "evaluation"

_Results = DecodeResult[list[torch.Tensor], list[str]]

# The methods shown for the trained transformers.
DEFAULT_METHODS = {
    model: tuple(name for name, method in METHODS.items() if method.in_default_evaluation and model in method.models)
    for model in dict.fromkeys(
        model for method in METHODS.values() if method.in_default_evaluation for model in method.models
    )
}


class Defaults(NamedTuple):
    """The defaults of `eval`."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    canvas: int | None = None
    """Maximum new tokens that the models were trained for; None: any number."""


FAMILIES: dict[str, Defaults] = {
    "causal": Defaults(tuple(DEFAULT_METHODS), ("sums", "source")),
    # These methods save recurrences, so they need a model whose answers require them, and a task with answers.
    "recurrent": Defaults(("tiny-deep",), ("chains",)),
    "masked": Defaults((WINGS["masked"].example,), ("sums",), canvas=128),
}

# Widths that are tried on prompts outside the measurement, so that every model runs at its own fastest width.
_TRIED = (4, 8, 16, 32)
# New tokens of a generation whose memory is measured.
_WATCHED_TOKENS = 160
# Two logits may swap when a forward has more rows, if they differ by at most so many units in the last place.
_TIE = 64


@dataclass(frozen=True)
class Row:
    """The result of a candidate on a task.

    Attributes:
        task: its name.
        model: name of the model.
        method: name of the method.
        width: tokens of a block or draft; None for methods without.
        settings: further options of the method.
        problems: how many prompts.
        batch_size: prompts per generation.
        tokens: new tokens, all prompts together.
        right: prompts whose answer is exactly right; None if there is no right or wrong.
        baseline: whether this is greedy autoregressive decoding, with which the model's other candidates are compared.
        identical: prompts whose tokens are those of the baseline in the same run.
        ties: of the others, those that diverge at two tokens whose logits are equal up to rounding.
        lossless: whether the candidate promises the baseline's tokens.
        tokens_per_forward: `tokens` over the forwards in which their sequences took part, including those over prompts.
        tokens_per_second: `tokens` over the seconds of all generations.
        speedup: median over the batches: tokens per second over those of the baseline on the same batch.
        speedup_quartiles: the first and the third quartile of the same.
        tokens_per_cycle: new tokens per verified draft. That is two forwards in linear self-speculation, one in the
            other methods; None for methods without drafts.
        accepted_per_cycle: accepted draft tokens per verified draft; the verifier adds one token of its own.
        extra_memory: peak bytes of tensors in a generation of 160 tokens, without weights; None: not measured.
        seconds: of each batch.

    Costs of a lossless method with other tokens, `tokens_per_forward` to `accepted_per_cycle`, are None.
    """

    task: str
    model: str
    method: str
    width: int | None
    settings: tuple[tuple[str, Any], ...]
    problems: int
    batch_size: int
    tokens: int
    right: int | None
    baseline: bool
    identical: int
    ties: int
    lossless: bool
    tokens_per_forward: float | None
    tokens_per_second: float | None
    speedup: float | None
    speedup_quartiles: tuple[float, float] | None
    tokens_per_cycle: float | None
    accepted_per_cycle: float | None
    extra_memory: int | None
    seconds: list[float] = field(repr=False)

    @property
    def label(self) -> str:
        """Method, width and settings."""
        return Candidate(self.model, self.method, self.width, self.settings).label

    @property
    def broken(self) -> bool:
        """Whether a lossless method emitted other tokens than greedy decoding."""
        return self.lossless and self.identical + self.ties < self.problems

    @property
    def verdict(self) -> str:
        """A short text that says whether the tokens are those of greedy decoding."""
        if self.baseline:
            return "is greedy"
        if self.identical == self.problems:
            return "yes"
        if self.lossless and not self.broken:
            return f"yes, {self.ties} tied"
        return f"{'no, ' if self.lossless else ''}{self.identical} of {self.problems}"


def baseline_of(model: Any) -> str:
    """The first method of a model's candidates, with default options, with which the others are compared."""
    able = [method for method in METHODS.values() if method.supports(model)]
    return next((method.name for method in able if method.wing == wing_of(model)), able[0].name)


def wing_of(model: Any) -> Wing:
    """The wing of decoders that a model is evaluated with. If it supports several, recurrent depth comes first."""
    offered = capabilities(model)
    if "recurrent" in offered:
        return "recurrent"
    return "masked" if "bidirectional" in offered and "causal" not in offered else "causal"


def candidates(
    models: Mapping[str, Any], methods: Sequence[str] = (), widths: Sequence[int] = ()
) -> tuple[list[Candidate], list[str]]:
    """The candidates, starting with every model's token-by-token decoding, and a line for each one that cannot run.

    Args:
        models: by name.
        methods: none: those of `DEFAULT_METHODS`, or for other models all that they can run.
        widths: none: the default widths of the methods.

    Raises:
        ValueError, NotImplementedError: no such method, a width below 1.
    """
    for width in widths:
        check(width >= 1, _OP, "width", "be at least 1", width)
    all_methods = [decoding.find(method) for method in methods or decoding.available()]
    competing: list[Candidate] = []
    skipped = []
    for name, model in models.items():
        wing = wing_of(model)
        if not methods and wing == "recurrent":
            competing += recurrent_candidates(name)
            continue
        if not methods and wing == "masked":
            competing += masked_candidates(name)
            continue
        has_mask = getattr(model, "mask_token", None) is not None
        able = [method for method in all_methods if has_mask or not method.needs_mask_token]
        names = methods or DEFAULT_METHODS.get(name, [method.name for method in able if method.supports(model)])
        for method in map(decoding.find, dict.fromkeys([baseline_of(model), *names])):
            if not method.supports(model):
                skipped.append(
                    f"{name} with {method.name}: that method is for models of another kind, such as {method.example}"
                )
            elif method in all_methods and method not in able:
                skipped.append(
                    f"{name} with {method.name}: the model has no mask token; "
                    f"a tri-mode model such as {method.example} has one"
                )
            else:
                chosen = dict.fromkeys(widths or method.widths) if method.widths else [None]
                competing += [Candidate(name, method.name, width) for width in chosen]
    return competing, skipped


def evaluate(
    models: Mapping[str, Any],
    competing: Sequence[Candidate],
    task: Task,
    *,
    batch_size: int = 1,
    memory: bool = False,
    group: Any = None,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> list[Row]:
    """Runs all candidates on the same prompts.

    Candidates take turns on every batch, so that other load on the machine affects all of them equally. The order
    rotates from batch to batch.

    Args:
        models: by name, with tokenizers.
        competing: as returned by `candidates`.
        task: as returned by `make_task`.
        batch_size: prompts per generation.
        memory: also measure the memory of an extra generation of 160 tokens in the worst case: see `with_full_wave`.
        group: a `torch.distributed.ProcessGroup` whose ranks share the batches; each has all models. None: no ranks.
        progress: called with a description of the next step and the fraction of the task that is done.

    Returns:
        A row for each candidate, in their order, on every rank. Only times depend on the number of ranks.

    Raises:
        ValueError: a batch size below 1, a model without a tokenizer or without autoregressive decoding.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.evaluation import Candidate, evaluate, make_task
        >>> models = {"tiny-code": pd.models.load("tiny-code")}
        >>> competing = [Candidate("tiny-code", "autoregressive"), Candidate("tiny-code", "jacobi", 4)]
        >>> [(row.method, row.tokens, row.verdict) for row in evaluate(models, competing, make_task("source", 1))]
        [('autoregressive', 64, 'is greedy'), ('jacobi', 64, 'yes')]
    """
    check(batch_size >= 1, _OP, "batch_size", "be at least 1", batch_size)
    baselines: dict[str, Candidate] = {}
    for candidate in competing:
        baselines.setdefault(candidate.model, candidate)
    for name, first in baselines.items():
        check(
            first.method == baseline_of(models[name]) and not first.settings,
            _OP,
            "competing",
            f"begin with {baseline_of(models[name])} for {name}",
            first.label,
        )
        check(
            models[name].tokenizer is not None,
            _OP,
            "models",
            "have tokenizers",
            f"none in {name}",
            "A checkpoint's folder needs its tokenizer.json.",
        )
    measured = []
    for candidate in competing:
        progress(f"{candidate.model}: {candidate.label}, warm-up", 0.0)
        _run(models, candidate, task, (task.warm_up * batch_size)[:batch_size])
        if candidate.width is None and decoding.find(candidate.method).widths:
            candidate = candidate._replace(width=of_first(_fastest_width(models, candidate, task), group))
        measured.append(candidate)

    results: dict[Candidate, list[_Results]] = {candidate: [] for candidate in measured}
    batches = [task.prompts[first : first + batch_size] for first in range(0, len(task.prompts), batch_size)]
    for number in own_numbers(len(batches), group):
        begin = number % len(measured)
        for turn, candidate in enumerate(measured[begin:] + measured[:begin]):
            progress(f"{candidate.model}: {candidate.label}", (number + turn / len(measured)) / len(batches))
            results[candidate].append(_run(models, candidate, task, batches[number]))
    results = {candidate: in_order(runs, len(batches), group) for candidate, runs in results.items()}
    watched: dict[Candidate, int] = {}
    for candidate in measured if memory and is_first(group) else ():
        if (full := with_full_wave(candidate)) is not None:
            progress(f"{candidate.model}: {candidate.label}, memory", 1.0)
            watched[candidate] = extra_memory(
                models[candidate.model],
                task.warm_up[0],
                candidate.method,
                max_new_tokens=min(_WATCHED_TOKENS, task.limit),
                end_tokens=(),
                **full,
            )
    watched = of_first(watched, group)
    progress("done", 1.0)
    return [
        _row(
            models[candidate.model],
            candidate,
            task,
            batch_size,
            runs,
            results[baselines[candidate.model]],
            watched.get(candidate),
        )
        for candidate, runs in results.items()
    ]


def as_json(rows: Sequence[Row], skipped: Sequence[str] = ()) -> dict[str, Any]:
    """The rows in the form of the other benchmarks, which `bench/report.py` reads, with machine and versions."""
    common = {"op": "evaluation", **facts()}
    benchmarks = []
    for row in rows:
        first, third = _quartiles(row.seconds)
        stats = {"median": statistics.median(row.seconds), "iqr": third - first, "max": max(row.seconds)}
        fields = {name: value for name, value in asdict(row).items() if name != "seconds"}
        benchmarks.append(
            {
                "group": f"evaluation, {row.task}",
                "name": f"{row.model}: {row.label}",
                "stats": {**stats, "rounds": len(row.seconds)},
                "extra_info": {
                    **common,
                    **fields,
                    "settings": dict(row.settings),
                    "candidate": row.label,
                    "verdict": row.verdict,
                },
            }
        )
    return {"benchmarks": benchmarks, "skipped": list(skipped)}


def _run(models: Mapping[str, Any], candidate: Candidate, task: Task, prompts: list[str]) -> _Results:
    return decoding.generate(
        models[candidate.model],
        prompts,
        decoding.find(candidate.method),
        max_new_tokens=task.limit,
        end_tokens=task.end_tokens,
        **candidate.options,
    )


def _fastest_width(models: Mapping[str, Any], candidate: Candidate, task: Task) -> int:
    """The fastest width by seconds, since the tokens are the same for every width. The first prompt is a warm-up."""
    seconds = {
        width: [_run(models, candidate._replace(width=width), task, [prompt]).stats.seconds for prompt in task.warm_up]
        for width in _TRIED
    }
    return min(_TRIED, key=lambda width: statistics.fmean(seconds[width][1:]))


def _row(
    model: Any,
    candidate: Candidate,
    task: Task,
    batch_size: int,
    results: list[_Results],
    greedy: list[_Results],
    memory: int | None,
) -> Row:
    texts = [text for result in results for text in result.text or ()]
    answers = [[ids for result in side for ids in result.tokens] for side in (results, greedy)]
    differing = [triple for triple in zip(task.prompts, *answers, strict=True) if not torch.equal(*triple[1:])]
    lossless = candidate.is_lossless
    ties = sum(_is_tie(model, *triple) for triple in differing) if lossless else 0
    right = None
    if task.problems is not None:
        right = sum(problem.is_solved_by(text) for problem, text in zip(task.problems, texts, strict=True))

    cost: dict[str, Any] = dict.fromkeys(
        (
            "tokens_per_forward",
            "tokens_per_second",
            "speedup",
            "speedup_quartiles",
            "tokens_per_cycle",
            "accepted_per_cycle",
        )
    )
    tokens = sum(result.stats.tokens for result in results)
    seconds = [result.stats.seconds for result in results]
    if not lossless or len(differing) == ties:
        ratios = [run.stats.tokens_per_second / base.stats.tokens_per_second for run, base in zip(results, greedy)]
        cost["tokens_per_forward"] = tokens / sum(
            result.stats.tokens / result.stats.tokens_per_forward for result in results
        )
        cost["tokens_per_second"] = tokens / sum(seconds)
        cost["speedup"], cost["speedup_quartiles"] = statistics.median(ratios), _quartiles(ratios)
        accepted = [count for result in results for sequence in result.stats.accepted for count in sequence]
        if accepted and decoding.find(candidate.method).verifies_drafts:
            # The first token of a sequence comes from the prompt's forward, and the first of a draft is already known.
            cost["tokens_per_cycle"] = (tokens - len(texts)) / len(accepted)
            cost["accepted_per_cycle"] = sum(accepted) / len(accepted) - 1
    return Row(
        task.name, *candidate, len(task.prompts), batch_size, tokens, right, baseline=results is greedy,
        identical=len(task.prompts) - len(differing), ties=ties, lossless=lossless, extra_memory=memory,
        seconds=seconds, **cost,
    )  # fmt: skip


@torch.inference_mode()
def _is_tie(model: Any, prompt: str, answer: torch.Tensor, greedy: torch.Tensor) -> bool:
    """Whether they diverge at two tokens whose logits are equal up to rounding, and not by stopping earlier."""
    index = next((i for i, (a, b) in enumerate(zip(answer.tolist(), greedy.tolist())) if a != b), None)
    if index is None:
        return False
    ids = torch.tensor([model.tokenizer.encode(prompt) + greedy[:index].tolist()], device=model.device)
    logits = model(ids, rows=[-1])[0, 0]
    gap = (logits[answer[index]] - logits[greedy[index]]).abs()
    return bool(gap <= _TIE * torch.finfo(logits.dtype).eps * logits.abs().max())


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
