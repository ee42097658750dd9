"""Train `tiny-deep`: a byte-level model that follows links between names, one link each time its core runs.

    python examples/train_tiny_deep.py

takes an estimated half an hour to an hour on one CPU core and writes tiny-deep.safetensors into the current folder.

The prompt lists links and asks for the last names of chains. The first recurrence of an answer's row is to recall the name that is
asked; each later one is to replace the name by the one it leads to, and every recurrence has a loss, up to the first one that goes
wrong: a right name is out of reach from there. So all recurrences learn the same step, and few need to be run at once to learn it.
There is no coda: its attention could follow a link for the core.

A row's input, the previous answer, says nothing about its own answer, and the sampler's drafts are names on the way. So a part of
the inputs are random names. Prompts are recomputed only a few times: rows of answers see the K and V of the prompt's last recurrence, as
they do in decoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from training_run import Output, Resume, Run, Score, console, save

from pdkernels.decoding import generate
from pdkernels.models import ByteTokenizer
from pdkernels.models.architectures.attention import Visibility
from pdkernels.models.architectures.recurrent_depth import STATE_STD, RecurrentDepth, RecurrentDepthConfig
from pdkernels.training import Chains, chains

CONFIG = RecurrentDepthConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=128,
    heads=4,
    head_dim=32,
    intermediate_size=256,
    prelude_layers=1,
    core_layers=2,
    coda_layers=0,
    mean_recurrence=32,
    max_positions=512,
)
HOPS, NAMES, CHAINS = 30, 62, 4
FAR = 6
"""Hops to the ends of the chains in the first batches, which take two: a model that is asked for ends first learns to guess one."""
USUAL = (4, 12)
"""Range of the recurrences in most batches; the others run to the ends of the chains."""
KEPT = 4
"""Recurrences with a connected graph."""


class Batch(NamedTuple):
    """Rows that fit into a tensor: prompts with equally many chains of the same length."""

    prompts: Tensor
    """``(batch, length)`` ids."""
    inputs: Tensor
    """``(batch, asked)`` ids: the answers, some replaced by random names."""
    targets: Tensor
    """``(recurrences, batch, asked + 1)`` ids: where a row is to be after each recurrence; the last row ends the text."""
    prompt_recurrences: int


def targets_of(one: Chains, recurrences: int) -> list[list[int]]:
    """The names that the rows of answers hold after 1 .. `recurrences` recurrences, then the end token."""
    at = [[ord(path[min(hop, len(path) - 1)]) for path in one.paths] for hop in range(recurrences)]
    return [[*names, ByteTokenizer.end_token] for names in at]


def batches(rows: int, short: int, seed: int) -> Iterator[Batch]:
    """Endless batches: the first `short` ones of two hops from names far from the ends of their chains, the others of any number."""
    numbers = random.Random(seed)
    for number in count():
        first = number < short
        hops = FAR if first else numbers.choice((HOPS, numbers.randint(1, HOPS)))
        many = numbers.randint(2, min(CHAINS, NAMES // (hops + 1)))
        stream = chains(numbers.randrange(2**32), hops=(hops, hops), count=(many, many))
        problems = list(islice(stream, rows))
        recurrences = hops + numbers.randint(1, 6)
        if first or numbers.random() < 0.75:
            recurrences = 3 if first else min(recurrences, numbers.randint(*USUAL))
        noise = 0.5 if numbers.random() < 0.8 else 1.0
        inputs = []
        for one in problems:
            names = sorted({name for path in one.paths for name in path})
            inputs.append([ord(numbers.choice(names) if numbers.random() < noise else name) for name in one.answer])
        targets = torch.tensor([targets_of(one, recurrences) for one in problems]).transpose(0, 1)
        prompts = torch.tensor([list(one.prompt.encode()) for one in problems])
        yield Batch(prompts, torch.tensor(inputs), targets, min(HOPS, 1 + int(numbers.expovariate(0.5))))


class Recalled:
    """K and V of earlier rows for the layers of later ones, as a cache holds them, but with a graph; and those of the new rows."""

    dtype = torch.float32

    def __init__(self, layers: int, before: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.layers, self.before = layers, before
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def append_(self, layer: int, k: Tensor, v: Tensor, counts: None) -> None:
        self.new[layer] = (k, v)

    def layer(self, layer: int, prefix: int) -> tuple[Tensor, Tensor]:
        if self.before is None:
            return tuple(tensor[:, :0] for tensor in self.new[layer])  # type: ignore[return-value]
        return self.before[layer]


def logits_of(model: RecurrentDepth, batch: Batch, generator: torch.Generator, kept: int = KEPT) -> Tensor:
    """``(recurrences, batch, asked + 1, vocabulary)``: what the rows of answers say after each recurrence."""
    tokens = torch.cat([batch.prompts, batch.inputs], 1)
    length, first = tokens.shape[1], batch.prompts.shape[1] - 1  # the last row of the prompt gives the first answer
    whole = model.context(length)
    term = model.embedding_term(model.prelude(tokens, whole))

    def initial(rows: Tensor) -> Tensor:
        state = torch.empty_like(rows, requires_grad=False)
        return torch.nn.init.trunc_normal_(state, std=STATE_STD, a=-3 * STATE_STD, b=3 * STATE_STD, generator=generator)

    visible = torch.ones(length, length, dtype=torch.bool).tril()
    context = whole._replace(rotation=whole.table.span(0, first))
    state = initial(term[:, :first])
    with torch.no_grad():
        for _ in range(batch.prompt_recurrences - 2):
            state = model.core(state, term[:, :first], context)
    if batch.prompt_recurrences > 1:
        state = model.core(state, term[:, :first], context)
    prompt: Any = Recalled(model.config.layers)
    mask = Visibility(visible[:first, :first][None, None])
    model.core(state, term[:, :first], context._replace(cache=prompt, visibility=mask))

    answers: Any = Recalled(model.config.layers, prompt.new)
    mask = Visibility(visible[first:][None, None], prefix=first)
    context = whole._replace(rotation=whole.table.span(first, length - first), cache=answers, visibility=mask)
    state, states = initial(term[:, first:]), []
    for number in range(len(batch.targets)):
        if number % kept == 0:
            state = state.detach()
        state = model.core(state, term[:, first:], context)
        states.append(state)
    return model.coda(torch.cat(states), whole).unflatten(0, (len(states), -1))


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss in nats up to each row's first wrong recurrence, and how many of these recurrences are right."""
    with torch.no_grad():
        right = logits.argmax(-1) == targets
        counted = torch.cat([torch.ones_like(right[:1]), right[:-1]]).cumprod(0)
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum(), (right * counted).sum() / counted.sum()


