"""The files next to a tokenizer.json that configure it, read as transformers reads them: tokenizer_config.json,
special_tokens_map.json, added_tokens.json and the chat templates.

Source: `tokenization_utils_base.py` and `tokenization_utils_tokenizers.py` of github.com/huggingface/transformers,
version 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdkernels._validation import check, fail, message
from pdkernels.models.files.fields import OP, Fields, shown
from pdkernels.models.files.folder import members, read_fields, read_text
from pdkernels.models.text.chat import ChatTemplate

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_JINJA, _MORE, _PROCESSOR = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_USUAL = "<|endoftext|>"
_DEFAULTS: dict[str, dict[str, str]] = {
    "Qwen2Tokenizer": {"eos_token": _USUAL, "unk_token": _USUAL, "pad_token": _USUAL},
    "GPT2Tokenizer": {"bos_token": _USUAL, "eos_token": _USUAL, "unk_token": _USUAL, "pad_token": ""},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
"""Default special tokens of transformers' classes. An empty string means no token, even if tokenizer.json pads with
one."""
_MISTRAL = ("mistral", "ministral3")  # model types whose class is not used
_CLEAN = "clean_up_tokenization_spaces"


class Added(NamedTuple):
    """A token that is matched in a text before the text is split."""

    content: str
    special: bool = True
    options: tuple[tuple[str, bool], ...] = (("normalized", False),)
    """Arguments of `tokenizers.AddedToken`."""
    listed: bool = False
    """Whether its options come from a file and override those in tokenizer.json."""


class TokenizerFiles(NamedTuple):
    """The settings of a folder for its tokenizer."""

    tokens: dict[str, str]
    """Special tokens by their names in transformers, such as "bos_token"."""
    added: list[Added]
    """Tokens to add to those of tokenizer.json where it lacks them, in this order."""
    split_special_tokens: bool
    clean_up: bool
    """Whether to remove spaces before punctuation from decoded text, unless the model is BPE."""
    chat_template: ChatTemplate | None


def read_tokenizer_files(
    folder: Path, model_type: str = "", byte_level: bool = True, pad_token: str | None = None
) -> TokenizerFiles:
    """The files of a checkpoint's folder.

    `byte_level`: whether tokenizer.json splits text into bytes; `pad_token`: what it pads with. Both decide on tokens
    that no other file names.
    """
    config = read_fields(folder, _CONFIG) or Fields({}, _CONFIG)
    versions = config.get("fast_tokenizer_files", [])
    alone = isinstance(versions, list) and set(map(str, versions)) <= {"tokenizer.json"}
    if not alone:
        fault = message(OP, f"{_CONFIG}: fast_tokenizer_files", "name tokenizer.json alone", shown(versions))
        raise NotImplementedError(fault)
    bpe = config.flag(f"{_CLEAN}_for_bpe_even_though_it_will_corrupt_output", False, null=False)
    clean = config.flag(_CLEAN, False, null=False)
    if bpe and clean:
        raise NotImplementedError(message(OP, f"{_CONFIG}: {_CLEAN}", "be false for BPE", True))
    values, added_tokens = _merged(folder, config)
    tokens = {**_defaults(config, model_type, byte_level), **_named(values)}
    if pad_token is not None and "pad_token" not in config.null:
        tokens.setdefault("pad_token", pad_token)
    ordered = dict.fromkeys(name for name in (*_NAMED, *tokens) if tokens.get(name))
    tokens = {name: tokens[name] for name in ordered}
    added = [*added_tokens]
    contents = {added_token.content for added_token in added_tokens}
    special_tokens = [*tokens.values(), *_extra(values)]
    added += [Added(token) for token in dict.fromkeys(special_tokens) if token not in contents]
    splits = config.flag("split_special_tokens", False)
    return TokenizerFiles(tokens, added, splits, clean, _template(folder, config, tokens))


def _merged(folder: Path, config: Fields) -> tuple[dict[str, Any], list[Added]]:
    """All fields that name special tokens, and the tokens that are listed with ids."""
    values = dict(config.values)
    added_tokens: dict[int, Added] = {}
    label = f"{_CONFIG}: added_tokens_decoder"
    check("added_tokens_decoder" not in config.null, OP, label, "hold an object", "None")
    if "added_tokens_decoder" in values:
        # Files written since 2023, in whose presence the older files are ignored.
        for index, token in config.part("added_tokens_decoder").values.items():
            label = f"{_CONFIG}: added_tokens_decoder: {shown(index)}"
            check(str(index).isdecimal() and len(index) < 10, OP, label, "be named by an id", shown(index))
            added_tokens[int(index)] = _added(token, label)
        return values, [token for _, token in sorted(added_tokens.items())]
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens")
    for name, value in (read_fields(folder, _MAP) or Fields({}, _MAP)).values.items():
        values[name] = value
        if name == "extra_special_tokens" and isinstance(value, list):
            values[name] = [*(extra if isinstance(extra, list) else []), *value]
    special = {*_named(values).values(), *_extra(values)}
    for content, index in (read_fields(folder, _ADDED) or Fields({}, _ADDED)).values.items():
        check(type(index) is int and index >= 0, OP, f"{_ADDED}: {shown(content)}", "be an id", shown(index))
        added_tokens[index] = Added(content, content in special, (("normalized", content not in special),))
    return values, [token for _, token in sorted(added_tokens.items())]


def _added(token: Any, label: str) -> Added:
    allowed = {"content", "special", "normalized", "lstrip", "rstrip", "single_word", "id", "__type"}
    valid = isinstance(token, dict) and isinstance(token.get("content"), str) and set(token) <= allowed
    check(valid, OP, label, "be an object with a content", shown(token))
    flags = {name: token[name] for name in ("normalized", "lstrip", "rstrip", "single_word") if name in token}
    special = token.get("special", False)
    check(all(type(flag) is bool for flag in (*flags.values(), special)), OP, label, "have flags", shown(token))
    return Added(token["content"], special, tuple(flags.items()), True)


def _text(value: Any, label: str) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    check(isinstance(content, str), OP, label, "be a token", shown(value))
    return str(content)


def _named(values: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens with names: the usual ones, those of any other field that ends with "_token", and extra ones with
    names."""
    named_tokens = {name: values[name] for name in _NAMED if values.get(name) is not None}
    for name, value in values.items():
        marked = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
        if name.endswith("_token") and name not in named_tokens and marked:
            named_tokens[name] = value
    extra = values.get("extra_special_tokens")
    named_tokens |= extra if isinstance(extra, dict) else {}
    return {name: _text(value, f"{_CONFIG}: {name}") for name, value in named_tokens.items()}


