"""Batch inference on many devices and machines: files of prompts in, one file of texts out, by Ray Data.

    report = generate_files("prompts.jsonl", "texts.jsonl", "tiny-trimode", "linear_self_speculation", workers=2)

Each worker is a process with its own copy of the model, on any machine of the Ray cluster, and gets one batch after
another. The calling process writes the results (`prompt_files`), so a worker needs the model's files but no shared
folder. If a worker dies, Ray sends its batch again, up to three times; a result is written once. If the calling process
dies, the same call resumes the run.

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
from pdkernels.batch.ledger import Ledger, ledger_path, refuse_links
from pdkernels.batch.prompt_files import OP, Contents, Prompt, check_output, model_identity, read_prompts, writer
from pdkernels.decoding import default_method, find, generate, sequence_seed
from pdkernels.decoding.options import check_options, refuse_settings
from pdkernels.generation.params import SETTINGS, SamplingParams, take_params
from pdkernels.models.checkpoints.packaged import PACKAGED, packaged, weight_folder
from pdkernels.models.checkpoints.zoo import WEIGHTS

__all__ = ["GenerationReport", "generate_files"]

_BLOCKS = 10_000
_RETRIES = 3
"""How often a batch is sent again after the death of its worker, because a batch may itself kill workers."""
Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OnError = Literal["record", "stop"]
Progress = Callable[[int, int], None]
"""Called with the number of finished prompts and of all prompts."""


@dataclass
class GenerationReport:
    """The result of `generate_files`.

    >>> GenerationReport(prompts=3, resumed=1).generated
    2
    """

    prompts: int
    """Number of prompts in the files."""
    resumed: int
    """Number of prompts whose results are from an earlier call."""
    failed: int = 0
    """Number of prompts whose result is an error."""
    tokens: int = 0
    """Number of tokens that this call generated."""
    seconds: float = 0.0
    """Time from the first batch to the last text, including the start of the workers."""
    workers: dict[str, int] = field(default_factory=dict)
    """Number of prompts of each worker, by machine and process."""

    @property
    def generated(self) -> int:
        """Number of prompts that this call generated texts for."""
        return self.prompts - self.resumed


Result = tuple[int, str | None, int, str]
"""Index of the prompt, text, number of tokens, and the error if there is no text."""
_OURS = (ValueError, TypeError, NotImplementedError, ImportError)


class _Started(Exception):
    """The first token of a prompt that shows whether the settings work."""


class Worker:
    """A model that generates texts batch by batch, in a separate process or in this one.

    Args:
        model: its name or path.
        loading: other arguments of `models.load`.
        method: None: that of `default_method`.
        seed, params, options: of `generate_files`; the options are those of the method and `overflow`.
        on_error: whether a failing prompt gets an error as its result or stops the run.
    """

    def __init__(
        self,
        model: str,
        loading: dict[str, Any],
        method: str | None,
        seed: int,
        params: SamplingParams,
        options: dict[str, Any],
        on_error: OnError = "record",
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.seed, self.params, self.options, self.on_error = seed, params, options, on_error
        self.works = False
        self.refused: Exception | None = None
        try:
            self.model = models.load(model, **loading)
            if method is None:
                names = [name for name in options if name not in _ARGUMENTS]
                method, chosen = default_method(self.model, names, name=model, several=True)
                self.options = {**chosen, **options}
                _check_options(method, self.options)
            self.method = find(method)
        except _OURS as error:
            self.refused = error  # for the caller; raised here, Ray would wrap it and start the worker again

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Processes a row of Ray Data. Prompts and results are JSON, which can encode any text. Errors are returned to
        the caller."""
        (content,) = batch["prompts"]
        error, results = b"", []
        try:
            results = self.generate(json.loads(content))
        except _OURS as raised:
            error = pickle.dumps(raised)
        return {"results": [json.dumps(results)], "worker": [self.name], "error": [error]}

    def generate(self, prompts: list[tuple[int, Any]]) -> list[Result]:
        """Results of ``(index, prompt)``. Sampling is keyed by the index, whatever the batch; a failing prompt does not
        affect others."""
        if self.refused is not None:
            raise self.refused
        try:
            return self._texts(prompts)
        except Exception as error:
            reason = _about_prompts(error)
            if reason is None or self.on_error == "stop":
                raise
            if len(prompts) == 1:
                if not self.works:
                    self._check_settings()
                return [(prompts[0][0], None, 0, reason)]
        # Outside the handler, so that the memory of the batch is free.
        return [result for prompt in prompts for result in self.generate([prompt])]

    def _texts(self, prompts: list[tuple[int, Any]]) -> list[Result]:
        params = self.params.replace(seed=[sequence_seed(self.seed, number) for number, _ in prompts])
        result = generate(self.model, [prompt for _, prompt in prompts], self.method, params=params, **self.options)
        self.works = True
        lines = zip(prompts, result.text or [], result.tokens, strict=True)
        return [(number, text, len(tokens), "") for (number, _), text, tokens in lines]

    def _check_settings(self) -> None:
        """Raises the error of settings that fail for every prompt, so that it is not recorded as the error of each
        prompt."""
        tokenizer = self.model.tokenizer
        prompt: Any = (tokenizer.encode("a") if tokenizer is not None else None) or [0]

        def stop(*_: Any) -> NoReturn:
            raise _Started

        try:
            generate(self.model, prompt, self.method, params=self.params, on_tokens=stop, **self.options)
        except _Started:
            pass
        self.works = True


