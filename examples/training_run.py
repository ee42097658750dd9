"""What the scripts that train tiny models share: a loop that can be stopped at any step and resumed, and files that are whole or not there.

Next to its output, ``NAME.safetensors``, which is written once, at the very end, a training keeps ``NAME.resume.pt``: weights,
optimizer and the state of all random numbers, as they were after a whole step. ``--resume`` continues from there. It redraws what the
earlier steps had drawn and gives the weights of a training that was never stopped, bit for bit with the same versions and threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from safetensors.torch import save as serialized
from torch import Tensor

from pdkernels.models import ByteTokenizer, Transformer
from pdkernels.models.checkpoints import zoo
from pdkernels.models.checkpoints.adapters import MASK_FILE

Output: TypeAlias = Annotated[Path, typer.Option(help="Where the weights go, once they are trained.")]
Resume: TypeAlias = Annotated[bool, typer.Option("--resume", help="Continue a training that was stopped.")]
Score: TypeAlias = Annotated[bool, typer.Option(help="Whether the trained model is scored on held-out sums.")]
# Elsewhere bfloat16 is emulated, thirty times slower than float32.
HAS_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
Fast: TypeAlias = Annotated[
    bool, typer.Option(help="Products of float32 in bfloat16, where the CPU multiplies that itself.")
]
SampledDrafts: TypeAlias = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of drafts that the adapter samples; the others are greedy.")
]
DraftTemperature: TypeAlias = Annotated[float, typer.Option(help="Temperature of sampled drafts.")]
Advance: TypeAlias = Callable[[int], None]
console = Console()


def fail(sentence: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), sentence), soft_wrap=True)
    raise typer.Exit(2)


def start_model(name: str, *, masks: bool = False) -> Transformer:
    """The byte-level transformer that a training starts from: a name, a folder, or a file that one of the scripts wrote."""
    try:
        model = zoo.load(name)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        fail(f"--start: {error}")
    if not isinstance(model, Transformer) or not isinstance(model.tokenizer, ByteTokenizer):
        fail(f"--start must name a byte-level transformer, got {name}.")
    if masks and model.mask_token is None:
        fail(f"--start must name a model with a mask token, got {name}.")
    return model


def start_checkpoint(name: str, drafter: str | None = None) -> Transformer:
    """The checkpoint that an adapter is trained for: a name, a folder or a GGUF file; in fp32, with all of its weights frozen."""
    try:
        model = zoo.load(name, dtype=torch.float32, drafter=drafter, packed=False)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        fail(f"--start: {error}")
    if not isinstance(model, Transformer):
        fail(f"--start must name a transformer, got {name}.")
    if drafter is None and model.mask_token is not None:
        fail(f"--start must name a model without a mask token, got {name}.")
    return model


def output_pairs(model: Transformer) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of attention's output projections, by their published names."""
    pairs = {}
    for index, layer in enumerate(model.layers):
        assert layer.adapter_in is not None and layer.adapter_out is not None
        pairs[f"model.layers.{index}.self_attn.o_proj"] = (layer.adapter_in, layer.adapter_out)
    return pairs


