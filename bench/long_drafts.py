"""How many guesses are right far into a text: `python -m bench.long_drafts --json bench/results/long_drafts.json`.

Held-out questions about Python's standard library, like those that the drafters learnt from, after earlier turns of a chat that fill the
text up to a position. Counts of tokens and forwards, which other load on the machine does not change; only "auto" chooses by measured times.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import pdkernels as pd
from bench.gpu_report import table
from bench.records import write
from pdkernels.evaluation.machine import facts

RESULT = Path(__file__).parent / "results/long_drafts.json"
POSITIONS = (100, 1024, 4096, 8000)
SIZES = (4, "auto")


def chats(model: Any, count: int, position: int) -> list[list[int]]:
    """Questions whose chats end before `position`, or at once where that is too short for a turn."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from smollm2_texts import functions, questions

    from pdkernels.training import standard_library

    turns = [
        [
            {"role": "user", "content": f"Write a Python function `{name}`. {docstring}"},
            {"role": "assistant", "content": f"```python\n{code}\n```"},
        ]
        for name, docstring, code in sorted(set(functions(standard_library()[0])))
    ]
    found, number, encode = list[list[int]](), 0, model.tokenizer.encode_chat
    for question in questions(0, held_out=True):
        last = [{"role": "user", "content": question}]
        if len(encode(last)) > 160:
            continue
        messages = last
        while number < len(turns) and len(encode(turns[number] + messages)) <= position:
            messages = turns[number] + messages
            number += 1
        found.append(encode(messages))
        if len(found) == count:
            break
    return found


class ReadOnce:
    """In place of the `tapped` of a model: reads a prompt once for all drafters, since far into a text most of the time goes there."""

    def __init__(self, model: Any) -> None:
        self.model, self.own, self.kept = model, model.tapped, dict[tuple[int, ...], Any]()
        self.taps = sorted({tap for head in model.drafters.values() for tap in head.config.taps})

    def __call__(self, tokens: torch.Tensor, taps: tuple[int, ...], *, cache: Any, **given: Any) -> Any:
        if int(cache.lengths):
            return self.own(tokens, taps, cache=cache, **given)
        prompt = tuple(tokens[0].tolist())
        if prompt not in self.kept:
            own = self.model.new_cache(1, len(prompt))
            found = self.own(tokens, self.taps, cache=own, **given)
            own.commit_(torch.tensor([len(prompt)]))
            self.kept = {prompt: (own, *found)}
        own, hidden, features = self.kept[prompt]
        cache.copy_row_(0, own, 0, len(prompt))
        cache.lengths.zero_()  # whoever calls commits
        return hidden, features[:, :, [self.taps.index(tap) for tap in taps]]


def measured(model: Any, count: int, tokens: int, positions: tuple[int, ...] = POSITIONS) -> list[dict[str, Any]]:
    """For each position, drafter and length of drafts: tokens, forwards, guesses verified, and the answers that equal those without
    drafts."""
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"max_new_tokens": tokens, "end_tokens": ()}
    model.tapped = ReadOnce(model)
    for position in positions:
        own = {
            (method, size): {"position": position, "method": method, "block_size": size, "prompts": list[int](),
                             "tokens": 0, "forwards": 0, "guesses": 0, "right": 0, "equal": 0}
            for method in model.drafters for size in SIZES
        }  # fmt: skip
        for prompt in chats(model, count, position):
            expected = pd.decoding.generate(model, prompt, "dflash", block_size=1, **options).tokens
            for (method, size), row in own.items():
                found: Any = pd.decoding.generate(model, prompt, method, block_size=size, trace=True, **options)
                row["prompts"].append(len(prompt))
                row["tokens"] += found.stats.tokens
                row["forwards"] += found.stats.forwards
                row["guesses"] += sum(len(step.draft) - 1 for step in found.stats.trace[0])
                row["right"] += sum(step.accepted - 1 for step in found.stats.trace[0])
                row["equal"] += torch.equal(found.tokens, expected)
            print(
                [(*name, len(row["prompts"]), row["tokens"], row["forwards"]) for name, row in own.items()], flush=True
            )
        rows += own.values()
    del model.tapped
    return rows


def markdown(found: dict[str, Any]) -> str:
    """A row for each drafter and length of drafts, columns for the positions."""
    rows = found["rows"]
    positions = sorted({row["position"] for row in rows})
    head = ["drafter, block size"]
    head += [f"{words} at {position:,}" for position in positions for words in ("tokens a forward", "guesses a token")]
    lines = []
    for method, size in dict.fromkeys((row["method"], row["block_size"]) for row in rows):
        own = {row["position"]: row for row in rows if (row["method"], row["block_size"]) == (method, size)}
        cells = [[f"{row['tokens'] / row['forwards']:.2f}", f"{row['guesses'] / row['tokens']:.2f}"] for row in (own[at] for at in positions)]  # fmt: skip
        lines.append([f"{method}, {size}", *(cell for pair in cells for cell in pair)])
    equal, answers = sum(row["equal"] for row in rows), sum(len(row["prompts"]) for row in rows)
    words = f"{found['questions']} questions, {found['answer']} tokens each; {equal} of {answers} answers equal those without drafts"
    return f"{table(head, lines)}\n\n{words}; costs of auto: {found['machine']['device']}, 1 thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", nargs="*", default=["smollm2-eagle", "smollm2-dflash"])
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS)
    parser.add_argument("--json", type=Path, help="rows of other positions that it holds are kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = pd.models.load(given.model)
    heads = [pd.models.load_drafter(name, model) for name in given.drafter]
    model.drafters = {head.method: head for head in heads}
    kept = json.loads(given.json.read_text())["rows"] if given.json is not None and given.json.exists() else []
    kept = [row for row in kept if row["position"] not in given.positions]
    rows = sorted(
        kept + measured(model, given.questions, given.tokens, tuple(given.positions)), key=lambda row: row["position"]
    )
    found = {"machine": facts(), "questions": given.questions, "answer": given.tokens, "rows": rows}
    print(markdown(found))
    if given.json is not None:
        write(given.json, found)


if __name__ == "__main__":
    main()