def _about_prompts(error: Exception) -> str | None:
    """The message of an error that a prompt may have caused; None for a bug."""
    text = str(error)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)) and text.startswith("pdkernels."):
        return text
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return sentence(
            OP, f"a prompt does not fit in memory ({(text or type(error).__name__).splitlines()[0].rstrip('.')})"
        )
    return None


REFUSED = {
    "n": "a prompt has one text",
    "logprobs": "a file of texts has no place for them",
    "max_time": "texts would depend on the speed of the machine",
} | {
    name: "settings are kept with the texts as JSON"
    for name, setting in SETTINGS.items()
    if setting.kind in ("functions", "grammar")
}
"""Settings that files of texts cannot follow, and why."""
_ARGUMENTS = ("overflow", "infill")
"""Options of `generate` that are neither settings nor those of a method."""


def _check_options(method: str, options: dict[str, Any]) -> None:
    method_options = {name: value for name, value in options.items() if name not in _ARGUMENTS}
    check_options(find(method), method_options, (*(name for name in SETTINGS if name not in REFUSED), *_ARGUMENTS))


def generate_files(
    prompts: Files,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str],
    method: str | None = None,
    *,
    params: SamplingParams | None = None,
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
        output: ``.jsonl`` or ``.parquet``: the fields of each prompt, its ``text``, and the number of its ``tokens``.
            The file appears when it is complete; until then ``<output>.partial`` holds the results, and the same call
            resumes the run. The prompts, the column, the model's files, the adapter, the method, the options, the seed,
            dtype and device, `on_error` and the version of this package have to be the same; `workers` and `batch_size`
            may differ.
        model: an argument of `pdkernels.models.load` that is valid on the machines of all workers.
        method: one of `pdkernels.decoding.available()`; None: that of `pdkernels.decoding.default_method` for the
            model.
        params: `SamplingParams` to start from; settings among the `options` come before its own.
        workers: processes of a Ray cluster, each with a model. The cluster is that of ``ray.init`` or RAY_ADDRESS, or
            else one that is started on this machine. 0: only this process, without Ray.
        batch_size: prompts per generation.
        column: the field with a prompt: a text, or messages for the checkpoint's chat template.
        seed: of sampling, which depends on the index of a prompt, not on its batch or worker.
        dtype, device, adapter: as `pdkernels.models.load`.
        on_error: "record" writes a prompt that cannot be generated from (too long, not UTF-8, no room in memory) with
            ``"text": null``, ``"tokens": 0`` and the sentence as its ``error``, and continues; "stop" raises the error.
            Settings that fail for every prompt, such as an option out of range, are raised in either case.
        cpus, gpus: resources of a worker. None: a GPU if `device` is "cuda".
        start_timeout: seconds until all workers have to be up. The first batch waits for them, so that all workers get
            batches.
        progress: called with the number of finished prompts and of all prompts.
        **options: settings (the fields of `SamplingParams`, but for `n`, `logprobs`, `max_time`, functions and
            grammars), `overflow` and options of the method, as for `pdkernels.decoding.generate`.

    Returns:
        `GenerationReport`.

    Raises:
        ValueError, TypeError: invalid files, fields or options, and errors of `generate` from any worker; an output
            that another call is writing, that is a link, or whose ``.partial`` is damaged or belongs to another run.
            Nothing is changed in these cases.
        NotImplementedError: a setting that files of texts, or the method, do not follow.
        OSError: an output that cannot be written, as on a full disk. Finished results are kept.
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
    passed = {} if params is None else {name: getattr(params, name) for name in SETTINGS if name in params.explicit}
    recorded = {**passed, **options}
    own_seed = recorded.pop("seed", 0)
    seed = integer(OP, "seed", seed or own_seed, 0)
    params = take_params("decoding.generate", params, options)
    refused = {**REFUSED, "adapter": "their own adapter= is the folder of one"}
    for name in refused.keys() & params.asked.keys():
        raise NotImplementedError(sentence(OP, f"files of texts do not follow {name}: {refused[name]}"))
    params = params.replace(max_time=None)  # also where a checkpoint asks for one
    check_type(isinstance(model, (str, os.PathLike)), OP, "model", "be a name or a path", type(model).__name__)
    check_choice(OP, "on_error", on_error, get_args(OnError))
    if method is not None:
        _check_options(method, options)
        refuse_settings(find(method), params)
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
        # The name of a model in the package stays a name; a path becomes absolute, so that workers find it from any
        # folder.
        loading["adapter"] = (
            adapter if isinstance(adapter, str) and not Path(adapter).exists() else Path(adapter).absolute()
        )
    try:
        json.dumps(recorded)
    except (TypeError, ValueError) as error:
        raise TypeError(message(OP, "options", "be what JSON can hold", str(error))) from None
    identity = _identity(name)
    run = {
        "version": __version__,
        "prompts": contents.digest,
        "column": column,
        "model": name if identity is None else os.path.basename(name),
        "model_files": identity,
        "adapter": None if adapter is None else _identity(weight_folder(loading["adapter"])),
        "method": method,
        "seed": seed,
        "dtype": str(dtype),
        "device": str(device),
        "on_error": on_error,
        "options": recorded,
    }
    count = contents.count
    ledger = Ledger(target, run, count)
    try:  # from here on the ledger is locked
        # Both are there if a run was killed at its very end; then `finish` compares them.
        ended = len(ledger.offsets) == count > 0
        check(ended or not os.path.lexists(target), OP, "output", "be a new file", str(target), new)
        report = GenerationReport(count, len(ledger.offsets))
        start = time.monotonic()
        remaining = (x for x in contents.watched(read_prompts(paths, column)) if x.number not in ledger.offsets)
        if report.generated:
            worker_arguments = (name, loading, method, seed, params, options, on_error)
            needs = {"num_cpus": cpus, "num_gpus": (device.startswith("cuda") if gpus is None else gpus) or None}
            waiting = _batches(_readable(remaining, ledger, on_error), batch_size, column)
            results = (
                _on_ray(waiting, worker_arguments, workers, needs, start_timeout)
                if workers
                else _here(waiting, worker_arguments)
            )
            with closing(results):
                for worker, texts in results:
                    for number, text, tokens, error_text in texts:
                        ledger.add(
                            number, {"text": text, "tokens": tokens, **({"error": error_text} if error_text else {})}
                        )
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
    """Prompts that a model can process; the errors of the others go into the ledger."""
    for prompt in prompts:
        if not prompt.error:
            yield prompt
            continue
        if on_error == "stop":
            raise ValueError(prompt.error)
        ledger.add(prompt.number, {"text": None, "tokens": 0, "error": prompt.error})


