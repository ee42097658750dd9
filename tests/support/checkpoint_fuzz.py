"""Checkpoints with faults drawn by chance, and the judgement: an error of the house that names the file, or a right load.

    python -m tests.support.checkpoint_fuzz 5000

A case is a small checkpoint of one of the families, with one to three mutations of its config, index, tensors, tokenizer or files.
What loads is compared with plain models that share no code with ours, on the tensors as this file reads them from disk.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from pdkernels import models
from reference import masked_model, recurrent_depth
from reference.recurrent_sampling import forward, position_states
from tests.support.checkpoints import LINEAR, LLAMA31, MINISTRAL3, QWEN2, QWEN3, plain_logits, random_checkpoint

SECONDS, BYTES = 2.0, 200_000_000
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
JUNK = [
    0, 1, 2, 3, 7, -1, 24, 10**9, 10**12, 2**31 - 1, 2**63, 10**40, 0.5, 1.0, -1.0, 1e308, float("nan"), float("inf"), True, False,
    "", "0", "24", "llama", "x" * 5000, "\ud800", "a\nb", [], [1], ["llama"], [[]], [5, 5], {}, {"a": 1}, {"rope_type": "yarn"}, None,
]  # fmt: skip
NAMES = [
    "../model.safetensors", "/etc/passwd", "/dev/zero", "", ".", "..", "a/../b", "sub/x.safetensors", "pipe", "link", "config.json",
    "model.safetensors", "no\0name", "\ud800", "C:\\x", "x" * 300, "model.safetensors/", 5, None, ["a"], {},
]  # fmt: skip
ROPES = [
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 4},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "attention_factor": 1.5, "beta_fast": 4, "beta_slow": 1},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, "llama_4_scaling_beta": 0.2},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "dynamic", "factor": 2.0},
]  # fmt: skip
RIGHT = {
    "rope_theta": [1.5, 100, 1e6], "rope_base": [30, 1e5], "rms_norm_eps": [1e-3, 0, 1e-8], "eos_token_id": [3, [3, 4], None, [3, 3]],
    "dtype": ["float32", "bfloat16", "float16", "float64"], "max_position_embeddings": [5, 10**6], "sliding_window": [None, 5, 10**7],
    "rope_scaling": ROPES, "rope_parameters": ROPES, "mean_recurrence": [1, 3], "mask_token_id": [0, 7], "model_type": ["mistral"],
}  # fmt: skip
LLADA = {
    "model_type": "llada", "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 24, "vocab_size": 13,
    "embedding_size": 16, "weight_tying": False, "rope": True, "rope_theta": 500.0, "rms_norm_eps": 1e-5, "block_type": "llama",
    "layer_norm_type": "rms", "activation_type": "silu", "max_sequence_length": 64, "mask_token_id": 11, "eos_token_id": 9,
}  # fmt: skip
DREAM = {
    "model_type": "Dream", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 16, "rope_theta": 500.0, "mask_token_id": 11, "eos_token_id": 9,
}  # fmt: skip
HUGINN = {
    "model_type": "huginn_raven", "architectures": ["RavenForCausalLM"], "n_embd": 24, "n_heads": 3, "intermediate_size": 20,
    "vocab_size": 29, "padded_vocab_size": 32, "n_layers": 3, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 1,
    "n_layers_in_coda": 1, "mean_recurrence": 2, "rope_base": 700.0, "norm_eps": 1e-5, "block_size": 64, "eos_token_id": 5,
    "init_values": {"embed_scale": 24**0.5},
}  # fmt: skip
KNOWN = [
    "head_dim", "num_key_value_heads", "sliding_window", "use_sliding_window", "rope_theta", "rms_norm_eps", "norm_eps", "attention_bias",
    "tie_word_embeddings", "max_position_embeddings", "eos_token_id", "mask_token_id", "dtype", "torch_dtype", "hidden_act", "n_kv_heads",
    "mlp_ratio", "init_values", "quantization_config", "architectures", "model_type", "use_mrope", "layer_types",
]  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


class Checkpoint:
    """Files in parts that can be spoilt one by one; `files` overrides what the parts would write."""

    def __init__(self, fields: dict[str, Any], content: bytes, shards: int) -> None:
        self.fields: Any = copy.deepcopy(fields)
        self.generation: Any = None
        self.index: Any = None
        self.tokenizer: Any = None
        self.after: list[Callable[[Path], None]] = []
        header, data = parse(content)
        names = (
            [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
            if shards > 1
            else ["model.safetensors"]
        )
        self.shards: dict[str, tuple[dict[str, Any], bytearray]] = {}
        for number, file in enumerate(names):
            part, bytes_ = {}, bytearray()
            for name in sorted(header)[number::shards]:
                first, last = header[name]["data_offsets"]
                part[name] = {**header[name], "data_offsets": [len(bytes_), len(bytes_) + last - first]}
                bytes_ += data[first:last]
            self.shards[file] = (part, bytes_)
        if shards > 1:
            self.index = {"weight_map": {name: file for file, (part, _) in self.shards.items() for name in part}}

    def write(self, folder: Path) -> None:
        texts = {
            "config.json": self.fields,
            "generation_config.json": self.generation,
            INDEX: self.index,
            "tokenizer.json": self.tokenizer,
        }
        for name, content in texts.items():
            if content is not None:
                (folder / name).write_text(json.dumps(content))
        for name, (header, data) in self.shards.items():
            words = json.dumps(header).encode()
            (folder / name).write_bytes(len(words).to_bytes(8, "little") + words + data)
        for spoil in self.after:
            spoil(folder)


def parse(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, content[8 + size :]


@cache
def bases() -> list[tuple[dict[str, Any], bytes]]:
    found = [
        (fields, save(random_checkpoint(fields, dtype=torch.float32)))
        for fields in (QWEN2, QWEN3, LLAMA31, LINEAR, MINISTRAL3)
    ]
    sizes = {"vocab_size": 16, "hidden_size": 16, "heads": 4, "kv_heads": 2, "intermediate_size": 24}
    for fields, names in ((LLADA, "llada"), (DREAM, "qwen2")):
        found.append(
            (fields, save({name: x.float() for name, x in masked_model.random_weights(names, **sizes).items()}))
        )
    recurrent = recurrent_depth.random_weights(
        vocab_size=32, hidden_size=24, heads=3, intermediate_size=20, layers=(1, 1, 1)
    )
    return [*found, (HUGINN, save({name: x.float() for name, x in recurrent.items()}))]


# ---- mutations


def spoil_value(rng: random.Random, value: Any) -> Any:
    """Something else in a place of a JSON file, or inside of what stands there."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        changed, name = dict(value), rng.choice(sorted(value))
        if rng.random() < 0.3:
            del changed[name]
        else:
            changed[name] = spoil_value(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.5:
        return [spoil_value(rng, value[0]), *value[1:]]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.3:
        return value * rng.choice([2, 0.5, 3])
    return copy.deepcopy(rng.choice(JUNK))


def config(rng: random.Random, made: Checkpoint) -> None:
    kind = rng.randrange(5)
    if not isinstance(made.fields, dict) or kind == 0:
        made.fields = spoil_value(rng, made.fields)
    elif kind == 1:
        made.fields["rope_scaling"] = spoil_value(rng, copy.deepcopy(rng.choice(ROPES)))
    elif kind == 2:
        made.fields[rng.choice(KNOWN)] = copy.deepcopy(rng.choice(JUNK))
    else:
        name = rng.choice(sorted(made.fields) or ["a"])
        made.fields[name] = spoil_value(rng, made.fields.get(name))


def right_config(rng: random.Random, made: Checkpoint) -> None:
    """Another config for the same tensors, most of the time."""
    if isinstance(made.fields, dict):
        name = rng.choice(sorted(RIGHT))
        made.fields[name] = copy.deepcopy(rng.choice(RIGHT[name]))


def generation(rng: random.Random, made: Checkpoint) -> None:
    made.generation = (
        {"eos_token_id": rng.choice([*JUNK, 3, [3, 4], [5, "a"], 10**6])} if rng.random() < 0.8 else rng.choice(JUNK)
    )


def index(rng: random.Random, made: Checkpoint) -> None:
    whole = {"weight_map": {name: file for file, (part, _) in made.shards.items() for name in part}}
    made.index = whole if made.index is None else made.index
    if not isinstance(made.index, dict) or not isinstance(made.index.get("weight_map"), dict) or rng.random() < 0.2:
        made.index = spoil_value(rng, whole)
        return
    weight_map = made.index["weight_map"]
    for name in rng.sample(sorted(weight_map), min(len(weight_map), rng.choice([1, 1, 30]))):
        weight_map[name] = rng.choice([*NAMES, *made.shards])
    if rng.random() < 0.3:
        weight_map[rng.choice(["lm_head.weight", "", "x"])] = rng.choice([*NAMES, *made.shards])


def tensors(rng: random.Random, made: Checkpoint) -> None:
    file = rng.choice(sorted(made.shards))
    header, data = made.shards[file]
    if not header or not all(isinstance(known, dict) for known in header.values()):
        return
    name = rng.choice(sorted(header))
    known = header[name]
    kind = rng.randrange(9)
    if kind == 0:
        known["dtype"] = rng.choice(["I8", "F16", "BF16", "I32", "F8_E4M3", "F64", "BOOL", "U8", "X", 5, None])
    elif kind == 1:
        known["shape"] = rng.choice(
            [[], [0], [-1], known["shape"][::-1], [2**40, 2**40], [1, *known["shape"]], "24", [1.5], None]
        )
    elif kind == 2:
        known["data_offsets"] = rng.choice(
            [[0, 0], [0, 2**63], [-1, 4], known["data_offsets"][::-1], [4], None, [0, len(data)]]
        )
    elif kind == 3:
        header[rng.choice(["lm_head.weight", "model.norm.bias", "x" * 3000, "model.layers.9.mlp.up_proj.weight"])] = (
            header.pop(name)
        )
    elif kind == 4:
        del header[name]
    elif kind == 5:  # numbers of another width, whose bytes are right
        width = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}
        dtype, size = rng.choice(sorted(width)), math.prod(known["shape"]) if isinstance(known["shape"], list) else 0
        first = len(data)
        added = (
            torch.arange(size).float().mul(0.01).to(DTYPES.get(dtype, torch.uint8)).view(torch.uint8).numpy().tobytes()
        )
        data += added
        header[name] = {"dtype": dtype, "shape": known["shape"], "data_offsets": [first, first + len(added)]}
        _compact(made, file)
    elif kind == 6:  # other numbers, NaN among them
        at = rng.randrange(max(len(data) - 64, 1))
        data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
    elif kind == 7:
        other = rng.choice(sorted(header))
        header[name], header[other] = header[other], header[name]
    else:
        header["__metadata__"] = rng.choice([{"format": "pt"}, {"a": 5}, [], None])


