"""A whole model of 8 billion random weights: token by token, and with drafts that are verified, beside torch with cuBLAS.

    python -m bench.verified_tokens [--weights bf16 q4_0] [--drafts 4 8] [--to FILE] [--dry-run]

For each kind of weights the answer is written token by token, and then with drafts, of which each third token is wrong, and both are compared; so are the
logits of a draft's rows with those that each row has alone. On a CPU they have the same bits. On CUDA attention does not promise it, and random weights tie:
`off` is the largest difference of a logit, `first` the first token that differs. Then a step is timed, captured in a graph: the forward, the choice of tokens, the
verification, the commit; tokens/s are what such steps come to, with the forwards that the wrong drafts cost. Torch's step of the same rows has the same weights in
bfloat16, products by cuBLAS and scaled_dot_product_attention, eager ops in a graph; "products" are cuBLAS's products of a step without anything else.

`--dry-run` takes a tiny model, on a GPU in name only. FILE has what was found so far after every step, so that one that is cut off costs no other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pdkernels as pd
from bench.bench_quantized_linear import LAYOUTS, matrix
from bench.gpu_clock import digits, floors, gpu_clock, replay
from bench.gpu_report import table
from bench.records import write
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.models.architectures.packing import adopt_

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/h200/verified_tokens.json"
WEIGHTS = ("bf16", "q4_0")
PROMPT, NEW, WRONG = 128, 48, 3
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "rope_theta": 500000.0, "tied_head": False, "max_positions": 8192,
}  # fmt: skip
TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 96, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
PACKED = ("qkv", "output", "gate_up", "down")


def model_of(sizes: dict[str, Any], weights: str, device: str = "cuda") -> Transformer:
    """Random weights; of packed ones all layers have the same numbers, each in memory of its own, and the embedding and the head are bfloat16."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta" if weights != "bf16" else device):
            model = Transformer(TransformerConfig(**sizes)).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    if weights == "bf16":
        return model
    shapes = {name: tuple(getattr(model.layers[0], name).shape) for name in PACKED}
    drawn = {name: matrix(LAYOUTS[weights], *shape).to(device) for name, shape in shapes.items()}
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in PACKED:
            state[name] = deepcopy(drawn[kind])
        elif parameter.dim() == 1:
            state[name] = torch.ones_like(parameter, device=device)
        else:
            state[name] = torch.empty_like(parameter, device=device).normal_(std=0.02)
    adopt_(model, state)
    return model


class TorchModel:
    """The same forward from torch's own parts, at a fixed position: what a user writes without kernels."""

    def __init__(self, model: Transformer, rows: int, prefix: int, before: TorchModel | None = None) -> None:
        """`before`: the cache of the rows so far; else its rows are zeros."""
        config, device = model.config, model.device
        self.model, self.rows, self.prefix = model, rows, prefix
        shape = (config.layers, 1, config.kv_heads, prefix + rows, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        if before is not None:
            self.keys[:, :, :, :prefix], self.values[:, :, :, :prefix] = before.keys, before.values
        at = torch.arange(prefix, prefix + rows, dtype=torch.float32)
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.cat([at[:, None] * config.rope_theta**-pairs] * 2, -1)
        self.cos, self.sin = (turn.to(device, model.dtype) for turn in (angles.cos(), angles.sin()))
        # A mask keeps a row alone from the fastest kernel.
        self.mask = torch.ones(rows, prefix + rows, dtype=torch.bool).tril(prefix).to(device) if rows > 1 else None

    def __call__(self, tokens: Tensor) -> Tensor:
        config, model = self.model.config, self.model
        x = F.embedding(tokens, model.embedding)
        for layer, keys, values in zip(model.layers, self.keys, self.values):
            normed = F.rms_norm(x, (config.hidden_size,), layer.attention_norm, config.norm_eps)
            heads = F.linear(normed, layer.qkv).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], 1)
            keys[:, :, self.prefix :], values[:, :, self.prefix :] = self._turned(k), v
            mixed = F.scaled_dot_product_attention(self._turned(q), keys, values, self.mask, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(-2), layer.output)
            gate, up = F.linear(
                F.rms_norm(x, (config.hidden_size,), layer.mlp_norm, config.norm_eps), layer.gate_up
            ).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x, (config.hidden_size,), model.norm, config.norm_eps), model.head)

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin

    def products(self, inputs: dict[int, Tensor]) -> None:
        for layer in self.model.layers:
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                F.linear(inputs[weight.shape[1]], weight)
        F.linear(inputs[self.model.head.shape[1]], self.model.head)