def solved_share(model: RecurrentDepth, problems: int, advance: Callable[[int], None]) -> float:
    """Share of held-out prompts that decoding with the mean number of recurrences answers without an error."""
    right, stream = 0, chains(0, held_out=True)
    for first in range(0, problems, 25):
        asked = list(islice(stream, min(25, problems - first)))
        limit = len(asked[0].paths) + 1
        texts = generate(model, [one.prompt for one in asked], "recurrent_static", max_new_tokens=limit).text
        right += sum(one.is_solved_by(text) for one, text in zip(asked, texts, strict=True))
        advance(len(asked))
    return right / problems


def main(
    output: Output = Path("tiny-deep.safetensors"),
    short: Annotated[int, typer.Option(help="Steps on two hops, the first ones.")] = 2000,
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = 3600,
    rows: Annotated[int, typer.Option(help="Prompts in a batch.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out prompts.")] = 300,
    scored: Annotated[int, typer.Option(help="Held-out prompts that the stored model is scored on.")] = 100,
    resume: Resume = False,
    score: Score = True,
) -> None:
    """Train tiny-deep and save it, rounded to bf16."""
    settings = {"short": short, "steps": steps, "rows": rows, "lr": lr, "warmup": warmup}
    run = Run(output, resume, settings | {"seed": seed}, threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = RecurrentDepth(CONFIG, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    data = batches(rows, short, seed + 1)

    def rate(number: int) -> float:
        return lr * min(1.0, (number + 1) / warmup) * min(1.0, (1 - number / steps) / 0.5)

    def step(number: int) -> tuple[Tensor, dict[str, float]]:
        batch = next(data)
        logits = logits_of(model, batch, generator)
        loss, right = loss_of(logits, batch.targets)
        return loss, {"loss": loss.item(), "right": right.item()}

    def look() -> str:
        return f"{solved_share(model, 10, lambda count: None):.0%} of 10 held-out prompts right"

    with run.stoppable():
        streams = {"skip": lambda number: next(data), "generators": [generator]}
        weights = list(model.parameters())
        run.optimise("training", model, weights, steps, rate, step, **streams, look=look, look_every=evaluate_every)
        model.to(torch.bfloat16).float()
        facts: dict[str, float] = {}
        if score:
            with run.scoring(scored) as advance:
                facts = {"held_out_prompts_right": solved_share(model, scored, advance)}
        save(run, model, "recurrent depth, byte-level, chains of links", **facts)


if __name__ == "__main__":
    typer.run(main)
