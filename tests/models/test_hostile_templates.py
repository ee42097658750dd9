"""Templates that ask for all time and memory: a sentence within two seconds, and a process that stays small."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs the package jinja2: pip install jinja2")
import jinja2

from pdkernels.models import ChatTemplate
from pdkernels.models.text import template_process

CHAT = [{"role": "user", "content": "Hi"}]
HOSTILE = [
    "{{ 'a'*10**9 }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ messages | tojson(indent=5e8|int) }}",
    "{{ range(10**9)|list }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 10**10**8 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ ([0]*10**9)|length }}",
    "{{ (['a'*1000]*1000000)|join(',')|length }}",
    "{{ ('a'*1000000).replace('a', 'b'*10000)|length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{{ 'a b'|indent(10**9) }}",
    "{{ ('a\\n'*100000)|indent(100000) }}",
    "{{ ('a'*100000)|wordwrap(1, wrapstring='b'*100000)|length }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ [1]|slice(10**8)|list }}",
    "{{ lipsum(n=1000000) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set a = namespace(x=1, y=1) %}{% for i in range(64) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}{{ a.x == a.y }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(64) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1}|length }}",
    "{{ cycler(*range(100000)).next() }}{{ (99999999 ** 999999) % 7 }}",
    "{{ (10**100000)|string|length }}{{ 3**(3**30) }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ ('(' * 100000)|urlize|length }}",
    "{{ ('<' * 1000000)|striptags|length }}",
    "{{ 'x' if ('a' * 2**28) in ('a' * 2**29) }}",
    "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
    "{{ " + "-" * 50000 + "1 }}",
]


def peak() -> int:
    """The largest resident size of this process so far, in MB."""
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def child() -> int:
    """The largest resident size of the process that renders, in MB; 0 if none runs."""
    running = template_process._PROCESS._running
    if running is None or running.poll() is not None:
        return 0
    with open(f"/proc/{running.pid}/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmHWM"))


def bounded(source: str, seconds: float = 2.0) -> str | None:
    """The text, or None after an error that is ours; asserts the bounds."""
    before, started = peak(), time.process_time() + os.times().children_user
    try:
        text = ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, tools=[{"a": 1}])
    except ValueError as error:
        assert str(error).startswith("pdkernels.models.load: chat template must ") and len(str(error)) < 600
        text = None
    assert time.process_time() + os.times().children_user - started < seconds
    assert peak() - before < 100 and child() < 400
    return text


# Those that run out of time, of which a few are enough for every day.
LONG = {9, 11, 13, 16, 18, 19, 21, 22, 23, 24, 25}


@pytest.mark.parametrize(
    "source",
    [pytest.param(source, marks=[pytest.mark.slow] * (i in LONG), id=str(i)) for i, source in enumerate(HOSTILE)],
)
def test_a_single_expression_ends(source: str) -> None:
    text = bounded(source)
    assert text is None or len(text) < 1 << 22
    assert ChatTemplate("{{ messages[0].content }}").render(CHAT) == "Hi"  # the next one is not disturbed


def test_a_template_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_A_TEST", "x")
    template_process._PROCESS.close()
    ChatTemplate("a").render(CHAT)
    running = template_process._PROCESS._running
    assert running is not None
    with open(f"/proc/{running.pid}/environ") as file:
        assert "SECRET_OF_A_TEST" not in file.read()
    # A way out of the sandbox of jinja2 3.1.5 and earlier.
    source = "{{ ''|attr('format')|attr('__globals__') }}{{ (''|attr)('format') }}"
    assert bounded(source) is None


@pytest.mark.parametrize("version", ["3.1.5", "2.11", "3.0.0rc1"])
def test_an_older_jinja2_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja2, "__version__", version)
    with pytest.raises(ImportError, match=r"^pdkernels.models.load: m.gguf needs jinja2 3.1.6 or newer"):
        ChatTemplate("a", where="m.gguf").render(CHAT)


def test_ordinary_templates_share_a_process() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    template.render(CHAT)
    running = template_process._PROCESS._running
    for _ in range(3):
        template.render(CHAT * 10)
    assert running is not None and template_process._PROCESS._running is running


def test_threads_and_forks_share_it() -> None:
    wrong: list[Any] = []

    def work(n: int) -> None:
        for i in range(20):
            if (
                ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": f"{n} {i}"}])
                != f"{n} {i}"
            ):
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pid = os.fork()
    if pid == 0:
        same = ChatTemplate("{{ messages[0].content }}").render(CHAT) == "Hi"
        template_process._PROCESS.close()
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0
    work(9)
    assert not wrong


def test_it_is_started_again() -> None:
    ChatTemplate("a").render(CHAT)
    running = template_process._PROCESS._running
    assert running is not None
    running.kill()
    running.wait()
    assert ChatTemplate("b").render(CHAT) == "b"


NUMBERS = ["0", "1", "7", "-1", "1000", "10**6", "10**9", "2**40", "5e8", "10**100", "True", "none"]
TEXTS = ["'a'", "'%999999d'", "'{:9999999}'", "messages[0].content", "bos_token", "'a b c'", "'<b>'", "('ab'*9999)"]
LISTS = ["messages", "range(1000)", "[1, 2]", "tools", "('a', 'b')", "{'a': 1}", "[[]]"]
FILTERS = ["center(%s)", "indent(%s)", "wordwrap(%s)", "batch(%s)", "slice(%s)", "truncate(%s)", "round(%s)", "tojson(indent=%s)", "list", "join", "string", "length", "upper", "urlize", "striptags", "title", "escape", "e", "xmlattr", "map('string')", "unique", "sort", "reverse", "sum", "groupby(%s)", "pprint", "filesizeformat", "float", "int(%s)", "format(%s)", "replace('a', 'b' * %s)", "random", "select", "dictsort", "items", "default(%s)", "first", "attr('x')", "wordcount", "urlencode", "forceescape"]  # fmt: skip
METHODS = ["ljust(%s)", "rjust(%s)", "zfill(%s)", "center(%s)", "format(%s)", "expandtabs(%s)", "split()", "join(%s)", "replace('a', 'bb' * %s)", "encode()", "splitlines()", "translate(%s)", "__class__", "append(1)", "items()", "format_map(%s)", "count('a')", "partition('a')"]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is"]


def expression(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(draw.choice([NUMBERS, TEXTS, LISTS]))
    one = expression(draw, depth - 1)
    kind = draw.randrange(7)
    if kind <= 1:
        return f"({one} {draw.choice(OPERATORS)} {expression(draw, depth - 1)})"
    if kind <= 3:
        name = draw.choice(FILTERS)
        return f"({one} | {name % expression(draw, depth - 1) if '%s' in name else name})"
    if kind == 4:
        name = draw.choice(METHODS)
        return f"({one}).{name % expression(draw, depth - 1) if '%s' in name else name}"
    if kind == 5:
        return f"{draw.choice(['range', 'lipsum', 'cycler', 'joiner', 'dict', 'namespace', 'm', 'strftime_now', 'ns.x'])}({one})"
    return f"[{one}, ns.x, {expression(draw, depth - 1)}]"


def statement(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return "{{ " + expression(draw, draw.randrange(3)) + " }}"
    inside = "".join(statement(draw, depth - 1) for _ in range(draw.randrange(1, 3)))
    value = expression(draw, draw.randrange(3))
    forms = [
        "{%% for i in %s %%}%s{%% endfor %%}",
        "{%% if %s %%}%s{%% endif %%}",
        "{%% set ns.x = [%s, ns.x, ns.x] %%}%s",
        "{%% set ns.x = ns.x ~ %s ~ ns.x %%}%s",
        "{%% macro m(n) %%}{{ %s }}%s{{ m(n) }}{%% endmacro %%}",
        "{%% set y %%}{{ %s }}%s{%% endset %%}{{ y }}{{ y }}",
        "{%% filter replace('a', %s) %%}%s{%% endfilter %%}",
        "{%% for i in range(64) %%}{%% set ns.x = [ns.x, %s, ns.x] %%}{%% endfor %%}%s",
        "{%% generation %%}{{ %s }}%s{%% endgeneration %%}",
        "{%% call(u) m(%s) %%}%s{%% endcall %%}",
    ]
    return draw.choice(forms) % (value, inside)


def mutated(draw: random.Random) -> str:
    source = "{% set ns = namespace(x='a') %}" + "".join(statement(draw, draw.randrange(3)) for _ in range(2))
    if draw.random() < 0.2:  # also what is no template
        at = draw.randrange(len(source))
        source = (
            source[:at]
            + draw.choice(["{{", "%}", "|", "(", "'", "\0", "\ud800", "", "}}", "{#"])
            + source[at + draw.randrange(3) :]
        )
    return source


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A renderer with less time, for many templates that use all of it."""
    template_process._PROCESS.close()
    monkeypatch.setattr(template_process, "_SECONDS", 0.1)
    yield
    template_process._PROCESS.close()


def test_random_templates(hasty: None) -> None:
    draw = random.Random(0)
    rendered = sum(bounded(mutated(draw)) is not None for _ in range(100))
    assert 5 < rendered < 90


@pytest.mark.slow
def test_many_random_templates(hasty: None) -> None:
    draw = random.Random(1)
    rendered = sum(bounded(mutated(draw)) is not None for _ in range(20000))
    assert 1000 < rendered < 19000
