"""The end tokens of a GGUF file: those that it names, and those that llama.cpp b11549 recognises by their text.

Source: the end-of-generation tokens of `src/llama-vocab.cpp` in github.com/ggml-org/llama.cpp, whose lists grow. Where
several tokens have texts of one kind, that program takes any of them; here it is the first.
"""

from __future__ import annotations

from typing import NamedTuple

from pdkernels.models.files.gguf_keys import Keys

NORMAL, CONTROL, USER = 1, 3, 4

_DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # with a wide bar and low blocks
_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", _DEEPSEEK, "<end_of_utterance>")  # fmt: skip
_TEXT = (*_TURN, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~[")  # fmt: skip


def _around(role: str) -> tuple[str, ...]:
    return f"<|fim_{role}|>", f"<fim-{role}>", f"<fim_{role}>", f"<|code_{role}|>", f"<|{role}|>"


_BY_TEXT = {
    "eot": _TURN,
    "eom": ("<|eom_id|>",),
    "fim_pre": (*_around("prefix"), "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
    "fim_suf": (*_around("suffix"), "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
    "fim_mid": (*_around("middle"), "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""The texts by which tokens are recognised if no field names them."""
_OLDER = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_RENDERED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Marks(NamedTuple):
    """End tokens and corrected token types of a file."""

    ends: tuple[int, ...]
    """Tokens that end a text, a turn or a message; those named by the file come first."""
    kinds: dict[int, int]
    """Token types that replace those in the file."""


def marks_of(fields: Keys, vocab_size: int) -> Marks:
    """The end tokens by llama.cpp's rule, and the token types that it changes."""
    tokens = fields.texts("tokenizer.ggml.tokens")
    index = {token: number for number, token in reversed(list(enumerate(tokens)))}
    roles: dict[str, int] = {}
    kinds: dict[int, int] = {}
    for role in ("eos", *_BY_TEXT):
        named = fields.token(f"tokenizer.ggml.{role}_token_id", vocab_size)
        if named is None and role in _OLDER:
            named = fields.token(f"tokenizer.ggml.{_OLDER[role]}_token_id", vocab_size)
        if named is None:
            candidates = [index[text] for text in _BY_TEXT.get(role, ()) if text in index]
            named = min(candidates, default=None)
            kinds |= {} if named is None else {named: CONTROL}
        if named is not None:
            roles[role] = named
    end_ids = sorted(index[text] for text in _TEXT if text in index)
    kinds |= dict.fromkeys(end_ids, CONTROL)
    kinds |= {index[text]: USER for text in _RENDERED if text in index}
    ends = dict.fromkeys([*(roles[role] for role in _ENDS if role in roles), *end_ids])
    texts = {tokens[end]: end for end in ends if end < len(tokens)}
    calls = "<|call|>" in texts or "<|calls|>" in texts
    if "<|end|>" in texts and calls and ("<|return|>" in texts or "<|flush|>" in texts):
        # In these formats the token ends each of several messages, and another token ends the text.
        kinds[texts["<|end|>"]] = USER
        del ends[texts["<|end|>"]]
    if "</s>" in texts and ("<|tool_response>" in texts or "<|plamo:eos|>" in texts):
        kinds[texts["</s>"]] = NORMAL
        del ends[texts["</s>"]]
    return Marks(tuple(ends), kinds)
