"""Recursive schemas and rules of any depth: the language, and the methods that follow it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.generation.filters import unpacked

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "kids": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["v"],
}
LIST: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["x", "next"],
        }
    },
}
SUM = 'start: start "+" term | term\nterm: /[0-9]/ | "(" start ")"'


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"v": 1}
    for _ in range(depth):
        value = {"v": 2, "kids": [value, {"v": 3}]}
    return value


def test_the_language_has_no_bound_of_depth() -> None:
    tree = Grammar.json_schema(TREE, depth=None)
    for depth in (0, 3, 40):
        whole = json.dumps(nested(depth))
        assert tree.matches(whole) and not tree.matches(whole[:-1]) and not tree.matches(whole + "}")
    assert not Grammar.json_schema(TREE).matches(json.dumps(nested(5)))
    assert not tree.matches('{"v": 1, "kids": [2]}') and not tree.matches('{"v": 10}')
    sums = Grammar.ebnf(SUM, depth=None)
    assert sums.matches("1+(2+((3))+4)+5") and not sums.matches("1+(2") and not sums.matches("+1")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text("ab ", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=12,
)


@given(json_values)
@settings(deadline=None)
def test_any_value_is_a_text_of_the_empty_schema(value: Any) -> None:
    assert any_value().matches(json.dumps(value))
    assert not any_value().matches(json.dumps(value) + "]")


def any_value() -> Grammar:
    if not _made:
        _made.append(Grammar.json_schema(True, depth=None))
    return _made[0]


_made: list[Grammar] = []


@given(json_values | st.fixed_dictionaries({"v": st.integers(-1, 10), "kids": st.lists(st.just({"v": 1}), max_size=2)}))
@settings(deadline=None)
def test_what_a_recursive_schema_takes_satisfies_it(value: Any) -> None:
    takes = tree().matches(json.dumps(value))
    valid = jsonschema.Draft202012Validator({**TREE, "additionalProperties": False}).is_valid(value)
    assert not takes or valid
    if isinstance(value, dict) and list(value) == ["v", "kids"]:
        assert takes == valid


def tree() -> Grammar:
    if len(_trees) == 0:
        _trees.append(Grammar.json_schema(TREE, depth=None))
    return _trees[0]


_trees: list[Grammar] = []


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'start' begins with itself by way of other rules"):
        Grammar.ebnf('start: b "x" | "y"\nb: start "z"', depth=None)
    with pytest.raises(ValueError, match="no text satisfies the grammar"):
        Grammar.ebnf('start: "(" start ")"', depth=None)
    with pytest.raises(ValueError, match="fit needs a depth"):
        Grammar.json_schema(TREE, depth=None, fit=True)
    with pytest.raises(TypeError, match="depth must be an int"):
        Grammar.json_schema(TREE, depth=1.5)  # type: ignore[arg-type]
    listed = {"$defs": {"t": TREE | {"properties": {"t": {"$ref": "#/$defs/t"}}, "required": []}}, "enum": [{"t": {}}]}
    with pytest.raises(NotImplementedError, match="recursive reference"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Grammar.json_schema({**listed, "properties": {"t": {"$ref": "#/$defs/t"}}, "type": "object"}, depth=None)
    model = pd.models.load("tiny-masked")
    with pytest.raises(ValueError, match="cannot be completed within max_new_tokens"):
        generate(model, "x", "llada", grammar=Grammar.json_schema(TREE, depth=None), max_new_tokens=4)


MASKED: list[tuple[str, dict[str, Any]]] = [
    ("llada", {"steps": 6}),
    ("llada", {"steps": 6, "remasking": "random"}),
    ("dream", {"steps": 6}),
    ("slowfast", {}),
    ("dllm_cache", {"steps": 6}),
    ("fast_dllm", {"block_size": 12}),
]


@pytest.mark.parametrize(("method", "options"), MASKED)
def test_recursive_schemas_of_canvases(method: str, options: dict[str, Any]) -> None:
    model, schema = pd.models.load("tiny-masked"), LIST if method == "dream" else TREE
    for fill, temperature, seed in (("each", 0.0, 0), ("joint", 0.0, 0), ("each", 1.5, 1)):
        if fill == "joint" and options.get("remasking") == "random":
            continue
        grammar = Grammar.json_schema(schema, depth=None, fill=fill)  # type: ignore[arg-type]
        given: dict[str, Any] = {"max_new_tokens": 36, "temperature": temperature, "seed": seed, "grammar": grammar}
        found = generate(model, ["tree = ", "x"], method, **options, **given)
        for text in found.text:
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("options", [{}, {"block_size": 8}, {"block_size": 8, "threshold": None, "steps_per_block": 3}])
def test_recursive_schemas_of_blocks(options: dict[str, Any]) -> None:
    model = pd.models.load("tiny-trimode")
    for fill, temperature in (("each", 0.0), ("joint", 0.0), ("each", 1.0)):
        grammar = Grammar.json_schema(TREE, depth=None, fill=fill)  # type: ignore[arg-type]
        found = generate(
            model,
            ["a = ", "x"],
            "block_diffusion",
            grammar=grammar,
            max_new_tokens=40,
            temperature=temperature,
            **options,
        )
        for text in found.text:
            jsonschema.validate(json.loads(text), TREE)


def test_drafts_have_the_tokens_of_single_steps() -> None:
    model, grammar = pd.models.load("tiny-code"), Grammar.json_schema(TREE, depth=None)
    for temperature in (0.0, 1.0):
        given: dict[str, Any] = {"grammar": grammar, "max_new_tokens": 40, "temperature": temperature, "seed": 4}
        alone = generate(model, "tree = ", "autoregressive", **given)
        jsonschema.validate(json.loads(alone.text), TREE)
        for method in ("jacobi", "suffix", "jacobi_multiblock"):
            assert torch.equal(generate(model, "tree = ", method, **given).tokens, alone.tokens)


def test_a_template_is_completed() -> None:
    model, grammar = pd.models.load("tiny-masked"), Grammar.ebnf(SUM, depth=None)
    mask, encode = model.mask_token, model.tokenizer.encode
    prompt = [*encode("(("), mask, *encode("+("), mask, mask, mask, *encode(")"), mask, mask]
    result = generate(model, [prompt], "llada", grammar=grammar, infill=True, max_new_tokens=0)
    text = model.tokenizer.decode([token for token in result.tokens[0].tolist() if token not in model.end_tokens])
    assert grammar.matches(text), text


def test_every_step_keeps_the_canvas_completable() -> None:
    """The tokens that a canvas allows, taken in any order, always complete it."""
    model, grammar = pd.models.load("tiny-masked"), Grammar.json_schema(LIST, depth=None)
    text = grammar.for_model(model, tuple(model.end_tokens))
    size = model.config.vocab_size
    bits = torch.zeros((size + 31) // 32, dtype=torch.int32)
    draw = torch.Generator().manual_seed(3)
    for length in (30, 37):
        canvas = [-1] * length
        for at in torch.randperm(length, generator=draw).tolist():
            found = text.fill(canvas, 0, 0)
            assert found
            found.allowed(at, bits.numpy())
            allowed = unpacked(bits, size).nonzero()[:, 0]
            canvas[at] = int(allowed[int(torch.randint(len(allowed), (1,), generator=draw))])
        kept = [token for token in canvas if token not in model.end_tokens]
        ends = [at for at, token in enumerate(canvas) if token in model.end_tokens]
        whole = kept if not ends else canvas[: ends[0]]
        jsonschema.validate(json.loads(model.tokenizer.decode(whole)), LIST)