class Text:
    """An answer of the model: its cache after the prompt, and what is written to it."""

    def __init__(self, model: Transformer, room: int) -> None:
        self.model = model
        self.cache = model.new_cache(1, PROMPT + room)
        self.prompt = torch.arange(1, PROMPT + 1).to(model.device) % model.config.vocab_size
        self.first = self._read()

    def _read(self) -> int:
        logits = self.model(self.prompt[None], cache=self.cache, rows=[PROMPT - 1])
        self.cache.commit_(torch.full((1,), PROMPT).to(self.model.device))
        return int(logits.argmax())

    def again(self) -> None:
        self.cache.lengths.fill_(PROMPT)

    def step(self, draft: Tensor) -> tuple[Tensor, Tensor]:
        """Verifies a draft whose first token is text, and keeps what was accepted. Nothing is read by the host."""
        verdict = pd.verify_draft(draft, self.model(draft, cache=self.cache).argmax(-1))
        self.cache.commit_(verdict.accepted)
        return verdict.accepted, verdict.next_token

    def write(self, new: int, drafts: int, known: list[int]) -> tuple[list[int], int]:
        """The answer's first tokens, and the forwards it took. Drafts are what is `known` of the answer; each third token is wrong."""
        self.again()
        text, forwards = [self.first], 0
        while len(text) < new:
            ahead = known[len(text) : len(text) + drafts]
            guesses = [
                (token + ((len(text) + at) % WRONG == 0)) % self.model.config.vocab_size
                for at, token in enumerate(ahead)
            ]
            draft = torch.tensor([[text[-1], *guesses]]).to(self.model.device)
            accepted, following = self.step(draft)
            text += [*guesses[: int(accepted) - 1], int(following)]
            forwards += 1
        return text[:new], forwards


def forwards_of(new: int, drafts: int) -> int:
    """Those that an answer takes if its rows have the same tokens in every forward.

    >>> forwards_of(7, 0), forwards_of(7, 4)
    (6, 2)
    """
    written, forwards = 1, 0
    while written < new:
        ahead = range(written, min(written + drafts, new))
        written = next((at for at in ahead if at % WRONG == 0), ahead.stop) + 1
        forwards += 1
    return forwards


def compared(together: Tensor, alone: Tensor) -> dict[str, Any]:
    """Of logits ``(1, rows, vocab_size)``: whether they have the same bits, and else how far they are off."""
    off = float((together.float() - alone.float()).abs().max())
    return {"same_bits": torch.equal(together.cpu(), alone.cpu()), "off": digits(off)}


def rows_alone(text: Text, tokens: Tensor) -> Tensor:
    """Logits of the rows of a draft, read one at a time."""
    text.again()
    rows = []
    for at in range(tokens.shape[1]):
        rows.append(text.model(tokens[:, at : at + 1], cache=text.cache))
        text.cache.commit_(torch.ones(1, dtype=torch.int64).to(text.model.device))
    return torch.cat(rows, 1)


def milliseconds(
    call: Callable[[], object], reset: Callable[[], object] = lambda: None, rounds: int = 9
) -> float | None:
    """None: it cannot be captured, because it waits for the host."""
    captured = replay(call, reset)
    if captured is None:
        return None
    times = []
    for _ in range(rounds):
        reset()
        times.append(gpu_clock.run(captured))
    return digits(1e3 * median(times))


def of_ours(text: Text, drafts: list[int], new: int) -> Iterator[dict[str, Any]]:
    """A record for each number of drafts, none first."""
    alone, count = text.write(new, 0, [])
    device = text.model.device
    for number in (0, *drafts):
        written, forwards = (alone, count) if number == 0 else text.write(new, number, alone)
        rows = torch.tensor([alone[: number + 1]]).to(device)
        one_by_one = rows_alone(text, rows)
        text.again()
        together = text.model(rows, cache=text.cache)
        took = milliseconds(partial(text.step, rows), text.again)
        differing = (at for at, (a, b) in enumerate(zip(written, alone, strict=True)) if a != b)
        record = {"drafts": number, "tokens": new, "forwards": forwards, "first": next(differing, -1)}
        record |= compared(together, one_by_one) | {"step_ms": took}
        if took is not None:
            record["tokens_per_s"] = digits(1e3 * (new - 1) / forwards_of(new, number) / took)
            record["tokens_per_s_all_right"] = digits(1e3 * (number + 1) / took)
        yield record


