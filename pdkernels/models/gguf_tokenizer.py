"""The tokenizer of a GGUF file: byte-level BPE from its tokens and merges, through the optional library `tokenizers`.

How text is split before merges apply is only named in the file (`tokenizer.ggml.pre`). Source of the names' meaning:
src/llama-vocab.cpp of github.com/ggml-org/llama.cpp, and the tokenizer.json files of the models.
"""

from __future__ import annotations

from typing import Any

from pdkernels._validation import check, fail, message
from pdkernels.models.chat import ChatTemplate
from pdkernels.models.fields import OP, Fields, shown
from pdkernels.models.tokenizers import JsonTokenizer, library, naming

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE = {
    "smollm": "smollm",
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
_UNKNOWN, _CONTROL, _USER = 2, 3, 4


def end_tokens(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message."""
    found = [fields.token(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def tokenizer(fields: Fields, vocab_size: int, ends: tuple[int, ...]) -> JsonTokenizer | None:
    """The tokenizer from the file's fields, None if it names no tokens."""
    if "tokenizer.ggml.tokens" not in fields.values:
        return None
    for field, known in (("model", ["gpt2"]), ("pre", list(_PRE))):
        value = fields.get(f"tokenizer.ggml.{field}")
        if value not in known:
            label = f"{fields.where}: tokenizer.ggml.{field}"
            raise NotImplementedError(message(OP, label, f"be one of {', '.join(known)}", shown(value)))
    tokens, merges = _texts(fields, "tokens"), _texts(fields, "merges")
    label = f"{fields.where}: tokenizer.ggml."
    fits = len(tokens) <= vocab_size
    check(fits, OP, f"{label}tokens", f"be as many as the embedding has rows ({vocab_size}), or fewer", len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    check(len(vocabulary) == len(tokens), OP, f"{label}tokens", "differ from each other", "the same one twice")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    known_pairs = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs)
    check(known_pairs, OP, f"{label}merges", "be pairs of tokens that make another one", "something else")
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    fits = isinstance(kinds, list) and len(kinds) == len(tokens)
    check(fits, OP, f"{label}token_type", "be one number for each token", shown(kinds))
    with naming(fields.where, "hold a tokenizer that the library `tokenizers` takes"):
        made = _assemble(_PRE[fields.get("tokenizer.ggml.pre")], vocabulary, pairs, kinds, library(fields.where))
        _begin(made, fields, tokens, library(fields.where))
    return JsonTokenizer.of(made, fields.where, end_tokens=ends, chat_template=_template(fields, tokens))


def _texts(fields: Fields, name: str) -> list[str]:
    values = fields.get(f"tokenizer.ggml.{name}", [])
    fits = isinstance(values, list) and all(isinstance(value, str) for value in values)
    check(fits, OP, f"{fields.where}: tokenizer.ggml.{name}", "be a list of strings", shown(values))
    return list(values)


def _assemble(pre: str, vocabulary: dict[str, int], pairs: list[Any], kinds: list[int], tokenizers: Any) -> Any:
    cut, added = tokenizers.pre_tokenizers, tokenizers.AddedToken
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama3"))
    if pre == "smollm":
        parts = [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        pattern = _LLAMA3 if pre == "llama3" else _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
        parts = [
            cut.Split(tokenizers.Regex(pattern), "isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if pre == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = cut.Sequence(parts)
    made.decoder = tokenizers.decoders.ByteLevel()
    # Control tokens are left out of decoded text, user-defined ones are not; both are matched whole, before text is split.
    by_kind = list(zip(vocabulary, kinds))
    made.add_special_tokens(
        [added(token, special=True, normalized=False) for token, kind in by_kind if kind in (_UNKNOWN, _CONTROL)]
    )
    made.add_tokens([added(token, normalized=False) for token, kind in by_kind if kind == _USER])
    return made


def _begin(made: Any, fields: Fields, tokens: list[str], tokenizers: Any) -> None:
    """Prepends the beginning-of-text token to a text if the model was trained so."""
    where = f"{fields.where}: tokenizer.ggml"
    if fields.flag("tokenizer.ggml.add_eos_token", False):
        raise NotImplementedError(message(OP, f"{where}.add_eos_token", "be false", True))
    begins = _PRE[fields.get("tokenizer.ggml.pre")] == "llama3"
    if not fields.flag("tokenizer.ggml.add_bos_token", begins):
        return
    bos = fields.token("tokenizer.ggml.bos_token_id", len(tokens))
    if bos is None:
        fail(OP, where, "name bos_token_id, since it begins every text", "none")
    special = [(tokens[bos], bos)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=[tokens[bos], "$A"], special_tokens=special)


def _template(fields: Fields, tokens: list[str]) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    if source is None:
        return None
    named = {
        name: fields.token(f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "padding", "unknown")
    }
    longer = {"padding": "pad", "unknown": "unk"}
    words = {f"{longer.get(name, name)}_token": tokens[token] for name, token in named.items() if token is not None}
    return ChatTemplate(source, words, f"{fields.where}: tokenizer.chat_template")
