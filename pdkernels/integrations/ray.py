"""Batch inference on many devices and machines: files of prompts in, one file of texts out, by Ray Data.

    report = generate_files("prompts.jsonl", "texts.jsonl", "tiny-trimode", "linear_self_speculation", workers=2)

Each worker is a process with a model of its own, on any machine of the Ray cluster, and gets batch after batch. The process that calls
writes what comes back (`prompt_files`), so a worker needs the model's files but no shared folder. Ray sends the batch of a worker that
died again, up to three times; a result is written once. After the calling process died, the same call goes on where it was.

Needs ``ray[data]`` 2.60 for `workers` above 0.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdkernels import models
from pdkernels._validation import check, check_type, integer, message
from pdkernels.decoding import check_options, find, generate, stream
from pdkernels.integrations.prompt_files import OP, Ledger, Prompt, check_output, fingerprint, read_prompts

__all__ = ["GenerationReport", "generate_files"]

_BLOCKS = 10_000
_RETRIES = 3
"""How often a batch is sent again after the death of its worker: one that kills workers must not do so forever."""
Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Progress = Callable[[int, int], None]
"""Called with the prompts that are done and all of them."""


@dataclass
class GenerationReport:
    """What a call of `generate_files` did.

    >>> GenerationReport(prompts=3, resumed=1).generated
    2
    """

    prompts: int
    """In the files."""
    resumed: int
    """Whose texts an earlier call had made."""
    tokens: int = 0
    """New ones, of this call."""
    seconds: float = 0.0
    """From the first batch to the last text, start of the workers included."""
    workers: dict[str, int] = field(default_factory=dict)
    """Prompts of each worker, by machine and process."""

    @property
    def generated(self) -> int:
        """Prompts of this call."""
        return self.prompts - self.resumed


class Worker:
    """A model that generates for batch after batch, in a process of its own or in this one."""

    def __init__(self, model: str, loading: dict[str, Any], method: str, seed: int, options: dict[str, Any]) -> None:
        self.model = models.load(model, **loading)
        self.method, self.seed, self.options = find(method), seed, options
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Of a row of Ray Data: prompts and results are JSON, in which any text can be written. Errors go to the caller as they are."""
        (content,) = batch["prompts"]
        error, found = b"", []
        try:
            found = self.generate(json.loads(content))
        except (ValueError, TypeError, NotImplementedError) as raised:
            error = pickle.dumps(raised)
        return {"results": [json.dumps(found)], "worker": [self.name], "error": [error]}

    def generate(self, prompts: list[tuple[int, Any]]) -> list[tuple[int, str, int]]:
        """Number, text and count of tokens of each ``(number, prompt)``. A prompt's draws are its number's, whatever its batch."""
        options = dict(self.options)
        if "seed" in self.method.options:
            options["seed"] = [stream(self.seed, number) for number, _ in prompts]
        found = generate(self.model, [prompt for _, prompt in prompts], self.method, **options)
        lines = zip(prompts, found.text or [], found.tokens, strict=True)
        return [(number, text, len(tokens)) for (number, _), text, tokens in lines]


