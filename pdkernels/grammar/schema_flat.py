"""Schemas without references, `allOf` and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from pdkernels._validation import check
from pdkernels.grammar.budget import OP, spend
from pdkernels.grammar.recursion import cycles
from pdkernels.grammar.schema_apart import OF_STRINGS, of_objects, of_texts
from pdkernels.grammar.schema_keywords import Unknown, check_keywords, demands, modern
from pdkernels.grammar.schema_merge import CONDITIONS, Flat, Merged, merged_all, unsupported
from pdkernels.grammar.schema_negate import negated

_VALUES = frozenset("const enum default example examples".split())
_BY_NAMES = frozenset(
    "properties patternProperties $defs definitions dependencies dependentRequired dependentSchemas".split()
)


class Flattener:
    """Follows the references of a root schema."""

    def __init__(self, root: Any, unknown: Unknown) -> None:
        self._root, self.unknown = root, unknown
        subschemas = list(_inside(root))
        self._named = {
            subschema["$anchor"]: subschema for subschema in subschemas if isinstance(subschema.get("$anchor"), str)
        }
        names = [(subschema["$id"], subschema) for subschema in subschemas if isinstance(subschema.get("$id"), str)]
        self._named |= {name[1:]: subschema for name, subschema in names if name.startswith("#")}  # of draft 7
        self._bases = ["", *(name.rstrip("#") for name, subschema in names if subschema is root)]
        self._inner = [name for name, subschema in names if subschema is not root and not name.startswith("#")]
        self._flat: dict[int, tuple[Any, Flat]] = {}
        """What schemas were flattened to, by their addresses: with the schemas, so that no other one gets the
        address."""

    def __call__(self, schema: Any, place: str) -> Flat:
        """A schema without notes, `$ref` and `allOf`, in the words of the latest draft."""
        if isinstance(schema, (bool, Merged)):
            return schema
        check(isinstance(schema, Mapping), OP, f"schema at {place}", "be an object or a bool", type(schema).__name__)
        if id(schema) not in self._flat:
            self._flat[id(schema)] = schema, self._flattened(schema, place)
        return self._flat[id(schema)][1]

    def _flattened(self, schema: Mapping[str, Any], place: str) -> Flat:
        spend(1 + len(schema))
        check_keywords(schema, place, self.unknown)
        modern_schema = Merged(modern(demands(schema)))
        conjuncts = modern_schema.pop("allOf", [])
        if "$ref" in modern_schema:
            conjuncts = [self.found(modern_schema.pop("$ref"), place), *conjuncts]
        if "not" in modern_schema:
            denied = self(modern_schema["not"], f"{place}/not")
            if denied is True or denied == {}:
                return False
            if denied is False:
                del modern_schema["not"]
            elif denied.keys() == {"anyOf"}:
                del modern_schema["not"]
                conjuncts = [*conjuncts, *({"not": alternative} for alternative in denied["anyOf"])]
            elif of_objects(denied):
                modern_schema[CONDITIONS] = [
                    *modern_schema.get(CONDITIONS, []),
                    (modern_schema.pop("not"), False, True),
                ]
            elif not of_texts(denied) and not (
                denied.keys() <= OF_STRINGS and modern_schema.keys() & {"const", "enum"}
            ):
                del modern_schema["not"]
                alternatives = negated(denied, f"{place}/not")
                conjuncts = [*conjuncts, Merged(anyOf=alternatives) if alternatives else False]
        flats = {id(flat): flat for flat in (self(conjunct, place) for conjunct in conjuncts)}  # each once
        return merged_all(modern_schema, list(flats.values()), place) if flats else modern_schema

    def cycles(self) -> dict[str, list[str]]:
        """Of each reference those that are recursive with it, as `recursion.cycles` has them."""
        uses, queue = dict[str, list[str]](), _references(self._root)
        for reference in queue:
            if reference not in uses:
                uses[reference] = []
                with suppress(ValueError, NotImplementedError):  # raised where it is followed, if it is
                    uses[reference] = _references(self.found(reference, "#"))
                queue += uses[reference]
        return cycles(uses)

    def found(self, reference: Any, place: str) -> Any:
        """The part of the root that a reference names."""
        uri = reference if isinstance(reference, str) else ""
        base, _, path = uri.partition("#")
        local = uri != "" and base in self._bases
        remedy = "Only those into the schema itself are followed."
        unsupported(not local, place, f"the reference {reference!r}", remedy)
        unsupported(
            bool(self._inner), place, f"a reference beside {self._inner and self._inner[0]!r}, an $id inside it"
        )
        node = self._root
        if path and not path.startswith("/"):
            check(path in self._named, OP, f"$ref at {place}", "point into the schema", repr(reference))
            return self._named[path]
        for segment in path.split("/")[1:]:
            name = unquote(segment).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
                continue
            there = isinstance(node, Mapping) and name in node
            check(there, OP, f"$ref at {place}", "point into the schema", repr(reference))
            node = node[name]
        return node


def _inside(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a schema that may be schemas: those by the names of properties and in values are others."""
    queue = [(schema, False)]
    while queue:
        spend()
        node, by_names = queue.pop()
        inner = [(value, False) for value in node] if isinstance(node, list) else []
        if isinstance(node, Mapping):
            if not by_names:
                yield node
            values = frozenset[str]() if by_names else _VALUES
            inner = [(two, name in _BY_NAMES and not by_names) for name, two in node.items() if name not in values]
        queue += reversed(inner)


def _references(schema: Any) -> list[str]:
    """The references of a schema."""
    references = [subschema["$ref"] for subschema in _inside(schema) if isinstance(subschema.get("$ref"), str)]
    return list(dict.fromkeys(references))
