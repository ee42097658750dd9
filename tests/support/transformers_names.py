"""What the installed transformers calls a model's cache: `model(tokens, **{CACHE: cache})`."""

from __future__ import annotations

import transformers

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