def generate_files(
    prompts: Files,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str],
    method: str = "autoregressive",
    *,
    workers: int = 0,
    batch_size: int = 8,
    column: str = "prompt",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    cpus: float = 1,
    gpus: float | None = None,
    start_timeout: float = 600,
    progress: Progress | None = None,
    **options: Any,
) -> GenerationReport:
    """Generate for all prompts of some files and write prompts and texts, in their order, into one file.

    Args:
        prompts: paths that end in ``.jsonl`` (an object a line), ``.txt`` (a prompt a line) or ``.parquet``.
        output: ``.jsonl`` or ``.parquet``: the fields of each prompt, its ``text``, and how many ``tokens`` that has. The file
            appears when it is complete; until then ``<output>.partial`` keeps what is done, and the same call goes on from it.
        model: what `pdkernels.models.load` takes; the machines of all workers have to find it.
        method: one of `pdkernels.decoding.available()`.
        workers: processes with a model each, of a Ray cluster. A program that called ``ray.init`` uses that cluster, as one with
            RAY_ADDRESS set does; else one is started on this machine. 0: this process alone, without Ray.
        batch_size: prompts of a generation.
        column: the field with a prompt: a text, or messages for the checkpoint's chat template.
        seed: of all draws. Those of a prompt depend on its number only, not on its batch or worker.
        dtype, device: as `pdkernels.models.load`.
        cpus, gpus: what a worker takes of its machine. None: a GPU if `device` is "cuda".
        start_timeout: seconds until all workers have to be up. The first batch waits for them, so that all get some.
        progress: called with the prompts that are done and all of them.
        **options: `max_new_tokens` and the others of `pdkernels.decoding.generate`.

    Returns:
        `GenerationReport`.

    Raises:
        ValueError, TypeError: for files, fields or options that do not fit; also those of `generate`, from any worker.
        ImportError: without Ray, or without pyarrow for Parquet.
        RuntimeError: for workers that do not start in time, and a batch whose workers died four times.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "prompts.txt").write_text("import o\\ndef f(\\n")
    >>> generate_files(folder / "prompts.txt", folder / "texts.jsonl", "tiny-code", max_new_tokens=1).generated
    2
    >>> (folder / "texts.jsonl").read_text().splitlines()[0]
    '{"prompt": "import o", "text": "s", "tokens": 1}'
    """
    paths = [prompts] if isinstance(prompts, (str, os.PathLike)) else list(prompts)
    workers, batch_size = integer(OP, "workers", workers, 0), integer(OP, "batch_size", batch_size, 1)
    seed = integer(OP, "seed", seed, 0)
    check_type(isinstance(model, (str, os.PathLike)), OP, "model", "be a name or a path", type(model).__name__)
    shared = {name: options[name] for name in ("max_new_tokens", "end_tokens", "overflow") if name in options}
    check_options(find(method), {name: value for name, value in options.items() if name not in shared})
    target = Path(output).absolute()
    check_output(target)
    check(not target.exists(), OP, "output", "be a new file", str(target), "Delete it, or name another one.")
    if workers:
        _ray()
    count, content = fingerprint(read_prompts(paths, column))
    name = str(Path(model).absolute()) if Path(model).exists() else os.fspath(model)
    run = {"prompts": content, "model": name, "method": method, "seed": seed, "dtype": str(dtype), "options": options}
    ledger = Ledger(target, run)
    try:
        report = GenerationReport(count, len(ledger.offsets))
        start = time.monotonic()
        waiting = _batches(
            (x for x in read_prompts(paths, column) if x.number not in ledger.offsets), batch_size, column
        )
        loading = {"dtype": dtype, "device": device}
        if report.generated:
            made = (name, loading, method, seed, options)
            needs = {"num_cpus": cpus, "num_gpus": (device.startswith("cuda") if gpus is None else gpus) or None}
            results = _on_ray(waiting, made, workers, needs, start_timeout) if workers else _here(waiting, made)
            with closing(results):
                for worker, texts in results:
                    for number, text, tokens in texts:
                        ledger.add(number, {"text": text, "tokens": tokens})
                        report.tokens += tokens
                    ledger.flush()
                    report.workers[worker] = report.workers.get(worker, 0) + len(texts)
                    report.seconds = time.monotonic() - start
                    if progress is not None:
                        progress(len(ledger.offsets), count)
        ledger.finish(read_prompts(paths, column))
        return report
    finally:
        ledger.close()


Batches = Iterator[list[tuple[int, Any]]]
Results = Generator[tuple[str, list[tuple[int, str, int]]], None, None]


def _batches(prompts: Iterator[Prompt], size: int, column: str) -> Batches:
    batch: list[tuple[int, Any]] = []
    for prompt in prompts:
        batch.append((prompt.number, prompt.fields[column]))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _here(batches: Batches, made: tuple[Any, ...]) -> Results:
    worker = Worker(*made)
    for batch in batches:
        yield worker.name, worker.generate(batch)


def _ray() -> Any:
    """The library, which only workers need."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install 'ray[data]'`, or pass workers=0."
        raise ImportError(f"pdkernels.{OP}: workers must have ray[data], got none. {remedy}") from missing
    return ray


def _on_ray(batches: Batches, made: tuple[Any, ...], workers: int, needs: dict[str, Any], timeout: float) -> Results:
    """What the workers of a cluster return, as it comes."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    known = context.enable_progress_bars, context.wait_for_min_actors_s
    # Batches would all go to the worker that is up first, which may be seconds before the others.
    context.enable_progress_bars, context.wait_for_min_actors_s = False, timeout
    level = logging.getLogger("ray.data").level
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        rows = [{"prompts": json.dumps(batch)} for batch in batches]
        # A batch at a time: what a worker has waiting, others cannot take.
        pool = ray.data.ActorPoolStrategy(size=min(workers, len(rows)), max_tasks_in_flight_per_actor=1)
        data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _BLOCKS))
        needs = {**needs, "max_task_retries": _RETRIES}
        data = data.map_batches(Worker, fn_constructor_args=made, batch_size=1, compute=pool, **needs)
        with closing(iter(data.iter_rows())) as found:
            for row in found:
                if row["error"]:
                    raise pickle.loads(row["error"])
                yield row["worker"], json.loads(row["results"])
    except ray.exceptions.RayError as error:
        first = str(error).partition("\n")[0].rstrip(".")
        remedy = "Texts that are done are kept; the same call goes on with the others."
        raise RuntimeError(message(OP, "workers", "start and stay alive", first, remedy)) from error
    finally:
        context.enable_progress_bars, context.wait_for_min_actors_s = known
        logging.getLogger("ray.data").setLevel(level)
