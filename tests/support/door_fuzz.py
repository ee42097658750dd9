"""Adapter folders and GGUF files with random faults: one of our errors that names the file, or a load, quickly and in little memory.

python -m tests.support.door_fuzz 5000
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import struct
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
from tests.models.test_adapters import ALL, CONFIG, lora
from tests.support import gguf_files
from tests.support.checkpoint_fuzz import BYTES, JUNK, SECONDS, peak, spoil_value
from tests.support.checkpoint_judge import parse
from tests.support.checkpoints import LLAMA, random_checkpoint

_TARGETS = sorted({name.rpartition(".")[2] for name in ALL})
_PATTERNS = [
    "(a+)+",
    "q_proj",
    ".*",
    "(|)" * 20,
    "^model.*",
    "(",
    "[",
    "a{3,1}",
    "\\",
    "(?=q)",
    "x" * 5000,
    "",
    "self_attn.*",
]
_FIELDS: dict[str, list[Any]] = {
    "init_lora_weights": [True, False, "pissa", "olora", "gaussian", "pissa_niter_2", "corda", "loftq"],
    "target_modules": [*_PATTERNS, "all-linear", _TARGETS, ["q_proj"]],
    "exclude_modules": [*_PATTERNS, ["q_proj"], ["other"]],
    "alpha_pattern": [{pattern: 3} for pattern in _PATTERNS],
    "rank_pattern": [{pattern: 3} for pattern in _PATTERNS],
    "layers_to_transform": [0, [0], [1], []],
    "layers_pattern": ["layers", ["h"]],
    "modules_to_save": [["lm_head"], ["nothing"], []],
    "lora_alpha": [0, -1, 1e300, 2.5],
    "r": [1, 3, 0, 10**9],
    "use_rslora": [True],
}


@cache
def adapter_bytes() -> bytes:
    return save(lora(random_checkpoint(LLAMA, dtype=torch.float32), ALL))


@cache
def gguf_bytes() -> list[bytes]:
    tokens = [f"t{number}" for number in range(40)]
    text = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": [], "token_type": [1] * 40, "eos_token_id": 5}
    made = []
    with tempfile.TemporaryDirectory() as place:
        for fields, kind, words in (
            (gguf_files.LLAMA, "F32", None),
            (gguf_files.QWEN2, "Q8_0", text),
            (gguf_files.QWEN3, "BF16", {**text, "chat_template": "{{ messages }}"}),
        ):
            gguf_files.write_gguf(Path(place) / "m.gguf", fields, kind=kind, tokens=words)
            made.append((Path(place) / "m.gguf").read_bytes())
    return made


def spoilt_bytes(rng: random.Random, content: bytes, header: int) -> bytes:
    """Flipped, cut, moved or overwritten, mostly in the first `header` bytes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        most = len(data) if rng.random() < 0.2 else min(header, len(data))
        at = rng.randrange(max(most, 1))
        kind = rng.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice([1, 8, 64]))
        elif kind == 3:
            del data[at : at + rng.choice([1, 4, 8, 100])]
        elif kind == 4:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 10**7, len(data)]))
        elif kind == 5:
            data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 4, 8, 9, 12, 13, 2**31, 2**32 - 1]))
        else:
            other = rng.randrange(max(most, 1))
            data[at : at + 32] = data[other : other + 32]
    return bytes(data)


def adapter_case(rng: random.Random, folder: Path) -> Callable[[], Any]:
    fields: Any = {**CONFIG, "target_modules": _TARGETS}
    for _ in range(rng.choice([1, 1, 2, 3])):
        if isinstance(fields, dict) and rng.random() < 0.7:
            name = rng.choice(sorted(_FIELDS))
            fields[name] = rng.choice(_FIELDS[name]) if rng.random() < 0.8 else rng.choice(JUNK)
        elif rng.random() < 0.5:
            fields = spoil_value(rng, fields)
    content = adapter_bytes()
    if rng.random() < 0.3:
        content = spoilt_bytes(rng, content, 2000)
    elif rng.random() < 0.3:
        header, data = parse(content)
        name = rng.choice(sorted(header))
        header[rng.choice([name.replace("q_proj", "k_proj"), "x", name + ".weight"])] = header.pop(name)
        words = json.dumps(header).encode()
        content = len(words).to_bytes(8, "little") + words + data
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    (adapter / "adapter_model.safetensors").write_bytes(content)
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(LLAMA))
    (base / "model.safetensors").write_bytes(save(random_checkpoint(LLAMA, dtype=torch.float32)))
    option = "drafter" if rng.random() < 0.1 else "adapter"
    return lambda: models.load(base, **{option: adapter})


def gguf_case(rng: random.Random, folder: Path) -> Callable[[], Any]:
    content = rng.choice(gguf_bytes())
    (folder / "m.gguf").write_bytes(spoilt_bytes(rng, content, 4000))
    return lambda: models.load(folder / "m.gguf")


def judge(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    load = rng.choice([adapter_case, gguf_case])(rng, folder)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 30 * SECONDS)  # by the clock, on a machine that may be busy
    try:
        model = load()
        model(torch.tensor([[3, 1, 4]]))
        answer = "right"
    except (ValueError, NotImplementedError) as error:
        answer = str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{seconds:.1f} s"
    if answer == "right":
        return answer
    names = ["adapter_config.json", "adapter_model.safetensors", "adapter", "drafter", "m.gguf", "checkpoint"]
    assert answer.startswith("pdkernels.models.load: ") and "\n" not in answer and len(answer) < 1500, answer
    assert any(name in answer for name in names), answer
    return answer.split(" must ")[0].split(": ")[-1][:40]


def _too_slow(*_: object) -> None:
    raise AssertionError("hangs")


def run(first: int, count: int, folder: Path, *, tell: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """How often each outcome came; AssertionError with the seeds of the cases whose outcome is not allowed."""
    ends: Counter[str] = Counter()
    wrong = []
    handler, before = signal.signal(signal.SIGALRM, _too_slow), peak()
    try:
        for seed in range(first, first + count):
            place = folder / str(seed)
            place.mkdir(parents=True)
            try:
                ends[judge(seed, place)] += 1
            except Exception as error:  # whatever it is, its seed reproduces it
                wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                tell(wrong[-1])
            shutil.rmtree(place)
    finally:
        signal.signal(signal.SIGALRM, handler)
    grown = peak() - before
    assert grown < BYTES, f"memory grew by {grown / 1e6:.0f} MB"
    assert not wrong, "\n".join([f"{len(wrong)} of {count} cases", *wrong[:20]])
    return ends


if __name__ == "__main__":
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        found = run(0 if len(sys.argv) < 3 else int(sys.argv[2]), int(sys.argv[1]), Path(place), tell=print)
    print(f"{sum(found.values())} cases in {time.perf_counter() - begun:.0f} s, {found['right']} loads, peak {peak() / 1e6:.0f} MB")  # fmt: skip
    for end, times in found.most_common(40):
        print(f"{times:6} {end}")
