"""The tokenizer of a GGUF file whose tokens are pieces of SentencePiece with scores (Gemma): BPE over characters, which
merges the pair with the best score first.

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


def assemble(fields: Keys, vocabulary: dict[str, int], kinds: list[int], tokenizers: Any) -> Any:
    """A tokenizer of the library from the file's tokens, in their order, and their scores."""
    where = f"{fields.where}: tokenizer.ggml"
    if fields.flag("tokenizer.ggml.add_space_prefix", None):
        raise NotImplementedError(message(OP, f"{where}.add_space_prefix", "be false", True))
    tokens, stored_scores = list(vocabulary), fields.get("tokenizer.ggml.scores")
    scores = list(stored_scores) if isinstance(stored_scores, (list, Kept)) else []
    valid = len(scores) == len(tokens) and all(type(score) is float and math.isfinite(score) for score in scores)
    check(valid, OP, f"{where}.scores", f"be a number for each of {len(tokens)} tokens", shown(stored_scores))
    longest = max(map(len, tokens), default=0)
    check(longest <= _LONGEST, OP, f"{where}.tokens", f"have at most {_LONGEST} characters", longest)
    result = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores, kinds, vocabulary),
            byte_fallback=_BYTE in kinds,
            unk_token=next((token for token, kind in zip(tokens, kinds) if kind == _UNKNOWN), None),
            fuse_unk=True,
        )
    )
    result.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
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
