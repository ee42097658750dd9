"""How a tri-mode model is trained, one technique at a time: tables 1 to 3 and figure 4 of Nemotron-Labs-Diffusion.

Every row is a short training of the tiny model on sums: the same texts, steps and rates, and the same seed if no other is named. A step has
the texts of several data-parallel ranks. With the global average the sum of the ranks' losses is the loss over all of their rows, so one
packed batch computes what the ranks would; the average over sequences does not depend on ranks either. Rows that tables share are
trained once in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bench.papers.runs import Progress
from pdkernels import decoding, models
from pdkernels.evaluation.machine import processor
from pdkernels.evaluation.tasks import make_task
from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    JointLoss,
    Problem,
    arithmetic,
    draw_masks,
    dual_stream_loss,
    noise_level,
    pack_dual_stream,
)

STEPS, TUNED_STEPS, RANKS, TEXTS, BLOCK, RATE = 200, 80, 4, 2, 4, 1e-3
"""Steps of a training and of the fine-tuning after it; ranks, texts of a rank, tokens of a block, the highest learning rate."""
TILE, CURVE, HELD_OUT, PROBLEMS = 64, 20, 32, 40


class Recipe(NamedTuple):
    """How a row is trained. The defaults are the paper's: its stage 2."""

    alpha: float | None = 0.3
    """Weight of the masked loss, where that of the autoregressive one is 1; None: the masked loss alone."""
    start: str = "tiny-code"
    """An autoregressive model (stage 1), or "random weights"."""
    average: Literal["global", "sequence"] = "global"
    noise: Literal["step", "rank", "sequence"] = "rank"
    """What has a noise level of its own."""
    clean: Literal["causal", "block"] = "causal"
    """Attention of the clean stream."""
    tuned: bool = False
    """Whether fine-tuning follows, in which prompts are neither masked nor labels."""
    seed: int = 0
    """Of texts, masks and random weights."""


class Base(NamedTuple):
    """A training before any fine-tuning."""

    weights: dict[str, Tensor]
    noise: float
    """Standard deviation of the norms of gradients over their mean, in the second half of the steps."""
    curve: list[dict[str, float]]
    """Means of both losses over every `CURVE` steps, nats a token."""
    seconds: float


class Trained(NamedTuple):
    """What a recipe gave."""

    base: Base
    autoregressive: int
    """Right answers of the task, token by token."""
    diffusion: int
    """And by block diffusion."""
    tokens_per_forward: float
    held_out_autoregressive: float
    """Nats a token."""
    held_out_masked: float
    """The mean over masked tokens, each weighted by 1 / p_mask: the bound of equation 2 a token."""
    seconds: float
    """Of fine-tuning and decoding, besides those of the base."""


_bases: dict[Recipe, Base] = {}
_trained: dict[tuple[Recipe, int], Trained] = {}


# ---- training


def with_mask(start: str, seed: int = 0) -> Any:
    """A model of tiny-code's shape with an id for the mask, which starts as the mean of the others."""
    known: Any = models.load("tiny-code")
    config = replace(known.config, vocab_size=known.config.vocab_size + 1)
    torch.manual_seed(seed)
    made = {"tokenizer": known.tokenizer, "end_tokens": known.end_tokens, "mask_token": known.config.vocab_size}
    model = models.Transformer(config, **made)
    if start != "random weights":
        state = dict(known.state_dict())
        state["embedding"] = torch.cat([state["embedding"], state["embedding"].mean(0, keepdim=True)])
        model.load_state_dict(state)
    return model


def sample(
    problem: Problem, generator: torch.Generator, end: int, level: float | None, tuned: bool
) -> DualStreamSample:
    """A sum and its solution in whole blocks, of end tokens after the end, as decoding fills them."""
    ids = [*(problem.prompt + problem.steps).encode(), end]
    given = len(problem.prompt) if tuned else 0
    ids += [end] * (-(len(ids) - given) % BLOCK)
    masks = draw_masks(len(ids), generator, frozen_prefix=given, t=level)
    return DualStreamSample(torch.tensor(ids), *masks, prefix_len=given)


def losses(model: Any, batch: DualStreamBatch, recipe: Recipe) -> tuple[JointLoss, tuple[float, float]]:
    """The loss that is trained, and both losses in nats a token whatever is trained."""
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan(TILE, TILE))[0]
    ar, masked = (model.logits(hidden[rows]) for rows in (batch.ar_rows, batch.masked_rows))
    loss = dual_stream_loss(ar, masked, batch, masked_weight=recipe.alpha or 0.0, average=recipe.average)
    with torch.no_grad():
        sums = dual_stream_loss(ar, masked, batch, normaliser=1.0)
    told = (
        float(sums.autoregressive) / len(batch.ar_rows),
        float(sums.masked) / max(float(batch.masked_weights.sum()), 1.0),
    )
    return loss, told