def _identity(model: str | Path) -> str | None:
    """The hash of a model or adapter that exists on this machine."""
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


def _here(batches: Batches, worker_arguments: tuple[Any, ...]) -> Results:
    worker = Worker(*worker_arguments)
    for batch in batches:
        yield worker.name, worker.generate(batch)


def _ray() -> Any:
    """The library Ray, which only workers need."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install 'ray[data]'`, or pass workers=0."
        raise ImportError(f"pdkernels.{OP}: workers need ray[data]. {remedy}") from missing
    return ray


def _on_ray(
    batches: Batches, worker_arguments: tuple[Any, ...], workers: int, needs: dict[str, Any], timeout: float
) -> Results:
    """Yields the results of a cluster's workers as they come."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    previous = context.enable_progress_bars, context.wait_for_min_actors_s
    # Otherwise all batches would go to the first worker that is up, which may be seconds before the others.
    context.enable_progress_bars, context.wait_for_min_actors_s = False, timeout
    level = logging.getLogger("ray.data").level
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        rows = [{"prompts": json.dumps(batch)} for batch in batches]
        if not rows:
            return
        # One batch at a time, because other workers cannot take a batch that is queued at a worker.
        pool = ray.data.ActorPoolStrategy(size=min(workers, len(rows)), max_tasks_in_flight_per_actor=1)
        data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _BLOCKS))
        needs = {**needs, "max_task_retries": _RETRIES}
        data = data.map_batches(Worker, fn_constructor_args=worker_arguments, batch_size=1, compute=pool, **needs)
        with closing(iter(data.iter_rows())) as result_rows:
            for row in result_rows:
                if row["error"]:
                    raise pickle.loads(row["error"])
                yield row["worker"], json.loads(row["results"])
    except ray.exceptions.RayError as error:
        first = str(error).partition("\n")[0].rstrip(".")
        remedy = "Texts that are done are kept; the same call goes on with the others."
        raise RuntimeError(message(OP, "workers", "start and stay alive", first, remedy)) from error
    finally:
        context.enable_progress_bars, context.wait_for_min_actors_s = previous
        logging.getLogger("ray.data").setLevel(level)
