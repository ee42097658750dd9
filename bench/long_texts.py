"""What a token costs far into a text, with attention and with recurrent states: `python -m bench.long_texts`.

Models of random weights that differ only in how many of their layers have a state instead of attention. A step of one token, or of a draft
of eight of which all are accepted, at positions whose keys, values and states hold random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.bench_grouped_linear import seconds
from bench.records import write
from pdkernels.cache import HybridCache
from pdkernels.evaluation.machine import processor
from pdkernels.models import Hybrid, HybridConfig, Transformer, TransformerConfig

RESULT = Path(__file__).parent / "results/long_texts.json"
LAYERS, RECURRENT = 8, (0, 6, 7)
POSITIONS = (1024, 8192, 32768)
ROWS = (1, 8)
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "layers": LAYERS, "heads": 4, "kv_heads": 4, "head_dim": 128, "intermediate_size": 1024,
}  # fmt: skip
STATES: dict[str, Any] = {"key_heads": 4, "value_heads": 8, "key_dim": 128, "value_dim": 128}


def build(recurrent: int) -> Any:
    torch.manual_seed(0)
    if recurrent == 0:
        return Transformer(TransformerConfig(**SIZES, max_positions=2 * POSITIONS[-1])).requires_grad_(False).eval()
    period = LAYERS // (LAYERS - recurrent)
    mixers = tuple("attention" if layer % period == period - 1 else "delta" for layer in range(LAYERS))
    config = HybridConfig(**SIZES, **STATES, mixers=mixers, max_positions=2 * POSITIONS[-1])
    assert mixers.count("delta") == recurrent
    return Hybrid(config).requires_grad_(False).eval()


class Text:
    """A model at a position of a text."""

    def __init__(self, recurrent: int, position: int, rows: int, steps: int) -> None:
        self.model = build(recurrent)
        self.cache = self.model.new_cache(1, position + rows * (steps + 1))
        self.tokens, self.counts = torch.randint(SIZES["vocab_size"], (1, rows)), torch.tensor([rows])
        for memory in (self.cache.k, self.cache.v):
            for layer in memory:
                layer.normal_()
        self.cache.lengths.fill_(position)
        self.bytes = 2 * position * (LAYERS - recurrent) * SIZES["kv_heads"] * SIZES["head_dim"] * 4
        if isinstance(self.cache, HybridCache):
            self.cache.state_lengths.fill_(position)
            for slots in self.cache.states.values():
                slots.state.normal_()
            self.bytes += sum(slots.state.nbytes for slots in self.cache.states.values())

    def step(self) -> None:
        self.model(self.tokens, cache=self.cache)
        self.cache.commit_(self.counts)


def measured(rounds: int = 20) -> dict[str, Any]:
    """The minimum CPU time of a step in ms, and the bytes that a text takes; the models take turns."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for rows in ROWS:
            for position in POSITIONS:
                texts = {recurrent: Text(recurrent, position, rows, rounds) for recurrent in RECURRENT}
                times: dict[int, list[float]] = {recurrent: [] for recurrent in RECURRENT}
                for _ in range(rounds):
                    for recurrent, text in texts.items():
                        times[recurrent].append(seconds(text.step))
                for recurrent, text in texts.items():
                    milliseconds = round(1000 * min(times[recurrent]), 3)
                    found.append(
                        {
                            "recurrent": recurrent,
                            "rows": rows,
                            "position": position,
                            "ms": milliseconds,
                            "bytes": text.bytes,
                        }
                    )
    return {"rounds": rounds, "processor": processor(), "layers": LAYERS, "steps": found}


def markdown(found: dict[str, Any]) -> str:
    """A row for each model and number of rows, a column for each position."""
    steps = found["steps"]
    positions = sorted({step["position"] for step in steps})
    heads = [f"at {position:,}" for position in positions]
    ends = f"memory at {positions[0]:,} | at {positions[-1]:,}"
    lines = [f"| layers with a state | rows | {' | '.join(heads)} | {ends} |"]
    lines.append("| --- |" + " ---: |" * (len(heads) + 3))
    for recurrent in sorted({step["recurrent"] for step in steps}):
        for rows in sorted({step["rows"] for step in steps}):
            own = {step["position"]: step for step in steps if step["recurrent"] == recurrent and step["rows"] == rows}
            cells = [f"{own[position]['ms']:.1f} ms" for position in positions]
            memory = [f"{own[position]['bytes'] / 1e6:.1f} MB" for position in (positions[0], positions[-1])]
            lines.append(f"| {recurrent} of {found['layers']} | {rows} | {' | '.join([*cells, *memory])} |")
    return "\n".join([*lines, "", f"CPU time of a step, minimum of {found['rounds']}; {found['processor']}, 1 thread"])


if __name__ == "__main__":
    result = measured()
    write(RESULT, result)
    print(markdown(result))
