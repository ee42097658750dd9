"""Train `tiny-recurrent`: a byte-level model whose core runs any number of times, on sums worked out digit by digit and on source.

    python examples/train_tiny_recurrent.py

takes less than half an hour on two CPU cores and writes tiny-recurrent.safetensors into the current folder.

Each step draws how often the core runs from a log-normal Poisson distribution, so that the model learns to use many recurrences and
to work after few; only the last few of them keep a graph. The mean grows during training: early on, learning needs no depth.

Source: Geiping et al., "Scaling up test-time compute with latent reasoning", section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from train_tiny_code import score as score_of
from training_run import Output, Resume, Run, Score, console, save

from pdkernels.models import ByteTokenizer
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.training import Problem, arithmetic, as_ids, draw_recurrences, standard_library, unrolled_logits

CONFIG = RecurrentDepthConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=128,
    heads=4,
    head_dim=32,
    intermediate_size=256,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    mean_recurrence=16,
    max_positions=512,
)
KEPT = (2, 4)
"""Recurrences with a graph, the last ones: in the first half of the training, and in the second."""
SHOWN = (1, 2, 4, 8, 16)
"""Recurrences at which the model is looked at."""


def loss_of(
    model: RecurrentDepth, windows: Tensor, counted: Tensor, steps: int, kept: int, generator: torch.Generator
) -> Tensor:
    """Mean loss in nats of the next bytes that are `counted`, after `steps` recurrences with a graph of the last `kept`."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    logits = unrolled_logits(model, tokens, steps, generator, backward_recurrences=kept)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum()


def rows_of_sums(problems: Iterator[Problem], count: int, context: int) -> tuple[Tensor, Tensor]:
    """Rows of context + 1 ids that begin with a question, as a prompt does, and continue with more problems; the questions do not count."""
    rows, marks = [], []
    for _ in range(count):
        ids: list[int] = []
        counted: list[bool] = []
        while len(ids) <= context:
            problem = next(problems)
            text = [*(problem.prompt + problem.steps).encode(), ByteTokenizer.end_token]
            ids += text
            counted += [False] * len(problem.prompt) + [True] * (len(text) - len(problem.prompt))
        rows.append(ids[: context + 1])
        marks.append(counted[1 : context + 1])
    return torch.tensor(rows), torch.tensor(marks)


def batches(sums: int, windows: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of rows of sums and of source, context + 1 ids each, and which of the ids 1 .. context a loss counts."""
    generator = torch.Generator().manual_seed(seed)
    problems, source = arithmetic(seed), as_ids(standard_library()[0])
    while True:
        rows, counted = rows_of_sums(problems, sums, context)
        starts = torch.randint(len(source) - context - 1, (windows,), generator=generator)
        pieces = source[starts[:, None] + torch.arange(context + 1)].long()
        yield torch.cat([rows, pieces]), torch.cat([counted, torch.ones(windows, context, dtype=torch.bool)])


@torch.no_grad()
def held_out_loss(model: RecurrentDepth, steps: int, rows: int = 64, context: int = 160) -> float:
    """Mean loss in nats of what follows held-out questions."""
    problems, generator = arithmetic(0, held_out=True), torch.Generator().manual_seed(0)
    windows, counted = rows_of_sums(problems, rows, context)
    return float(loss_of(model, windows, counted, steps, 0, generator))


def solved_share(model: RecurrentDepth, problems: int, advance: Callable[[int], None]) -> float:
    """Share of held-out sums that decoding with the mean number of recurrences gets right."""
    return score_of(model, "recurrent_static", list(islice(arithmetic(0, held_out=True), problems)), advance)[0]


def main(
    output: Output = Path("tiny-recurrent.safetensors"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2400,
    sums: Annotated[int, typer.Option(help="Rows of sums in a batch.")] = 14,
    windows: Annotated[int, typer.Option(help="Rows of source in a batch.")] = 2,
    context: Annotated[int, typer.Option(help="Bytes of a row.")] = 160,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out sums.")] = 200,
    scored: Annotated[int, typer.Option(help="Held-out sums that the stored model is scored on.")] = 200,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-recurrent and save it, rounded to bf16."""
    settings = {"steps": steps, "sums": sums, "windows": windows, "context": context, "lr": lr, "warmup": warmup}
    run = Run(output, resume, settings | {"seed": seed}, threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = RecurrentDepth(CONFIG, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    data = batches(sums, windows, context, seed + 1)

    def rate(number: int) -> float:
        return lr * min(1.0, (number + 1) / warmup) * min(1.0, (1 - number / steps) / 0.3)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        done = number / steps
        mean = 1 + (CONFIG.mean_recurrence - 1) * min(1.0, 2 * done)
        rows, counted = next(data)
        loss = loss_of(model, rows, counted, draw_recurrences(mean, generator), KEPT[done >= 0.5], generator)
        return loss, {"loss": loss.item()}

    def look() -> str:
        looks = ", ".join(f"{held_out_loss(model, count):.3f} at {count}" for count in SHOWN)
        return f"held-out sums after recurrences: {looks}"

    with run.stoppable():
        streams = {"skip": lambda number: next(data), "generators": [generator]}
        weights = list(model.parameters())
        run.optimise("training", model, weights, steps, rate, step, **streams, look=look, look_every=evaluate_every)
        model.to(torch.bfloat16).float()
        facts: dict[str, float] = {}
        if score:
            with run.scoring(scored) as advance:
                facts = {"held_out_sums_right": solved_share(model, scored, advance)}
        save(run, model, "recurrent depth, byte-level, arithmetic and Python's standard library", **facts)


if __name__ == "__main__":
    typer.run(main)
