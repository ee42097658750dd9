"""Schemas without references, `allOf` and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urljoin

from pdkernels._validation import check
from pdkernels.grammar.budget import OP, spend
from pdkernels.grammar.recursion import cycles
from pdkernels.grammar.schema_apart import OF_STRINGS, of_objects, of_texts
from pdkernels.grammar.schema_keywords import Unknown, check_keywords, demands, is_note, modern
from pdkernels.grammar.schema_merge import ALSO, CONDITIONS, Flat, Merged, Narrower, merged_all, unsupported
from pdkernels.grammar.schema_negate import negated

_VALUES = frozenset("const enum".split())
_DEFINITIONS = frozenset({"$defs", "definitions"})
_BY_NAMES = frozenset(
    "properties patternProperties $defs definitions dependencies dependentRequired dependentSchemas".split()
)


class Flattener:
    """Follows the references of a root schema."""

    def __init__(self, root: Any, unknown: Unknown) -> None:
        self._root, self.unknown = root, unknown
        self._base: dict[int, str] = {}
        """The URIs that references in schemas start from, by the addresses of the schemas."""
        self._at: dict[str, Any] = {}
        """What URIs name, without a fragment or with the name of an anchor."""
        self._walk(root)
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
            del modern_schema["$ref"]
            conjuncts = [self.found(self.uri(schema, place), place), *conjuncts]
        if "not" in modern_schema:
            denied = self(modern_schema["not"], f"{place}/not")
            narrower = not isinstance(denied, bool) and any(
                isinstance(choice.get("anyOf"), Narrower) for choice in (denied, *denied.get(ALSO, ()))
            )
            unsupported(narrower, f"{place}/not", "a not of properties by other than their names, in a not")
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

    def _walk(self, root: Any) -> None:
        """Finds what has a name. An `$id` is the base of the references inside it."""
        draft = str(root.get("$schema", "")) if isinstance(root, Mapping) else ""
        alone = any(f"draft-0{number}" in draft for number in (3, 4, 6, 7))  # what is beside a $ref is nothing there

        def base_of(schema: Mapping[str, Any], base: str) -> str:
            name = schema.get("$id")
            has_name = isinstance(name, str) and not name.startswith("#") and not (alone and "$ref" in schema)
            return _joined(base, str(name)).partition("#")[0] if has_name else base

        self._at[""] = root
        if isinstance(root, Mapping) and isinstance(root.get("id"), str):  # of draft 4
            self._at[root["id"].rstrip("#")] = root
        for schema, base in _inside(root, base_of):
            self._base[id(schema)] = base
            if "$id" in schema:
                self._at.setdefault(base, schema)
            anchor = "#" + str(schema.get("$anchor")) if "$anchor" in schema else None
            for name in (schema.get("$id"), schema.get("id"), anchor):
                if isinstance(name, str) and name.startswith("#"):  # those of draft 7 are an $id, of draft 4 an id
                    self._at[base + name] = schema

    def uri(self, schema: Mapping[str, Any], place: str) -> str:
        """What the reference of a schema names."""
        reference = schema["$ref"]
        check(isinstance(reference, str) and reference != "", OP, f"$ref at {place}", "be a URI", repr(reference))
        return _joined(self._base.get(id(schema), ""), reference)

    def cycles(self) -> dict[str, list[str]]:
        """Of each reference those that are recursive with it, as `recursion.cycles` has them."""
        uses, queue = dict[str, list[str]](), self._uris(self._root)
        for uri in queue:
            if uri not in uses:
                uses[uri] = []
                with suppress(ValueError, NotImplementedError):  # raised where it is followed, if it is
                    uses[uri] = self._uris(self.found(uri, "#"))
                queue += uses[uri]
        return cycles(uses)

    def _uris(self, schema: Any) -> list[str]:
        """What the references of a schema name."""
        with_reference = [subschema for subschema, _ in _inside(schema) if isinstance(subschema.get("$ref"), str)]
        return list(dict.fromkeys(self.uri(subschema, "#") for subschema in with_reference))

    def found(self, uri: str, place: str) -> Any:
        """The part of the root that a URI names."""
        base, _, path = uri.partition("#")
        remedy = "Only those into the schema itself are followed."
        unsupported(base not in self._at, place, f"the reference {uri!r}", remedy)
        if path and not path.startswith("/"):
            check(uri in self._at, OP, f"$ref at {place}", "point into the schema", repr(uri))
            return self._at[uri]
        node = self._at[base]
        for segment in path.split("/")[1:]:
            name = unquote(segment).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
                continue
            there = isinstance(node, Mapping) and name in node
            check(there, OP, f"$ref at {place}", "point into the schema", repr(uri))
            node = node[name]
        return node


def _joined(base: str, reference: str) -> str:
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _inside(
    schema: Any, base_of: Callable[[Mapping[str, Any], str], str] = lambda schema, base: base
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """All objects of a schema that may be schemas: those by the names of properties and in values are others. Each with
    its base, which `base_of` finds from the one around it."""
    queue = [(schema, False, "")]
    while queue:
        spend()
        node, by_names, base = queue.pop()
        inner = [(value, False, base) for value in node] if isinstance(node, list) else []
        if isinstance(node, Mapping):
            if not by_names:
                base = base_of(node, base)
                yield node, base
            inner = [
                (inner_node, name in _BY_NAMES and not by_names, base)
                for name, inner_node in node.items()
                if by_names or name in _DEFINITIONS or not (name in _VALUES or is_note(name))
            ]
        queue += reversed(inner)
