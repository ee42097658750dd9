"""Checkpoints with random faults, and the expected outcome: one of our errors that names the file, or a correct load.

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
from reference import recurrent_depth
from tests.models.test_llada_checkpoints import DREAM, LLADA, weights
from tests.models.test_recurrent_depth_checkpoints import SMALL
from tests.support.checkpoint_judge import DTYPES, INDEX, check_right, parse
from tests.support.checkpoints import LINEAR, LLAMA31, MINISTRAL3, QWEN2, QWEN3, random_checkpoint

SECONDS, BYTES = 2.0, 200_000_000
NUMBERS = [0, 1, 2, 3, 7, -1, 24, 10**9, 10**12, 2**31 - 1, 2**63, 10**40, 0.5, 1.0, -1.0, 1e308]
WORDS = [float("nan"), float("inf"), True, False, None, "", "0", "24", "llama", "x" * 5000, "\ud800", "a\nb"]
NESTED = [[], [1], ["llama"], [[]], [5, 5], {}, {"a": 1}, {"rope_type": "yarn"}]
JUNK: list[Any] = [*NUMBERS, *WORDS, *NESTED]
OUTSIDE = "../model.safetensors /etc/passwd /dev/zero . .. a/../b sub/x.safetensors pipe link config.json C:\\x".split()
NAMES: list[Any] = [
    *OUTSIDE,
    "",
    "model.safetensors",
    "no\0name",
    "\ud800",
    "x" * 300,
    "model.safetensors/",
    5,
    None,
    ["a"],
    {},
]
LLAMA3 = dict(factor=8.0, low_freq_factor=1, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(factor=2, original_max_position_embeddings=8, attention_factor=1.5, beta_fast=4, beta_slow=1)
ROPES = [
    {"rope_type": "linear", "factor": 2.5},
    {"type": "linear", "factor": 4},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, "llama_4_scaling_beta": 0.2},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "dynamic", "factor": 2.0},
]
RIGHT: dict[str, list[Any]] = {
    "rope_theta": [1.5, 100, 1e6],
    "rope_base": [30, 1e5],
    "rms_norm_eps": [1e-3, 0, 1e-8],
    "eos_token_id": [3, [3, 4], None, [3, 3]],
    "dtype": ["float32", "bfloat16", "float16", "float64"],
    "max_position_embeddings": [5, 10**6],
    "sliding_window": [None, 5, 10**7],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "mean_recurrence": [1, 3],
    "mask_token_id": [0, 7],
    "model_type": ["mistral"],
}
KNOWN = [
    *"head_dim num_key_value_heads sliding_window use_sliding_window attention_bias tie_word_embeddings norm_eps".split(),
    *"max_position_embeddings torch_dtype hidden_act n_kv_heads mlp_ratio init_values quantization_config".split(),
    *"architectures use_mrope layer_types mask_token_id rope_theta rms_norm_eps eos_token_id model_type".split(),
]
HUGINN = SMALL | dict(n_embd=24, intermediate_size=20, n_layers=3, n_layers_in_coda=1, n_layers_in_recurrent_block=1)
HUGINN |= dict(head_dim=8, mean_recurrence=2, init_values={"embed_scale": 24**0.5})
WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}
TOKENIZER = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": WORD_LEVEL}
TOKENIZER |= dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
PADDING = dict(
    strategy={"Fixed": 10**11}, direction="Right", pad_id=0, pad_type_id=0, pad_token="?", pad_to_multiple_of=None
)
TRUNCATION = dict(direction="Right", max_length=1, strategy="LongestFirst", stride=0)


class Checkpoint:
    """Files in parts that can be corrupted one by one; `files` overrides what the parts would write."""

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


@cache
def bases() -> list[tuple[dict[str, Any], bytes]]:
    found = [
        (fields, save(random_checkpoint(fields, dtype=torch.float32)))
        for fields in (QWEN2, QWEN3, LLAMA31, LINEAR, MINISTRAL3)
    ]
    found += [(LLADA, save(weights("llada"))), (DREAM, save(weights("qwen2")))]
    recurrent = recurrent_depth.random_weights(
        vocab_size=32, hidden_size=24, heads=3, intermediate_size=20, layers=(1, 1, 1)
    )
    return [*found, (HUGINN, save({name: x.float() for name, x in recurrent.items()}))]


# ---- mutations


def spoil_value(rng: random.Random, value: Any) -> Any:
    """Another value for a field of a JSON file, or for a part of it."""
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
    elif kind == 6:  # other numbers, including NaN
        at = rng.randrange(max(len(data) - 64, 1))
        data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
    elif kind == 7:
        other = rng.choice(sorted(header))
        header[name], header[other] = header[other], header[name]
    else:
        header["__metadata__"] = rng.choice([{"format": "pt"}, {"a": 5}, [], None])


def _compact(made: Checkpoint, file: str) -> None:
    """The bytes that the header describes, without gaps."""
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
        made.tokenizer["padding"] = PADDING
    elif kind == 1:
        made.tokenizer["truncation"] = TRUNCATION
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
    """Pipes, devices, links, folders or nothing in place of a file."""
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


# ---- cases


def _too_slow(*_: object) -> None:
    raise AssertionError("hangs")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def judge(seed: int, folder: Path) -> str:
    """Make, load and check one case: "right", or the beginning of its error. AssertionError for everything else."""
    rng = random.Random(seed)
    fields, content = rng.choice(bases())
    made = Checkpoint(fields, content, rng.choice([1, 1, 2, 3]))
    chosen = [rng.choice(MUTATIONS) for _ in range(rng.choice([1, 1, 2, 3]))]
    for mutate in chosen:
        mutate(rng, made)
    made.write(folder)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 30 * SECONDS)  # by the clock, on a machine that may be busy
    try:
        model = models.load(folder)
        answer = "right"
    except (ValueError, NotImplementedError) as error:
        answer = str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{seconds:.1f} s"
    if answer == "right":
        check_right(model, folder)
        return answer
    names = ["config.json", "generation_config.json", INDEX, "tokenizer.json", "*.safetensors", *made.shards]
    assert answer.startswith("pdkernels.models.load: ") and "\n" not in answer and len(answer) < 1500, answer
    assert any(name in answer for name in names), answer
    return answer.split(" must ")[0].split(": ")[-1][:40]


def run(first: int, count: int, folder: Path, *, tell: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """How often each outcome came; AssertionError with the seeds of the cases whose outcome is not allowed."""
    ends: Counter[str] = Counter()
    wrong = []
    handler, before = signal.signal(signal.SIGALRM, _too_slow), peak()
    try:
        for seed in range(first, first + count):
            place = folder / str(seed) / "checkpoint"
            place.mkdir(parents=True)
            try:
                ends[judge(seed, place)] += 1
            except Exception as error:  # whatever it is, its seed reproduces it
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
