"""Train `tiny-masked`: a byte-level masked-diffusion model that works out sums, on canvases padded with end tokens.

    python examples/train_tiny_masked.py

takes less than half an hour on two CPU cores where they multiply bfloat16 themselves, and writes
pdkernels/models/weights/tiny-masked.safetensors.

It starts from `tiny-trimode`, whose causal rows can add and whose masks are filled in block by block, and learns to attend
to a whole canvas at once. A step adds three losses:

- Masked diffusion. A canvas is a question, which is never masked, its solution, then end tokens. One of every three
  masks each byte after the question with one probability t, drawn for the canvas and evenly spread over the batch, and weights
  the loss of masked bytes by 1 / t: a bound of the log-likelihood. In the others the masked share grows from left to right.
- The same on the others again, with the model's confident guesses filled in: as they look during decoding.
- The joint loss of `train_tiny_trimode.py`, under its dual-stream mask. There every byte of a text must be predicted
  from everything to its left; in a canvas only a few are. Without it the model forgets how to add.

Source: Nie et al., "Large language diffusion models" (LLaDA), section 2 and algorithms 1 and 2; the even spread: Kingma et al.,
"Variational diffusion models", appendix I.1; from a causal to a masked model with trained weights: Ye et al., "Dream 7B", section 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from train_tiny_code import HAS_BF16
from train_tiny_trimode import joint_batches, joint_step

from pdkernels.models import ByteTokenizer, Transformer, load
from pdkernels.models.zoo import WEIGHTS, save_tiny
from pdkernels.training import Problem, arithmetic

END_TOKEN, MASK_TOKEN = ByteTokenizer.end_token, ByteTokenizer.vocab_size
CANVAS = 128
"""New tokens that the model is scored with; longer solutions, four in ten, are left out."""
LONGEST_PROMPT = 24
SHORTEST_ROW = 64
LEAST_MASKED = 0.02
BEHIND = 0.2
"""Weight of a masked byte far after the known ones, in rows with a growing masked share; 1 more next to them."""
console = Console()


def bidirectional(model: Transformer) -> Transformer:
    """The weights of a model that knows masks, without its adapter, where every row sees all and is about its own token."""
    config = replace(model.config, attention="bidirectional", predicts="own")
    wide = Transformer(config, tokenizer=model.tokenizer, end_tokens=model.end_tokens, mask_token=model.mask_token)
    wide.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "adapter" not in name})
    return wide


class Rows(NamedTuple):
    """A batch of canvases, each (rows, length)."""

    tokens: Tensor
    hidden: Tensor
    """Which tokens the model sees masked."""
    weights: Tensor
    """What the loss of a hidden one counts."""


def rows_of_sums(problems: Iterator[Problem], count: int, length: int) -> tuple[Tensor, Tensor]:
    """(count, length) ids of problems that fit, followed by end tokens, and where their solutions begin and end, (count, 2)."""
    rows, spans = [], []
    while len(rows) < count:
        problem = next(problems)
        ids = list((problem.prompt + problem.steps).encode())
        if len(ids) < length:
            rows.append([*ids, *[END_TOKEN] * (length - len(ids))])
            spans.append((len(problem.prompt), len(ids)))
    return torch.tensor(rows), torch.tensor(spans)


def hide(tokens: Tensor, spans: Tensor, generator: torch.Generator) -> Rows:
    """Mask tokens after the questions: with one probability in every third row, with a growing one in the others."""
    count, length = tokens.shape
    starts, ends = spans[:, :1], spans[:, 1:]
    places, answers = torch.arange(length), length - starts
    spread = (torch.rand((), generator=generator) + torch.arange(count) / count) % 1
    level = (LEAST_MASKED + (1 - LEAST_MASKED) * spread)[:, None].expand(-1, length)
    width = (length / 4 * torch.rand(count, 1, generator=generator)).clamp(min=1)
    first = spread[:, None] * (ends - starts + width) - width + starts
    growing = ((places - first) / width).clamp(0, 1)
    alike = (torch.arange(count) % 3 == 0)[:, None]
    share = torch.where(alike, level, growing)
    weights = torch.where(alike, 1 / level, 1 + BEHIND - growing) / answers
    hidden = (torch.rand(count, length, generator=generator) < share) & (places >= starts)
    return Rows(tokens, hidden, weights)


def batches(rows: int, seed: int) -> Iterator[Rows]:
    """Endless batches of sums on canvases of a length that changes from batch to batch."""
    generator, problems = torch.Generator().manual_seed(seed), arithmetic(seed)
    while True:
        # The square root: long rows hold more to learn.
        span = CANVAS + LONGEST_PROMPT - SHORTEST_ROW
        length = SHORTEST_ROW + 1 + int(span * torch.rand((), generator=generator).sqrt())
        yield hide(*rows_of_sums(problems, rows, length), generator)


def loss_of(model: Transformer, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean over rows of the weighted loss, in nats, and how sure the model is of its guesses, (rows, length), 0 elsewhere."""
    seen = rows.tokens.masked_fill(rows.hidden, MASK_TOKEN)
    logits = model.logits(model.hidden(seen)[rows.hidden]).float()
    losses = F.cross_entropy(logits, rows.tokens[rows.hidden], reduction="none")
    sure = torch.zeros(rows.tokens.shape).masked_scatter(rows.hidden, logits.detach().softmax(-1).amax(-1))
    return (losses * rows.weights[rows.hidden]).sum() / len(rows.tokens), sure