def _compact(made: Checkpoint, file: str) -> None:
    """The bytes that the header speaks of, without gaps."""
    header, data = made.shards[file]
    packed = bytearray()
    for known in header.values():
        span = known.get("data_offsets")
        if not (isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span)):
            return
        first, last = span
        known["data_offsets"] = [len(packed), len(packed) + len(data[first:last])]
        packed += data[first:last]
    made.shards[file] = (header, packed)


def tokenizer(rng: random.Random, made: Checkpoint) -> None:
    fits = isinstance(made.tokenizer, dict)
    made.tokenizer = copy.deepcopy(TOKENIZER) if not fits else made.tokenizer
    kind = rng.randrange(4)
    if kind == 0:
        made.tokenizer["padding"] = {"strategy": {"Fixed": 10**11}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "?"}  # fmt: skip
    elif kind == 1:
        made.tokenizer["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    elif kind == 2:
        made.tokenizer = spoil_value(rng, made.tokenizer)


def raw(rng: random.Random, made: Checkpoint) -> None:
    """Bytes of one file: flipped, cut, doubled or put before it."""
    texts = {"config.json": made.fields, INDEX: made.index, "tokenizer.json": made.tokenizer}
    name = rng.choice([*made.shards, *(name for name, content in texts.items() if content is not None)])
    kind, share, noise = rng.randrange(6), rng.random(), rng.randbytes(16)

    def spoil(folder: Path) -> None:
        path = folder / name
        if not path.is_file():
            return
        content = bytearray(path.read_bytes())
        at = int(share * min(len(content), 3000))
        if kind == 0:
            content = content[:at]
        elif kind == 1 and content:
            content[at % len(content)] ^= 1 << noise[0] % 8
        elif kind == 2:
            content[at:at] = noise
        elif kind == 3:
            content[:8] = noise[:8]
        elif kind == 4:
            content += noise
        else:
            content = b'{"a": ' + (b"[" if noise[0] % 2 else b'{"b": ') * 100_000
        path.write_bytes(content)

    made.after.append(spoil)


def files(rng: random.Random, made: Checkpoint) -> None:
    """Pipes, devices, links, folders and nothing where a file belongs."""
    present = {"config.json", *made.shards, *([INDEX] if made.index is not None else [])}
    name = rng.choice([*sorted(present), "tokenizer.json", "generation_config.json", "pipe", "link"])
    kind = rng.randrange(6)

    def spoil(folder: Path) -> None:
        path, outside = folder / name, folder.with_name("outside")
        if path.is_dir() and not path.is_symlink():
            return
        moved = path.is_file()
        if moved and kind == 0:
            shutil.move(path, outside)
        path.unlink(missing_ok=True)
        if kind == 0:
            path.symlink_to(outside)
        elif kind == 1:
            os.mkfifo(path)
        elif kind == 2:
            path.symlink_to("/dev/zero")
        elif kind == 3:
            path.mkdir()
        elif kind == 4:
            path.symlink_to(path)

    made.after.append(spoil)


MUTATIONS = [
    config,
    config,
    config,
    *[right_config] * 5,
    generation,
    index,
    index,
    tensors,
    tensors,
    tensors,
    tokenizer,
    raw,
    raw,
    files,
]


# ---- judgement


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes().decode())


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder that loads, read without the library."""
    index = folder / INDEX
    names = (
        set(read_json(index)["weight_map"].values())
        if index.exists()
        else {path.name for path in folder.glob("*.safetensors")}
    )
    state = {}
    for name in names:
        header, data = parse((folder / name).read_bytes())
        for tensor, known in header.items():
            first, last = known["data_offsets"]
            flat = torch.frombuffer(bytearray(data[first:last]) or bytearray(8), dtype=DTYPES[known["dtype"]])
            state[tensor] = flat[: math.prod(known["shape"])].view(known["shape"])
    return state


def expected(fields: dict[str, Any], state: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits of the plain models."""
    if fields.get("model_type") == "huginn_raven" or "RavenForCausalLM" in fields.get("architectures", []):
        state.setdefault("transformer.wte.weight", state.get("lm_head.weight", torch.zeros(0)))
        plain = recurrent_depth.RecurrentDepthReference(state, rope_theta=fields.get("rope_base", 50000.0), norm_eps=fields.get("norm_eps", 1e-6))  # fmt: skip
        return forward(
            plain, tokens, plain.new_past(), fields.get("mean_recurrence", 32), position_states(fields["n_embd"])
        )
    if fields["model_type"] == "llada":
        if fields.get("weight_tying", True):
            state.pop("model.transformer.ff_out.weight", None)
        plain = masked_model.MaskedTransformerReference(state, heads=fields["n_heads"], names="llada", rope_theta=fields.get("rope_theta", 10000.0), norm_eps=fields.get("rms_norm_eps", 1e-5))  # fmt: skip
        length = len(tokens)
        return plain(torch.tensor([tokens]), torch.arange(length)[None], torch.ones(length, length, dtype=torch.bool))[
            0
        ]
    if fields.get("tie_word_embeddings"):
        state.setdefault("model.embed_tokens.weight", state.get("lm_head.weight", torch.zeros(0)))
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings", 2048))
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope}
    whole = {"num_key_value_heads": fields["num_attention_heads"], **fields, "rope_parameters": rope}
    everything = [[True] * len(tokens)] * len(tokens) if fields["model_type"] == "Dream" else None
    return plain_logits(state, whole, tokens, visible=everything)


