"""Which names of a grammar or a schema are recursive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def cycles(uses: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """For each name, the names that it uses, at any distance, and that use it; none for one that never uses itself.

    How often one of these is inside itself is all that decides what a name unfolds to.

    >>> cycles({"a": ["b"], "b": ["a", "c"], "c": []})
    {'a': ['a', 'b'], 'b': ['a', 'b'], 'c': []}
    """
    order, seen = list[str](), set[str]()
    for root in uses:
        stack = [] if root in seen else [(root, iter(uses[root]))]
        seen.add(root)
        while stack:
            name, pending = stack[-1]
            new = next((used_name for used_name in pending if used_name not in seen), None)
            if new is None:
                order.append(stack.pop()[0])
            else:
                seen.add(new)
                stack.append((new, iter(uses[new])))
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for used_name in used:
            users[used_name].append(name)
    groups: dict[str, list[str]] = {}
    for name in reversed(order):  # a name that uses others comes before them, but for those of its own cycle
        if name not in groups:
            group = groups[name] = [name]
            for used_name in group:
                for user in users[used_name]:
                    if user not in groups:
                        groups[user] = group
                        group.append(user)
            if len(group) == 1 and name not in uses[name]:
                group.clear()
            group.sort()
    return {name: groups[name] for name in uses}
