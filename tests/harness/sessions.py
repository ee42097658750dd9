"""Sessions of requests, without `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkernels.decoding import find
from pdkernels.decoding.request import open_session as open_request
from pdkernels.decoding.steps import RunningBatch
from pdkernels.generation.params import SETTINGS, SamplingParams, names_of
from pdkernels.generation.session import Session


def open_session(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    end_tokens: Sequence[int] | None,
    on_tokens: Any = None,
    trace: bool = False,
    **options: Any,
) -> tuple[Session, bool]:
    """A session with the settings among `options`, which may hold options of a method too."""
    settings, _ = split(options)
    params = SamplingParams(max_new_tokens=max_new_tokens, end_tokens=end_tokens, **settings)
    return open_request(model, prompt, params, on_tokens, trace)


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings, and options of a method."""
    settings = {name: value for name, value in options.items() if name in SETTINGS}
    return settings, {name: value for name, value in options.items() if name not in SETTINGS}


def steps_of(method: str, session: Session, **options: Any) -> Any:
    """The steps of a method, for settings and options of its own."""
    settings, options = split(options)
    session.params = session.params.replace(**settings)
    steps = find(method).steps
    assert steps is not None
    return steps(session, **options)


def running_batch(kind: Any, largest: Session, staging: Any = None, **options: Any) -> RunningBatch:
    """A running batch, for settings and options of its method."""
    settings, options = split(options)
    largest.params = largest.params.replace(**settings)
    return RunningBatch(kind, largest, staging, **options)


FILTERS = tuple(name for name in names_of("filter") if name != "grammar")
"""Settings that filter logits by tokens."""


def error_of(method: str, text: str) -> str:
    """An error about an argument, which settings have in the name of `generate` and options in that of their method."""
    return f"pdkernels.decoding.{'generate' if text.split()[0] in SETTINGS else method}: {text}"