def check_right(model: Any, folder: Path) -> None:
    """What was loaded is what stands on disk."""
    fields = {name: value for name, value in read_json(folder / "config.json").items() if value is not None}
    dtype = DTYPES[
        {"float64": "F64", "bfloat16": "BF16", "float16": "F16"}.get(
            fields.get("dtype", fields.get("torch_dtype")), "F32"
        )
    ]
    assert model.dtype == dtype, "another dtype"
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if path.exists() else None
    ends = fields.get("eos_token_id", []) if ends is None else ends
    assert set(model.end_tokens) == set(ends if isinstance(ends, list) else [ends]), "other end tokens"
    if isinstance(model, models.Transformer) and "mask_token_id" in fields:
        assert model.mask_token == fields["mask_token_id"], "another mask token"
    state = {name: x.to(dtype).double() for name, x in on_disk(folder).items()}
    tokens = [3, 1, 4, 1, 5][: model.config.max_positions]
    logits = model.double()(torch.tensor([tokens]))[0]
    torch.testing.assert_close(logits, expected(fields, state, tokens), rtol=1e-8, atol=1e-8, equal_nan=True)
    if model.tokenizer is not None:
        try:
            assert len(model.tokenizer.encode("a b a")) < 100
        except ValueError as error:
            assert str(error).startswith("pdkernels.models.load: tokenizer.json must encode the text")


