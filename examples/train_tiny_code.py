"""Train `tiny-code`: a byte-level model of about 2 M parameters, on the Python standard library's source and on arithmetic.

    python examples/train_tiny_code.py

takes about an hour on two CPU cores, a quarter of that if the CPU has bfloat16 products, and writes tiny-code.safetensors
into the current folder. It predicts one token at a time; `train_tiny_trimode.py` and `train_tiny_jacobi.py`
teach it to predict several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from training_run import HAS_BF16, Output, Resume, Run, Score, console, save, start_model

from pdkernels.decoding import generate
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.training import Problem, arithmetic, as_ids, standard_library

PROBLEMS = 400_000
CONFIG = TransformerConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=352,
    rope_theta=10000.0,
    max_positions=512,
)


def corpus(seed: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Ids to train on: source files, and sums from the second value on; and the ids of the held-out files."""
    files, held_out = standard_library()
    sums = [(problem.prompt + problem.steps).encode() for problem in islice(arithmetic(seed), PROBLEMS)]
    source = as_ids(files)
    return torch.cat([source, as_ids(sums)]), len(source), as_ids(held_out)


def score(
    model: Transformer,
    method: str,
    problems: list[Problem],
    advance: Callable[[int], None] = lambda count: None,
    **options: object,
) -> tuple[float, float]:
    """Share of sums solved, and tokens per forward."""
    solved = tokens = 0
    forwards = 0.0
    for first in range(0, len(problems), 25):
        batch = problems[first : first + 25]
        result = generate(model, [problem.prompt for problem in batch], method, max_new_tokens=400, **options)
        solved += sum(problem.is_solved_by(text) for problem, text in zip(batch, result.text, strict=True))
        tokens += result.stats.tokens
        forwards += result.stats.tokens / result.stats.tokens_per_forward
        advance(len(batch))
    return solved / len(problems), tokens / forwards


def solved_share(model: Transformer, problems: int = 100, advance: Callable[[int], None] = lambda count: None) -> float:
    """Share of held-out sums that greedy decoding gets right."""
    return score(model, "autoregressive", list(islice(arithmetic(0, held_out=True), problems)), advance)[0]


def batches(
    data: torch.Tensor, first_sum: int, batch: int, context: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Packed windows of context + 1 ids: source from a new random offset in each epoch, sums from where one begins.

    A model asked for a sum sees it at position 0, so it must have seen sums there.
    """
    begins = (data[:-1] == ByteTokenizer.end_token).nonzero()[:, 0] + 1
    begins = begins[(begins >= first_sum) & (begins < len(data) - context - 1)]
    windows_of_sums = (len(data) - first_sum) // context
    while True:
        source = torch.arange(int(torch.randint(context, (), generator=generator)), first_sum - context - 1, context)
        sums = begins[torch.randperm(len(begins), generator=generator)[:windows_of_sums]]
        starts = torch.cat([source, sums])
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in starts[: len(starts) // batch * batch].view(-1, batch):
            yield data[chosen[:, None] + torch.arange(context + 1)].long()


def loss_of(model: torch.nn.Module, window: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, data: torch.Tensor, context: int, limit: int | None = None) -> float:
    """Mean bits per token over whole windows of `context`, from the first `limit` windows on an even grid."""
    windows = data[: (len(data) - 1) // context * context + 1].unfold(0, context + 1, context)
    if limit is not None:
        windows = windows[:: max(1, len(windows) // limit)]
    total = sum(float(loss_of(model, part.long(), "sum")) for part in windows.split(32))
    return total / (windows.shape[0] * context) / math.log(2)


def main(
    output: Output = Path("tiny-code.safetensors"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 6000,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 16,
    context: Annotated[int, typer.Option(help="Bytes per sequence.")] = 256,
    long_share: Annotated[float, typer.Option(help="Share of the steps, at the end, with twice the context.")] = 0.15,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    start: Annotated[
        str | None, typer.Option(help="Name, folder or file of a model to start from, instead of random weights.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    fast: Annotated[
        bool, typer.Option(help="bfloat16 and compiled: where the CPU multiplies bfloat16 itself.")
    ] = HAS_BF16,
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out text.")] = 500,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-code and save it, rounded to bf16, with the held-out bits per byte of the rounded weights."""
    settings = {"steps": steps, "batch": batch, "context": context, "long_share": long_share, "lr": lr}
    settings |= {"warmup": warmup, "start": start, "seed": seed, "fast": fast}
    run = Run(output, resume, settings, threads)
    torch.manual_seed(seed)
    if start is None:
        model = Transformer(CONFIG, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)
    else:
        model = start_model(start).train().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    train, first_sum, held_out = corpus(seed)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{len(train):,} bytes to train on, {len(held_out):,} bytes of source held out; {parameters:,} parameters"
    )

    # Two shapes of batch, each with its own kernels; the weights are shared with `model`.
    forward = torch.compile(model, dynamic=False) if fast else model
    short = batches(train, first_sum, batch, context, generator)
    long = batches(train, first_sum, batch // 2, 2 * context, generator)

    def window(number: int) -> torch.Tensor:
        return next(long if number >= steps * (1 - long_share) else short)

    def rate(number: int) -> float:
        done = max(0.0, (number - warmup) / max(1, steps - warmup))
        return lr * min(1.0, (number + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * done)) * 0.99 + 0.01)

    def step(number: int) -> tuple[torch.Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            loss = loss_of(forward, window(number))
        return loss, {"loss": loss.item(), "bits per byte": loss.item() / math.log(2)}

    def look() -> str:
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            bits = bits_per_byte(model, held_out, context, limit=200)
        return f"held out {bits:.3f} bits per byte, {solved_share(model):.0%} of held-out sums right"

    with run.stoppable():
        weights = list(model.parameters())
        run.optimise(
            "training", model, weights, steps, rate, step, skip=window, look=look, look_every=evaluate_every, muon=True
        )
        model.to(torch.bfloat16).float()
        facts: dict[str, float] = {}
        if score:
            with run.scoring(200) as advance:
                bits = bits_per_byte(model, held_out, context)
                facts = {
                    "held_out_bits_per_byte": round(bits, 4),
                    "held_out_sums_right": solved_share(model, 200, advance),
                }
        save(run, model, "byte-level, Python's standard library and arithmetic", **facts)


if __name__ == "__main__":
    typer.run(main)
