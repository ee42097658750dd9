"""What the adapters of SmolLM2 learn from: questions about Python's standard library, and the model's own greedy answers.

A question shows a function and asks what it does, shows its first half and asks for the rest, or tells its docstring and asks for
the function. Questions about held-out modules are for scoring alone.
"""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Callable, Iterator, Sequence
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
    told: str
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
            if len(node.body) > 1 and len(code) <= LONGEST_SOURCE and (told := ast.get_docstring(node)):
                told = " ".join(told.partition("\n\n")[0].split())
                yield Function(f"{node.name}({ast.unparse(node.args)})", told, code)


@lru_cache(maxsize=1)
def _functions() -> tuple[set[Function], set[Function]]:
    known, unseen = standard_library()
    return set(functions(known)), set(functions(unseen))


def questions(seed: int, *, held_out: bool = False) -> list[str]:
    """One about each function, shuffled; the same ones for the same seed and standard library.

    No function of a held-out module is asked about in training, nor one of the same name and arguments or docstring.
    """
    numbers, asked = random.Random(seed), []
    known, unseen = _functions()
    kept = {value for function in unseen for value in function[:2]}
    asked_about = unseen if held_out else {function for function in known if not kept & set(function[:2])}
    for name, told, code in sorted(asked_about):
        kind, lines = numbers.randrange(3), code.splitlines()
        if kind == 0:
            asked.append(f"Explain what this Python function does.\n\n```python\n{code}\n```")
        elif kind == 1:
            asked.append(f"Write a Python function `{name}`. {told}")
        else:
            half = "\n".join(lines[: max(2, len(lines) // 2)])
            asked.append(f"Complete this Python function.\n\n```python\n{half}\n```")
    numbers.shuffle(asked)
    return asked


def prompts(model: Transformer, count: int, longest: int, seed: int, *, held_out: bool = False) -> list[list[int]]:
    """The first `count` questions as chats of at most `longest` tokens."""
    chats: list[list[int]] = []
    encode: Any = model.tokenizer
    for question in questions(seed, held_out=held_out):
        ids = encode.encode_chat([{"role": "user", "content": question}])
        if len(ids) <= longest:
            chats.append(ids)
            if len(chats) == count:
                break
    return chats


def answered(
    model: Transformer,
    chats: Sequence[list[int]],
    max_new_tokens: int,
    file: Path | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Text]:
    """The chats with the model's greedy answers. `file` keeps what is answered, so that nothing is answered twice."""
    texts: list[Text] = []
    if file is not None and file.exists():
        kept = torch.load(file, weights_only=True)
        same = [ids[:length].tolist() for ids, length in kept] == chats[: len(kept)]
        texts = [Text(*text) for text in kept] if same else []
    advance(len(texts))
    while len(texts) < len(chats):
        batch = chats[len(texts) : len(texts) + BATCH]
        answers = generate(model, batch, max_new_tokens=max_new_tokens).tokens
        texts += [
            Text(torch.cat([torch.tensor(chat), answer]), len(chat))
            for chat, answer in zip(batch, answers, strict=True)
        ]
        if file is not None:
            write(file, [tuple(text) for text in texts])
        advance(len(batch))
    return texts


def write(file: Path, value: object) -> None:
    """As a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        torch.save(value, unfinished)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
