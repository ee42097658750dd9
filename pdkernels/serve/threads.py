"""Functions of the caller's, such as tokenizers and templates, in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """As `asyncio.to_thread`. What waits for it would never hear of a StopIteration, so that is a RuntimeError here, as
    in generators.

    >>> asyncio.run(in_thread(len, "abc"))
    3
    """
    return await asyncio.to_thread(called, function, *arguments)


def called(function: Callable[..., T], *arguments: object) -> T:
    """The result of a function. RuntimeError: it raises StopIteration."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised") from error
