"""Train a tiny transformer on packed masked streams through `pd.block_sparse_attention`, compiled to one graph.

    python examples/train_masked_streams.py --layout all

takes a few minutes on two CPU cores, most of it compilation. Three layouts: the noise-aware one of Jacobi Forcing (autoregressive
and consistency loss), the dual stream of block diffusion and the rounds of planned diffusion (autoregressive and masked loss). Two
samples of new lengths are packed in every step, so every step has another mask; the compiled graph handles them all.

Every step is also taken with the dense mask and scaled dot-product attention from the same weights, in float32 and in float64.
The float64 one gives the error of the dense step; losses and gradients through the op may have twice that error, and the run
fails if they exceed it.

Ctrl-C stops after the current step, and `--resume` continues from there: the same batches, and the same losses as
without the interruption, except for the rounding of a graph that was compiled for another first batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from training_run import Resume, Run, console

from pdkernels.masks import TilePlan
from pdkernels.models import ByteTokenizer, PlanTokens, Transformer, TransformerConfig
from pdkernels.training import (
    DualStreamBatch,
    DualStreamSample,
    NoiseAwareBatch,
    NoiseAwareSample,
    PlanItem,
    PlannedBatch,
    PlannedSample,
    as_ids,
    draw_chunk_masks,
    draw_masks,
    dual_stream_terms,
    lay_out,
    noise_aware_terms,
    noise_ratios,
    pack_dual_stream,
    pack_noise_aware,
    pack_planned,
    planned_terms,
    standard_library,
)

Layout: TypeAlias = Literal["noise-aware", "dual-stream", "planned"]
Batch: TypeAlias = NoiseAwareBatch | DualStreamBatch | PlannedBatch

MASK_TOKEN = ByteTokenizer.vocab_size
PLAN_TOKENS = PlanTokens(*range(MASK_TOKEN + 1, MASK_TOKEN + 7), digits=range(ord("0"), ord("9") + 1), unit=1)
CONFIG = TransformerConfig(
    vocab_size=MASK_TOKEN + 7,
    hidden_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_positions=512,
)
TILE = 64
CORPUS_BYTES = 400_000
# Jacobi Forcing: noise grows from block to block and restarts after this many of them.
NOISE_WINDOW = 4
# Nemotron-Labs-Diffusion: weight of the masked loss.
MASKED_WEIGHT = 0.3
# Steps from one save of what `--resume` needs to the next.
KEEP_EVERY = 10


class Outcome(NamedTuple):
    """One layout of a step."""

    rows: Tensor
    """(rows,) what each row that is trained adds to the loss."""
    loss: float
    gradients: list[Tensor]


class Step(NamedTuple):
    """The record of a step. Without a comparison the last five are None."""

    loss: float
    pairs: float
    """Visible pairs as a share of all."""
    plan_bytes: int
    dense_loss: float | None = None
    loss_budget: float | None = None
    """How far the two losses may be apart."""
    gradient_error: float | None = None
    """Of the gradients through the op, against float64, relative."""
    dense_gradient_error: float | None = None
    gradient_budget: float | None = None

    @property
    def within_budget(self) -> bool:
        if self.dense_loss is None:
            return True
        return abs(self.loss - self.dense_loss) <= self.loss_budget and self.gradient_error <= self.gradient_budget


# ---- batches


def corpus() -> Tensor:
    """Source bytes of the standard library, each file closed by the end token."""
    return as_ids(standard_library()[0])[:CORPUS_BYTES].long()


def split(length: int, generator: torch.Generator) -> tuple[int, int]:
    """Tokens of the packed sequence for each of two samples."""
    first = int(torch.randint(length // 4, length // 2, (), generator=generator))
    return first, length - first


def window(data: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    start = int(torch.randint(len(data) - tokens, (), generator=generator))
    return data[start : start + tokens]


def noise_aware_batch(data: Tensor, length: int, block: int, generator: torch.Generator) -> NoiseAwareBatch:
    """Noisy blocks keep a prefix of the clean one, as drafts of Jacobi decoding do; the rest is drawn from the text before."""
    samples, ratios = [], noise_ratios(NOISE_WINDOW)
    for share in split(length, generator):
        prompt_len = int(torch.randint(share // 16, share // 4, (), generator=generator))
        blocks = (share - prompt_len) // (2 * block)
        text = window(data, prompt_len + blocks * block, generator)
        clean = text[prompt_len:].view(blocks, block)
        noisy = clean.clone()
        for number, row in enumerate(noisy):
            wrong = round(ratios[number % NOISE_WINDOW] * block)
            before = text[: prompt_len + number * block]
            row[block - wrong :] = before[torch.randint(len(before), (wrong,), generator=generator)]
        samples.append(NoiseAwareSample(text[:prompt_len], clean, noisy))
    return pack_noise_aware(samples, length, end_token=ByteTokenizer.end_token)


def dual_stream_batch(data: Tensor, length: int, block: int, generator: torch.Generator) -> DualStreamBatch:
    """Each sample is masked with its own probability."""
    samples = []
    for share in split(length, generator):
        text = window(data, share // 2, generator)
        samples.append(DualStreamSample(text, *draw_masks(len(text), generator)))
    return pack_dual_stream(samples, block, MASK_TOKEN, length)


def planned_batch(data: Tensor, length: int, block: int, generator: torch.Generator) -> PlannedBatch:
    """Two rounds of text, each in chunks of up to three blocks, after a prompt; the first round's chunks have a clean copy."""
    samples = []
    for share in split(length, generator):
        prompt_len = int(torch.randint(share // 16, share // 8, (), generator=generator))
        rounds, last = [], share - prompt_len - 2
        for copies, room in ((2, last * 2 // 3), (1, last - last * 2 // 3)):
            items = []
            while room >= 5 + 3 * copies:  # an item of the plan, and a chunk of one token in its tags
                size = min(int(torch.randint(1, 3 * block + 1, (), generator=generator)), (room - 5) // copies - 2)
                items.append(PlanItem([ord("t")], window(data, size, generator).clamp(max=255).tolist()))
                room -= 5 + copies * (size + 2)
            rounds.append(items)
        prompt = window(data, prompt_len, generator).tolist()
        layout = lay_out(PlannedSample(prompt, rounds), PLAN_TOKENS, ByteTokenizer.end_token)
        samples.append(draw_chunk_masks(layout, generator, noise="round"))
    return pack_planned(samples, PLAN_TOKENS, MASK_TOKEN, length, past="clean")


# ---- losses


def hidden(model: Transformer, mask: Tensor | TilePlan, batch: Batch) -> Tensor:
    return model.hidden(batch.tokens[None], positions=batch.positions, mask=mask)[0]


def noise_aware_losses(model: Transformer, mask: Tensor | TilePlan, batch: NoiseAwareBatch) -> Tensor:
    """Cross-entropy on prompts and clean blocks; noisy rows learn the (detached) distributions of their clean ones."""
    rows = hidden(model, mask, batch)
    logits = [model.logits(rows[listed]) for listed in (batch.ar_rows, batch.student_rows, batch.teacher_rows)]
    return torch.cat(noise_aware_terms(*logits, batch))


def dual_stream_losses(model: Transformer, mask: Tensor | TilePlan, batch: DualStreamBatch) -> Tensor:
    """Cross-entropy on the clean copies, and on the masked tokens of the noisy ones."""
    rows = hidden(model, mask, batch)
    ar, masked = dual_stream_terms(model.logits(rows[batch.ar_rows]), model.logits(rows[batch.masked_rows]), batch)
    return torch.cat([ar, MASKED_WEIGHT * masked])


def planned_losses(model: Transformer, mask: Tensor | TilePlan, batch: PlannedBatch) -> Tensor:
    """Cross-entropy on the plans, and on the masked tokens of the chunks."""
    rows = hidden(model, mask, batch)
    return torch.cat(planned_terms(model.logits(rows[batch.ar_rows]), model.logits(rows[batch.masked_rows]), batch))


LAYOUTS = {
    "noise-aware": (noise_aware_batch, noise_aware_losses),
    "dual-stream": (dual_stream_batch, dual_stream_losses),
    "planned": (planned_batch, planned_losses),
}


# ---- training


def outcome(losses_of: Callable[..., Tensor], model: Transformer, mask: Tensor | TilePlan, batch: Batch) -> Outcome:
    rows = losses_of(model, mask, batch)
    gradients = torch.autograd.grad(rows.sum(), list(model.parameters()))
    # Summed in float64, so that losses differ only by what their rows differ.
    return Outcome(rows.detach(), float(rows.detach().double().sum()), list(gradients))


def distance(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Distance of two gradients, relative to the second."""
    flat = [torch.cat([part.double().flatten() for part in parts]) for parts in (ours, exact)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def judge(ours: Outcome, dense: Outcome, exact: Outcome) -> dict[str, float]:
    """The fields of a `Step` with the distance of the step through the op from the dense one, and the allowed distance.

    If the op errs up to twice as much as the dense step, the two losses are at most three times the dense error apart. That
    error is a sum of absolute values: rows whose errors happen to cancel must not shrink the budget.
    """
    unit = torch.finfo(torch.float32).eps / 2
    dense_error = (dense.rows.double() - exact.rows).abs().sum()
    dense_gradient_error = distance(dense.gradients, exact.gradients)
    return {
        "dense_loss": dense.loss,
        "loss_budget": 3 * float(dense_error) + unit * exact.loss,
        "gradient_error": distance(ours.gradients, exact.gradients),
        "dense_gradient_error": dense_gradient_error,
        "gradient_budget": 2 * dense_gradient_error + unit,
    }


def train(
    layout: Layout,
    *,
    steps: int,
    length: int,
    block: int,
    lr: float = 3e-3,
    compare: bool = True,
    seed: int = 0,
    device: str = "cpu",
    compile_backend: str | Callable = "inductor",
    config: TransformerConfig = CONFIG,
    state: dict[str, Any] | None = None,
) -> Iterator[Step]:
    """Trains one model and reports after each step. A recompilation after the first step is an error.

    `state` is where to continue, empty at the start; after each step it holds what the next one needs.
    """
    state = {} if state is None else state
    make_batch, losses_of = LAYOUTS[layout]
    torch.manual_seed(seed)
    generator, data = torch.Generator().manual_seed(seed), corpus()
    model = Transformer(config).to(device)
    exact = copy.deepcopy(model).double()
    # Rotation tables are made once, outside the graph, which would otherwise recompile when they appear.
    model(torch.zeros(1, 1, dtype=torch.int64, device=device))
    compiled = torch.compile(losses_of, fullgraph=True, dynamic=True, backend=compile_backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    first = state.get("step", 0)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
    for number in range(first, steps):
        packed = make_batch(data, length, block, generator)
        plan = packed.mask.plan(TILE, TILE, device)
        batch = packed._replace(
            **{name: part.to(device) for name, part in packed._asdict().items() if isinstance(part, Tensor)}
        )
        # Sizes that happen to be equal in the first plan must not be specialised as equal.
        distinct_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
        with distinct_sizes, torch.compiler.set_stance("fail_on_recompile" if number > first else "default"):
            ours = outcome(compiled, model, plan, batch)
        step = Step(ours.loss, packed.mask.density, plan.nbytes)
        if compare:
            exact.load_state_dict(model.state_dict())
            dense = (packed.mask.dense().to(device), batch)
            step = step._replace(**judge(ours, outcome(losses_of, model, *dense), outcome(losses_of, exact, *dense)))
        for parameter, gradient in zip(model.parameters(), ours.gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.update(
            step=number + 1, model=model.state_dict(), optimizer=optimizer.state_dict(), generator=generator.get_state()
        )
        yield step


# ---- what is shown


def summary(layout: str, steps: list[Step], rows: int = 12) -> Table:
    table = Table(title=f"{layout}: losses, and errors of the gradients against float64, from the same weights")
    for name in ("step", "op", "dense", "apart", "allowed", "grad. op", "grad. dense", "allowed"):
        table.add_column(name, justify="right")
    evenly = {round(i * (len(steps) - 1) / (rows - 1)) for i in range(rows)}
    for number in sorted(evenly | {i for i, step in enumerate(steps) if not step.within_budget}):
        step = steps[number]
        cells = [str(number), f"{step.loss:.4f}"]
        if step.dense_loss is not None:
            cells += [f"{step.dense_loss:.4f}", f"{abs(step.loss - step.dense_loss):.1e}", f"{step.loss_budget:.1e}"]
            cells += [f"{e:.1e}" for e in (step.gradient_error, step.dense_gradient_error, step.gradient_budget)]
        table.add_row(*cells, style=None if step.within_budget else "bold red")
    return table


def draw(runs: dict[str, list[Step]], path: Path) -> None:
    """Losses above, and how far apart they are below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2,
        len(runs),
        figsize=(5.2 * len(runs), 5),
        sharex=True,
        squeeze=False,
        layout="constrained",
        height_ratios=(2, 1),
    )
    for (layout, steps), (above, below) in zip(runs.items(), axes.T, strict=True):
        above.plot([step.loss for step in steps], color="#1f77b4", label="through the op, compiled")
        above.set(title=layout, ylabel="loss")
        if steps[0].dense_loss is not None:
            above.plot([step.dense_loss for step in steps], ":", color="#f58518", linewidth=2.5, label="dense mask")
            below.semilogy(
                [max(abs(step.loss - step.dense_loss), 1e-12) for step in steps], ".", color="#1f77b4", label="apart"
            )
            below.semilogy([step.loss_budget for step in steps], color="#d62728", linewidth=1, label="allowed")
            below.legend(frameon=False, fontsize=8)
        above.legend(frameon=False, fontsize=8)
        below.set(xlabel="step", ylabel="difference")
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    layout: Annotated[
        Literal["noise-aware", "dual-stream", "planned", "all"], typer.Option(help="What to train on.")
    ] = "all",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each layout.")] = 40,
    length: Annotated[int, typer.Option(min=128, help="Tokens of the packed sequence, noisy and clean.")] = 512,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    compare: Annotated[
        bool, typer.Option(help="Take every step with the dense mask too, and fail if they differ.")
    ] = True,
    plot: Annotated[Path, typer.Option(help="Where the plot of the losses goes.")] = Path("train_masked_streams.png"),
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    resume: Resume = False,
) -> None:
    """Train on packed masked streams, checking each step against the dense mask."""
    options = dict(steps=steps, length=length, block=block, lr=lr, compare=compare, seed=seed)
    run = Run(plot, resume, {"layout": layout, **options}, threads)
    saved = run.resumed()
    runs = {name: [Step(*step) for step in taken] for name, taken in saved.get("runs", {}).items()}
    with run.stoppable():
        for name in LAYOUTS if layout == "all" else [layout]:
            taken = runs.setdefault(name, [])
            if len(taken) < steps:
                state = dict(saved["state"]) if taken else {}
                take_steps(run, runs, name, state, device=device, **options)
            console.print(summary(name, taken))
            plan_bytes = max(step.plan_bytes for step in taken)
            console.print(
                f"{run.seconds():.0f} s, compilation included. The largest plan takes {plan_bytes:,} bytes, a dense "
                f"boolean mask {length * length:,}; {taken[-1].pairs:.0%} of the pairs are visible.\n"
            )
    draw(runs, plot)
    run.kept.unlink(missing_ok=True)
    console.print(f"losses: {plot}")
    wrong = [
        f"{name}, step {i}" for name, taken in runs.items() for i, step in enumerate(taken) if not step.within_budget
    ]
    if wrong:
        console.print(f"[bold red]Over the budget: {'; '.join(wrong)}.")
        raise typer.Exit(1)


def take_steps(run: Run, runs: dict[str, list[Step]], name: str, state: dict[str, Any], **options: Any) -> None:
    """Runs the remaining steps of a layout and appends them to its list in `runs`."""
    columns = (TextColumn(name), BarColumn(), TextColumn("{task.completed}/{task.total}  {task.fields[note]}"))
    taken = runs[name]
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(name, total=options["steps"], completed=len(taken), note="compiling")
        for step in train(name, **options, state=state):
            taken.append(step)
            apart = "" if step.dense_loss is None else f", {abs(step.loss - step.dense_loss):.1e} from dense"
            progress.update(task, advance=1, note=f"loss {step.loss:.3f}{apart}")
            if len(taken) % KEEP_EVERY == 0 or len(taken) == options["steps"] or run.stopping:
                run.keep(runs={name: [tuple(step) for step in steps] for name, steps in runs.items()}, state=state)
            run.check_stop()


if __name__ == "__main__":
    typer.run(main)
