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
from typing import Any, Literal, NoReturn, get_args

import torch

from pdkernels import models
from pdkernels._validation import check, check_choice, check_type, integer, message, sentence
from pdkernels._version import __version__
from pdkernels.decoding import check_options, default_method, find, generate, stream
from pdkernels.integrations.ledger import Ledger, ledger_path, refuse_links
from pdkernels.integrations.prompt_files import OP, Contents, Prompt, check_output, model_identity, read_prompts, writer
from pdkernels.models.adapters import named_adapter
from pdkernels.models.packaged import PACKAGED, packaged
from pdkernels.models.zoo import WEIGHTS

__all__ = ["GenerationReport", "generate_files"]

_BLOCKS = 10_000
_RETRIES = 3
"""How often a batch is sent again after the death of its worker: one that kills workers must not do so forever."""
Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OnError = Literal["record", "stop"]
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
    """Whose results an earlier call had made."""
    failed: int = 0
    """Of all, those whose result is an error."""
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


Result = tuple[int, str | None, int, str]
"""Number, text, count of tokens, and the error where there is no text."""
_OURS = (ValueError, TypeError, NotImplementedError, ImportError)


class _Started(Exception):
    """The first token of a prompt that shows whether the settings work."""


class Worker:
    """A model that generates for batch after batch, in a process of its own or in this one.

    Args:
        model: its name or path.
        loading: other arguments of `models.load`.
        method: None: that of `default_method`.
        seed, options: of `generate_files`.
        on_error: whether a prompt that fails has an error as its result, or ends the run.
    """

    def __init__(
        self,
        model: str,
        loading: dict[str, Any],
        method: str | None,
        seed: int,
        options: dict[str, Any],
        on_error: OnError = "record",
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.seed, self.options, self.on_error = seed, options, on_error
        self.works = False
        self.refused: Exception | None = None
        try:
            self.model = models.load(model, **loading)
            if method is None:
                own = [name for name in options if name not in _OF_GENERATE]
                method, chosen = default_method(self.model, own, name=model, several=True)
                self.options = {**chosen, **options}
                _check_options(method, self.options)
            self.method = find(method)
        except _OURS as error:
            self.refused = error  # for the caller; raised here, Ray would wrap it and start the worker again

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Of a row of Ray Data: prompts and results are JSON, in which any text can be written. Errors go to the caller as they are."""
        (content,) = batch["prompts"]
        error, found = b"", []
        try:
            found = self.generate(json.loads(content))
        except _OURS as raised:
            error = pickle.dumps(raised)
        return {"results": [json.dumps(found)], "worker": [self.name], "error": [error]}

    def generate(self, prompts: list[tuple[int, Any]]) -> list[Result]:
        """Results of ``(number, prompt)``. A prompt's draws are its number's, whatever its batch; one that fails costs no other its text."""
        if self.refused is not None:
            raise self.refused
        try:
            return self._texts(prompts)
        except Exception as error:
            words = _about_prompts(error)
            if words is None or self.on_error == "stop":
                raise
            if len(prompts) == 1:
                if not self.works:
                    self._check_settings()
                return [(prompts[0][0], None, 0, words)]
        # Outside of the handler, so that what the batch allocated is free.
        return [result for prompt in prompts for result in self.generate([prompt])]

    def _texts(self, prompts: list[tuple[int, Any]]) -> list[Result]:
        options = dict(self.options)
        if "seed" in self.method.options:
            options["seed"] = [stream(self.seed, number) for number, _ in prompts]
        found = generate(self.model, [prompt for _, prompt in prompts], self.method, **options)
        self.works = True
        lines = zip(prompts, found.text or [], found.tokens, strict=True)
        return [(number, text, len(tokens), "") for (number, _), text, tokens in lines]

    def _check_settings(self) -> None:
        """Raises what any prompt would raise, so that settings that cannot work are not the prompts' errors."""
        tokenizer = self.model.tokenizer
        prompt: Any = (tokenizer.encode("a") if tokenizer is not None else None) or [0]

        def stop(*_: Any) -> NoReturn:
            raise _Started

        try:
            generate(self.model, prompt, self.method, on_tokens=stop, **self.options)
        except _Started:
            pass
        self.works = True


def _about_prompts(error: Exception) -> str | None:
    """The sentence of an error that a prompt may have caused; None for a fault of the program."""
    words = str(error)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)) and words.startswith("pdkernels."):
        return words
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in words:
        return sentence(
            OP, f"a prompt does not fit in memory ({(words or type(error).__name__).splitlines()[0].rstrip('.')})"
        )
    return None


_OF_GENERATE = ("max_new_tokens", "end_tokens", "overflow", "infill", "repetition_penalty", "stop_strings")


def _check_options(method: str, options: dict[str, Any]) -> None:
    check_options(find(method), {name: value for name, value in options.items() if name not in _OF_GENERATE})


