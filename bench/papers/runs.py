"""Measurements behind the tables of `bench.papers.tables`: each takes a number of problems and reports its progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.papers import theory
from bench.papers.row_times import measure_row_times
from bench.papers.speed_of_light import speed_of_light
from pdkernels import decoding, models
from pdkernels.decoding.methods import METHODS
from pdkernels.evaluation.candidate import Candidate
from pdkernels.evaluation.planned import held_out_orders, score_orders
from pdkernels.evaluation.sweep import parse_sweep, sweep, sweep_candidates
from pdkernels.evaluation.tasks import make_task

Progress = Callable[[str, float], None]
Run = Callable[[int, Progress], dict[str, Any]]


# ---- Nemotron-Labs-Diffusion


def limits(problems: int, progress: Progress) -> dict[str, Any]:
    """Masks per forward by block size, in the oracle's schemes and in methods that do not know the text."""
    model: Any = models.load("tiny-trimode")
    task = make_task("sums", problems)
    schemes, rows = ("greedy", "first_all", "exhaustive", "binary"), []
    for number, size in enumerate((4, 8, 16)):
        progress(f"blocks of {size}", number / 3)
        limits = speed_of_light(model, task.prompts, size, schemes=schemes, max_new_tokens=task.limit)
        serial = [
            model.tokenizer.decode([token for token in text if token not in model.end_tokens]) for text in limits.texts
        ]
        target = sum(problem.is_solved_by(text) for problem, text in zip(task.problems or (), serial))
        for scheme in schemes:
            exact = limits.exact(scheme)
            rows.append(
                {
                    "block size": size,
                    "": f"oracle, {scheme}",
                    "masks per forward": round(limits.acceptance(scheme), 2),
                    "tokens per forward": round(limits.tokens_per_forward(scheme), 2),
                    "exact blocks": f"{exact:.1%}",
                    "simulated forwards a block": round(limits.simulated(scheme), 1),
                    "right": target if exact == 1 else None,
                }
            )
        options: dict[str, Any] = {"max_new_tokens": task.limit, "block_size": size}
        others = {
            "block_diffusion": ("threshold 0.9", {"threshold": 0.9}),
            "linear_self_speculation": ("linear self-speculation", {}),
        }
        for method, (name, settings) in others.items():
            result = decoding.generate(model, task.prompts, decoding.find(method), **options, **settings)
            rows.append(
                {
                    "block size": size,
                    "": name,
                    "masks per forward": None,
                    "tokens per forward": round(result.stats.tokens_per_forward, 2),
                    "exact blocks": None,
                    "simulated forwards a block": None,
                    "right": sum(
                        problem.is_solved_by(text) for problem, text in zip(task.problems or (), result.text or ())
                    ),
                }
            )
    return {"model": "tiny-trimode", "task": "sums", "problems": problems, "rows": rows}


# ---- recurrent depth


def prefill(problems: int, progress: Progress) -> dict[str, Any]:
    rows = []
    for length in (1, 64, 512, 4096):
        cost = theory.prefill_cost(length, 4, 1024)
        depth, shared, unshared = cost.flops
        advantage = float(theory.width_advantage(length, 4, 206))
        rows.append(
            {
                "prompt": length,
                "FLOPs of depth": float(depth),
                "shared K/V over depth": round(shared / depth, 6),
                "all copies over depth": round(unshared / depth, 4),
                "time of depth over width": round(advantage, 3),
            }
        )
    return {"hidden": 1024, "factor": 4, "knee": 206, "rows": rows}


def decode(problems: int, progress: Progress) -> dict[str, Any]:
    rows = []
    for inner in (1, 2, 4, 8, 32):
        budget = theory.decode_budget(320, 32, inner)
        rows.append(
            {
                "inner recurrences": inner,
                "wavefront": budget.wave,
                "tokens, autoregressive": budget.tokens[0],
                "tokens, sampler": budget.tokens[1],
                "limit of the ratio": float(budget.limit),
                "products per token, over autoregressive": round(float(budget.products), 3),
            }
        )
    return {"recurrences": 32, "applications": 320, "rows": rows}