def later(rows: Rows, sure: Tensor, generator: torch.Generator) -> Rows:
    """The rows that hide more and more, once all that the model is sure of is known, as far as a threshold drawn for each."""
    threshold = 0.5 + 0.5 * torch.rand(len(sure), 1, generator=generator)
    chosen = torch.arange(len(sure)) % 3 != 0
    return Rows(rows.tokens[chosen], (rows.hidden & (sure < threshold))[chosen], rows.weights[chosen])


@torch.no_grad()
def fill(model: Transformer, tokens: Tensor, threshold: float | None = None) -> tuple[Tensor, int]:
    """Fill the masks of canvases (rows, length), the surest first: one a forward, or all whose probability reaches `threshold`.

    Returns the canvases and the number of forwards.
    """
    tokens, forwards = tokens.clone(), 0
    while bool((masked := tokens == MASK_TOKEN).any()):
        logits = model(tokens)
        logits[..., MASK_TOKEN] = -torch.inf
        sure, guess = logits.softmax(-1).max(-1)
        sure = sure.masked_fill(~masked, -1)
        chosen = F.one_hot(sure.argmax(-1), tokens.shape[1]).bool()
        if threshold is not None:
            chosen |= sure >= threshold
        tokens = torch.where(chosen & masked, guess, tokens)
        forwards += 1
    return tokens, forwards


def held_out_sums(count: int) -> list[Problem]:
    """Problems whose solutions fit on the canvas with an end token after them."""
    return list(islice((problem for problem in arithmetic(0, held_out=True) if len(problem.steps) < CANVAS), count))


def look(model: Transformer, problems: list[Problem], threshold: float | None = None) -> tuple[float, float]:
    """Share of the sums that come out right, and forwards for one of them."""
    groups: dict[int, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(len(problem.prompt), []).append(problem)
    solved = forwards = 0
    for start, group in groups.items():
        prompts = torch.tensor([list(problem.prompt.encode()) for problem in group])
        canvases = torch.cat([prompts, torch.full((len(group), CANVAS), MASK_TOKEN)], 1)
        filled, count = fill(model, canvases, threshold)
        for problem, row in zip(group, filled[:, start:].tolist(), strict=True):
            text = bytes(token for token in row[: [*row, END_TOKEN].index(END_TOKEN)]).decode(errors="replace")
            solved += problem.is_solved_by(text)
        forwards += count * len(group)
    return solved / len(problems), forwards / len(problems)


def main(
    output: Annotated[Path, typer.Option(help="Where the weights go.")] = WEIGHTS / "tiny-masked.safetensors",
    start: Annotated[
        str, typer.Option(help="Name or folder of the model with a mask token to start from.")
    ] = "tiny-trimode",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 4000,
    rows: Annotated[int, typer.Option(help="Canvases in a batch.")] = 12,
    sums: Annotated[int, typer.Option(help="Sums in a batch of the joint loss.")] = 8,
    joint_weight: Annotated[float, typer.Option(help="Weight of the joint loss.")] = 3.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate; a high one makes the model forget how to add.")] = 4e-4,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    minutes: Annotated[float, typer.Option(help="End after this time, if it comes first; 0 is no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, masks and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    fast: Annotated[bool, typer.Option(help="bfloat16, where the CPU multiplies it itself.")] = HAS_BF16,
    look_every: Annotated[int, typer.Option(help="Steps between looks at held-out sums.")] = 1000,
    scored: Annotated[int, typer.Option(help="Held-out sums that the stored model is scored on.")] = 100,
) -> None:
    """Train tiny-masked and save it, rounded to bf16."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = bidirectional(load(start))
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    data, joint, problems = batches(rows, seed + 1), joint_batches(sums, 0, seed + 2), held_out_sums(scored)
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    started, smooth = time.perf_counter(), math.log(model.config.vocab_size)
    with progress:
        task = progress.add_task("training", total=steps, loss=smooth)
        for step in range(steps):
            done = step / steps
            if minutes:
                done = max(done, (time.perf_counter() - started) / (60 * minutes))
            if done >= 1:
                break
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                canvases = next(data)
                loss, sure = loss_of(model, canvases)
                loss = loss + loss_of(model, later(canvases, sure, generator))[0]
                total = loss + joint_weight * joint_step(model, next(joint), 1.0)[0]
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warmup) * min(1.0, (1 - done) / 0.8)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            smooth += (loss.item() - smooth) * max(0.01, 1 / (step + 1))
            progress.update(task, advance=1, loss=smooth)
            if (step + 1) % look_every == 0:
                with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                    solved, forwards = look(model, problems[:20], 0.9)
                progress.console.print(
                    f"step {step + 1}: loss {smooth:.3f}; at threshold 0.9 {solved:.0%} of held-out sums right after "
                    f"{forwards:.0f} forwards; {time.perf_counter() - started:.0f} s"
                )
                save_tiny(model, output)

    model.to(torch.bfloat16).float()
    solved, _ = look(model, problems)
    quick, forwards = look(model, problems, 0.9)
    save_tiny(
        model,
        output,
        description="masked diffusion, byte-level, arithmetic",
        canvas=CANVAS,
        held_out_sums_right=solved,
        held_out_sums_right_at_threshold_09=quick,
    )
    console.print(
        f"saved {output} ({output.stat().st_size / 1e6:.2f} MB) after {time.perf_counter() - started:.0f} s: as stored, "
        f"{solved:.1%} of held-out sums right with one byte a forward, {quick:.1%} with all above 0.9 in {forwards:.0f}"
    )


if __name__ == "__main__":
    typer.run(main)
