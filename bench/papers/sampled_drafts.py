"""Adapters of `tiny-trimode` for linear self-speculation: trained on greedy and on sampled drafts, and what one gains at all."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.papers.runs import KINDS, Progress
from pdkernels import decoding, models
from pdkernels.evaluation.tasks import Task, make_task

MODEL = "tiny-trimode"
SHARES = {"greedy drafts": 0.0, "90 % sampled drafts": 0.9}
"""Names of trained adapters, and the share of sampled drafts in their training."""
SEEDS, STEPS, RATE, RANK, SCALE, WIDTHS = (0, 1), 240, 2e-3, 8, 4.0, (8, 16)
TEXTS, TEXTS_PER_STEP = 240, 4
"""Of sums, and of source."""
WINDOW = 256
"""Bytes of a piece of source; the first half is the prompt."""
BLOCK = 16
CONDITIONS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    **{
        f"{temperature:g}, {verification}": {"temperature": temperature, "verification": verification}
        for verification in ("compare", "rejection")
        for temperature in (0.5, 1.0)
    },
}
"""How drafts and verifier sample, and how drafts are accepted."""
Counts = dict[tuple[str, str, str], list[Tensor]]
"""Of a task, an adapter and a condition: `counts_of` each of its trainings."""
DRAFTS, ACCEPTED, TOKENS, FORWARDS = range(4)
MEASURES = {"accepted per draft": (ACCEPTED, DRAFTS), "tokens per forward": (TOKENS, FORWARDS)}
RESAMPLES = 2000


def without_adapter(model: Any) -> Any:
    """A copy of a model that drafts with its own weights."""
    bare = copy.deepcopy(model)
    for layer in bare.layers:
        layer.adapter_in = layer.adapter_out = None
    return bare


# ---- training


def own_texts(model: Any, seed: int, count: int) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """Greedy texts of the model after `count` sums and after as many pieces of source: ids, and the length of the prompt."""
    from pdkernels.training import arithmetic, as_ids, standard_library

    sums = [torch.tensor(list(problem.prompt.encode())) for problem in islice(arithmetic(seed), count)]
    source, generator = as_ids(standard_library()[0]).long(), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - WINDOW, (count,), generator=generator).tolist()
    pieces = [source[start : start + WINDOW // 2] for start in starts]
    found = []
    for prompts, limit in ((sums, 360), (pieces, WINDOW // 2)):
        texts = []
        for first in range(0, count, 32):
            batch = prompts[first : first + 32]
            written = decoding.generate(model, batch, max_new_tokens=limit).tokens
            texts += [(torch.cat([prompt, text]), len(prompt)) for prompt, text in zip(batch, written, strict=True)]
        found.append(texts)
    return found[0], found[1]


def trained(
    bare: Any, texts: Sequence[Sequence[tuple[Tensor, int]]], share: float, seed: int, progress: Callable[[float], None]
) -> tuple[Any, float]:
    """The model with an adapter trained on drafts of its own, of which `share` are sampled,
    and the share of rows that the loss read in the last half of the steps."""
    from pdkernels.training import attach_drafter_, count_accepted, drafter_loss, draw_drafts, pack_drafts

    model, mask = copy.deepcopy(bare), bare.mask_token
    parameters = attach_drafter_(model, RANK, scale=SCALE, generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    order, chance = (torch.Generator().manual_seed(seed + offset) for offset in (100, 200))
    seen = []
    for step in range(STEPS):
        progress(step / STEPS)
        chosen = [
            part[index]
            for part in texts
            for index in torch.randint(len(part), (TEXTS_PER_STEP,), generator=order).tolist()
        ]
        width = WIDTHS[int(torch.randint(len(WIDTHS), (), generator=order))]
        batch = pack_drafts(chosen, width, mask)
        plan = batch.mask.plan(64, 64)
        hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=plan, adapted=batch.drafting)[0]
        # The mask is the last id, which is never drafted.
        draft, verifier = (model.logits(hidden[rows])[..., :mask] for rows in (batch.draft_rows, batch.verifier_rows))
        accepted = count_accepted(draw_drafts(draft, chance, sampled_share=share), verifier)
        optimizer.zero_grad()
        drafter_loss(draft, verifier, accepted).total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        warm, done = STEPS // 30 + 1, step / STEPS
        optimizer.param_groups[0]["lr"] = (
            RATE * min(1.0, (step + 1) / warm) * (0.01 + 0.495 * (1 + math.cos(math.pi * done)))
        )
        optimizer.step()
        if 2 * step >= STEPS:
            read = (accepted + 1).clamp(max=width - 1).double() / (width - 1)
            seen.append(float(read.mean()))
    return model.requires_grad_(False), sum(seen) / len(seen)


# ---- measurement


def counts_of(model: Any, task: Task, size: int, prompts: Sequence[str] | None = None, **options: Any) -> Tensor:
    """``(prompts, 4)``: drafts, their accepted tokens, tokens and forwards of every text, the prompt's forward included."""
    given: dict[str, Any] = {"max_new_tokens": task.limit, "block_size": size, "trace": True, **options}
    if task.end_tokens is not None:
        given["end_tokens"] = task.end_tokens
    asked = list(task.prompts if prompts is None else prompts)
    found = decoding.generate(model, asked, "linear_self_speculation", **given)
    traces: Any = found.stats.trace
    rows = [
        [
            sum(step.forwards > 1 for step in steps),
            sum(step.accepted - 1 for step in steps),
            len(text),
            1 + sum(step.forwards for step in steps),
        ]
        for steps, text in zip(traces, found.tokens, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def resampled(counts: Tensor, measure: str) -> Tensor:
    """``(1 + RESAMPLES,)``: the ratio of `measure` over all prompts, and over prompts drawn with replacement, the same in every call."""
    above, below = MEASURES[measure]
    drawn = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=torch.Generator().manual_seed(0))
    sums = torch.cat([counts.sum(0, keepdim=True), counts[drawn].sum(1)])
    return sums[:, above] / sums[:, below]


def cell(values: Tensor, sign: str = "") -> str:
    """A value with its 95 % interval.

    >>> cell(torch.cat([torch.tensor([2.0]), torch.linspace(1, 3, 2001)]).double())
    '2.00 (1.05-2.95)'
    """
    low, high = torch.quantile(values[1:], torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    between = " to " if sign else "-"
    return f"{float(values[0]):{sign}.2f} ({low:{sign}.2f}{between}{high:{sign}.2f})"


def sampled_drafts(problems: int, progress: Progress) -> dict[str, Any]:
    """Adapters from the same first pairs, texts and order, and what their drafts are worth when the verifier samples."""
    from pdkernels.evaluation.machine import processor

    started = time.process_time()
    shipped: Any = models.load(MODEL)
    bare = without_adapter(shipped)
    tasks = {name: make_task(name, problems) for name in ("sums", "source")}
    adapters: dict[str, list[Any]] = {"none": [bare], "shipped": [shipped]}
    read: dict[str, float] = {}
    trainings = [(seed, name, share) for seed in SEEDS for name, share in SHARES.items()]
    for number, (seed, name, share) in enumerate(trainings):
        if number % len(SHARES) == 0:
            texts = own_texts(bare, 1000 + seed, TEXTS)
        shown = partial(_advance, progress, f"{name}, seed {seed}", 0.7 * number / len(trainings), 0.7 / len(trainings))
        model, rows_read = trained(bare, texts, share, seed, shown)
        adapters.setdefault(name, []).append(model)
        read[name] = read.get(name, 0.0) + rows_read / len(SEEDS)
    counts: Counts = {}
    cases = [(task, name, condition) for task in tasks for name in adapters for condition in CONDITIONS]
    for number, (task, name, condition) in enumerate(cases):
        progress(f"{task}, {name}, {condition}", 0.7 + 0.3 * number / len(cases))
        options = CONDITIONS[condition]
        counts[task, name, condition] = [counts_of(model, tasks[task], BLOCK, **options) for model in adapters[name]]
    rows = [row for task in tasks for measure in MEASURES for row in _rows(counts, task, measure, list(adapters))]
    return {
        "model": MODEL,
        "block size": BLOCK,
        "problems": problems,
        "steps": STEPS,
        "seeds": ", ".join(map(str, SEEDS)),
        "texts trained on": f"{TEXTS} sums and {TEXTS} pieces of source per seed",
        "rows that the loss read": ", ".join(f"{share:.1%} with {name}" for name, share in read.items()),
        "device": processor(),
        "seconds of one core": round(time.process_time() - started),
        "rows": rows,
    }


def _advance(progress: Progress, what: str, start: float, whole: float, share: float) -> None:
    progress(what, start + whole * share)


def _rows(counts: Counts, task: str, measure: str, adapters: Sequence[str]) -> list[dict[str, str]]:
    """Adapters over all seeds, then differences: to no adapter over all seeds, and between the two trainings of a seed."""

    def values(name: str, condition: str, number: int | None = None) -> Tensor:
        found = counts[task, name, condition]
        return resampled(torch.stack(found).sum(0) if number is None else found[number], measure)

    greedy, sampled = SHARES
    told = {name: {key: cell(values(name, key)) for key in CONDITIONS} for name in adapters}
    for name in SHARES:
        told[f"{name} - none"] = {key: cell(values(name, key) - values("none", key), "+") for key in CONDITIONS}
    for number, seed in enumerate(SEEDS):
        told[f"sampled - greedy, seed {seed}"] = {
            key: cell(values(sampled, key, number) - values(greedy, key, number), "+") for key in CONDITIONS
        }
    return [{"task": task, "": measure, "adapter": name, **cells} for name, cells in told.items()]


# ---- Tables 6 and 10


def adapter(problems: int, progress: Progress) -> dict[str, Any]:
    """Greedy linear self-speculation with and without the shipped adapter, by what the text is about."""
    from pdkernels.evaluation.machine import processor

    shipped: Any = models.load(MODEL)
    pair = {"without": without_adapter(shipped), "with": shipped}
    sums, source = make_task("sums", 3 * problems), make_task("source", problems)
    kinds = [next(sign for sign in prompt if sign in KINDS) for prompt in sums.prompts]
    groups: dict[str, tuple[Task, list[str]]] = {
        kind: (sums, [prompt for prompt, own in zip(sums.prompts, kinds, strict=True) if own == sign])
        for sign, kind in KINDS.items()
    }
    groups["source"] = source, source.prompts
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(WIDTHS):
        counts = {}
        for name, model in pair.items():
            for kind, (task, prompts) in groups.items():
                progress(f"{name} adapter, {kind}, {size}", number / len(WIDTHS))
                counts[name, kind] = counts_of(model, task, size, prompts)
        for measure in ("tokens per forward", "tokens per draft"):
            values = {name: [_values(counts[name, kind], measure) for kind in groups] for name in pair}
            for name, found in values.items():
                cells = {kind: round(float(value[0]), 2) for kind, value in zip(groups, found, strict=True)}
                mean = round(sum(float(value[0]) for value in found) / len(found), 2)
                rows.append({"block size": size, "": measure, "adapter": name, **cells, "mean": mean})
            gains = [one - other for one, other in zip(values["with"], values["without"], strict=True)]
            told = {kind: cell(gain, "+") for kind, gain in zip(groups, gains, strict=True)}
            told["mean"] = cell(torch.stack(gains).mean(0), "+")
            rows.append({"block size": size, "": measure, "adapter": "with - without", **told})
    asked = ", ".join(f"{len(prompts)} {kind}" for kind, (_, prompts) in groups.items())
    return {"model": MODEL, "prompts": asked, "temperature": 0, "device": processor(), "rows": rows}


def _values(counts: Tensor, measure: str) -> Tensor:
    """`resampled`; the tokens of a draft are those accepted and the verifier's own after them."""
    return resampled(counts, measure) if measure in MEASURES else 1 + resampled(counts, "accepted per draft")
