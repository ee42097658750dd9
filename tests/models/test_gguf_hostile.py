"""GGUF files whose metadata would fill memory: refused or read within 2 seconds and 3 times the file's size."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pdkernels import models
from tests.support import gguf_files as files
from tests.support.forks import forked

pytest.importorskip("gguf")


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def listed(key: bytes, kind: int, count: int, items: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + items


def strings(size: int, word: bytes) -> bytes:
    count = size // (8 + len(word))
    return listed(b"tokenizer.ggml.tokens", 8, count, text(word) * count)


def many(size: int, made: Callable[[int], bytes], each: int) -> list[bytes]:
    return [made(number) for number in range(size // each)]


EMOJI = "😀".encode()
HOSTILE: dict[str, Callable[[int], list[bytes]]] = {
    "empty strings": lambda size: [strings(size, b"")],
    "tiny strings": lambda size: [strings(size, b"ab")],
    "strings with one wide character": lambda size: [strings(size, b"a" * 15 + EMOJI)],
    "as many as are read": lambda size: [strings(min(size, 16 << 20), b"abcdefg" + bytes(1)), b""][:1],
    "one long string": lambda size: [text(b"tokenizer.chat_template") + struct.pack("<I", 8) + text(EMOJI + b"a" * size)],
    "many long strings": lambda size: many(size, lambda n: text(b"t%d" % n) + struct.pack("<I", 8) + text(EMOJI + b"a" * (1 << 20)), 1 << 20),
    "bytes": lambda size: [listed(b"tokenizer.ggml.token_type", 0, size, bytes(size))],
    "numbers": lambda size: [listed(b"tokenizer.ggml.scores", 6, size // 4, struct.pack("<f", 1.5) * (size // 4))],
    "kinds": lambda size: [listed(b"tokenizer.ggml.token_type", 5, size // 4, struct.pack("<i", 70000) * (size // 4))],
    "arrays of numbers": lambda size: many(size, lambda n: listed(b"n%d" % n, 0, 4096, bytes(range(256)) * 16), 4096),
    "short arrays": lambda size: many(size, lambda n: listed(b"n%d" % n, 12, 16, struct.pack("<d", n) * 16), 160),
    "arrays inside arrays": lambda size: [listed(b"n", 9, size // 12, struct.pack("<IQ", 9, 1) * (size // 12))],
    "fields": lambda size: many(size, lambda n: text(b"field%d" % n) + struct.pack("<IB", 7, 1), 20),
    "one field again and again": lambda size: [text(b"a") + struct.pack("<IB", 7, 1)] * (size // 14),
}  # fmt: skip


def hostile(path: Path, name: str, size: int) -> None:
    fields = HOSTILE[name](size)
    count = min(len(fields), 1 << 16)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, count + 1))
        file.write(text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"))
        file.write(b"".join(fields[:count]))
        file.truncate(max(file.tell(), size))


LOADER = """
import resource, sys, time
import gguf, gguf.quants
from pdkernels import models
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
try:
    models.load(sys.argv[1])
    words = "right"
except (ValueError, NotImplementedError) as error:
    words = str(error)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown * 1024, time.process_time() - start, words[:200].encode("ascii", "replace").decode())
"""


def check(path: Path, size: int) -> None:
    answer = forked(LOADER, path)
    assert answer.returncode == 0, answer.stderr[-2000:]
    grown, seconds, words = answer.stdout.split(" ", 2)
    assert words.startswith("pdkernels.models.load: m.gguf"), words
    assert float(seconds) < 2, (seconds, words)
    # What was mapped counts as well.
    assert int(grown) < 3 * size, (int(grown) / size, words)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [16 << 20, 128 << 20])
@pytest.mark.slow
def test_metadata_is_read_within_bounds(name: str, size: int, tmp_path: Path) -> None:
    hostile(tmp_path / "m.gguf", name, size)
    check(tmp_path / "m.gguf", size)


@pytest.mark.parametrize("name", ["tiny strings", "kinds"])
def test_metadata_is_read_within_bounds_in_short(name: str, tmp_path: Path) -> None:
    hostile(tmp_path / "m.gguf", name, 16 << 20)
    check(tmp_path / "m.gguf", 16 << 20)


def test_lists_that_stay_in_the_file(tmp_path: Path) -> None:
    """A vocabulary is read where it is used."""
    tokens = [f"token {number}" for number in range(40)]
    files.write_gguf(tmp_path / "m.gguf", files.LLAMA, tokens={"tokens": tokens, "eos_token_id": 5})
    with pytest.raises(
        NotImplementedError, match=r"m\.gguf: tokenizer\.ggml\.model must be one of gpt2, llama, gemma4, got None"
    ):
        models.load(tmp_path / "m.gguf")
    files.write_gguf(tmp_path / "m.gguf", files.LLAMA, tokens={"tokens": [*tokens, "x"], "eos_token_id": 5})
    with pytest.raises(ValueError, match=r"tokens must be as many as the embedding has rows \(40\), or fewer, got 41"):
        models.load(tmp_path / "m.gguf")


def test_yarn_extends_the_context_of_a_file(tmp_path: Path) -> None:
    more = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    files.write_gguf(tmp_path / "m.gguf", files.LLAMA, more=more)
    assert models.load(tmp_path / "m.gguf").config.max_positions == 128
