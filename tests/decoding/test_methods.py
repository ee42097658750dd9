"""The registry of methods: it is complete, nothing duplicates it, and a misspelt name is suggested."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding.method import SHARED, WINGS, described
from pdkernels.decoding.methods import METHODS
from scripts import methods as made
from tests.support.plans import example

ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONS = [(method, option) for method in METHODS.values() for option in method.options.values()]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (None, {}),
        ("", {}),
        ("Nothing to describe.", {}),
        ("Text.\n\n    Args:\n        a: one.\n", {"a": "one."}),
        (
            "Text.\n\nArgs:\n    a: one.\n    b, c: two: with a colon\n        and a second line.",
            dict(zip("abc", ["one."] + ["two: with a colon and a second line."] * 2)),
        ),
        (
            "Text.\n\n    Args:\n        a: one,\n            two.\n\n            A paragraph.\n        b:\n            below.\n\n    Returns:\n        c: not an argument.\n",
            {"a": "one, two. A paragraph.", "b": "below."},
        ),
        ("Args: of a sentence.\n\n    Text: of another.\n", {}),
    ],
)
def test_arguments_of_a_docstring(docstring: str | None, expected: dict[str, str]) -> None:
    assert described(docstring) == expected


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_described_and_nothing_else_is(name: str) -> None:
    method = METHODS[name]
    assert method.name == name and method.summary.endswith(".") and method.options
    assert [option.name for option in method.options.values() if not option.help] == []
    assert set(described(method.decode.__doc__)) <= set(method.options)
    assert not any(text == SHARED.get(option) for option, text in described(method.decode.__doc__).items())


def test_first_method_of_a_wing_is_its_baseline() -> None:
    first = {method.wing: method for method in reversed(METHODS.values())}
    assert {wing: method.name for wing, method in first.items()} == {
        "causal": "autoregressive",
        "recurrent": "recurrent_static",
        "masked": "llada",
        "planned": "planned",
    }
    assert set(first) == set(WINGS)
    assert all(method.supports(example(method)) for method in METHODS.values())


@pytest.mark.parametrize(
    ("method", "option"), [(method.name, option.name) for method, option in OPTIONS if option.choices]
)
def test_options_with_choices_take_no_other_string(method: str, option: str) -> None:
    found = pd.decoding.find(method)
    model = example(found)
    with pytest.raises(ValueError, match=f"{option} must be .*, got 'neither'") as raised:
        pd.decoding.generate(model, [1], found, max_new_tokens=1, **{option: "neither"})
    assert all(repr(choice) in str(raised.value) for choice in found.options[option].choices)


def test_generate_describes_all_methods_and_options() -> None:
    text = inspect.getdoc(pd.decoding.generate)
    assert text is not None
    for method, option in OPTIONS:
        assert f"{method.name}: {method.summary}" in text
        assert option.help in text and str(option) in text


def test_signatures_are_those_of_the_decoders() -> None:
    source = made.REGISTRY.read_text()
    assert made.registry(source) == source, "run: python -m scripts.methods"


def names_in(path: Path) -> int:
    """The most names of methods that a collection in a file lists."""
    lists = [
        node.keys if isinstance(node, ast.Dict) else node.elts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Dict, ast.List, ast.Set, ast.Tuple))
    ]
    return max(
        [0, *(sum(isinstance(item, ast.Constant) and item.value in METHODS for item in items) for items in lists)]
    )


def test_no_other_table_of_methods() -> None:
    files = [path for folder in ("pdkernels", "bench", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if names_in(path) > 2] == []


def test_a_misspelt_name_is_suggested() -> None:
    model = pd.models.load("tiny-code")
    with pytest.raises(
        TypeError, match=r"no option 'blocksize'. Did you mean 'block_size'\? It accepts: block_size, window"
    ):
        pd.decoding.generate(model, [1], pd.decoding.find("jacobi"), blocksize=4)
    with pytest.raises(
        TypeError,
        match=r"no option 'nope'. It accepts: allow_mask_token, page_size, temperature, top_k, top_p, min_p, typical_p, seed\.",
    ):
        pd.decoding.generate(model, [1], pd.decoding.find("autoregressive"), nope=4)
    with pytest.raises(ValueError, match=r"got 'jaccobi'. Did you mean 'jacobi'\? Known: autoregressive, jacobi, "):
        pd.decoding.find("jaccobi")


ELSEWHERE = {
    "stop": "stop_strings",
    "max_tokens": "max_new_tokens",
    "max_new_token": "max_new_tokens",
    "gramar": "grammar",
    "eos_token_id": "end_tokens",
    "num_return_sequences": "n",
    "on_token": "on_tokens",
    "temp": "temperature",
}


@pytest.mark.parametrize(("name", "meant"), ELSEWHERE.items())
def test_an_argument_of_generate_is_suggested_at_every_door(name: str, meant: str) -> None:
    model = pd.models.load("tiny-code")
    with pd.Engine(model, max_new_tokens=4) as engine:
        doors: list[Callable[..., Any]] = [
            lambda **given: pd.decoding.generate(model, "a", **given),
            lambda **given: pd.decoding.generate(model, ["a", "b"], **given),
            lambda **given: list(pd.decoding.stream(model, "a", **given)),
            lambda **given: engine.submit("a", **given),
        ]
        for door in doors:
            with pytest.raises(TypeError, match=rf"no option '{name}'. Did you mean '{meant}'\? It accepts: allow"):
                door(**{name: None})


def test_arguments_of_an_engine_are_suggested() -> None:
    model = pd.models.load("tiny-code")
    for name, meant in (("max_batch", "max_batches"), ("max_tokens", "max_new_tokens"), ("cache", "cache_tokens")):
        words = rf"pdkernels.Engine: there is no argument '{name}'. Did you mean '{meant}'\? It accepts: model, max_run"
        with pytest.raises(TypeError, match=words):
            pd.Engine(model, **{name: 4})
    with pytest.raises(TypeError, match="there is no argument 'stop'. It accepts"):
        pd.Engine(model, stop=4)
    with pd.Engine(model) as engine, pytest.raises(TypeError, match=r"Did you mean 'timeout'\?"):
        engine.submit("a", time_out=4)


def test_the_default_of_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="method 'jacobi' has no option 'x'. It accepts: block_size"):
        pd.decoding.default_option("jacobi", "x")
