"""Train `tiny-code`: a byte-level model of about 2 M parameters, on the Python standard library's own source.

    python examples/train_tiny_code.py

takes some minutes on two CPU cores and writes pdkernels/models/weights/tiny-code.safetensors.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdkernels.models.tokenizers import ByteTokenizer
from pdkernels.models.transformer import Transformer, TransformerConfig
from pdkernels.models.zoo import WEIGHTS, save_tiny

# Tests repeat themselves, encodings and pydoc_data are tables, the rest is no code of the library proper.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data",
           "__pycache__", "turtledemo", "config"}
HELD_OUT_EVERY = 25
CONFIG = TransformerConfig(
    vocab_size=ByteTokenizer.vocab_size, hidden_size=256, layers=4, heads=4, kv_heads=2, head_dim=64,
    intermediate_size=352, rope_theta=10000.0, max_positions=512,
)
console = Console()


def corpus() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids of the training and the held-out files, each file closed by the end token, and the number of files."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (path for path in root.rglob("*.py")
         if not any(part in SKIPPED or part.startswith("config-") for part in path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    if not files:
        raise SystemExit(f"No Python source found in {root}: this interpreter ships no standard library as files.")
    parts: tuple[list[int], list[int]] = ([], [])
    for index, path in enumerate(files):
        part = parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
        part.extend(path.read_bytes())
        part.append(ByteTokenizer.end_token)
    return torch.tensor(parts[0], dtype=torch.int16), torch.tensor(parts[1], dtype=torch.int16), len(files)


def batches(data: torch.Tensor, batch: int, context: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Packed windows of context + 1 ids, every id once per epoch, from a new random offset in each epoch."""
    while True:
        offset = int(torch.randint(context, (), generator=generator))
        starts = torch.arange(offset, len(data) - context - 1, context)
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


def optimizers(model: Transformer, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embedding" in name]
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def main(
    output: Annotated[Path, typer.Option(help="Where the weights go.")] = WEIGHTS / "tiny-code.safetensors",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 5000,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 16,
    context: Annotated[int, typer.Option(help="Bytes per sequence.")] = 256,
    long_share: Annotated[float, typer.Option(help="Share of the steps, at the end, with twice the context.")] = 0.15,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    compiled: Annotated[bool, typer.Option(help="Compile the forward and backward (1.5x faster).")] = True,
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out files.")] = 250,
) -> None:
    """Train tiny-code and save it, rounded to bf16, with the held-out bits per byte of the rounded weights."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train, held_out, files = corpus()
    model = Transformer(CONFIG, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{files} files, {len(train):,} bytes to train on, {len(held_out):,} held out; {parameters:,} parameters"
    )

    # Two shapes of batch, each with kernels of its own; the weights are shared with `model`.
    forward = torch.compile(model, dynamic=False) if compiled else model
    optimizer_list = optimizers(model, lr)
    short, long = batches(train, batch, context, generator), batches(train, batch // 2, 2 * context, generator)
    progress = Progress(
        TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}  bits per byte {task.fields[bits]:.3f}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    )
    started, smooth = time.perf_counter(), math.log(CONFIG.vocab_size)
    with progress:
        task = progress.add_task("training", total=steps, loss=smooth, bits=smooth / math.log(2))
        for step in range(steps):
            done = max(0.0, (step - warmup) / max(1, steps - warmup))
            rate = lr * min(1.0, (step + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * done)) * 0.99 + 0.01)
            window = next(long if step >= steps * (1 - long_share) else short)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(forward, window)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizer_list:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            smooth += (loss.item() - smooth) * max(0.02, 1 / (step + 1))
            progress.update(task, advance=1, loss=smooth, bits=smooth / math.log(2))
            if (step + 1) % evaluate_every == 0:
                with torch.autocast("cpu", torch.bfloat16):
                    bits = bits_per_byte(model, held_out, context, limit=200)
                progress.console.print(
                    f"step {step + 1}: train {smooth / math.log(2):.3f}, held out {bits:.3f} bits per byte, "
                    f"{time.perf_counter() - started:.0f} s"
                )

    model.to(torch.bfloat16).float()
    bits = bits_per_byte(model, held_out, context)
    save_tiny(model, output, description="byte-level, Python's standard library", held_out_bits_per_byte=round(bits, 4))
    console.print(
        f"saved {output} ({output.stat().st_size / 1e6:.2f} MB) after {time.perf_counter() - started:.0f} s: "
        f"held out {bits:.4f} bits per byte as stored"
    )


if __name__ == "__main__":
    typer.run(main)
