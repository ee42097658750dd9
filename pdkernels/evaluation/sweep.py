"""Runs every combination of option values on the same prompts, and measures accuracy, forwards and seconds.

Source: the sweeps of SlowFast sampling (figures 4 and 5), the configuration search of Jacobi Forcing (appendix E) and
the threshold curves of Nemotron-Labs-Diffusion (figure 8), as one command: `python -m pdkernels eval --sweep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from pdkernels import decoding
from pdkernels._validation import check, fail
from pdkernels.evaluation.candidate import Candidate
from pdkernels.evaluation.comparison import baseline_of
from pdkernels.evaluation.planned import interval
from pdkernels.evaluation.tasks import Task

_OP = "evaluation.sweep"


class Swept(NamedTuple):
    """An option and the values to try."""

    option: str
    values: tuple[Any, ...]
    method: str | None = None
    """None: all methods that have the option."""


def parse_sweep(text: str) -> Swept:
    """Parses ``option=value,value`` or ``method.option=value,value``; values are numbers, true, false, none or words.

    Raises:
        ValueError: another form.

    Example:
        >>> parse_sweep("threshold=.5,.9,none")
        Swept(option='threshold', values=(0.5, 0.9, None), method=None)
        >>> parse_sweep("block_diffusion.block_size=8,16").method
        'block_diffusion'
    """
    name, sign, values = text.partition("=")
    method, _, option = name.strip().replace("-", "_").rpartition(".")
    parsed = tuple(parse_value(value.strip()) for value in values.split(",") if value.strip())
    if not (sign and option and parsed):
        fail(_OP, "sweep", "have the form option=value,value", repr(text))
    different = {repr(value): value for value in parsed}  # 1 and true are equal
    return Swept(option, tuple(different.values()), method or None)


def parse_value(text: str) -> Any:
    """A number, true, false, none or a word."""
    literals = {"none": None, "true": True, "false": False}
    if text.lower() in literals:
        return literals[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def sweep_candidates(models: Mapping[str, Any], swept: Sequence[Swept], methods: Sequence[str] = ()) -> list[Candidate]:
    """For each model its default baseline, then all combinations of values for each method with any of the options.

    Args:
        models: by name.
        swept: options; a method ignores those it does not have.
        methods: empty: all methods that the models can run and that have one of the options.

    Raises:
        ValueError: an option that none of the methods has, one that is swept twice, a method that has none of them.

    Example:
        >>> import pdkernels as pd
        >>> models = {"tiny-trimode": pd.models.load("tiny-trimode")}
        >>> for one in sweep_candidates(models, [parse_sweep("threshold=.7,.9")], ["block_diffusion"]):
        ...     print(one.label)
        autoregressive
        block_diffusion, threshold 0.7
        block_diffusion, threshold 0.9
    """
    chosen = [decoding.find(name) for name in methods or decoding.available()]
    candidates: dict[Candidate, None] = {}
    used: set[Swept] = set()
    for name, model in models.items():
        baseline = baseline_of(model)
        candidates[Candidate(name, baseline)] = None
        has_mask = getattr(model, "mask_token", None) is not None
        able = [method for method in chosen if method.supports(model) and (has_mask or not method.needs_mask_token)]
        for method in able:
            options = [item for item in swept if item.method in (None, method.name) and item.option in method.options]
            check(
                len({item.option for item in options}) == len(options),
                _OP,
                "sweep",
                "name an option once",
                [o.option for o in options],
            )
            used.update(options)
            if options or methods:
                for values in product(*(item.values for item in options)):
                    settings = tuple(zip((item.option for item in options), values))
                    candidates[Candidate(name, method.name, settings=settings)] = None
    for item in swept:
        option_names = ", ".join(dict.fromkeys(option for method in chosen for option in method.options))
        check(
            item in used,
            _OP,
            "sweep",
            "name an option of a method that the models can run",
            item.option,
            f"There are: {option_names}.",
        )
    return list(candidates)


def planned_settings(swept: Sequence[Swept]) -> list[dict[str, Any]]:
    """Every combination of values for planned decoding, with dense and sparse chunks unless "sparse" is swept too.

    Raises:
        ValueError: an option that planned decoding does not have, one that is swept twice.

    Example:
        >>> planned_settings([parse_sweep("threshold=.5,.9")])[1:3]
        [{'sparse': False, 'threshold': 0.9}, {'sparse': True, 'threshold': 0.5}]
    """
    allowed = decoding.find("planned").options
    for item in swept:
        is_option = item.option in allowed and item.method in (None, "planned")
        check(is_option, _OP, "sweep", "name an option of planned", item.option, f"There are: {', '.join(allowed)}.")
    options = {item.option: item.values for item in swept}
    check(len(options) == len(swept), _OP, "sweep", "name an option once", [item.option for item in swept])
    options = {"sparse": options.pop("sparse", (False, True)), **options}
    return [dict(zip(options, values)) for values in product(*options.values())]


def without_many_rows(candidates: Sequence[Candidate], maximum: int) -> tuple[list[Candidate], list[str]]:
    """Leaves out candidates whose forwards have more than `maximum` rows per sequence, and lists them.

    Rows beyond the knee of a device cost time, so a search may skip blocks of more than twice the knee.

    >>> few, many = (Candidate("m", "jacobi", settings=(("block_size", size),)) for size in (8, 64))
    >>> without_many_rows([few, many], 16)
    ([Candidate(model='m', method='jacobi', width=None, settings=(('block_size', 8),))], ['m: jacobi, block_size 64: 64
    rows'])
    """
    accepted, skipped = [], []
    for candidate in candidates:
        rows = rows_of(candidate)
        if rows <= maximum:
            accepted.append(candidate)
        else:
            skipped.append(f"{candidate.model}: {candidate.label}: {rows} rows")
    return accepted, skipped


def rows_of(candidate: Candidate) -> int:
    """The maximum number of rows of a decoding forward by the options: a block times its blocks and candidates, a group
    of masks for each token, or a wavefront; 1 for other methods.

    >>> [rows_of(Candidate("m", method, 8)) for method in ("autoregressive", "jacobi", "quadratic_self_speculation")]
    [1, 8, 72]
    """

    def option(name: str) -> Any:
        if name in candidate.options:
            return candidate.options[name]
        return decoding.default_option(candidate.method, name)

    method = decoding.find(candidate.method)
    if candidate.method == "recurrent_diffusion":
        return int(option("max_wavefront"))
    size = option("block_size") if "block_size" in method.options and method.wing == "causal" else None
    if size is None:
        return 1
    if size == "auto":  # the longest of any method
        return 16
    if candidate.method == "quadratic_self_speculation":
        return int(size * (1 + (option("masks_per_group") or size - option("label_shift"))))
    if candidate.method == "jacobi_multiblock":
        return int(size * (option("blocks") - 1 + option("verification_size")))
    return int(size)


@dataclass(frozen=True)
class SweepRow:
    """The result of a combination of options.

    Attributes:
        model, method, settings: the candidate.
        baseline: whether this is its model's token-by-token method, with any settings.
        problems: prompts.
        right: those whose answer is exactly right.
        interval: 95 %, of the share that is right.
        answers: for each prompt whether it is right.
        tokens: new tokens, over all prompts.
        forwards: the number of forwards in which a sequence took part, summed over sequences.
        seconds: of all generations.
        batches: seconds of each batch.
    """

    model: str
    method: str
    settings: dict[str, Any]
    baseline: bool
    problems: int
    right: int
    interval: tuple[float, float]
    answers: list[bool]
    tokens: int
    forwards: float
    seconds: float
    batches: list[float]

    @property
    def share(self) -> float:
        return self.right / self.problems

    @property
    def label(self) -> str:
        """Method and settings."""
        return Candidate(self.model, self.method, settings=tuple(self.settings.items())).label

    def as_json(self) -> dict[str, Any]:
        """All fields, and common ratios of them."""
        return {
            **asdict(self),
            "label": self.label,
            "tokens_per_forward": self.tokens / self.forwards,
            "tokens_per_second": self.tokens / self.seconds,
        }


Measured = dict[str, dict[str, Any]]
"""Measurements by candidate and by index of the batch (a string, as JSON requires)."""


def key_of(candidate: Candidate) -> str:
    """A unique name of the candidate."""
    return f"{candidate.model}: {candidate.label}"


def sweep(
    models: Mapping[str, Any],
    candidates: Sequence[Candidate],
    task: Task,
    *,
    batch_size: int = 1,
    measured: Measured | None = None,
    keep: Callable[[Measured], None] = lambda measured: None,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> list[SweepRow]:
    """Runs all candidates on the same prompts, in turns whose order rotates from batch to batch.

    Args:
        models: by name, with tokenizers.
        candidates: as returned by `sweep_candidates`.
        task: one whose answers are right or wrong.
        batch_size: prompts per generation.
        measured: the measurements that an interrupted sweep of the same task saved; it is extended.
        keep: called after each generation with all measurements.
        progress: called with a description of the next step and the fraction that is done.

    Raises:
        ValueError: a task without right and wrong, a batch size below 1.

    Example:
        >>> import pdkernels as pd
        >>> from pdkernels.evaluation import make_task
        >>> models = {"tiny-code": pd.models.load("tiny-code")}
        >>> found = sweep_candidates(models, [parse_sweep("block_size=4")], ["jacobi"])
        >>> rows = sweep(models, found, make_task("sums", 1))
        >>> [row.label for row in rows], rows[0].answers == rows[1].answers, rows[1].forwards < rows[0].forwards
        (['autoregressive', 'jacobi, block_size 4'], True, True)
    """
    check(batch_size >= 1, _OP, "batch_size", "be at least 1", batch_size)
    check(task.problems is not None, _OP, "task", "be one whose answers are right or wrong", task.name)
    assert task.problems is not None
    measured = {} if measured is None else measured
    warm: set[str] = set()
    starts = range(0, len(task.prompts), batch_size)
    total = len(starts) * len(candidates)
    for number, start in enumerate(starts):
        prompts, problems = task.prompts[start : start + batch_size], task.problems[start : start + batch_size]
        begin = number % len(candidates)
        for turn, candidate in enumerate([*candidates[begin:], *candidates[:begin]]):
            key = key_of(candidate)
            measurements = measured.setdefault(key, {})
            if str(number) in measurements:
                continue
            progress(key, (number * len(candidates) + turn) / total)
            if key not in warm:
                _generate(models, candidate, task, (task.warm_up * batch_size)[:batch_size])
                warm.add(key)
            result = _generate(models, candidate, task, prompts)
            stats = result.stats
            measurements[str(number)] = {
                "right": [problem.is_solved_by(text) for problem, text in zip(problems, result.text, strict=True)],
                "tokens": stats.tokens,
                "forwards": stats.tokens / stats.tokens_per_forward if stats.tokens else 0.0,
                "seconds": stats.seconds,
            }
            keep(measured)
    progress("done", 1.0)
    return [
        _row(
            candidate,
            measured[key_of(candidate)],
            candidate.method == baseline_of(models[candidate.model]),
            len(starts),
        )
        for candidate in candidates
    ]


def _generate(models: Mapping[str, Any], candidate: Candidate, task: Task, prompts: list[str]) -> Any:
    return decoding.generate(
        models[candidate.model],
        prompts,
        decoding.find(candidate.method),
        max_new_tokens=task.limit,
        end_tokens=task.end_tokens,
        **candidate.options,
    )


def _row(candidate: Candidate, measurements: Mapping[str, Any], baseline: bool, count: int) -> SweepRow:
    batches = [measurements[str(number)] for number in range(count)]
    answers = [right for batch in batches for right in batch["right"]]
    return SweepRow(
        candidate.model, candidate.method, candidate.options, baseline, len(answers), sum(answers),
        interval(sum(answers), len(answers)), answers, sum(batch["tokens"] for batch in batches),
        sum(batch["forwards"] for batch in batches), sum(batch["seconds"] for batch in batches),
        [batch["seconds"] for batch in batches],
    )  # fmt: skip
