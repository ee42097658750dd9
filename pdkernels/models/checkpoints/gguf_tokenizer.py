"""The tokenizer of a GGUF file: byte-level BPE from its tokens and merges, or pieces with scores
(`gguf_sentencepiece`), through the optional library `tokenizers`.

The file only names the pre-tokenizer, which splits text before merges apply (`tokenizer.ggml.pre`). Source of the
meaning of the names: src/llama-vocab.cpp of github.com/ggml-org/llama.cpp, and the tokenizer.json files of the models.
"""

from __future__ import annotations

import json
from typing import Any

from pdkernels._validation import check, fail, message
from pdkernels.models.checkpoints import gguf_sentencepiece
from pdkernels.models.checkpoints.gguf_ends import CONTROL, NORMAL, USER, Marks
from pdkernels.models.files.fields import OP, shown
from pdkernels.models.files.gguf_keys import Keys
from pdkernels.models.text.chat import ChatTemplate
from pdkernels.models.text.tokenizers import JsonTokenizer, library, naming

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE = {
    "smollm": "smollm",
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    "lfm2": "llama3",
    "qwen35": "qwen35",
    "dbrx": "dbrx",
    "gpt-4o": "gpt-4o",
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), "bailingmoe"),
}
_WORD_BEGIN, _WORD_END = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# Words end where capitals follow small letters, and keep what an apostrophe appends.
_GPT_4O = "|".join(
    [
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_WORD_BEGIN}]{first}[{_WORD_END}]{rest}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for first, rest in ("*+", "+*")
        ),
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
# A contraction is a word of its own, and so is a digit.
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_UNKNOWN, _UNUSED = 2, 5
_WHOLE = "llama3"
"""Takes a piece that is a token as it is."""
_NORMALIZED = ("qwen2", "qwen35")


def tokenizer(fields: Keys, vocab_size: int, marks: Marks) -> JsonTokenizer | None:
    """The tokenizer from the file's fields, None if it names no tokens."""
    if "tokenizer.ggml.tokens" not in fields.values:
        return None
    model = fields.get("tokenizer.ggml.model")
    pieces = model in ("llama", "gemma4")
    for field, known in (("model", ["gpt2", "llama", "gemma4"]), *([] if pieces else [("pre", list(_PRE))])):
        value = fields.get(f"tokenizer.ggml.{field}")
        if value not in known:
            label = f"{fields.where}: tokenizer.ggml.{field}"
            raise NotImplementedError(message(OP, label, f"be one of {', '.join(known)}", shown(value)))
    tokens = _texts(fields, "tokens")
    label = f"{fields.where}: tokenizer.ggml."
    enough = len(tokens) <= vocab_size
    check(enough, OP, f"{label}tokens", f"be as many as the embedding has rows ({vocab_size}), or fewer", len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    check(len(vocabulary) == len(tokens), OP, f"{label}tokens", "differ from each other", "the same one twice")
    pairs = [] if model == "llama" else [tuple(merge.split(" ")) for merge in _texts(fields, "merges")]
    known_pairs = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs)
    check(known_pairs, OP, f"{label}merges", "be pairs of tokens that make another one", "something else")
    kinds = fields.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else kinds
    aligned = isinstance(kinds, list) and len(kinds) == len(tokens)
    check(aligned, OP, f"{label}token_type", "be one number for each token", shown(kinds))
    kinds = [marks.kinds.get(index, kind) for index, kind in enumerate(kinds)]
    with naming(fields.where, "hold a tokenizer that the library `tokenizers` takes"):
        if pieces:
            merges = pairs if model == "gemma4" else None
            tokenizer = gguf_sentencepiece.assemble(fields, vocabulary, kinds, library(fields.where), merges)
        else:
            tokenizer = _assemble(
                _PRE[fields.get("tokenizer.ggml.pre")], vocabulary, pairs, kinds, library(fields.where)
            )
        _begin(tokenizer, fields, tokens, library(fields.where))
    begin, template = fields.token("tokenizer.ggml.bos_token_id", len(tokens)), _template(fields, tokens)
    return JsonTokenizer.of(tokenizer, fields.where, end_tokens=marks.ends, chat_template=template, bos_token_id=begin)


def _texts(fields: Keys, name: str) -> list[str]:
    return fields.texts(f"tokenizer.ggml.{name}")


def _assemble(pre: str, vocabulary: dict[str, int], pairs: list[Any], kinds: list[int], tokenizers: Any) -> Any:
    added = tokenizers.AddedToken
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == _WHOLE))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, tokenizers)
    if pre in _NORMALIZED:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # Control tokens are left out of decoded text, user-defined ones are not; both are matched whole, before text is
    # split.
    by_kind = list(zip(vocabulary, kinds))
    tokenizer.add_special_tokens(
        [added(token, special=True, normalized=False) for token, kind in by_kind if kind in (_UNKNOWN, CONTROL)]
    )
    tokenizer.add_tokens([added(token, normalized=False) for token, kind in by_kind if kind == USER])
    return tokenizer