def _extra(values: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens without names."""
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return
    label = f"{_CONFIG}: extra_special_tokens"
    check(isinstance(extra, list), OP, label, "be a list of tokens", shown(extra))
    for value in extra:
        yield _text(value, label)


def _defaults(config: Fields, model_type: str, byte_level: bool) -> dict[str, str]:
    """The defaults that the class in transformers adds to the files."""
    class_name = str(config.get("tokenizer_class") or "")
    class_name = class_name.removesuffix("Fast")
    if model_type in _MISTRAL:
        return {}
    if model_type == "qwen2" or (model_type == "qwen3" and not class_name):
        class_name = "Qwen2Tokenizer"
    if model_type == "llama" and not class_name:
        class_name = "LlamaTokenizer"
    defaults = {} if class_name == "LlamaTokenizer" and byte_level else _DEFAULTS.get(class_name, {})
    return {name: token for name, token in defaults.items() if name not in config.null}


def _template(folder: Path, config: Fields, tokens: dict[str, str]) -> ChatTemplate | None:
    """The chat templates: from separate files, else from tokenizer_config.json, else from a processor's file."""
    sources: dict[str, str] = {}
    source = read_text(folder, _JINJA)
    if source is not None:
        sources["default"] = source
    for name in members(folder, _MORE, ".jinja"):
        source = read_text(folder, f"{_MORE}/{name}.jinja")
        if source is not None:
            sources[name] = source
    if sources:
        only_default = set(sources) == {"default"}
        where = _JINJA if only_default else f"{_JINJA} and {_MORE}"
        return ChatTemplate(sources["default"] if only_default else sources, tokens, where)
    where = f"{_CONFIG}: chat_template"
    template = config.get("chat_template")
    if template is None:
        processor = read_fields(folder, _PROCESSOR)
        where, template = _PROCESSOR, None if processor is None else processor.get("chat_template")
    if template is None:
        return None
    if isinstance(template, list):
        for item in template:
            valid = isinstance(item, dict) and isinstance(item.get("name"), str) and "template" in item
            check(valid, OP, where, "be a list of templates with names", shown(item))
        template = {item["name"]: item["template"] for item in template}
    for source in template.values() if isinstance(template, dict) else [template]:
        if not isinstance(source, str):
            fail(OP, where, "be text", shown(source))
    return ChatTemplate(template, tokens, where)
