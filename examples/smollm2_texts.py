"""What the adapters of SmolLM2 learn from: questions about Python's standard library, and the model's own greedy answers.

A question shows a function and asks what it does, shows its first half and asks for the rest, or gives its docstring and asks for
the function. Questions about held-out modules are for scoring alone.
"""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdkernels.decoding import generate
from pdkernels.models import Transformer
from pdkernels.training import standard_library

LONGEST_SOURCE = 600
"""Characters of a function."""
BATCH = 64


class Text(NamedTuple):
    """A question and its answer."""

    ids: Tensor
    """(n,) int64."""
    prompt_len: int


class Function(NamedTuple):
    """A function, its arguments in the name."""

    name: str
    docstring: str
    """The first paragraph of its docstring."""
    code: str


def functions(files: Sequence[bytes]) -> Iterator[Function]:
    """Every short function with a docstring."""
    for file in files:
        try:
            source = file.decode()
            tree, lines = ast.parse(source), source.splitlines()
        except (UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            margin = " " * node.col_offset
            code = "\n".join(line.removeprefix(margin) for line in lines[node.lineno - 1 : node.end_lineno])
            if len(node.body) > 1 and len(code) <= LONGEST_SOURCE and (docstring := ast.get_docstring(node)):
                docstring = " ".join(docstring.partition("\n\n")[0].split())
                yield Function(f"{node.name}({ast.unparse(node.args)})", docstring, code)


@lru_cache(maxsize=1)
def _functions() -> tuple[set[Function], set[Function]]:
    known, unseen = standard_library()
    return set(functions(known)), set(functions(unseen))


def questions(seed: int, *, held_out: bool = False) -> list[str]:
    """One question for each function, shuffled; the same ones for the same seed and standard library.

    No function of a held-out module is asked about in training, nor one of the same name and arguments or docstring.
    """
    numbers, asked = random.Random(seed), []
    known, unseen = _functions()
    kept = {value for function in unseen for value in function[:2]}
    asked_about = unseen if held_out else {function for function in known if not kept & set(function[:2])}
    for name, docstring, code in sorted(asked_about):
        kind, lines = numbers.randrange(3), code.splitlines()
        if kind == 0:
            asked.append(f"Explain what this Python function does.\n\n```python\n{code}\n```")
        elif kind == 1:
            asked.append(f"Write a Python function `{name}`. {docstring}")
        else:
            half = "\n".join(lines[: max(2, len(lines) // 2)])
            asked.append(f"Complete this Python function.\n\n```python\n{half}\n```")
    numbers.shuffle(asked)
    return asked


def prompts(model: Transformer, count: int, longest: int, seed: int, *, held_out: bool = False) -> list[list[int]]:
    """The first `count` questions as chats of at most `longest` tokens; as they are for a model without a chat template."""
    chats: list[list[int]] = []
    encode: Any = model.tokenizer
    for question in questions(seed, held_out=held_out):
        asked = [{"role": "user", "content": question}]
        ids = encode.encode(f"{question}\n\n") if encode.chat_template is None else encode.encode_chat(asked)
        if len(ids) <= longest:
            chats.append(ids)
            if len(chats) == count:
                break
    return chats


class Kept:
    """A list that grows in a file. Items from other prompts or settings are not reused."""

    def __init__(self, file: Path, chats: Sequence[list[int]], **settings: object) -> None:
        self.file, self.chats, self.items = file, chats, list[Any]()
        self.settings = {name: str(value) for name, value in settings.items()}
        if file.exists():
            saved = torch.load(file, weights_only=True)
            made = [list(chat) for chat in saved["chats"]]
            if saved["settings"] == self.settings and made[: len(chats)] == list(chats[: len(made)]):
                self.items = saved["items"][: len(chats)]

    def missing(self, batch: int) -> Iterator[list[list[int]]]:
        """The prompts for which items are still to be added, `batch` at a time."""
        while len(self.items) < len(self.chats):
            yield list(self.chats[len(self.items) : len(self.items) + batch])

    def add(self, items: Iterable[tuple[Any, ...]]) -> None:
        self.items += [tuple(item) for item in items]
        saved = {"settings": self.settings, "chats": self.chats[: len(self.items)], "items": self.items}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            torch.save(saved, unfinished)
            os.replace(unfinished, self.file)
        finally:
            unfinished.unlink(missing_ok=True)


def answered(
    model: Transformer, start: str, chats: Sequence[list[int]], longest: int, file: Path, advance: Callable[[int], None]
) -> list[Text]:
    """The chats with the model's greedy answers of up to `longest` tokens. `file` keeps them: nothing is answered twice."""
    kept = Kept(file, chats, start=start, longest=longest)
    advance(len(kept.items))
    for batch in kept.missing(BATCH):
        answers = generate(model, batch, max_new_tokens=longest).tokens
        kept.add(
            (torch.cat([torch.tensor(chat), answer]), len(chat)) for chat, answer in zip(batch, answers, strict=True)
        )
        advance(len(batch))
    return [Text(*item) for item in kept.items]
