"""Tables of the papers that need training: a sampler for block diffusion, and Jacobi Forcing with different noise."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from bench.papers.runs import Progress
from pdkernels import decoding, models
from pdkernels.evaluation.tasks import make_task

TRAINED_ON, EPOCHS, BLOCK = 320, 12, 8


def sampler(problems: int, progress: Progress) -> dict[str, Any]:
    """Networks trained on forwards of sums, judged by the area under their curve, and by what they decode at a threshold."""
    from pdkernels.training import arithmetic, auc, collect_sampler_steps, train_sampler
    from pdkernels.training.sampler import SamplerSteps

    model: Any = models.load("tiny-trimode")
    table = models.semantic_table(model.embedding, 16)
    known = list({one.prompt: one for one in islice(arithmetic(100), TRAINED_ON)}.values())
    parts = []
    for start in range(0, len(known), 32):
        progress("forwards", 0.4 * start / len(known))
        batch = known[start : start + 32]
        texts = [[*one.steps.encode(), model.end_tokens[0]] for one in batch]
        options: dict[str, Any] = {"table": table, "max_new_tokens": max(map(len, texts))}
        prompts = [one.prompt for one in batch]
        for found in (
            collect_sampler_steps(model, prompts, BLOCK, **options),
            collect_sampler_steps(model, prompts, BLOCK, "hybrid", texts=texts, **options),
        ):
            parts.append(found._replace(prompts=found.prompts + start))
    steps = SamplerSteps(*(torch.cat(columns) for columns in zip(*parts)))
    kept = len(known) - len(known) // 5
    train, held_out = (
        SamplerSteps(*(c[chosen] for c in steps)) for chosen in (steps.prompts < kept, steps.prompts >= kept)
    )
    heads: dict[str, Any] = {"confidence": None}
    areas = {"confidence": auc(*held_out.confidence())}
    kinds: tuple[tuple[Literal["pointwise", "attention"], int], ...] = (("pointwise", 4), ("attention", 2))
    for number, (kind, layers) in enumerate(kinds):
        progress(kind, 0.4 + 0.2 * number)
        torch.manual_seed(0)
        config = models.SamplerConfig(16, width=64, feed_forward=128, heads=4, kind=kind, layers=layers)
        heads[kind] = models.SamplerHead(config, table)
        areas[kind] = max(train_sampler(heads[kind], train, held_out, epochs=EPOCHS))
    task, rows = make_task("sums", problems), []
    for number, (name, head) in enumerate(heads.items()):
        progress(f"{name}, decoding", 0.8 + number / 15)
        for threshold in (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99):
            settings: dict[str, Any] = {"block_size": BLOCK, "threshold": threshold, "sampler": head}
            written = decoding.generate(model, task.prompts, "block_diffusion", max_new_tokens=task.limit, **settings)
            rows.append(
                {
                    "": name,
                    "parameters": None if head is None else sum(p.numel() for p in head.parameters()),
                    "AUC": round(areas[name], 3),
                    "threshold": threshold,
                    "right": sum(one.is_solved_by(text) for one, text in zip(task.problems or (), written.text or ())),
                    "tokens per forward": round(written.stats.tokens_per_forward, 2),
                }
            )
    return {
        "model": "tiny-trimode",
        "block size": BLOCK,
        "sums trained on": kept,
        "held out for the AUC": len(known) - kept,
        "forwards": len(train.final),
        "problems": problems,
        "rows": rows,
    }


# ---- noise schedules and masks of Jacobi Forcing

FORCED_BLOCK, FORCED_SUMS, FORCED_STEPS, FORCED_WINDOW = 16, 320, 240, 4
TRAJECTORIES_PER_STEP, SUMS_PER_STEP = 5, 3
FORCINGS: dict[str, tuple[Any, Any]] = {
    "progressive, on noise": ("progressive", "noisy"),
    "random, on noise": ("random", "noisy"),
    "reverse, on noise": ("reverse", "noisy"),
    "progressive, on noise of the window": ("progressive", "window"),
    "progressive, on clean blocks": ("progressive", "clean"),
}


def forcings(problems: int, progress: Progress) -> dict[str, Any]:
    """The same few steps on the same trajectories under each order of noise, and under each of the masks."""
    from pdkernels.training import arithmetic, collect_trajectories

    start: Any = models.load("tiny-code")
    task = make_task("sums", problems)
    known = list(islice(arithmetic(200), FORCED_SUMS))
    progress("trajectories", 0.0)
    options: dict[str, Any] = {"block_size": FORCED_BLOCK, "batch_size": 64, "max_new_tokens": task.limit}
    trajectories = collect_trajectories(start, [one.prompt for one in known], **options)
    settings: dict[str, Any] = {"block_size": FORCED_BLOCK, "max_new_tokens": task.limit}
    rows = []
    for number, (name, (order, conditioning)) in enumerate([("not trained", ("", "")), *FORCINGS.items()]):
        progress(name, 0.1 + 0.9 * number / (1 + len(FORCINGS)))
        model = copy.deepcopy(start)
        if order:
            _force(model, trajectories, order, conditioning)
        found = decoding.generate(model, task.prompts, "jacobi", **settings)
        ahead = decoding.generate(model, task.prompts, "jacobi_multiblock", blocks=2, spawn_ratio=0.3, **settings)
        rows.append(
            {
                "noise, and what noisy blocks see": name,
                "right": sum(one.is_solved_by(text) for one, text in zip(task.problems or (), found.text or ())),
                "tokens per forward": round(found.stats.tokens_per_forward, 3),
                "forwards per token": round(1 / found.stats.tokens_per_forward, 3),
                "tokens per forward, a block ahead": round(ahead.stats.tokens_per_forward, 3),
            }
        )
    return {
        "model": "tiny-code",
        "task": "sums",
        "block size": FORCED_BLOCK,
        "window": FORCED_WINDOW,
        "steps": FORCED_STEPS,
        "trajectories": len(trajectories),
        "problems": problems,
        "rows": rows,
    }


def _force(model: Any, trajectories: list[Any], order: Any, conditioning: Any) -> None:
    from pdkernels.training import arithmetic, noise_aware_loss, noise_aware_sample, noiseless_sample, pack_noise_aware

    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    generator, sums = torch.Generator().manual_seed(0), arithmetic(300)
    end = model.end_tokens[0]
    for step in range(FORCED_STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 20, 1.05 - step / FORCED_STEPS)
        chosen = torch.randint(len(trajectories), (TRAJECTORIES_PER_STEP,), generator=generator).tolist()
        samples = [
            noise_aware_sample(trajectories[index], FORCED_WINDOW, order=order, generator=generator) for index in chosen
        ]
        for one in islice(sums, SUMS_PER_STEP):
            answer: Tensor = torch.tensor([*one.steps.encode(), end])
            samples.append(noiseless_sample(torch.tensor(list(one.prompt.encode())), answer, FORCED_BLOCK))
        window = FORCED_WINDOW if conditioning == "window" else None
        batch = pack_noise_aware(samples, end_token=end, conditioning=conditioning, window=window)
        hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan())[0]
        listed = (batch.ar_rows, batch.student_rows, batch.teacher_rows)
        ar, student, teacher = (model.logits(hidden[rows]) for rows in listed)
        loss = noise_aware_loss(ar, student, teacher, batch, ar_weight=2.0).total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.requires_grad_(False)
