"""Models that say what a test wants, and their servers."""

from __future__ import annotations

from typing import Any

import torch

from pdkernels.models import ByteTokenizer, from_callable
from tests.serve.clients import Chatting


def speaking(*said: str, template: str, positions: int = 800) -> Any:
    """A model that writes `said`, one after each odd number of messages, by a `template` that shows a message as "." and
    ends a prompt with "!".

    The prompt has a token for each message and one more; an answer goes on where the text after that place does.
    """
    tables = dict[int, torch.Tensor]()
    for turn, text in enumerate(said):
        ids = torch.tensor([0] * (2 * turn + 1) + [*text.encode()] + [256] * positions)[:positions]
        tables[2 * turn + 1] = 9 * torch.nn.functional.one_hot(ids, 257).float()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in tokens:
            dots = int((row == ord(".")).int().cumprod(0).sum())
            rows.append(tables.get(dots, tables[1])[: len(row)])
        return torch.stack(rows)

    return from_callable(
        logits, vocab_size=257, end_tokens=[256], max_positions=positions,
        tokenizer=Chatting(ByteTokenizer(), f"{{% for m in messages %}}.{{% endfor %}}!{{# {template} #}}"),
    )  # fmt: skip


def serve_speaking(serve: Any, *said: str, template: str = "tools") -> tuple[str, Any]:
    """The address of a server of such a model, and its engine."""
    address, engine = serve(
        model=speaking(*said, template=template), engine={"max_new_tokens": 300, "max_prompt_tokens": 399}
    )
    return address, engine