def generate_files(
    prompts: Files,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str],
    method: str | None = None,
    *,
    workers: int = 0,
    batch_size: int = 8,
    column: str = "prompt",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    adapter: str | os.PathLike[str] | None = None,
    on_error: OnError = "record",
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
            appears when it is complete; until then ``<output>.partial`` keeps what is done, and the same call goes on from it. Same
            are the prompts, the column, the model's files, the adapter, the method, the options, the seed, dtype and device, `on_error` and
            the version of this package; `workers` and `batch_size` may differ.
        model: what `pdkernels.models.load` takes; the machines of all workers have to find it.
        method: one of `pdkernels.decoding.available()`; None: what `pdkernels.decoding.default_method` chooses for the model.
        workers: processes with a model each, of a Ray cluster. A program that called ``ray.init`` uses that cluster, as one with
            RAY_ADDRESS set does; else one is started on this machine. 0: this process alone, without Ray.
        batch_size: prompts of a generation.
        column: the field with a prompt: a text, or messages for the checkpoint's chat template.
        seed: of all draws. Those of a prompt depend on its number only, not on its batch or worker.
        dtype, device, adapter: as `pdkernels.models.load`.
        on_error: "record" writes a prompt that cannot be generated from (too long, not UTF-8, no room in memory) with ``"text": null``,
            ``"tokens": 0`` and the sentence as its ``error``, and goes on; "stop" raises the error. What no prompt could be generated with,
            such as an option out of range, is raised in either case.
        cpus, gpus: what a worker takes of its machine. None: a GPU if `device` is "cuda".
        start_timeout: seconds until all workers have to be up. The first batch waits for them, so that all get some.
        progress: called with the prompts that are done and all of them.
        **options: `max_new_tokens` and the others of `pdkernels.decoding.generate`.

    Returns:
        `GenerationReport`.

    Raises:
        ValueError, TypeError: for files, fields or options that do not fit; also those of `generate`, from any worker. For an output
            that another call is writing, that is a link, or whose ``.partial`` is damaged or of another run: nothing is changed then.
        OSError: for an output that cannot be written, as on a full disk. What is done is kept.
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
    check_choice(OP, "on_error", on_error, get_args(OnError))
    if method is not None:
        _check_options(method, options)
    target = Path(output).absolute()
    check_output(target)
    refuse_links(target)
    partial = ledger_path(target)
    new = "Delete it, or name another one."
    check(not target.exists() or partial.exists(), OP, "output", "be a new file", str(target), new)
    if workers:
        _ray()
    contents = Contents(read_prompts(paths, column), target)
    name = str(Path(model).absolute()) if Path(model).exists() else os.fspath(model)
    loading: dict[str, Any] = {"dtype": dtype, "device": device}
    if adapter is not None:
        # A name of one in the package stays one, and a path is found from any folder.
        loading["adapter"] = (
            adapter if isinstance(adapter, str) and not Path(adapter).exists() else Path(adapter).absolute()
        )
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise TypeError(message(OP, "options", "be what JSON can hold", str(error))) from None
    identity = _identity(name)
    run = {
        "version": __version__,
        "prompts": contents.digest,
        "column": column,
        "model": name if identity is None else os.path.basename(name),
        "model_files": identity,
        "adapter": None if adapter is None else _identity(named_adapter(loading["adapter"])),
        "method": method,
        "seed": seed,
        "dtype": str(dtype),
        "device": str(device),
        "on_error": on_error,
        "options": options,
    }
    count = contents.count
    ledger = Ledger(target, run, count)
    try:  # from here on the ledger is locked
        # Both are there if a run was killed at its very end; then `finish` compares them.
        ended = len(ledger.offsets) == count > 0
        check(ended or not os.path.lexists(target), OP, "output", "be a new file", str(target), new)
        report = GenerationReport(count, len(ledger.offsets))
        start = time.monotonic()
        left = (x for x in contents.watched(read_prompts(paths, column)) if x.number not in ledger.offsets)
        if report.generated:
            made = (name, loading, method, seed, options, on_error)
            needs = {"num_cpus": cpus, "num_gpus": (device.startswith("cuda") if gpus is None else gpus) or None}
            waiting = _batches(_readable(left, ledger, on_error), batch_size, column)
            results = _on_ray(waiting, made, workers, needs, start_timeout) if workers else _here(waiting, made)
            with closing(results):
                for worker, texts in results:
                    for number, text, tokens, words in texts:
                        ledger.add(number, {"text": text, "tokens": tokens, **({"error": words} if words else {})})
                        report.tokens += tokens
                    ledger.flush()
                    report.workers[worker] = report.workers.get(worker, 0) + len(texts)
                    report.seconds = time.monotonic() - start
                    if progress is not None:
                        progress(len(ledger.offsets), count)
            ledger.flush()
        report.failed = ledger.failed
        ledger.finish(contents.watched(read_prompts(paths, column)), writer(target))
        return report
    finally:
        ledger.close()


def _readable(prompts: Iterator[Prompt], ledger: Ledger, on_error: OnError) -> Iterator[Prompt]:
    """Prompts that a model can be given; the others' errors go into the ledger."""
    for prompt in prompts:
        if not prompt.error:
            yield prompt
            continue
        if on_error == "stop":
            raise ValueError(prompt.error)
        ledger.add(prompt.number, {"text": None, "tokens": 0, "error": prompt.error})


def _identity(model: str | Path) -> str | None:
    """Of a model or adapter that can be seen from here."""
    path = Path(model)
    if model in models.available():
        path = WEIGHTS / f"{model}.safetensors"
    elif model in PACKAGED:
        path = packaged(str(model))
    return model_identity(path) if path.exists() else None


Batches = Iterator[list[tuple[int, Any]]]
Results = Generator[tuple[str, list[Result]], None, None]


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
        raise ImportError(f"pdkernels.{OP}: workers need ray[data]. {remedy}") from missing
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
        if not rows:
            return
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
