"""The accepted forms of prompts, and their ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import torch

from pdkernels._validation import check, check_type, fail


class Ids(Protocol):
    """A NumPy array of integers, typed without importing NumPy."""

    @property
    def ndim(self) -> int: ...

    @property
    def itemsize(self) -> int: ...

    def tolist(self) -> Any: ...


_OP = "decoding.generate"

Prompt: TypeAlias = "str | torch.Tensor | Ids | Sequence[int] | Sequence[Mapping[str, Any]]"
Batch: TypeAlias = "Sequence[Prompt]"
Prompts: TypeAlias = "Prompt | Batch | Mapping[str, Any]"

_FORMS = "be text, a 1-D tensor, a list of ints or messages"
_AS_LIST = "Give a batch as a list of 1-D tensors."


def token_lists(model: Any, prompt: Any, vocabulary: int) -> tuple[list[list[int]], bool]:
    """Each prompt as a list of ids, and whether it was a single prompt, not a batch."""
    if isinstance(prompt, Mapping):
        prompts, single = _of_tokenizer(prompt)
    else:
        is_one_list = _is_list(prompt) and (all(map(_is_id, prompt)) or _is_chat(prompt))
        single = isinstance(prompt, str) or _is_array(prompt) or is_one_list
        if not single:
            check_type(
                _is_list(prompt),
                _OP,
                "prompt",
                "be text, token ids, messages or a list of these",
                type(prompt).__name__,
            )
        single = single and not (_is_list(prompt) and len(prompt) == 0)
        prompts = [_token_list(model, item) for item in ([prompt] if single else prompt)]
    check(len(prompts) > 0, _OP, "prompt", "hold at least one token", "an empty list")
    for ids in prompts:
        check(
            len(ids) > 0,
            _OP,
            "prompt",
            "hold at least one token",
            "an empty prompt",
            "Start from a beginning-of-text token if the model has one.",
        )
        low, high = min(ids), max(ids)
        check(low >= 0 and high < vocabulary, _OP, "prompt", f"hold ids in 0 .. {vocabulary - 1}", f"{low} .. {high}")
    return prompts, single


def _is_id(value: Any) -> bool:
    """Whether it is a Python or NumPy int."""
    if type(value) is int:
        return True
    if isinstance(value, (bool, torch.Tensor)) or getattr(value, "ndim", 0) > 0:
        return False
    return isinstance(value, SupportsIndex) and getattr(getattr(value, "dtype", None), "kind", "i") in "iu"


def _is_numpy(value: object) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "dtype") and not isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (_is_numpy(value) and value.ndim > 0)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_chat(prompt: Any) -> bool:
    return _is_list(prompt) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _token_list(model: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        expectation = "be token ids (the model has no tokenizer)"
        remedy = "Encode it, or give the model its tokenizer: tokenizer.json, in a folder."
        check(model.tokenizer is not None, _OP, "prompt", expectation, "a str", remedy)
        return list(model.tokenizer.encode(prompt))
    if _is_chat(prompt):
        encode = getattr(model.tokenizer, "encode_chat", None)
        if encode is None:
            expectation = "be no messages (the model has no chat template)"
            fail(_OP, "prompt", expectation, "a chat", "Write the prompt as text.")
        return list(encode(prompt))
    if _is_array(prompt):
        _check_integers("prompt", prompt)
        is_single = prompt.ndim == 1 or (prompt.ndim == 2 and prompt.shape[0] == 1)
        check(is_single, _OP, "prompt", "be a 1-D tensor", f"shape {tuple(prompt.shape)}", _AS_LIST)
        ids: list[int] = prompt.reshape(-1).tolist()
        return ids
    check_type(_is_list(prompt) and all(map(_is_id, prompt)), _OP, "prompt", _FORMS, type(prompt).__name__)
    return [operator.index(item) for item in prompt]


def _check_integers(name: str, array: Any) -> None:
    masks = name == "attention_mask"  # whose ones may be true
    if isinstance(array, torch.Tensor):
        integral = not (array.is_floating_point() or array.is_complex() or (array.dtype == torch.bool and not masks))
    else:
        integral = array.dtype.kind in ("iub" if masks else "iu")
    expectation = "be a tensor of integers or bools" if masks else "be an integer tensor"
    check_type(integral, _OP, name, expectation, array.dtype)
    if isinstance(array, torch.Tensor):
        actual = "one on the meta device" if array.is_meta else f"one in the layout {array.layout}"
        check(array.layout == torch.strided and not array.is_meta, _OP, name, "be a dense tensor with numbers", actual)


def _of_tokenizer(encoding: Mapping[str, Any]) -> tuple[list[list[int]], bool]:
    """The output of a tokenizer: `input_ids`, and an `attention_mask` that is 0 where they are padding."""
    actual = f"a mapping with {', '.join(map(str, encoding)) or 'nothing'}"
    check("input_ids" in encoding, _OP, "prompt", "have `input_ids`", actual)
    ids, single = _rows("input_ids", encoding["input_ids"])
    mask = encoding.get("attention_mask")
    if mask is None:
        padded = _is_array(encoding["input_ids"]) and len(ids) > 1
        check(not padded, _OP, "prompt", "have an `attention_mask` with several rows of `input_ids`", actual, _AS_LIST)
        return ids, single
    counts, _ = _rows("attention_mask", mask)
    alike = [len(row) for row in counts] == [len(row) for row in ids]
    check(alike, _OP, "prompt", "have an `attention_mask` of the shape of `input_ids`", "another one")
    for row in counts:
        text = bytes(row).strip(b"\0") if set(row) <= {0, 1} else b"\0"
        check(b"\0" not in text, _OP, "prompt", "have ones in `attention_mask` and zeros around them", row)
    return [[token for token, attended in zip(row, on) if attended] for row, on in zip(ids, counts)], single


def _rows(name: str, value: Any) -> tuple[list[list[int]], bool]:
    if _is_array(value):
        _check_integers(name, value)
        check(value.ndim in (1, 2), _OP, name, "be a 1-D or 2-D tensor", f"shape {tuple(value.shape)}")
        rows: list[list[int]] = (value if value.ndim == 2 else value[None]).tolist()
        return rows, len(rows) == 1
    check_type(_is_list(value), _OP, name, "be ids, or a list of lists of them", type(value).__name__)
    single = all(map(_is_id, value))
    rows = [value] if single else value
    are_ids = all((_is_list(row) and all(map(_is_id, row))) or _is_array(row) for row in rows)
    check_type(are_ids, _OP, name, "be ids, or a list of lists of them", "something else")
    return [[operator.index(item) for item in row] for row in rows], single
