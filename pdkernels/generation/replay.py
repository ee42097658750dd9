"""A trace as a page that replays it. Steps of all kinds of decoders are reduced to the same few facts, which
`replay.html` draws."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pdkernels.generation.traces import (
    AdaptiveStep,
    ChunkStep,
    DenoiseStep,
    LinearStep,
    MaskedStep,
    RecurrentStep,
    TraceStep,
)
from pdkernels.models.plan_tokens import PlanTokens

# The origin of a token.
MODEL, DRAFT, FILLED = "model", "draft", "filled"


class Source(NamedTuple):
    """The inputs of a page other than the trace."""

    prompts: list[list[int]]
    tokens: list[list[int]]  # after the prompts
    tokenizer: Any
    names: Mapping[int, str] = {}
    """Of special tokens that the tokenizer has no text for."""


def special_names(model: Any) -> dict[int, str]:
    """Names of a model's special tokens, for a page.

    >>> from types import SimpleNamespace
    >>> special_names(SimpleNamespace(mask_token=7, end_tokens=(5,)))
    {5: '⟨end⟩', 7: '⟨mask⟩'}
    """
    tags = getattr(model, "plan_tokens", None)
    names = dict.fromkeys(getattr(model, "end_tokens", ()), "⟨end⟩")
    if tags is not None:
        names |= {getattr(tags, name): f"⟨{name}⟩" for name in PlanTokens.control_names()}
    if getattr(model, "mask_token", None) is not None:
        names[model.mask_token] = "⟨mask⟩"
    return names


class Write(NamedTuple):
    """A token that is text from this step on."""

    lane: int
    position: int
    token: int
    kind: str


class Ghost(NamedTuple):
    """A step's guess for a position, not kept: a token, a confidence between 0 and 1, or both."""

    lane: int
    position: int
    token: int | None
    confidence: float | None


class Frame(NamedTuple):
    """A step. Positions are relative to a lane; there is one lane, the new tokens, unless chunks are written in
    parallel."""

    note: str
    writes: list[Write]
    ghosts: list[Ghost]
    window: tuple[int, int] | None = None  # positions that could be written


def frames(trace: Sequence[Any], prompt: Sequence[int], tokens: Sequence[int]) -> list[Frame]:
    """The steps of one sequence. Tokens that no step wrote come from the prompt's forward.

    >>> [frame.note for frame in frames([TraceStep([5, 6, 9], [6, 7, 8], 2)], [1, 2], [5, 6, 7])]
    ['the prompt', '1 of 2 drafts accepted']
    """
    kind = type(trace[0]) if trace else TraceStep
    steps = list(_READERS[kind](trace, len(prompt)))
    if kind is ChunkStep:
        return [Frame("the prompt and the first plan", [], []), *steps]
    # A forward may emit more tokens than requested.
    steps = [
        frame._replace(writes=[write for write in frame.writes if write.position < len(tokens)]) for frame in steps
    ]
    filled = {write.position for frame in steps for write in frame.writes}
    first = [Write(0, position, token, MODEL) for position, token in enumerate(tokens) if position not in filled]
    return [Frame("the prompt", first, []), *steps]


def _drafted(trace: Sequence[TraceStep | LinearStep], prompt_len: int) -> Iterator[Frame]:
    position = 0  # of the draft's first token, which is already text
    for step in trace:
        accepted, drafts = step.accepted, len(step.draft) - 1
        writes = [Write(0, position + i, step.draft[i], DRAFT) for i in range(1, accepted)]
        writes.append(Write(0, position + accepted, step.predictions[accepted - 1], MODEL))
        ghosts = [Ghost(0, position + i, step.draft[i], None) for i in range(accepted + 1, len(step.draft))]
        note = f"{accepted - 1} of {drafts} drafts accepted" if drafts else "one token"
        if isinstance(step, LinearStep):
            note += f", {step.forwards} forwards"
        yield Frame(note, writes, ghosts)
        position += accepted


def _denoised(trace: Sequence[DenoiseStep], prompt_len: int) -> Iterator[Frame]:
    begin, after = 0, None
    for step in trace:
        writes = []
        if step.block != after:  # a new block; its first token may be given, and is then not a mask
            begin += 0 if after is None else len(after)
            if step.block[0] != step.block[-1]:
                writes.append(Write(0, begin, step.block[0], MODEL))
        after = list(step.block)
        for slot, token in step.committed.items():
            after[slot] = token
            writes.append(Write(0, begin + slot, token, FILLED))
        window = begin, begin + len(after)
        yield Frame(f"block at {begin}, positions filled: {len(step.committed)}", writes, [], window)


def _masked(trace: Sequence[MaskedStep], prompt_len: int) -> Iterator[Frame]:
    for step in trace:
        writes = [Write(0, position - prompt_len, token, FILLED) for position, token in step.committed.items()]
        ghosts = [
            Ghost(0, position - prompt_len, None, confidence)
            for position, confidence in step.confidence.items()
            if position not in step.committed
        ]
        first, last = step.window
        note = f"positions filled: {len(step.committed)} of {len(step.confidence)} guessed"
        yield Frame(note, writes, ghosts, (first - prompt_len, last - prompt_len))


