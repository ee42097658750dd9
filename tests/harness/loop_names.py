"""Names that Triton does not carry through a loop, though they change in it.

Before its front end (of 3.6 to 3.9, and Gluon's) builds a `for` or a `while`, it runs the body once and carries the names that have another
value then. A name that enters as the value of a second one, and takes that one's value in the body, has the same still: `a = b` before
a loop, and in it `a = b` and a new `b`. So `a` keeps its first value for ever. The interpreter is not concerned.

`aliased` reads sources, `forgotten` watches what is compiled.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

Copy = tuple[str, str]


def copies(node: ast.AST) -> Iterator[Copy]:
    """(name, name) of what an assignment makes the same value; a cast to the same type is no new one."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    yield from (
        (a.id, b.id) for a, b in zip(targets, targets[1:]) if isinstance(a, ast.Name) and isinstance(b, ast.Name)
    )
    for target in targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = [*zip(target.elts, node.value.elts)]
        yield from ((to.id, name) for to, value in pairs if isinstance(to, ast.Name) for name in _copied(value))


def _copied(value: ast.AST) -> Iterator[str]:
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.IfExp):
        yield from (*_copied(value.body), *_copied(value.orelse))
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cast"):
        yield from _copied(value.args[0] if value.func.attr == "cast" else value.func.value)


def reachable(pairs: list[Copy], name: str) -> set[str]:
    """The names that may have the value of `name`, by these copies in either direction."""
    found, left = {name}, [name]
    while left:
        one = left.pop()
        new = {b if a == one else a for a, b in pairs if one in (a, b)} - found
        found |= new
        left += new
    return found


def aliased(source: str) -> list[str]:
    """The places in kernels where a loop may assign a name from another one that it entered as the same value.

    >>> aliased('''
    ... @triton.jit
    ... def kernel(x, out):
    ...     a = tl.load(x)
    ...     b = a
    ...     for i in range(8):
    ...         if i == 3:
    ...             b = a
    ...         a += 1
    ...     tl.store(out, b)
    ... ''')
    ['line 6: b = a']
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in function.decorator_list):
            for loop in ast.walk(function):
                if isinstance(loop, ast.For | ast.While):
                    found += [f"line {loop.lineno}: {' = '.join(pair)}" for pair in _aliased(function, loop)]
    return found


def _aliased(function: ast.FunctionDef, loop: ast.For | ast.While) -> list[Copy]:
    inside = [*ast.walk(loop)]
    earlier = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node.lineno < loop.lineno]
    before = [pair for node in earlier for pair in copies(node)]
    within = [pair for node in inside for pair in copies(node)]
    changing = stored(loop)
    return sorted(
        (name, other)
        for name in {name for name, _ in within}
        for other in (reachable(within, name) & reachable(before, name) & changing) - {name}
    )


def stored(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


@contextmanager
def forgotten() -> Iterator[list[str]]:
    """Names in loops that are compiled meanwhile which are assigned there, are not carried, and entered as the value of one that is."""
    from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir

    found: list[str] = []
    find, assign = CodeGenerator._find_carries, CodeGenerator.set_value
    tried: dict[int, set[str]] = {}  # by the function: what the body of a loop assigns

    def find_and_look(self: Any, node: Any, liveins: dict[str, Any], *given: Any, **options: Any) -> Any:
        if id(self) in tried:  # a loop in a body that is tried is built later
            return find(self, node, liveins, *given, **options)
        assigned = tried[id(self)] = set()
        try:
            names, *rest = find(self, node, liveins, *given, **options)
        finally:
            del tried[id(self)]
        carried = [handle for name in names for handle in handles(liveins[name])]
        target = {node.target.id} if isinstance(node, ast.For) else set()
        for name in sorted((assigned & liveins.keys()) - {*names} - target):
            if any(handle in carried for handle in handles(liveins[name])):
                found.append(f"{self.jit_fn.__name__}: {name}")
        return (names, *rest)

    def assign_and_note(self: Any, name: str, value: Any) -> None:
        tried.get(id(self), set()).add(name)
        assign(self, name, value)

    def handles(value: Any) -> list[Any]:
        return flatten_values_to_ir([value]) if hasattr(value, "_flatten_ir") else []

    with patch.multiple(CodeGenerator, _find_carries=find_and_look, set_value=assign_and_note):
        yield found


def main() -> None:
    """Compiles kernels that the front end gets wrong, and prints what `forgotten` says of them."""
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def last_of_three(x):
        a = tl.load(x)
        b = a
        for i in range(8):
            if i == 3:
                b = a
            a += i
        tl.store(x, b)

    @triton.jit
    def before_the_last(x):
        a = tl.load(x)
        b = a
        while a < 9:
            b = a
            a += 1
        tl.store(x, b)

    @triton.jit
    def right(x):
        a = tl.load(x)
        b = a * 0
        for i in range(8):
            b = a
            a += i
        tl.store(x, b)

    knobs.compilation.always_compile = True  # a kernel from Triton's cache does not pass the front end
    with forgotten() as found:
        for kernel in (last_of_three, before_the_last, right):
            triton.compile(ASTSource(kernel, {"x": "*i32"}), target=GPUTarget("cuda", 90, 32))
    print(*found, sep="\n")


if __name__ == "__main__":
    main()