def of_torch(model: Transformer, drafts: list[int]) -> Iterator[dict[str, Any]]:
    """The same steps by torch: their time, that of their products alone, and whether rows keep their bits."""
    tokens = torch.arange(7, 7 + max(drafts) + 1)[None].to(model.device)
    alone, one = [], None
    for at in range(tokens.shape[1]):
        one = TorchModel(model, 1, PROMPT + at, one)
        alone.append(one(tokens[:, at : at + 1]))
    for number in (0, *drafts):
        several = TorchModel(model, number + 1, PROMPT)
        rows = tokens[:, : number + 1]
        widths = (model.config.hidden_size, model.config.heads * model.config.head_dim, model.config.intermediate_size)
        inputs = {width: torch.randn(1, number + 1, width).to(model.device, model.dtype) for width in widths}
        yield {
            "drafts": number,
            **compared(several(rows), torch.cat(alone[: number + 1], 1)),
            "step_ms": milliseconds(lambda several=several, rows=rows: several(rows).argmax(-1)),
            "products_ms": milliseconds(partial(several.products, inputs)),
        }


def checked_torch(model: Transformer) -> float:
    """The largest difference of torch's logits from ours, over the largest logit, for rows without anything before them."""
    tokens = torch.arange(5, 13)[None].to(model.device)
    ours, theirs = model(tokens).float().cpu(), TorchModel(model, 8, 0)(tokens).float().cpu()
    off = float((ours - theirs).abs().max() / ours.abs().max())
    if off > 0.05:
        raise AssertionError(f"torch's forward is not that of the model: {off:.3f} of the largest logit")
    return digits(off)


def pretended() -> AbstractContextManager[None]:
    from bench.dry_run import dry_run

    return dry_run()


def verified_table(found: dict[str, Any]) -> str:
    """The table of the docs: torch's step of the same rows over ours says how much slower or faster ours is."""
    torchs = {row["drafts"]: row for row in found["rows"].get("torch, bf16", [])}
    lines = []
    for weights, rows in found["rows"].items():
        for row in rows:
            theirs, took = torchs.get(row["drafts"]), row["step_ms"]
            same = "-" if "first" not in row else "yes" if row["first"] < 0 else f"up to {row['first']}"
            bits = "yes" if row["same_bits"] else f"off by {row['off']:g}"
            rates = [f"{row[name]:,.0f}" if name in row else "-" for name in ("tokens_per_s", "tokens_per_s_all_right")]
            ratio = (
                f"{theirs['step_ms'] / took:.2f}x"
                if theirs and theirs is not row and theirs["step_ms"] and took
                else "-"
            )
            lines.append(
                [f"{weights}, {row['drafts']} drafts", same, bits, f"{took:.2f}" if took else "-", ratio, *rates]
            )
    head = ["8B, random weights", "same tokens", "rows keep their bits", "step, ms", "torch's by ours"]
    head += ["tokens/s by the step, each third draft wrong", "all drafts right"]
    products = ", ".join(f"{row['products_ms'] or 0:.2f} of {row['drafts'] + 1} rows" for row in torchs.values())
    words = f"cuBLAS's products of a step alone, ms: {products}. {found['floors']['device']}, torch {found['torch']}"
    return f"{table(head, lines)}\n\n{words}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.verified_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--drafts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on a GPU in name only")
    parser.add_argument("--to", type=Path, default=RESULTS)
    given = parser.parse_args()
    with pretended() if given.dry_run else nullcontext(), torch.inference_mode():
        found: dict[str, Any] = {"torch": torch.__version__, "prompt": PROMPT, "floors": floors(), "rows": {}}

        def kept(name: str, records: Iterable[dict[str, Any]]) -> None:
            for record in records:
                found["rows"].setdefault(name, []).append(record)
                write(given.to, found)
                print(name, json.dumps(record), flush=True)

        for weights in given.weights:
            model = model_of(TINY if given.dry_run else LLAMA_8B, weights)
            kept(weights, of_ours(Text(model, NEW + max(given.drafts) + 1), given.drafts, NEW))
            if weights == "bf16":
                found["torch_off"] = checked_torch(model)
                kept("torch, bf16", of_torch(model, given.drafts))


if __name__ == "__main__":
    main()