def save_adapter(run: Run, pairs: Mapping[str, tuple[Tensor, Tensor]], mask: Tensor | None = None) -> None:
    """The end of a training of low-rank pairs, by published names without ``.weight``: a folder in PEFT's format, replaced as a whole."""
    folder, unfinished = run.output, run.output.with_name(f"{run.output.name}.{os.getpid()}")
    tensors = {}
    for name, (a, b) in pairs.items():
        for half, tensor in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor.detach().bfloat16().contiguous()
    rank = len(next(iter(pairs.values()))[0])
    modules = sorted({name.rpartition(".")[2] for name in pairs})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    unfinished.mkdir(parents=True)
    try:
        (unfinished / "adapter_config.json").write_text(json.dumps({**fields, "bias": "none"}, indent=2) + "\n")
        # Written here, since files that safetensors writes are readable by their owner only.
        (unfinished / "adapter_model.safetensors").write_bytes(serialized(tensors, metadata={"format": "pt"}))
        if mask is not None:
            (unfinished / MASK_FILE).write_bytes(serialized({"embedding": mask.detach().bfloat16().contiguous()}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    run.kept.unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    console.print(f"saved {folder} ({size:.2f} MB) after {run.seconds():.0f} s", soft_wrap=True)


def save(run: Run, model: torch.nn.Module, description: str, **facts: object) -> None:
    """The end of a training: the model is saved, and what it could be resumed from is removed."""
    zoo.save_tiny(model, run.output, description=description, **facts)
    run.kept.unlink(missing_ok=True)
    told = "; ".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in facts.items())
    size = run.output.stat().st_size / 1e6
    console.print(
        f"saved {run.output} ({size:.2f} MB) after {run.seconds():.0f} s{'; ' if told else ''}{told}", soft_wrap=True
    )


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with the scale that `optimizers_of` names, in float32: PyTorch's multiplies in bfloat16, which takes most of a
    step of a tiny model on CPUs that emulate it."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float = 0.0) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                update = orthogonal(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U V^T of the singular value decomposition, by five Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if len(matrix) > matrix.shape[1] else x


def optimizers_of(
    model: torch.nn.Module, parameters: Sequence[Tensor], muon: bool, weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """AdamW for `parameters`; with `muon` for their embeddings and vectors only, at the same rate, and Muon for the rest.

    Source: Jordan et al., "Muon"; the scale that lets both share a rate: Liu et al., "Muon is scalable for LLM training", section 2.2.
    """
    chosen = {id(parameter) for parameter in parameters}
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if muon and id(parameter) in chosen and parameter.ndim == 2 and "embedding" not in name
    ]
    others = chosen - {id(matrix) for matrix in matrices}
    rest = [p for p in parameters if id(p) in others]
    adamw = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, weight_decay)]


