"""Arrays of JSON schemas as expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdkernels._validation import sentence
from pdkernels.grammar.language import EMPTY, NOTHING, OP, Alt, Expression, Repeat, Seq, either, is_nothing, separated
from pdkernels.grammar.products import both
from pdkernels.grammar.schema_keywords import counts
from pdkernels.grammar.schema_merge import CONTAINED, CONTAINS, Flat, Merged, different, is_among, merged, together
from pdkernels.grammar.schema_parts import Parts

_MAX_LISTED = 64
_FIRST = ["[^0-9A-Za-z]", *"0123456789", *(f"[{letter.upper()}{letter}]" for letter in "abcdefghijklmnopqrstuvwxyz")]
"""What strings may begin with that are told apart by it."""


class UnlistedItems(NotImplementedError):
    """Items of `uniqueItems` that no list of values tells apart."""


class Arrays(Parts):
    """The arrays of a schema."""

    _ordered = False

    def _array(self, schema: Mapping[str, Any], place: str) -> Expression:
        schema = self._evaluated(schema)
        expression = self._items(schema, place)
        for contained in (schema, *schema.get(CONTAINED, ())):
            if "contains" not in contained or is_nothing(expression):
                continue
            if contained.get("minContains", 1) > 0 or "maxContains" in contained:
                bounds = {name: contained[name] for name in CONTAINS if name in contained}
                of_items = {name: value for name, value in schema.items() if name not in CONTAINS}
                containing = self._containing({**of_items, **bounds}, place)
                expression = both(expression, containing, f"the schema at {place}")
        return expression

    def _evaluated(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema whose `unevaluatedItems` are its `items`: what `contains` finds is evaluated, too, but for draft
        2019-09."""
        unevaluated = schema.get("unevaluatedItems", True)
        if "items" in schema or unevaluated in (True, {}):
            return schema
        contained = [
            constraint["contains"] for constraint in (schema, *schema.get(CONTAINED, ())) if "contains" in constraint
        ]
        if self._contains_evaluates and contained:
            unevaluated = {"anyOf": [*contained, *([unevaluated] if unevaluated is not False else [])]}
        return {**schema, "items": unevaluated}

    def _items(self, schema: Mapping[str, Any], place: str) -> Expression:
        minimum, maximum = counts(schema, "minItems", "maxItems", place)
        if maximum is not None and maximum < minimum:
            return NOTHING
        if schema.get("uniqueItems", False) and (maximum is None or maximum > 1):
            return self._unique(schema, minimum, maximum, place)
        first = [self.value(item_schema, f"{place}/prefixItems") for item_schema in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        if not first:
            item = self.value(items, f"{place}/items") if maximum != 0 else EMPTY
            if is_nothing(item):
                return NOTHING if minimum else self._enclosed("[", "]", EMPTY)
            return self._enclosed("[", "]", separated(item, self._comma, minimum, maximum))
        # Without a prefix item there are no later ones.
        top = len(first) if maximum is None or maximum > len(first) else maximum
        forms = [self._joined(first[:count]) for count in range(minimum, top)] if minimum < top else []
        prefix = first[:top]
        if items is False or (maximum is not None and maximum <= len(first)):
            if minimum > top:
                return NOTHING
            forms.append(self._joined(prefix))
        else:
            item = Seq((self._comma, self.value(items, f"{place}/items")))
            later_items = Repeat(item, max(0, minimum - len(first)), None if maximum is None else maximum - len(first))
            forms.append(Seq((self._joined(prefix), later_items)))
        return self._enclosed("[", "]", either(forms))

    def _containing(self, schema: Mapping[str, Any], place: str) -> Expression:
        """Arrays of the items of a schema in which so many satisfy `contains`."""
        minimum, maximum = counts(schema, "minContains", "maxContains", place)
        if maximum is not None and maximum < minimum:
            return NOTHING
        kinds = list(schema.get("prefixItems", ()))
        kinds += [schema.get("items", True)] if schema.get("items", True) is not False else []
        contained = schema["contains"]
        hit = self._either_of([together(kind, contained) for kind in kinds], f"{place}/contains")
        if maximum is None:
            item = self._either_of(kinds, f"{place}/items")
            any_items = Repeat(Seq((self._comma, item)), 0, None)
            # The first that satisfies it, and those before it.
            first = Alt((hit, Seq((item, any_items, self._comma, hit))))
            later_matches = Repeat(Seq((any_items, self._comma, hit)), minimum - 1, minimum - 1)
            return self._enclosed("[", "]", Seq((first, later_matches, any_items)))
        other = self._either_of([together(kind, {"not": contained}) for kind in kinds], f"{place}/contains")
        # Of each item, whether it satisfies it: as many as may be there, and any number of the others between them.
        others_between, others_after = (Repeat(Seq((self._comma, item)), 0, None) for item in (other, other))
        later_hits = Repeat(Seq((self._comma, hit, others_after)), max(0, minimum - 1), max(0, maximum - 1))
        begins_with_hit = Seq((hit, others_after, later_hits))
        only_others = Seq((other, others_between))
        begins_with_other = Seq((only_others, Repeat(Seq((self._comma, hit, others_after)), minimum, maximum)))
        forms = [begins_with_other, *([begins_with_hit] if maximum > 0 else []), *([EMPTY] if minimum == 0 else [])]
        return self._enclosed("[", "]", Alt(tuple(forms)))

    def _either_of(self, schemas: list[Any], place: str) -> Expression:
        return Alt(tuple(self.value(schema, place) for schema in schemas))

    def _unique(self, schema: Mapping[str, Any], minimum: int, maximum: int | None, place: str) -> Expression:
        """An array of different items, which are listed: in the order of the list."""
        flat = self._flat(schema.get("items", True), f"{place}/items")
        values = None if "prefixItems" in schema else _listed(flat)
        if values is None or isinstance(flat, bool):
            return self._ascending(schema, flat, minimum, maximum, place)
        if "const" in flat:
            values = [value for value in values if is_among(value, flat.get("enum", values))]
        constraints = Merged({name: entry for name, entry in flat.items() if name not in ("const", "enum")})
        items = [self.value(Merged(constraints, const=value), f"{place}/items") for value in different(values)]
        return self._enclosed(
            "[", "]", self._some([(False, entry) for entry in items if not is_nothing(entry)], minimum, maximum)
        )

    def _ascending(
        self, schema: Mapping[str, Any], flat: Flat, minimum: int, maximum: int | None, place: str
    ) -> Expression:
        """An array of different items, which are not listed: strings of ascending first characters, or one item."""
        if not self._ordered:
            fault = f"the schema has uniqueItems of items that are not listed at {place}/uniqueItems, which is not supported"
            remedy = "Give items an enum, set maxItems to 1, or take fewer of its values by fit=True."
            raise UnlistedItems(sentence(OP, fault, remedy))
        if isinstance(flat, bool) or flat.get("type") != "string" or "prefixItems" in schema:
            return self._items({**schema, "uniqueItems": False, "maxItems": 1}, place)
        starts = (Merged(pattern=f"^{first}") for first in _FIRST)
        items = [self.value(merged(flat, start, place), f"{place}/items") for start in starts]
        return self._enclosed(
            "[", "]", self._some([(False, item) for item in items if not is_nothing(item)], minimum, maximum)
        )


def _listed(flat: Flat) -> list[Any] | None:
    """The values of a schema that lists them, or has few."""
    if isinstance(flat, bool):
        return None
    if "const" in flat:
        return [flat["const"]]
    if "enum" in flat:
        return list(flat["enum"])
    if flat.get("type") == "boolean":
        return [False, True]
    low, high = flat.get("minimum"), flat.get("maximum")
    if flat.get("type") == "integer" and type(low) is int and type(high) is int and high - low < _MAX_LISTED:
        return [*range(low, high + 1)]
    return None
