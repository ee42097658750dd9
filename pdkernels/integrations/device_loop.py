"""Whole generations without the host: a decoder's step in a CUDA graph, inside a conditional node that repeats it.

Needs a GPU, a driver for CUDA 13.0 or newer and cuda-python: ``pip install 'cuda-bindings>=13.0.3,<14'``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pdkernels._validation import check, check_fits_memory, check_type, message, refuse_foreign, sentence
from pdkernels.decoding import DecodeResult, OnTokens
from pdkernels.decoding.generate import check_capabilities
from pdkernels.decoding.methods import METHODS
from pdkernels.decoding.options import check_options
from pdkernels.decoding.request import finished, open_session
from pdkernels.decoding.steps import run
from pdkernels.generation.generation_config import completed, remedy_of
from pdkernels.generation.params import MAX_POSITIONS, SamplingParams, names_of, take_params
from pdkernels.generation.prompts import Prompts
from pdkernels.generation.session import Session
from pdkernels.integrations.while_graph import WhileGraph, capture, kinds_of, require
from pdkernels.models import RecurrentDepth, Transformer
from pdkernels.ops import log_step_
from pdkernels.ops.library import DEBUG_CHECKS

_OP = "integrations.device_loop.DeviceLoop"
_FOLLOWED = (*names_of("draw"), "max_new_tokens", "end_tokens")


def available() -> bool:
    """Whether this machine can run a `DeviceLoop`: a GPU, and a recent enough driver and cuda-python."""
    if not torch.cuda.is_available():
        return False
    try:
        require(_OP, torch.device("cuda"))
    except (ImportError, NotImplementedError):
        return False
    return True


def _check_model(model: Any) -> None:
    """Raises NotImplementedError for a model whose forwards a graph cannot repeat."""
    expectation, remedy = "be one of pdkernels.models.load or from_transformers", "Use pdkernels.decoding.generate."
    actual = f"a {type(model).__name__}"
    refuse_foreign(_OP, "model", model)
    if not isinstance(model, (Transformer, RecurrentDepth)):
        raise NotImplementedError(message(_OP, "model", f"{expectation}, whose forward needs no host", actual, remedy))
    if hasattr(model, "ranks"):
        raise NotImplementedError(message(_OP, "model", "be whole on one GPU", f"{actual}, split across ranks", remedy))
    for name, module in model.named_modules():
        # Python code would run only during capture.
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotImplementedError(
                message(_OP, "model", "have no forward hooks", f"one at {name or 'the top'!r}", remedy)
            )
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.device != model.device:
            actual = f"{name} on {weight.device} and others on {model.device}"
            raise NotImplementedError(message(_OP, "model", "be whole on one GPU", actual, remedy))


class DeviceLoop:
    """One decoding method on one model, for generations that run on the device from the prompt to the last token.

    `pdkernels.decoding.generate` reads its device after every step. Here the step is captured once, in a conditional
    while node of a CUDA graph. If there are two kinds of rounds, both are captured, and the device chooses. A kernel
    logs the entry that the host would have read, and sets the condition of the node while a sequence is active
    (`pdkernels.log_step_`). The host reads the log at the end. Tokens, stats and traces are those of `generate`;
    confidences and distances in a trace up to rounding.

    Args:
        model: a model of `pdkernels.models.load` or `from_transformers`, whole on one GPU. Its weights are read in
            place for as long as this object lives.
        method: one that has `steps`; docs/device_loop.md lists them.
        batch: sequences of every generation.
        longest_prompt: maximum number of tokens of a prompt.
        params: `SamplingParams` to start from; settings among the `options` come before its own.
        **options: of the method, and settings that draw, `max_new_tokens` and `end_tokens`, as in `generate`.

    Raises:
        NotImplementedError: no GPU, an old driver; a method or an option that needs its host; a model whose forward may
            need it (of `from_callable` or `wrap`, one of your own, one with forward hooks), or which other ranks or
            devices share.
        ImportError: no cuda-python.
        ValueError, TypeError: as in `generate`.

    The cache and the log of all steps are allocated here, once. One generation at a time.

    Example:
        >>> import torch, pdkernels as pd
        >>> from pdkernels.integrations.device_loop import DeviceLoop, available
        >>> if available():
        ...     model = pd.models.load("tiny-code").cuda()
        ...     loop = DeviceLoop(model, "jacobi", longest_prompt=64, max_new_tokens=32, block_size=8)
        ...     result = loop.generate("class Node:")
        ...     assert torch.equal(result.tokens, pd.decoding.generate(model, "class Node:", max_new_tokens=32).tokens)
    """

    def __init__(
        self,
        model: Any,
        method: str = "autoregressive",
        *,
        batch: int = 1,
        longest_prompt: int,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        steps = {name: entry_of_method.steps for name, entry_of_method in METHODS.items() if entry_of_method.steps}
        if method not in steps:
            raise NotImplementedError(
                message(
                    _OP,
                    "method",
                    f"be one of {', '.join(steps)}",
                    repr(method),
                    "Others decide between steps on the host: use pdkernels.decoding.generate.",
                )
            )
        _check_model(model)
        params = completed(_OP, take_params(_OP, params, options), model)
        for name in params.asked:
            if name not in _FOLLOWED:
                raise NotImplementedError(
                    sentence(
                        _OP, f"it does not follow {name}", remedy_of(model, name) or "Use pdkernels.decoding.generate."
                    )
                )
        max_new_tokens = params.max_new_tokens
        check_capabilities(METHODS[method], model, options)
        check_options(METHODS[method], options, ("batch", "longest_prompt", *_FOLLOWED))
        # The prompts' forward gives the first token, so the loop is only for further ones.
        sizes = {"batch": (batch, 1), "longest_prompt": (longest_prompt, 1), "max_new_tokens": (max_new_tokens, 2)}
        for name, (size, minimum) in sizes.items():
            check_type(type(size) is int, _OP, name, "be an int", type(size).__name__)
            check(size >= minimum, _OP, name, f"be at least {minimum}", size)
            check(size <= MAX_POSITIONS, _OP, name, f"be at most {MAX_POSITIONS}", size)
        require(_OP, model.device)
        check(
            not DEBUG_CHECKS, _OP, "PDKERNELS_DEBUG_CHECKS", "be unset", 1, "Its checks read the device in every step."
        )
        self.model, self.method, self.params = model, method, params
        with torch.inference_mode(), torch.cuda.device(model.device):
            # Only the sizes of this session are used.
            self._largest, _ = open_session(model, [[0] * longest_prompt] * batch, params)
            self._steps = steps[method](self._largest, **options)
            if self._steps.needs_host:
                raise NotImplementedError(
                    message(
                        _OP,
                        "options",
                        "leave the host out of a step",
                        self._steps.needs_host,
                        "Use pdkernels.decoding.generate.",
                    )
                )
            entry = self._steps.entry.table
            log_words = self._steps.max_entries * entry.numel()
            check_fits_memory(_OP, "max_new_tokens", max_new_tokens, 8 * log_words, model.device)
            self._log, self._count = entry.new_zeros(self._steps.max_entries, *entry.shape), entry.new_zeros(1)
            self._more = torch.zeros_like(self._count, dtype=torch.bool)
            # The same kernel sets the condition of the if node: the next kind is above 0 or not, like the remaining
            # tokens of an entry. Its log starts over in every round.
            self._form = self._steps.entry.table_of("form" if len(self._steps.forms) > 1 else "pending")[:1]
            self._form_log, self._form_count = entry.new_zeros(2, 1, 1), entry.new_zeros(1)
            self._second = torch.zeros_like(self._more)
            # A graph reads addresses: moving the model elsewhere must not free them.
            self._weights = [parameter.detach() for parameter in model.parameters()]
            self._assemble()

    def _assemble(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Compiles kernels and allocates tables and workspaces, which is impossible in a capture.
        forms = [getattr(self._steps, name) for name in self._steps.forms]
        if len(forms) > 1:
            forms = [partial(self._round, form) for form in forms]
        with torch.cuda.stream(stream):
            self._steps.start(self._largest)
            self._record(None)
            cache = getattr(self._steps, "cache", None)
            for form in forms:
                # Both kinds of rounds run here: with a short past the cache has room for the rows that they store.
                if cache is not None:
                    cache.lengths.clamp_(max=1)
                form()
        torch.cuda.current_stream().wait_stream(stream)
        self._captured = [capture(form, stream) for form in forms]
        raw = [captured.raw_cuda_graph() for captured in self._captured]
        self._graph = WhileGraph(raw, self._record, stream, self._choose if len(forms) > 1 else None)

    def _round(self, form: Callable[[], None]) -> None:
        self._form_count.zero_()
        form()

    def _record(self, handle: int | None) -> None:
        log_step_(self._log, self._count, self._more, self._steps.entry.table, handle=handle)

    def _choose(self, handle: int) -> None:
        log_step_(self._form_log, self._form_count, self._second, self._form, handle=handle)

    @property
    def nodes(self) -> dict[str, dict[str, int]]:
        """For each form of the captured step, how many nodes of each kind it has: its launches, copies and memsets."""
        graphs = zip(self._steps.forms, self._captured, strict=True)
        return {form: kinds_of(captured.raw_cuda_graph()) for form, captured in graphs}

    def generate(self, prompt: Prompts, *, on_tokens: OnTokens | None = None, trace: bool = False) -> DecodeResult:
        """The result of `pdkernels.decoding.generate` for these prompts.

        Args:
            prompt: `batch` of them, none longer than `longest_prompt`.
            on_tokens: as in `generate`. With a callback the host reads the device after every step and replays the
                captured step.
            trace: as in `generate`.
        """
        session, single = open_session(self.model, prompt, self.params, on_tokens, trace)
        check(
            session.batch == self._largest.batch, _OP, "prompt", f"hold {self._largest.batch} sequences", session.batch
        )
        check(
            session.longest <= self._largest.longest,
            _OP,
            "prompt",
            f"have at most {self._largest.longest} tokens",
            session.longest,
            "Raise longest_prompt.",
        )
        with torch.cuda.device(self.model.device):
            return finished(session, single, self.method, lambda: self._decode(session))

    def _decode(self, session: Session) -> int:
        if session.listens:
            return run(self._steps, session, [captured.replay for captured in self._captured])
        self._steps.start(session)
        self._count.zero_()
        self._form_count.zero_()
        self._graph.launch()
        # The first and the last wait for the device.
        return self._steps.recorded(session, self._log[: int(self._count)].tolist())
