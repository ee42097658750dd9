"""The fields of a config.json, checked for type and range; every error names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from pdkernels._validation import check, fail, message

OP = "models.load"
_LARGEST = 2**31 - 1


class Kept(Sequence[Any]):
    """An array that stays in its file until `read` is called; until then only its length is known."""

    def __init__(self, count: int, read: Callable[[], list[Any]]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def shown(value: object) -> str:
    """A short form of a value for error messages, because values from files may be arbitrarily long."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if isinstance(value, Kept) or (isinstance(value, (list, tuple)) and len(value) > 8):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 1 << 200:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def some(names: Iterable[str], maximum: int = 4) -> str:
    """The first of these names, and the number of the others."""
    readable = [name if name.isprintable() and len(name) <= 120 else shown(name) for name in names]
    return ", ".join(readable[:maximum]) + (f" and {len(readable) - maximum} more" if len(readable) > maximum else "")


def demand(condition: bool, field: str, expectation: str, actual: object) -> None:
    """Raises NotImplementedError for a requirement of config.json that our models do not support."""
    if not condition:
        raise NotImplementedError(message(OP, f"config.json: {field}", expectation, actual))


@contextmanager
def read_from(where: str) -> Iterator[None]:
    """Adds the name of the file to errors of objects that are built from its fields."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        op, _, detail = str(error).partition(": ")
        if op == f"pdkernels.{OP}" or not op.startswith("pdkernels."):
            raise
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        raise kind(f"pdkernels.{OP}: {where}: {detail}") from None


class Fields:
    """A JSON object in the file, or part of a file, named by `where`.

    A null is a value: a number or flag is refused if it is null, unless `null` says what that means. Where nothing is a
    number, a part or a list may be null as well as absent.

    >>> fields = Fields({"n_layers": 2, "rope": {"theta": 100}})
    >>> fields.integer("n_layers"), fields.integer("n_heads", 4), fields.part("rope").number("theta")
    (2, 4, 100.0)
    """

    def __init__(self, values: Any, where: str = "config.json") -> None:
        check(isinstance(values, Mapping), OP, where, "hold an object", shown(values))
        self.where = where
        self.given = values
        self.values = {name: value for name, value in values.items() if value is not None}
        self.null = values.keys() - self.values.keys()

    def __bool__(self) -> bool:
        return bool(self.values)

    def require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.values:
                fail(OP, self.where, f"hold {name!r}", f"only {some(sorted(map(str, self.values)), 60)}")

    def get(self, name: str, default: Any = None) -> Any:
        """The field unchecked; None if it is null, whatever its default."""
        return self.given.get(name, default)

    def integer(self, name: str, default: int | None = None, minimum: int = 1, *, null: int | None = None) -> int:
        """An integer of at least `minimum`. Without a default it is required."""
        value = self._found(name, default, null)
        if type(value) is not int or not minimum <= value <= _LARGEST:
            self._refuse(name, f"be an integer from {minimum} to {_LARGEST}", value)
        return int(value)

    def maybe_integer(self, name: str) -> int | None:
        return self.integer(name) if name in self.values else None

    def number(
        self,
        name: str,
        default: float | None = None,
        minimum: float = -math.inf,
        above: float = -math.inf,
        *,
        null: float | None = None,
    ) -> float:
        """A finite number, at least `minimum` and more than `above`. Without a default it is required."""
        value = self._found(name, default, null)
        if type(value) in (int, float) and abs(value) < 1e300 and value >= minimum and value > above:
            return float(value)
        bound = f" of at least {minimum}" if minimum > -math.inf else f" above {above}" if above > -math.inf else ""
        self._refuse(name, f"be a number{bound}", value)

    def flag(self, name: str, default: bool | None, *, null: bool | None = None) -> bool:
        value = self._found(name, default, null)
        if type(value) is not bool:
            self._refuse(name, "be true or false", value)
        return bool(value)

    def part(self, name: str) -> Fields:
        """An object inside this one, empty if absent."""
        return Fields(self.values.get(name, {}), f"{self.where}: {name}")

    def token(self, name: str, below: int, default: int | None = None) -> int | None:
        """A token id. A null names none of its own."""
        value = self.values.get(name, default)
        if value is not None and (type(value) is not int or not 0 <= value < below):
            self._refuse(name, f"be an id below vocab_size ({below})", value)
        return value

    def ids(self, name: str, below: int) -> tuple[int, ...] | None:
        """One token id, or a list of them."""
        if name not in self.values:
            return None
        value = self.values[name]
        tokens = value if isinstance(value, list) else [value]
        for token in tokens:
            if type(token) is not int or not 0 <= token < below:
                self._refuse(name, f"be ids below vocab_size ({below})", token)
        return tuple(dict.fromkeys(tokens))

    def texts(self, name: str) -> list[str]:
        """A list of strings, empty if absent."""
        value = self.values.get(name, [])
        items: list[Any] = list(value) if isinstance(value, (list, Kept)) else [None]
        if not all(isinstance(item, str) for item in items):
            self._refuse(name, "be a list of strings", value)
        return items

    def _found(self, name: str, default: Any, null: Any) -> Any:
        if name in self.null:
            return null
        if default is None:
            self.require([name])
        return self.values.get(name, default)

    def _refuse(self, name: str, expectation: str, value: object) -> NoReturn:
        fail(OP, f"{self.where}: {name}", expectation, shown(value))