def _adaptive(trace: Sequence[AdaptiveStep], prompt_len: int) -> Iterator[Frame]:
    for step in trace:
        write = Write(0, step.cursor + 1 - prompt_len, step.prediction, MODEL)
        yield Frame(f"{step.recurrences} recurrences", [write], [])


def _recurrent(trace: Sequence[RecurrentStep], prompt_len: int) -> Iterator[Frame]:
    for step in trace:
        begin = step.cursor + 1 - prompt_len
        rows = list(enumerate(step.predictions))
        writes = [Write(0, begin + i, token, MODEL) for i, token in rows[: step.frozen]]
        # A distance of 0 is full confidence, one of 1 or more none.
        ghosts = [
            Ghost(0, begin + i, token, round(max(0.0, 1 - step.distance[i]), 3)) for i, token in rows[step.frozen :]
        ]
        yield Frame(f"{step.frozen} of {len(rows)} rows frozen", writes, ghosts, (begin, begin + len(rows)))


def _chunks(trace: Sequence[ChunkStep], prompt_len: int) -> Iterator[Frame]:
    first_lane, lanes, number = 0, 0, None
    for step in trace:
        if step.round != number:
            first_lane, number = lanes, step.round
            lanes += len(step.canvas)
        writes = [
            Write(first_lane + chunk, position, token, FILLED) for (chunk, position), token in step.committed.items()
        ]
        yield Frame(f"round {step.round + 1}, positions filled: {len(writes)}", writes, [])


_READERS: dict[type, Callable[[Sequence[Any], int], Iterator[Frame]]] = {
    TraceStep: _drafted,
    LinearStep: _drafted,
    DenoiseStep: _denoised,
    MaskedStep: _masked,
    AdaptiveStep: _adaptive,
    RecurrentStep: _recurrent,
    ChunkStep: _chunks,
}


def _lanes(
    trace: Sequence[Any], tokens: Sequence[int], rounds: Sequence[Any] | None, text: Any
) -> list[dict[str, Any]]:
    """Name and length of each lane."""
    if not trace or not isinstance(trace[0], ChunkStep):
        return [{"name": "", "length": len(tokens)}]
    lanes, seen = [], set()
    for step in trace:
        if step.round in seen:
            continue
        seen.add(step.round)
        for chunk, content in enumerate(step.canvas):
            topics = rounds[step.round].topics if rounds is not None and step.round < len(rounds) else []
            topic = "".join(map(text, topics[chunk])).strip() if chunk < len(topics) else ""
            name = f"round {step.round + 1}, chunk {chunk + 1}" + (f": {topic}" if topic else "")
            lanes.append({"name": name, "length": len(content)})
    return lanes


def _sequence(
    trace: Sequence[Any], prompt: list[int], tokens: list[int], rounds: Sequence[Any] | None, text: Callable[[int], str]
) -> dict[str, Any]:
    steps = [
        {
            "note": frame.note,
            "writes": [[write.lane, write.position, text(write.token), write.kind] for write in frame.writes],
            "ghosts": [
                [ghost.lane, ghost.position, None if ghost.token is None else text(ghost.token), ghost.confidence]
                for ghost in frame.ghosts
            ],
            "window": frame.window,
        }
        for frame in frames(trace, prompt, tokens)
    ]
    lanes = _lanes(trace, tokens, rounds, text)
    return {"prompt": [text(token) for token in prompt], "lanes": lanes, "steps": steps}


def write_page(
    path: str | PathLike[str],
    title: str,
    summary: dict[str, Any],
    source: Source,
    trace: Sequence[Sequence[Any]],
    rounds: Sequence[Sequence[Any]] | None,
) -> None:
    """See `DecodeResult.save_html`. `rounds`: those of each sequence's plan."""

    def text(token: int) -> str:
        try:
            piece = "" if source.tokenizer is None else source.tokenizer.decode([token])
            if piece == "" and hasattr(source.tokenizer, "decode_all"):
                piece = source.tokenizer.decode_all([token])
        except ValueError:  # a byte tokenizer has no tags
            piece = ""
        return piece or source.names.get(token) or f"⟨{token}⟩"

    sequences = [
        _sequence(steps, prompt, tokens, None if rounds is None else rounds[number], text)
        for number, (steps, prompt, tokens) in enumerate(zip(trace, source.prompts, source.tokens, strict=True))
    ]
    # No text can close the script's element.
    data = json.dumps({"facts": summary, "sequences": sequences}, ensure_ascii=False).replace("<", "\\u003c")
    page = files("pdkernels.generation").joinpath("replay.html").read_text(encoding="utf-8")
    page = page.replace("{{title}}", html.escape(title)).replace("{{data}}", data)
    Path(path).write_text(page, encoding="utf-8")