class Run:
    """One training. `settings` are all options that its result depends on."""

    def __init__(self, output: Path, resume: bool, settings: dict[str, Any], threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.output, self.kept = output, output.with_suffix(".resume.pt")
        self.settings = {name: str(value) for name, value in settings.items()}
        self._saved: dict[str, Any] | None = self._load() if resume else None
        self._started = time.perf_counter() - (self._saved["seconds"] if self._saved else 0.0)
        self._asked_to_stop = False

    def seconds(self) -> float:
        """How long this training has taken, the time before an interruption included."""
        return time.perf_counter() - self._started

    def _load(self) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = torch.load(self.kept, weights_only=True)
            settings = saved["settings"]
        except FileNotFoundError:
            fail(f"--resume needs {self.kept}, which is missing. Leave it out to start from scratch.")
        except Exception:  # a damaged file raises many kinds of errors
            fail(
                f"--resume needs {self.kept} as a training wrote it, and it is damaged. Leave it out to start from scratch."
            )
        for name, value in self.settings.items():
            if settings.get(name) != value:
                option = f"--{name.replace('_', '-')}"
                fail(
                    f"--resume continues with the options of the start, but {option} was {settings.get(name)}, now {value}."
                )
        return saved

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Ctrl-C ends the training after the current step, a second one at once; both report what is kept."""

        def ask(*_: object) -> None:
            if self._asked_to_stop:
                raise KeyboardInterrupt
            self._asked_to_stop = True
            console.print("stopping after this step; Ctrl-C again stops at once")

        try:
            before = signal.signal(signal.SIGINT, ask)
        except ValueError:  # not the main thread, and only that one is interrupted
            yield
            return
        try:
            yield
        except KeyboardInterrupt:
            left = f"{self.kept} is kept, continue with --resume" if self.kept.exists() else "nothing is kept"
            console.print(f"stopped: {left}; {self.output} is as it was.", soft_wrap=True)
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def products_in_bf16(self, fast: bool) -> Iterator[None]:
        """Rounds the factors of PyTorch's products in float32 to bfloat16; the sums stay in float32."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium" if fast else before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    @property
    def stopping(self) -> bool:
        """Whether the training has been asked to end after this step."""
        return self._asked_to_stop

    def check_stop(self) -> None:
        if self._asked_to_stop:
            raise KeyboardInterrupt

    def resumed(self) -> dict[str, Any]:
        """What a script with its own loop kept; empty if nothing is resumed."""
        return self._saved or {}

    def keep(self, **state: Any) -> None:
        """Keeps what a training can be resumed from: tensors, numbers, texts, and lists, tuples and dicts of them."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        partial_file = self.kept.with_name(f"{self.kept.name}.{os.getpid()}")
        try:
            torch.save({"settings": self.settings, "seconds": self.seconds(), **state}, partial_file)
            os.replace(partial_file, self.kept)
        finally:
            partial_file.unlink(missing_ok=True)

    @contextmanager
    def scoring(self, total: int, name: str = "scoring") -> Iterator[Advance]:
        """A bar for long work besides the steps; the value it yields is called with how many of the `total` are done."""
        columns = (TextColumn(name), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(name, total=total)

            def advance(count: int) -> None:
                progress.advance(task, count)
                self.check_stop()

            yield advance

    def is_past(self, stage: str, model: torch.nn.Module) -> bool:
        """Whether a resumed training is past this stage. Sets the weights that the interrupted stage began with."""
        saved = self._saved
        if saved is None:
            return False
        own = model.state_dict()
        model.load_state_dict({name: value for name, value in saved["start"].items() if name in own})
        return bool(saved["stage"] != stage)

    def optimise(
        self,
        stage: str,
        model: torch.nn.Module,
        parameters: Sequence[Tensor],
        steps: int,
        rate: Callable[[int], float | None],
        step: Callable[[int], tuple[Tensor, dict[str, float]]],
        *,
        skip: Callable[[int], object] = lambda number: None,
        generators: Sequence[torch.Generator] = (),
        look: Callable[[], str] | None = None,
        look_every: int = 500,
        muon: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        """AdamW, or Muon for the matrices of layers. Nothing happens in a stage that a resumed training is past.

        Args:
            parameters: of `model`, those that are trained.
            rate: the learning rate of a step; None ends the stage.
            step: the loss of a step, and figures for the bar.
            skip: draws what `step` draws from streams that cannot be rewound, and does nothing else.
            generators: the other streams that `step` draws from.
            muon: whether matrices other than embeddings are trained by Muon, which learns sums in half the steps.
            weight_decay: decoupled, of all of them.
        """
        if self.is_past(stage, model):
            return
        saved, first = self._saved, 0
        optimizers = optimizers_of(model, parameters, muon, weight_decay)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        smooth: dict[str, float] = {}
        if saved is not None:
            first, smooth, start = saved["step"], saved["facts"], saved["start"]
            for number in range(first):
                skip(number)
            model.load_state_dict(saved["model"])
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            torch.set_rng_state(saved["random"])
            for generator, state in zip(generators, saved["generators"], strict=True):
                generator.set_state(state)
            self._saved = None

        def keep(number: int) -> None:
            self.keep(
                stage=stage,
                step=number,
                facts=smooth,
                start=start,
                model=model.state_dict(),
                optimizers=[optimizer.state_dict() for optimizer in optimizers],
                random=torch.get_rng_state(),
                generators=[generator.get_state() for generator in generators],
            )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[facts]}"),
        )
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(stage, total=steps, completed=first, facts="")
            done = first
            while done < steps and (lr := rate(done)) is not None:
                number, done = done, done + 1
                loss, facts = step(number)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = lr
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                for fact, value in facts.items():
                    smooth[fact] = smooth.get(fact, value) + (value - smooth.get(fact, value)) * max(0.02, 1 / done)
                words = "  ".join(f"{fact} {value:.3f}" for fact, value in smooth.items())
                progress.update(task, advance=1, facts=words)
                looks = done % look_every == 0
                if looks or self._asked_to_stop:
                    keep(done)
                self.check_stop()
                if looks and look is not None:
                    progress.console.print(f"{stage} {done}: {words}; {look()}; {self.seconds():.0f} s")
                    self.check_stop()
        keep(done)