def rate(step: int, steps: int, tuned: bool) -> float:
    """Warm-up, a constant rate, and its decay in the last fifth (WSD), to the paper's share: 0.3 of it. Fine-tuning has a quarter of the
    rate, and ends at a tenth of that."""
    left, last = (steps - step) / (0.2 * steps), 0.1 if tuned else 0.3
    return (RATE / 4 if tuned else RATE) * min(1.0, (step + 1) / 20, last + (1 - last) * min(1.0, left))


def train(
    model: Any, recipe: Recipe, steps: int, tuned: bool, told: Callable[[float], None]
) -> tuple[list[Any], list[float]]:
    """Returns both losses in nats a token and the norm of the gradient, of each step."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator, problems = torch.Generator().manual_seed(recipe.seed), arithmetic(100 + 10 * recipe.seed + tuned)
    seen, norms = [], []
    for step in range(steps):
        levels: dict[str, list[float | None]] = {
            "step": [noise_level(recipe.seed, step)] * RANKS,
            "rank": [noise_level(recipe.seed, step, rank) for rank in range(RANKS)],
            "sequence": [None] * RANKS,
        }
        samples = [
            sample(problem, generator, model.end_tokens[0], level, tuned)
            for level in levels[recipe.noise]
            for problem in islice(problems, TEXTS)
        ]
        batch = pack_dual_stream(samples, BLOCK, model.mask_token, clean=recipe.clean)
        with torch.autocast("cpu", torch.bfloat16):
            loss, both = losses(model, batch, recipe)
        (loss.masked if recipe.alpha is None else loss.total).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.param_groups[0]["lr"] = rate(step, steps, tuned)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(both)
        told((step + 1) / steps)
    model.requires_grad_(False)
    return seen, norms


@torch.no_grad()
def held_out_losses(model: Any, recipe: Recipe) -> tuple[float, float]:
    """Nats a token of solutions that no training sees, at noise levels evenly over [0, 1], each text at two of them."""
    generator, sums = torch.Generator().manual_seed(1), list(islice(arithmetic(0, held_out=True), HELD_OUT))
    found = []
    for start in range(0, HELD_OUT, 8):
        for turned in (False, True):
            levels = [(2 * number + 1) / (2 * HELD_OUT) for number in range(start, start + 8)]
            samples = [
                sample(problem, generator, model.end_tokens[0], 1 - level if turned else level, True)
                for problem, level in zip(sums[start : start + 8], levels)
            ]
            batches = [
                pack_dual_stream(samples, BLOCK, model.mask_token, clean=kind) for kind in ("causal", recipe.clean)
            ]
            (ar, _), (_, masked) = (losses(model, batch, Recipe())[1] for batch in batches)
            found.append((ar, len(batches[0].ar_rows), masked, float(batches[1].masked_weights.sum())))
    rows, weight = sum(part[1] for part in found), sum(part[3] for part in found)
    return sum(part[0] * part[1] for part in found) / rows, sum(part[2] * part[3] for part in found) / weight


def right(model: Any, problems: int, method: Any, **options: Any) -> tuple[int, float]:
    task = make_task("sums", problems)
    given: dict[str, Any] = {"max_new_tokens": task.limit, **options}
    found = decoding.generate(model, task.prompts, method, **given)
    solved = zip(task.problems or (), found.text or (), strict=True)
    return sum(one.is_solved_by(text) for one, text in solved), found.stats.tokens_per_forward


def base(recipe: Recipe, told: Callable[[float], None]) -> Base:
    if recipe not in _bases:
        began, model = time.process_time(), with_mask(recipe.start, recipe.seed)
        seen, norms = train(model, recipe, STEPS, False, told)
        curve = []
        for last in range(CURVE, STEPS + 1, CURVE):
            ar, masked = (round(mean(column), 4) for column in zip(*seen[last - CURVE : last]))
            # In a block-wise clean stream a row sees the token that it would predict.
            own = {} if recipe.clean == "block" else {"autoregressive": ar}
            curve.append({"step": last, **own, "masked": masked})
        late = norms[len(norms) // 2 :]
        _bases[recipe] = Base(model.state_dict(), stdev(late) / mean(late), curve, time.process_time() - began)
    return _bases[recipe]


def trained(recipe: Recipe, problems: int, told: Callable[[float], None]) -> Trained:
    if (recipe, problems) not in _trained:
        known = base(recipe._replace(tuned=False), told)
        began, model = time.process_time(), with_mask(recipe.start, recipe.seed)
        model.load_state_dict(known.weights)
        model.requires_grad_(False)
        if recipe.tuned:
            train(model, recipe, TUNED_STEPS, True, told)
        held_out = held_out_losses(model, recipe)
        ar, _ = right(model, problems, "autoregressive")
        # Where no row was trained to predict the next token, the first of a block is not taken from there either.
        refresh = "causal" if recipe.clean == "causal" else "bidirectional"
        diffusion = right(model, problems, "block_diffusion", block_size=BLOCK, refresh=refresh)
        _trained[recipe, problems] = Trained(known, ar, *diffusion, *held_out, time.process_time() - began)
    return _trained[recipe, problems]


# ---- tables

BLOCK_WISE = Recipe(None, clean="block")
TECHNIQUES = {
    "block-wise attention": BLOCK_WISE._replace(start="random weights", average="sequence", noise="step"),
    "+ global loss average": BLOCK_WISE._replace(start="random weights", noise="step"),
    "+ masking ratios by rank": BLOCK_WISE._replace(start="random weights"),
    "+ two stages": BLOCK_WISE,
    "+ autoregressive loss": Recipe(),
    "the same with masking ratios by sequence": Recipe(noise="sequence"),
}
ALPHAS = {
    **{f"{alpha:g}": Recipe(alpha) for alpha in (0.0, 0.1, 0.3, 0.5, 1.0)},
    "no autoregressive loss": BLOCK_WISE,
    **{f"{alpha:g}, seed 1": Recipe(alpha, seed=1) for alpha in (0.3, 1.0)},
}
PRESERVED = {
    "base, autoregressive loss alone": Recipe(0.0),
    "base, with the masked loss": Recipe(),
    "fine-tuned, autoregressive loss alone": Recipe(0.0, tuned=True),
    "fine-tuned, with the masked loss": Recipe(tuned=True),
}


def _tell(progress: Progress, name: str, number: int, count: int, done: float) -> None:
    progress(name, (number + done) / count)


def all_of(recipes: dict[str, Recipe], problems: int, progress: Progress) -> dict[str, Trained]:
    found = {}
    for number, (name, recipe) in enumerate(recipes.items()):
        found[name] = trained(recipe, problems, partial(_tell, progress, name, number, len(recipes)))
    return found


def facts(
    recipes: dict[str, Recipe], found: dict[str, Trained], problems: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    bases = {id(one.base): one.base.seconds for one in found.values()}
    return {
        "start": "tiny-code",
        "steps": STEPS,
        "texts a step": f"{RANKS} ranks of {TEXTS}",
        "block size": BLOCK,
        "seeds": " and ".join(str(seed) for seed in sorted({recipe.seed for recipe in recipes.values()})),
        "problems": problems,
        "seconds": round(sum(bases.values()) + sum(one.seconds for one in found.values())),
        "processor": processor(),
        "rows": rows,
    }


def techniques(problems: int, progress: Progress) -> dict[str, Any]:
    """Table 1: what block diffusion gets right, with one technique more in each row."""
    found = all_of(TECHNIQUES, problems, progress)
    rows = [
        {
            "": name,
            "right": one.diffusion,
            "tokens per forward": round(one.tokens_per_forward, 2),
            "held-out masked loss": round(one.held_out_masked, 3),
            "spread of gradient norms": round(one.base.noise, 2),
        }
        for name, one in found.items()
    ]
    return facts(TECHNIQUES, found, problems, rows)


def alphas(problems: int, progress: Progress) -> dict[str, Any]:
    """Table 2 and the curves of figure 4."""
    found, rows = all_of(ALPHAS, problems, progress), []
    for name, one in found.items():
        modes = {
            "block diffusion": (one.diffusion, round(one.tokens_per_forward, 2), one.held_out_masked),
            "autoregressive": (one.autoregressive, 1.0, one.held_out_autoregressive),
        }
        for mode, (solved, speed, loss) in modes.items():
            rows.append(
                {
                    "alpha": name,
                    "mode": mode,
                    "right": solved,
                    "tokens per forward": speed,
                    "held-out loss": round(loss, 4),
                }
            )
    curves = {name: one.base.curve for name, one in found.items() if ALPHAS[name].seed == 0}
    return {**facts(ALPHAS, found, problems, rows), "curves": curves}


def preserved(problems: int, progress: Progress) -> dict[str, Any]:
    """Table 3: what the masked loss costs or adds token by token."""
    found = all_of(PRESERVED, problems, progress)
    rows = [
        {"": name, "right": one.autoregressive, "held-out autoregressive loss": round(one.held_out_autoregressive, 4)}
        for name, one in found.items()
    ]
    return {**facts(PRESERVED, found, problems, rows), "steps of fine-tuning": TUNED_STEPS}