DEEP, CHAINS = "tiny-deep", "chains"
"""A model that needs its recurrences, and its task."""
RECURRENT = {
    "static": ["recurrent_static.recurrences=1,2,4,8,16,24,32"],
    "cache": ["recurrent_static.kept_recurrences=1,2,4,0", "recurrent_static.recurrences=16,24,32"],
    "grid": ["recurrent_diffusion.inner_recurrence=1,2,4,8", "recurrent_diffusion.noise=0.0,0.1,0.2,0.5"],
    "threshold": ["recurrent_diffusion.threshold=0.003,0.01,0.03,0.1,0.3,1.0"],
    "momentum": ["recurrent_diffusion.momentum=0.0,0.1,0.3,0.6,0.9"],
    "noise": ["recurrent_diffusion.noise=0.0,0.1,0.2,0.5,1.0"],
    "headway": ["recurrent_diffusion.headway=1,2,4,8"],
    "init-scale": ["recurrent_diffusion.init_scale=0.0,0.5,1.0,2.0,4.0"],
    "continuous": ["recurrent_diffusion.new_state=fresh,copied", "recurrent_diffusion.inner_recurrence=2,4,8"],
}


def recurrent(name: str) -> Run:
    """A sweep of the recurrent paper."""
    return lambda problems, progress: swept(DEEP, "recurrent", RECURRENT[name], problems, progress, CHAINS)


