"""The grammars of answers that requests ask for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("pydantic")

from pdkernels.serve.forms import asked_grammar
from pdkernels.serve.schema import ChatRequest


def grammar_of(form: dict[str, Any]) -> Any:
    body = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], response_format=form)  # type: ignore[arg-type]
    asked = asked_grammar(body)
    assert asked is not None
    return asked.grammar()


def test_json_object_takes_nested_values() -> None:
    matches = grammar_of({"type": "json_object"}).matches
    assert all(
        map(matches, ["{}", '{"a": {"b": {"c": 1}}}', '{"a": [[1], {"b": null}], "c": ""}', '{"a": {"b": {"c": {}}}}'])
    )
    assert not any(map(matches, ["[]", "1", '{"a": 1', '{"a": {"b": {"c": {"d": {}}}}}']))


def test_unknown_keywords_of_a_schema_print_nothing() -> None:
    """Clients choose the names, so warnings of them would fill the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = {"type": "string", "maxLength": 2, "coment": "anything", "format": "money"}
        assert grammar_of({"type": "json_schema", "json_schema": {"schema": schema}}).matches('"ab"')
