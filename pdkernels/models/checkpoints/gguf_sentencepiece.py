"""The tokenizer of a GGUF file whose tokens are pieces of SentencePiece: BPE over characters, which merges the pair with
the best score first (Gemma 2 and 3), or in the order of the file's merges (Gemma 4).

Sources: `llm_tokenizer_spm` in src/llama-vocab.cpp of github.com/ggml-org/llama.cpp; transformers, integrations/ggml.py.
"""

from __future__ import annotations

import math
from typing import Any

from pdkernels._validation import check, message
from pdkernels.models.checkpoints.gguf_ends import CONTROL, USER
from pdkernels.models.files.fields import OP, Kept, shown
from pdkernels.models.files.gguf_keys import Keys

SPACE = "\u2581"
_LONGEST = 256  # characters of a token; pieces of SentencePiece have 16
_UNKNOWN, _BYTE = 2, 6


def assemble(
    fields: Keys, vocabulary: dict[str, int], kinds: list[int], tokenizers: Any, merges: list[Any] | None = None
) -> Any:
    """A tokenizer of the library from the file's tokens, in their order, and their scores, or its `merges`. With these,
    none reaches over the end of a line, and line ends that are a token are one; of more than any token has, llama.cpp makes
    single ones."""
    where = f"{fields.where}: tokenizer.ggml"
    if fields.flag("tokenizer.ggml.add_space_prefix", None):
        raise NotImplementedError(message(OP, f"{where}.add_space_prefix", "be false", True))
    tokens = list(vocabulary)
    longest = max(map(len, tokens), default=0)
    check(longest <= _LONGEST, OP, f"{where}.tokens", f"have at most {_LONGEST} characters", longest)
    result = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, _scores(fields, len(tokens)), kinds, vocabulary) if merges is None else merges,
            byte_fallback=_BYTE in kinds,
            unk_token=next((token for token, kind in zip(tokens, kinds) if kind == _UNKNOWN), None),
            fuse_unk=True,
        )
    )
    result.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
    if merges is not None:
        lines = tokenizers.Regex(r"\n+")
        result.pre_tokenizer = tokenizers.pre_tokenizers.Split(lines, "isolated")
        kinds = [USER if token and not token.strip("\n") else kind for token, kind in zip(tokens, kinds, strict=True)]
    decoders = tokenizers.decoders
    result.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added, special, user_defined = tokenizers.AddedToken, [], []
    for token, kind in zip(tokens, kinds):
        if kind in (_UNKNOWN, CONTROL):
            special.append(added(token, special=True, normalized=False))
        elif kind == USER:
            user_defined.append(added(token, normalized=False))
    result.add_special_tokens(special)
    result.add_tokens(user_defined)
    return result


def _scores(fields: Keys, count: int) -> list[float]:
    stored = fields.get("tokenizer.ggml.scores")
    scores = list(stored) if isinstance(stored, (list, Kept)) else []
    valid = len(scores) == count and all(type(score) is float and math.isfinite(score) for score in scores)
    label = f"{fields.where}: tokenizer.ggml.scores"
    check(valid, OP, label, f"be a number for each of {count} tokens", shown(stored))
    return scores


def _merges(
    tokens: list[str], scores: list[float], kinds: list[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, by its score, the best first; of those that make the same one, the one
    with the earlier pieces."""
    pieces = {token for token, kind in zip(tokens, kinds) if kind not in (_UNKNOWN, CONTROL, USER, _BYTE)}
    merges = []
    for token in pieces:
        for at in range(1, len(token)):
            first, second = token[:at], token[at:]
            if first in pieces and second in pieces:
                merges.append((-scores[vocabulary[token]], vocabulary[first], vocabulary[second], first, second))
    merges.sort()
    return [(first, second) for *_, first, second in merges]
