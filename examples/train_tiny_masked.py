"""Train `tiny-masked`: a byte-level masked-diffusion model that works out sums, on canvases padded with end tokens.

    python examples/train_tiny_masked.py

takes less than half an hour on two CPU cores with bfloat16 products, and writes tiny-masked.safetensors into the current folder.

It starts from `tiny-trimode`, whose causal rows can add and whose masks are filled in block by block, and learns to attend
to a whole canvas at once. A step adds three losses:

- Masked diffusion. A canvas is a question, which is never masked, its solution, then end tokens. One of every three
  masks each byte after the question with one probability t, drawn for the canvas and evenly spread over the batch, and weights
  the loss of masked bytes by 1 / t: a bound of the log-likelihood. In the others the masked share grows from left to right.
- The same on the others again, with the model's confident guesses filled in, as during decoding.
- The joint loss of `train_tiny_trimode.py`, under its dual-stream mask. There every byte of a text must be predicted
  from everything to its left; in a canvas only a few are. Without it the model forgets how to add.

Source: Nie et al., "Large language diffusion models" (LLaDA), section 2 and algorithms 1 and 2; the even spread: Kingma et al.,
"Variational diffusion models", appendix I.1; from a causal to a masked model with trained weights: Ye et al., "Dream 7B", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from train_tiny_trimode import joint_batches, joint_step
from training_run import HAS_BF16, Output, Resume, Run, Score, console, save, start_model

from pdkernels.models import ByteTokenizer, Transformer
from pdkernels.training import Problem, arithmetic

END_TOKEN, MASK_TOKEN = ByteTokenizer.end_token, ByteTokenizer.vocab_size
CANVAS = 128
"""New tokens that the model is scored with; longer solutions, four in ten, are left out."""
LONGEST_PROMPT = 24
SHORTEST_ROW = 64
LEAST_MASKED = 0.02
BEHIND = 0.2
"""Weight of a masked byte far after the known ones, in rows with a growing masked share; 1 more next to them."""


def bidirectional(model: Transformer) -> Transformer:
    """The weights of a model trained with masks, without its adapter, as a model whose rows see everything and predict their own token."""
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
    positions, answers = torch.arange(length), length - starts
    spread = (torch.rand((), generator=generator) + torch.arange(count) / count) % 1
    level = (LEAST_MASKED + (1 - LEAST_MASKED) * spread)[:, None].expand(-1, length)
    width = (length / 4 * torch.rand(count, 1, generator=generator)).clamp(min=1)
    first = spread[:, None] * (ends - starts + width) - width + starts
    growing = ((positions - first) / width).clamp(0, 1)
    alike = (torch.arange(count) % 3 == 0)[:, None]
    share = torch.where(alike, level, growing)
    weights = torch.where(alike, 1 / level, 1 + BEHIND - growing) / answers
    hidden = (torch.rand(count, length, generator=generator) < share) & (positions >= starts)
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
    """Mean over rows of the weighted loss, in nats, and the confidence of the model's guesses, (rows, length), 0 elsewhere."""
    seen = rows.tokens.masked_fill(rows.hidden, MASK_TOKEN)
    logits = model.logits(model.hidden(seen)[rows.hidden]).float()
    losses = F.cross_entropy(logits, rows.tokens[rows.hidden], reduction="none")
    sure = torch.zeros(rows.tokens.shape).masked_scatter(rows.hidden, logits.detach().softmax(-1).amax(-1))
    return (losses * rows.weights[rows.hidden]).sum() / len(rows.tokens), sure


def later(rows: Rows, sure: Tensor, generator: torch.Generator) -> Rows:
    """The rows whose masked share grows, after every guess above a threshold, drawn for each row, is filled in."""
    threshold = 0.5 + 0.5 * torch.rand(len(sure), 1, generator=generator)
    chosen = torch.arange(len(sure)) % 3 != 0
    return Rows(rows.tokens[chosen], (rows.hidden & (sure < threshold))[chosen], rows.weights[chosen])


@torch.no_grad()
def fill(model: Transformer, tokens: Tensor, threshold: float | None = None) -> tuple[Tensor, int]:
    """Fill the masks of canvases (rows, length), the most confident first: one per forward, or all whose probability reaches `threshold`.

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


def look(
    model: Transformer,
    problems: list[Problem],
    threshold: float | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[float, float]:
    """Share of the sums that are right, and forwards per sum."""
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
        advance(len(group))
    return solved / len(problems), forwards / len(problems)


def main(
    output: Output = Path("tiny-masked.safetensors"),
    start: Annotated[
        str, typer.Option(help="Name, folder or file of the model with a mask token to start from.")
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
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-masked and save it, rounded to bf16."""
    settings = {"start": start, "steps": steps, "rows": rows, "sums": sums, "joint_weight": joint_weight, "lr": lr}
    run = Run(output, resume, settings | {"warmup": warmup, "minutes": minutes, "seed": seed, "fast": fast}, threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = bidirectional(start_model(start, masks=True))
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    data, joint, problems = batches(rows, seed + 1), joint_batches(sums, 0, seed + 2), held_out_sums(scored)

    def rate(number: int) -> float | None:
        done = number / steps
        if minutes:
            done = max(done, run.seconds() / (60 * minutes))
        return None if done >= 1 else lr * min(1.0, (number + 1) / warmup) * min(1.0, (1 - done) / 0.8)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            canvases = next(data)
            loss, sure = loss_of(model, canvases)
            loss = loss + loss_of(model, later(canvases, sure, generator))[0]
            # An alpha of 1, not 0.3: this model fills masks, and predicts next tokens only to keep what it knows.
            total = loss + joint_weight * joint_step(model, next(joint), 1.0)[0]
        return total, {"loss": loss.item()}

    def glance() -> str:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            solved, forwards = look(model, problems[:20], 0.9)
        return f"at threshold 0.9 {solved:.0%} of held-out sums right after {forwards:.0f} forwards"

    with run.stoppable():
        streams = {"skip": lambda number: (next(data), next(joint)), "generators": [generator]}
        weights = list(model.parameters())
        run.optimise(
            "training", model, weights, steps, rate, step, **streams, look=glance, look_every=look_every, muon=True
        )
        model.to(torch.bfloat16).float()
        facts: dict[str, float] = {}
        if score:
            with run.scoring(2 * len(problems)) as advance:
                facts["held_out_sums_right"] = look(model, problems, None, advance)[0]
                facts["held_out_sums_right_at_threshold_09"] = look(model, problems, 0.9, advance)[0]
        save(run, model, "masked diffusion, byte-level, arithmetic", canvas=CANVAS, **facts)


if __name__ == "__main__":
    typer.run(main)
