"""Schemas without references, `allOf` and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from pdkernels._validation import check
from pdkernels.grammar.budget import OP, spend
from pdkernels.grammar.recursion import cycles
from pdkernels.grammar.schema_apart import of_objects
from pdkernels.grammar.schema_keywords import Unknown, check_keywords, demands, modern
from pdkernels.grammar.schema_merge import CONDITIONS, Flat, Merged, merged_all, unsupported

_VALUES = frozenset("const enum default example examples".split())
_BY_NAMES = frozenset(
    "properties patternProperties $defs definitions dependencies dependentRequired dependentSchemas".split()
)


class Flattener:
    """Follows the references of a root schema."""

    def __init__(self, root: Any, unknown: Unknown) -> None:
        self._root, self.unknown = root, unknown
        inside = list(_inside(root))
        self._named = {one["$anchor"]: one for one in inside if isinstance(one.get("$anchor"), str)}
        names = [(one["$id"], one) for one in inside if isinstance(one.get("$id"), str)]
        self._named |= {name[1:]: one for name, one in names if name.startswith("#")}  # of draft 7
        self._bases = ["", *(name.rstrip("#") for name, one in names if one is root)]
        self._inner = [name for name, one in names if one is not root and not name.startswith("#")]
        self._flat: dict[int, tuple[Any, Flat]] = {}
        """What schemas were flattened to, by their addresses: with the schemas, so that no other one gets the address."""

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
        made = Merged(modern(demands(schema)))
        parts = made.pop("allOf", [])
        if "$ref" in made:
            parts = [self.found(made.pop("$ref"), place), *parts]
        if "not" in made:
            denied = self(made["not"], f"{place}/not")
            if denied is True or denied == {}:
                return False
            if denied is False:
                del made["not"]
            elif denied.keys() == {"anyOf"}:
                del made["not"]
                parts = [*parts, *({"not": one} for one in denied["anyOf"])]
            elif of_objects(denied):
                made[CONDITIONS] = [*made.get(CONDITIONS, []), (made.pop("not"), False, True)]
        flats = {id(flat): flat for flat in (self(part, place) for part in parts)}  # each once
        return merged_all(made, list(flats.values()), place) if flats else made

    def cycles(self) -> dict[str, list[str]]:
        """Of each reference those that are recursive with it, as `recursion.cycles` has them."""
        uses, queue = dict[str, list[str]](), _references(self._root)
        for one in queue:
            if one not in uses:
                uses[one] = []
                with suppress(ValueError, NotImplementedError):  # raised where it is followed, if it is
                    uses[one] = _references(self.found(one, "#"))
                queue += uses[one]
        return cycles(uses)

    def found(self, reference: Any, place: str) -> Any:
        """The part of the root that a reference names."""
        whole = reference if isinstance(reference, str) else ""
        base, _, path = whole.partition("#")
        local = whole != "" and base in self._bases
        remedy = "Only those into the schema itself are followed."
        unsupported(not local, place, f"the reference {reference!r}", remedy)
        unsupported(
            bool(self._inner), place, f"a reference beside {self._inner and self._inner[0]!r}, an $id inside it"
        )
        found = self._root
        if path and not path.startswith("/"):
            check(path in self._named, OP, f"$ref at {place}", "point into the schema", repr(reference))
            return self._named[path]
        for part in path.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
                continue
            there = isinstance(found, Mapping) and name in found
            check(there, OP, f"$ref at {place}", "point into the schema", repr(reference))
            found = found[name]
        return found


def _inside(part: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a schema that may be schemas: those by the names of properties and in values are others."""
    queue = [(part, False)]
    while queue:
        spend()
        one, by_names = queue.pop()
        inner = [(value, False) for value in one] if isinstance(one, list) else []
        if isinstance(one, Mapping):
            if not by_names:
                yield one
            values = frozenset[str]() if by_names else _VALUES
            inner = [(two, name in _BY_NAMES and not by_names) for name, two in one.items() if name not in values]
        queue += reversed(inner)


def _references(part: Any) -> list[str]:
    """The references of a schema."""
    found = [one["$ref"] for one in _inside(part) if isinstance(one.get("$ref"), str)]
    return list(dict.fromkeys(found))