def _too_slow(*_: object) -> None:
    raise AssertionError("hangs")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def judge(seed: int, folder: Path) -> str:
    """Make, load and judge one case: "right", or the beginning of its error. AssertionError for everything else."""
    rng = random.Random(seed)
    fields, content = rng.choice(bases())
    made = Checkpoint(fields, content, rng.choice([1, 1, 2, 3]))
    chosen = [rng.choice(MUTATIONS) for _ in range(rng.choice([1, 1, 2, 3]))]
    for mutate in chosen:
        mutate(rng, made)
    made.write(folder)
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, 4 * SECONDS)
    try:
        model = models.load(folder)
        answer = "right"
    except (ValueError, NotImplementedError) as error:
        answer = str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - start
    assert seconds < SECONDS, f"{seconds:.1f} s"
    if answer == "right":
        check_right(model, folder)
        return answer
    names = ["config.json", "generation_config.json", INDEX, "tokenizer.json", "*.safetensors", *made.shards]
    assert answer.startswith("pdkernels.models.load: ") and "\n" not in answer and len(answer) < 1500, answer
    assert any(name in answer for name in names), answer
    return answer.split(" must ")[0].split(": ")[-1][:40]


def run(first: int, count: int, folder: Path, *, tell: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """How often each end came; AssertionError with the seeds of the cases that have none of those allowed."""
    ends: Counter[str] = Counter()
    wrong = []
    handler, before = signal.signal(signal.SIGALRM, _too_slow), peak()
    try:
        for seed in range(first, first + count):
            place = folder / str(seed) / "checkpoint"
            place.mkdir(parents=True)
            try:
                ends[judge(seed, place)] += 1
            except Exception as error:  # whatever it is, its seed is what helps
                wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                tell(wrong[-1])
    finally:
        signal.signal(signal.SIGALRM, handler)
    # The whole run grows by no more than one case may, so no case takes more.
    grown = peak() - before
    assert grown < BYTES, f"memory grew by {grown / 1e6:.0f} MB"
    assert not wrong, "\n".join([f"{len(wrong)} of {count} cases", *wrong[:20]])
    return ends


if __name__ == "__main__":
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        found = run(0 if len(sys.argv) < 3 else int(sys.argv[2]), int(sys.argv[1]), Path(place), tell=print)
    print(
        f"{sum(found.values())} cases in {time.perf_counter() - begun:.0f} s, {found['right']} right loads, peak {peak() / 1e6:.0f} MB"
    )
    for end, times in found.most_common(40):
        print(f"{times:6} {end}")
