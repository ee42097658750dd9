"""The share of orders that a planning model gets right, and its cost.

Source: Planned Diffusion, section 5 (quality against critical path, ablations), in miniature.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from pdkernels import decoding
from pdkernels._validation import check
from pdkernels.evaluation.candidate import Candidate
from pdkernels.evaluation.machine import facts
from pdkernels.generation.result import PlanReport
from pdkernels.training.lists import PICK, PICKED, Orders, orders

KINDS = ("lists", "picks", "lists of picks")
"""Kinds of orders: lists of a digit in the prompt, picks of a digit, lists of the picked digit."""
PLANNED_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"sparse": sparse, **settings}
    for sparse in (False, True)
    for settings in (
        *({"steps_ratio": share} for share in (1.0, 0.75, 0.5, 0.25)),
        *({"threshold": minimum} for minimum in (0.5, 0.7, 0.9)),
        *({"length_scale": factor} for factor in (0.5, 1.5, 2.0)),
        {"threshold": 0.9, "temperature": 1.0},
    )
)
"""Options of the evaluation. Picks are sampled, because two greedy guesses of a pick agree even without a plan."""
_LIMIT = 320
"""Maximum new tokens, including plans and pads: two rounds of four chunks of 32 fit."""


@dataclass(frozen=True)
class PlannedScore:
    """The result on some orders.

    Attributes:
        settings: options of the method.
        problems: prompts.
        right: for each of `KINDS`, the number of right orders and of all orders.
        valid_plans: prompts whose plans name every order once, those of the picked digit after the round of the pick;
            None for methods without plans.
        critical_path: forwards on the critical path, mean over the prompts.
        forwards: those by phase ("plan", "chunks", "refresh"), means; empty for methods without plans.
        rounds: mean.
        reasons: what ended the texts, and how often.
        tokens: new tokens, over all prompts, including plans and pads.
        characters: of the answers, without tags and pads, over all prompts.
        seconds: of all generations.
    """

    settings: dict[str, Any]
    problems: int
    right: dict[str, tuple[int, int]]
    valid_plans: int | None
    critical_path: float
    forwards: dict[str, float]
    rounds: float
    reasons: dict[str, int]
    tokens: int
    characters: int
    seconds: float

    @property
    def items(self) -> tuple[int, int]:
        """The number of right orders of all kinds, and the number of orders."""
        right, count = zip(*self.right.values(), strict=True)
        return sum(right), sum(count)

    def __str__(self) -> str:
        low, high = interval(*self.items)
        kinds = ", ".join(f"{kind} {right}/{count}" for kind, (right, count) in self.right.items() if count)
        plans = "" if self.valid_plans is None else f", plans valid {self.valid_plans}/{self.problems}"
        share = self.items[0] / max(1, self.items[1])
        return (
            f"{share:.1%} of {self.items[1]} orders right ({low:.1%} to {high:.1%}; {kinds}){plans}, "
            f"critical path {self.critical_path:.1f} forwards, {self.characters / self.seconds:.0f} characters/s"
        )


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(end, 3) for end in interval(45, 50)]
    [0.786, 0.957]
    >>> interval(0, 0)
    (0.0, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    z = 1.959964
    share, scale = right / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return middle - half, middle + half


def held_out_orders(problems: int, seed: int = 0) -> list[Orders]:
    """Distinct prompts that no model was trained on, determined by the seed.

    >>> len({problem.prompt for problem in held_out_orders(20)})
    20
    """
    check(problems >= 1, "evaluation.held_out_orders", "problems", "be at least 1", problems)
    by_prompt: dict[str, Orders] = {}
    for problem in islice(orders(seed, held_out=True), 100 * problems):
        by_prompt[problem.prompt] = problem
        if len(by_prompt) == problems:
            break
    return list(by_prompt.values())


def score_orders(
    model: Any,
    problems: Sequence[Orders],
    method: str | decoding.Method = "planned",
    *,
    batch_size: int = 1,
    advance: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> PlannedScore:
    """Scores a model on prompts of orders.

    Args:
        model: with a tokenizer; for "planned" one with `plan_tokens`.
        problems: of `held_out_orders`.
        method: "planned", or another method for a model trained without plans; a name, or a `Method`.
        batch_size: prompts per generation.
        advance: called after each generation with its number of prompts.
        options: of the method.

    Raises:
        ValueError: no problems, a batch size below 1, what `pdkernels.decoding.generate` refuses.
    """
    op = "evaluation.score_orders"
    check(len(problems) > 0, op, "problems", "hold orders", "none")
    check(batch_size >= 1, op, "batch_size", "be at least 1", batch_size)
    chosen = decoding.find(method) if isinstance(method, str) else method
    joined = {"joiner": ""} if "joiner" in chosen.options else {}
    counts = {kind: [0, 0] for kind in KINDS}
    reports: list[PlanReport] = []
    tokens = characters = valid = 0
    path = seconds = 0.0
    for first in range(0, len(problems), batch_size):
        batch = problems[first : first + batch_size]
        prompts = [problem.prompt for problem in batch]
        result = decoding.generate(model, prompts, chosen, max_new_tokens=_LIMIT, **joined, **options)
        stats, texts = result.stats, list(result.text or ())
        tokens, seconds = tokens + stats.tokens, seconds + stats.seconds
        characters += sum(len(text) for text in texts)
        path += (
            sum(plan.critical_path for plan in stats.plans) if stats.plans else stats.tokens / stats.tokens_per_forward
        )
        for problem, text in zip(batch, texts, strict=True):
            for order, right in problem.right(text).items():
                kind = KINDS[1 if order == PICK else 2 if order[0] == PICKED else 0]
                counts[kind][0] += right
                counts[kind][1] += 1
        for problem, plan in zip(batch, stats.plans or (), strict=False):
            reports.append(plan)
            valid += _is_valid(model, problem, plan)
        advance(len(batch))
    count = len(problems)
    forwards: Counter[str] = Counter()
    for plan in reports:
        forwards.update(plan.forwards)
    return PlannedScore(
        dict(options), count, {kind: (right, number) for kind, (right, number) in counts.items()},
        valid if reports else None, path / count, {phase: total / count for phase, total in forwards.items()},
        sum(len(plan.rounds) for plan in reports) / count, dict(Counter(plan.reason for plan in reports)), tokens,
        characters, seconds,
    )  # fmt: skip


def evaluate_planned(
    name: str,
    model: Any,
    problems: Sequence[Orders],
    *,
    batch_size: int = 1,
    settings: Sequence[Mapping[str, Any]] | None = None,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> dict[str, PlannedScore]:
    """Scores by label under each of the evaluated settings; without `plan_tokens`, of autoregressive decoding.

    Args:
        name: of the model, for `progress`.
        model, problems, batch_size: as in `score_orders`.
        settings: options of planned decoding; None: `PLANNED_SETTINGS`.
        progress: called with a description of the next step and the fraction that is done.
    """
    plans = getattr(model, "plan_tokens", None) is not None
    competing = [Candidate(name, "planned", settings=tuple(each.items())) for each in settings or PLANNED_SETTINGS]
    if not plans:
        competing = [Candidate(name, "autoregressive")]
    scores = {}
    for number, candidate in enumerate(competing):
        progress(f"{name}: {candidate.label}", number / len(competing))
        scores[candidate.label] = score_orders(
            model, problems, candidate.method, batch_size=batch_size, **candidate.options
        )
    progress("done", 1.0)
    return scores


def planned_json(scores: Mapping[str, Mapping[str, PlannedScore]], batch_size: int) -> dict[str, Any]:
    """The scores of models by name, in the form of the other benchmarks, with intervals.

    >>> score = PlannedScore({}, 1, {"lists": (3, 4)}, 1, 20.0, {"plan": 12.0}, 1.0, {"end": 1}, 80, 60, 2.0)
    >>> (row,) = planned_json({"tiny": {"planned": score}}, 1)["benchmarks"]
    >>> row["name"], row["stats"]["median"], row["extra_info"]["items"], row["extra_info"]["right"]
    ('tiny: planned', 2.0, [3, 4], {'lists': [3, 4]})
    """
    benchmarks = []
    for model, by_label in scores.items():
        for label, score in by_label.items():
            figures = json.loads(json.dumps(asdict(score)))
            figures |= {"items": list(score.items), "interval": list(interval(*score.items)), "batch_size": batch_size}
            stats = {"median": score.seconds, "iqr": 0.0, "max": score.seconds, "rounds": 1}
            benchmarks.append(
                {
                    "group": "evaluation, orders",
                    "name": f"{model}: {label}",
                    "stats": stats,
                    "extra_info": {
                        "op": "evaluation of plans",
                        **facts(),
                        "model": model,
                        "candidate": label,
                        **figures,
                    },
                }
            )
    return {"benchmarks": benchmarks}


def _is_valid(model: Any, problem: Orders, plan: PlanReport) -> bool:
    """Whether the plans name every order once, and lists of the pick only after the round of the pick."""
    rounds = [[model.tokenizer.decode(topic) for topic in round_.topics] for round_ in plan.rounds]
    order_names = problem.prompt.strip().split(";")[:-1]
    if sorted(order_names) != sorted(topic for topics in rounds for topic in topics):
        return False
    chosen = next((number for number, topics in enumerate(rounds) if PICK in topics), len(rounds))
    return all(
        topic[0] != PICKED or number > chosen for number, topics in enumerate(rounds) for topic in topics if topic
    )