def wave(problems: int, progress: Progress) -> dict[str, Any]:
    """What a wave of each size holds at its widest, and what it takes: its states and embeddings, besides the cache."""
    model: Any = models.load(DEEP)
    task = make_task(CHAINS, problems)
    rows = []
    sizes = (1, 2, 4, 8, 16, 32, 128)
    for number, size in enumerate(sizes):
        progress(f"waves of {size}", number / len(sizes))
        options: dict[str, Any] = {"max_new_tokens": task.limit, "max_wavefront": size, "trace": True}
        found = decoding.generate(model, task.prompts, "recurrent_diffusion", **options)
        traces: Any = found.stats.trace
        widths = [[len(step.tokens) for step in steps] for steps in traces]
        widest = sorted(max(own) for own in widths)
        states = 2 * model.config.hidden_size * model.dtype.itemsize
        rows.append(
            {
                "wave at most": size,
                "right": sum(one.is_solved_by(text) for one, text in zip(task.problems or (), found.text or ())),
                "tokens per forward": round(found.stats.tokens_per_forward, 3),
                "mean width": round(sum(map(sum, widths)) / sum(map(len, widths)), 2),
                "rows per prompt": round(sum(map(sum, widths)) / len(widths), 1),
                "widest, median": widest[len(widest) // 2],
                "widest, largest": widest[-1],
                "KB of states, median": round(widest[len(widest) // 2] * states / 1024, 2),
                "KB of states, largest": round(widest[-1] * states / 1024, 2),
            }
        )
    return {"model": DEEP, "task": CHAINS, "problems": problems, "rows": rows}


def same_texts(problems: int, progress: Progress) -> dict[str, Any]:
    """How often the sampler writes the very text of static decoding, how much of it otherwise, and what the model thinks of it."""
    model: Any = models.load(DEEP)
    task = make_task(CHAINS, problems)
    rows, texts = [], {}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "static": ("recurrent_static", {}),
        **{f"sampler, r' = {r}": ("recurrent_diffusion", {"inner_recurrence": r}) for r in (1, 2, 4, 8)},
        "sampler, r' = 4, noise 0.2": ("recurrent_diffusion", {"inner_recurrence": 4, "noise": 0.2}),
        "sampler, r' = 4, threshold 1": ("recurrent_diffusion", {"inner_recurrence": 4, "threshold": 1.0}),
    }
    for number, (name, (method, options)) in enumerate(settings.items()):
        progress(name, number / len(settings))
        found = decoding.generate(model, task.prompts, decoding.find(method), max_new_tokens=task.limit, **options)
        texts[name] = found.tokens
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(texts["static"], found.tokens)]
        rows.append(
            {
                "": name,
                "right": sum(one.is_solved_by(text) for one, text in zip(task.problems or (), found.text or ())),
                "identical": f"{sum(a == b for a, b in pairs) / len(pairs):.0%}",
                "ROUGE-1 F1": round(sum(rouge_1(a, b) for a, b in pairs) / len(pairs), 4),
                "ROUGE-L F1": round(sum(rouge_l(a, b) for a, b in pairs) / len(pairs), 4),
                "perplexity": round(perplexity(model, task.prompts, found.tokens), 4),
            }
        )
    return {"model": DEEP, "task": CHAINS, "problems": problems, "rows": rows}


def rouge_1(first: Sequence[int], second: Sequence[int]) -> float:
    """F1 of the tokens that two texts have in common, each as often as both have it.

    >>> rouge_1([1, 1, 2, 3], [3, 1, 4, 1]), rouge_1([], [1])
    (0.75, 0.0)
    """
    if not first or not second:
        return float(len(first) == len(second))
    return 2 * (Counter(first) & Counter(second)).total() / (len(first) + len(second))


def rouge_l(first: Sequence[int], second: Sequence[int]) -> float:
    """F1 of the longest common subsequence of two texts.

    >>> rouge_l([1, 2, 3, 4], [1, 3, 4, 5]), rouge_l([], [1])
    (0.75, 0.0)
    """
    if not first or not second:
        return float(len(first) == len(second))
    row = [0] * (len(second) + 1)
    for a in first:
        before = 0
        for column, b in enumerate(second, 1):
            row[column], before = (before + 1 if a == b else max(row[column], row[column - 1])), row[column]
    return 2 * row[-1] / (len(first) + len(second))


def perplexity(model: Any, prompts: Sequence[str], texts: Sequence[torch.Tensor]) -> float:
    """Of texts after their prompts, under the model itself in one forward each."""
    total, count = 0.0, 0
    for prompt, text in zip(prompts, texts):
        known = model.tokenizer.encode(prompt)
        ids = torch.tensor([[*known, *text.tolist()]])
        scores = model(ids, rows=slice(len(known) - 1, -1))[0].double().log_softmax(-1)
        total -= float(scores.gather(1, text[:, None]).sum())
        count += len(text)
    return math.exp(total / max(count, 1))


# ---- SlowFast, Jacobi Forcing

KNOBS = {
    "tau_min": "0.02,0.05,0.1,0.2,0.3,0.5",
    "tau_high": "0.6,0.7,0.8,0.85,0.9,0.95,0.99",
    "max_exploration": "1,2,4,6,8,12",
    "window": "1,2,3,4,6",
    "variance": "0.25,1.0,4.0,16.0",
}


def knob(option: str) -> Callable[[int, Progress], dict[str, Any]]:
    def run(problems: int, progress: Progress) -> dict[str, Any]:
        return swept("tiny-masked", "masked", [f"slowfast.{option}={KNOBS[option]}"], problems, progress)

    return run


LOOPS: dict[str, dict[str, Any]] = {"the paper's text": {}, "its equation 9": {"cycle": "mean"}}


def loops(problems: int, progress: Progress) -> dict[str, Any]:
    """The paper's two loops at its settings."""
    model, task, rows = models.load("tiny-masked"), make_task("sums", problems, canvas=128), []
    for number, (name, settings) in enumerate(LOOPS.items()):
        progress(name, number / len(LOOPS))
        forwards = tokens = right = 0.0
        for first in range(0, problems, 8):
            batch = slice(first, first + 8)
            given: dict[str, Any] = {"max_new_tokens": task.limit, "end_tokens": task.end_tokens, **settings}
            found = decoding.generate(model, task.prompts[batch], "slowfast", **given)
            tokens += found.stats.tokens
            forwards += found.stats.tokens / found.stats.tokens_per_forward
            solved = zip((task.problems or ())[batch], found.text or (), strict=True)
            right += sum(problem.is_solved_by(text) for problem, text in solved)
        rows.append(
            {
                "": name,
                "right": int(right),
                "forwards per prompt": round(forwards / problems, 2),
                "tokens per forward": round(tokens / forwards, 3),
            }
        )
    return {"model": "tiny-masked", "task": "sums", "problems": problems, "rows": rows}


def swept(
    name: str, family: str, swept: Sequence[str], problems: int, progress: Progress, task_name: str = "sums"
) -> dict[str, Any]:
    """Right answers and forwards of a sweep. Seconds depend on the machine and moment, and are left to the sweep command."""
    from pdkernels.evaluation.comparison import FAMILIES

    loaded, task = {name: models.load(name)}, make_task(task_name, problems, canvas=FAMILIES[family].canvas)
    found = sweep(
        loaded, sweep_candidates(loaded, [parse_sweep(text) for text in swept]), task, batch_size=8, progress=progress
    )
    rows = [
        {
            "": row.label,
            "right": row.right,
            "forwards per prompt": round(row.forwards / row.problems, 2),
            "tokens per forward": round(row.tokens / row.forwards, 3),
        }
        for row in found
    ]
    return {"model": name, "task": task_name, "problems": problems, "rows": rows}


def knee(problems: int, progress: Progress) -> dict[str, Any]:
    from pdkernels.evaluation.machine import processor

    times = measure_row_times(models.load("tiny-jacobi"))
    rows = [
        {"rows": count, "milliseconds": round(1e3 * seconds, 3), "over one row": round(seconds / times.seconds[0], 2)}
        for count, seconds in zip(times.rows, times.seconds)
    ]
    found = times.as_json()
    return {
        "model": "tiny-jacobi",
        "device": processor(),
        "knee": round(found["knee"], 1),
        "budget": found["budget"],
        "rows": rows,
    }


# ---- by kind of problem

KINDS = {"+": "additions", "-": "subtractions", "*": "products"}


def acceptance(problems: int, progress: Progress) -> dict[str, Any]:
    """Tokens a forward by what the text is about: sums by their first sign."""
    model: Any = models.load("tiny-trimode")
    task = make_task("sums", problems)
    methods = [name for name, method in METHODS.items() if "tiny-trimode" in method.models and method.widths]
    rows = []
    kinds = [next(sign for sign in prompt if sign in KINDS) for prompt in task.prompts]
    for number, (size, method) in enumerate((size, method) for size in (4, 8, 16) for method in methods):
        progress(f"{method}, {size}", number / 9)
        told: dict[str, Any] = {"": method.replace("_", " "), "block size": size}
        for sign, kind in KINDS.items():
            prompts = [prompt for prompt, own in zip(task.prompts, kinds) if own == sign]
            options: dict[str, Any] = {"max_new_tokens": task.limit, "block_size": size}
            found = decoding.generate(model, prompts, decoding.find(method), **options) if prompts else None
            told[kind] = round(found.stats.tokens_per_forward, 2) if found is not None else None
        rows.append(told)
    counts = ", ".join(f"{kinds.count(sign)} {kind}" for sign, kind in KINDS.items())
    return {"model": "tiny-trimode", "prompts": counts, "problems": problems, "rows": rows}


# ---- Jacobi Forcing

JACOBI = {
    "blocks": ["jacobi.block_size=4,8,16,32,64"],
    "windows": ["jacobi.window=4,8,16,32,64"],
    "multiblock": [
        "jacobi_multiblock.block_size=8,16,32",
        "jacobi_multiblock.blocks=1,2,3",
        "jacobi_multiblock.verification_size=1,4",
    ],
    "ratios": ["jacobi_multiblock.block_size=16,64", "jacobi_multiblock.spawn_ratio=0.25,0.5,0.7,0.85,1.0"],
}


def jacobi(name: str) -> Run:
    """A sweep of Jacobi Forcing."""
    return lambda problems, progress: swept("tiny-jacobi", "causal", JACOBI[name], problems, progress)


# ---- Planned Diffusion

_BOTH = ({"sparse": False}, {"sparse": True})
PLANNED: dict[str, list[dict[str, Any]]] = {
    "path": [{**sparse, **one} for sparse in _BOTH for one in ({"steps_ratio": 1.0}, {"threshold": 0.9})],
    "lengths": [{"length_scale": factor} for factor in (0.5, 1.0, 1.5, 2.0, 2.5)],
    "steps": [
        {**sparse, name: value}
        for sparse in _BOTH
        for name, values in (("steps_ratio", (1.0, 0.75, 0.5, 0.25)), ("threshold", (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)))
        for value in values
    ],
}


def planned(name: str) -> Run:
    """Orders that are right, and the forwards that waited for each other, under each of the settings."""

    def run(problems: int, progress: Progress) -> dict[str, Any]:
        prompts = held_out_orders(problems)
        model = models.load("tiny-planned")
        found = []
        for number, settings in enumerate(PLANNED[name]):
            label = Candidate("tiny-planned", "planned", settings=tuple(settings.items())).label
            progress(label, number / len(PLANNED[name]))
            score = score_orders(model, prompts, batch_size=8, **settings)
            found.append((label.removeprefix("planned, "), score))
        rows = [
            {
                "": label,
                "right": score.items[0],
                "valid plans": f"{score.valid_plans} of {score.problems}",
                "critical path": round(score.critical_path, 1),
                "forwards of the plan": round(score.forwards["plan"], 1),
                "rounds": round(score.rounds, 2),
            }
            for label, score in found
        ]
        orders = found[0][1].items[1]
        return {"model": "tiny-planned", "prompts": problems, "task": "orders", "problems": orders, "rows": rows}

    return run
