"""Arguments of ops as named structures, whose fields their schemas follow from (`pdkernels.ops.library.schema_of`)."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

Structure = TypeVar("Structure", bound=NamedTuple)


def part_of(structure: Any, kind: type[Structure]) -> Structure:
    """The fields of `given` that `kind` has as well.

    >>> class Pair(NamedTuple):
    ...     left: int
    ...     right: int
    >>> class Three(NamedTuple):
    ...     left: int
    ...     middle: int
    ...     right: int
    >>> part_of(Three(1, 2, 3), Pair)
    Pair(left=1, right=3)
    """
    return kind(*(getattr(structure, name) for name in kind._fields))


def flat(structure: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of a structure, and of the structures in it, as an op takes them.

    >>> class Pair(NamedTuple):
    ...     left: int
    ...     right: int
    >>> class Nested(NamedTuple):
    ...     first: Pair
    ...     sizes: list[int]
    >>> flat(Nested(Pair(1, 2), [3, 4]))
    (1, 2, [3, 4])
    """
    fields: list[Any] = []
    for value in structure:
        if isinstance(value, tuple):
            fields += flat(value)
        else:
            fields.append(value)
    return tuple(fields)
