"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdkernels.models.files.layout import DTYPES

MAX_THREADS = 1024
"""Of --threads: OpenMP ends the process where the system has no room for more."""

_DRAFTER = "the name or folder of an EAGLE-3 or DFlash head for the model, or the name or path of a small model with its vocabulary"
_DTYPE = f"Dtype of the weights: {', '.join(DTYPES)}; by default the checkpoint's."
_PACKED = (
    "Keep quantised matrices as they are stored, or make numbers of them; by default kept on the CPU where possible."
)
_CACHE_DTYPE = "Dtype of the KV cache: int8, for about half the memory of 16 bits, or for a model in float32 on a CPU float16; by default the model's."
_THREADS = "CPU threads; by default one for a tiny model, else torch's default."
_METHOD = "by default the one the model was trained for, else 'jacobi' with prompt lookup where that pays."

Model = Annotated[str, typer.Option(help="Name of a model, a checkpoint's folder, or a .gguf file.")]
Method = Annotated[str | None, typer.Option(help=f"Decoding method; {_METHOD}")]
DefaultMethod = Annotated[str | None, typer.Option(help=f"Decoding method of requests that name none; {_METHOD}")]
Drafter = Annotated[str | None, typer.Option(help=f"A drafter: {_DRAFTER}.")]
Adapter = Annotated[
    str | None, typer.Option(help="Folder of a PEFT LoRA adapter, which stays apart from the model's weights.")
]
Device = Annotated[str, typer.Option(help="Device of the model: cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help=_DTYPE)]
Packed = Annotated[bool | None, typer.Option(help=_PACKED)]
CacheDtype = Annotated[str | None, typer.Option(help=_CACHE_DTYPE)]
Threads = Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help=_THREADS)]
_ASSIGNMENT = "Any other option of the method, such as block_size=16; may be given several times."
Assignments = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help=_ASSIGNMENT)]

_SCHEMA = "A JSON schema, or a file with one: the text is a value that satisfies it."
_REGEX = "A regular expression that the whole text matches."
_CHOICE = "A text that may be written; given several times, the text is one of them."
_EBNF = "A file with a grammar in Lark's EBNF, whose rule `start` the text follows."
Schema = Annotated[str | None, typer.Option(metavar="SCHEMA", help=_SCHEMA)]
_KEY_ORDER = "Of a schema's properties: as it names them, or in any order (at most 8 in an object)."
_SPACES = (
    "Of JSON: compact, single, any, or a regular expression; by default at most one space after commas and colons."
)
_DEPTH = (
    "How often a reference of a schema, or a rule of a grammar, may be inside itself: a number, by default 3, or any."
)
KeyOrder = Annotated[str | None, typer.Option(metavar="schema|any", help=_KEY_ORDER)]
Whitespace = Annotated[str | None, typer.Option(metavar="TEXT", help=_SPACES)]
Depth = Annotated[str | None, typer.Option(metavar="NUMBER|any", help=_DEPTH)]
Regex = Annotated[str | None, typer.Option(metavar="PATTERN", help=_REGEX)]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help=_CHOICE)]
Ebnf = Annotated[Path | None, typer.Option(dir_okay=False, help=_EBNF)]
