"""What a file is that is taken for another one, by its first bytes."""

from __future__ import annotations

from pathlib import Path

from pdkernels._validation import fail
from pdkernels.models.files.fields import OP

FROM_TORCH = "Load it with torch.load(weights_only=True) and write it with safetensors.torch.save_file."

_KINDS = {
    b"version https://git-lfs": ("a pointer of Git LFS", "`git lfs pull` in its folder fetches the file."),
    b"<!doctype html": ("a web page", "Download the file itself."),
    b"<html": ("a web page", "Download the file itself."),
    b"gguf": ("a GGUF file", "Give it a name that ends in .gguf."),
    b"pk\x03\x04": ("a file of torch.save or a zip archive, which can run code", FROM_TORCH),
}
_SAFETENSORS = "a safetensors file", "Name the folder that holds it and its config.json."


def kind_of(path: Path) -> tuple[str, str] | None:
    """What a file is and what helps; None if it is nothing that is known here.

    >>> kind_of(Path("missing.gguf")) is None
    True
    """
    try:
        with path.open("rb") as file:
            start, size = file.read(32), path.stat().st_size
    except OSError:
        return None
    for mark, told in _KINDS.items():
        if start.lower().startswith(mark):
            return told
    header = int.from_bytes(start[:8], "little")
    return _SAFETENSORS if start[8:9] == b"{" and 2 <= header <= size - 8 else None


def refuse_mistaken(path: Path, label: str, expectation: str) -> None:
    """Refuses a file that is something else than expected, with what it is. The caller knows that it is not what it should be."""
    kind = kind_of(path)
    if kind is not None and kind[0] not in expectation:
        fail(OP, label, expectation, *kind)