def _pre_tokenizer(pre: str, tokenizers: Any) -> Any:
    cut = tokenizers.pre_tokenizers
    if pre == "smollm":
        parts = [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        pattern = {"gpt-4o": _GPT_4O, "bailingmoe": _BAILING}.get(pre, _LLAMA3)
        if pre in ("qwen2", "qwen35"):
            pattern = pattern.replace(r"\p{N}{1,3}", r"\p{N}")
        if pre == "qwen35":  # combining marks belong to words
            pattern = pattern.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
                r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
            )
        parts = [
            cut.Split(tokenizers.Regex(pattern), "isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    return cut.Sequence(parts)


def fields_of_tokenizer(tokenizer: JsonTokenizer, rows: int) -> dict[str, Any]:
    """The fields of a tokenizer of byte-level BPE, the inverse of `tokenizer`; ids up to `rows` without a token are
    unused."""
    described, op = tokenizer.described(), "models.save_gguf"
    model, added = described["model"], described["added_tokens"]
    pre = _name_of(described, library("models.save_gguf"))
    if model["type"] != "BPE" or pre is None:
        expectation = "be byte-level BPE with a pre-tokenizer that GGUF has a name for"
        raise NotImplementedError(message(op, "model.tokenizer", expectation, f"{model['type']} with another one"))
    texts = {index: text for text, index in model["vocab"].items()} | {token["id"]: token["content"] for token in added}
    kinds = dict.fromkeys(texts, NORMAL) | {token["id"]: CONTROL if token["special"] else USER for token in added}
    count = max(rows, max(texts) + 1)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    entries: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts.get(index, f"[PAD{index}]") for index in range(count)],
        "token_type": [kinds.get(index, _UNUSED) for index in range(count)],
        "merges": merges,
    }
    begins = tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False)
    if begins and tokenizer.encode("a") != [tokenizer.bos_token_id, *tokenizer.encode("a", add_special_tokens=False)]:
        raise NotImplementedError(message(op, "model.tokenizer", "add its BOS token alone", "something else"))
    entries |= {} if tokenizer.bos_token_id is None else {"bos_token_id": tokenizer.bos_token_id}
    entries["add_bos_token"] = begins
    fields = {f"tokenizer.ggml.{name}": value for name, value in entries.items() if value != []}
    template = tokenizer.chat_template
    if template is not None and isinstance(template.source, str):
        fields["tokenizer.chat_template"] = template.source
    return fields


def _name_of(described: dict[str, Any], tokenizers: Any) -> str | None:
    """The first name of GGUF for what cuts texts; None: it has none."""
    normalized, whole = described["normalizer"] is not None, bool(described["model"].get("ignore_merges"))
    for name, pre in _PRE.items():
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())
        empty.pre_tokenizer = _pre_tokenizer(pre, tokenizers)
        same = json.loads(empty.to_str())["pre_tokenizer"] == described["pre_tokenizer"]
        if same and normalized == (pre in _NORMALIZED) and whole == (pre == _WHOLE):
            return name
    return None


def _begin(tokenizer: Any, fields: Keys, tokens: list[str], tokenizers: Any) -> None:
    """Prepends the BOS token to a text if the model was trained with it."""
    where = f"{fields.where}: tokenizer.ggml"
    if fields.flag("tokenizer.ggml.add_eos_token", None):
        raise NotImplementedError(message(OP, f"{where}.add_eos_token", "be false", True))
    if not fields.flag("tokenizer.ggml.add_bos_token", None):
        return
    bos = fields.token("tokenizer.ggml.bos_token_id", len(tokens))
    if bos is None:
        fail(OP, where, "name bos_token_id, since it begins every text", "none")
    special = [(tokens[bos], bos)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[tokens[bos], "$A"], special_tokens=special
    )


def _template(fields: Keys, tokens: list[str]) -> ChatTemplate | None:
    """The templates of the file. The fields of templates other than the default end with a name."""
    main = "tokenizer.chat_template"
    found = {
        name.removeprefix(f"{main}."): value for name, value in fields.values.items() if name.startswith(f"{main}.")
    }
    if main in fields.values:
        found["default"] = fields.get(main)
    for name in fields.texts("tokenizer.chat_templates"):
        check(name in found, OP, f"{fields.where}: tokenizer.chat_templates", "name templates of the file", shown(name))
    for name, value in found.items():
        label = main if name == "default" else f"{main}.{name}"
        check(isinstance(value, str), OP, f"{fields.where}: {label}", "be text", shown(value))
    if not found:
        return None
    named = {
        name: fields.token(f"tokenizer.ggml.{long}_token_id", len(tokens))
        for name, long in {"pad": "padding", "unk": "unknown", "sep": "seperator"}.items()
    }
    named |= {
        name: fields.token(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos", "cls", "mask")
    }
    special_tokens = {f"{name}_token": tokens[token] for name, token in named.items() if token is not None}
    sources = found["default"] if set(found) == {"default"} else found
    return ChatTemplate(sources, special_tokens, f"{fields.where}: {main}")
