"""Which cases of a product are fast."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from tests.harness.covering import covering

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_occurs(strength: int) -> None:
    every = [dict(zip("abcd", values)) for values in product(range(2), "xyz", [None, 0.5], range(5))]
    cases = random.Random(0).sample(every, 40)  # no whole product
    chosen = [cases[number] for number in covering(cases, strength)]
    assert len(chosen) < len(cases)
    for names in combinations("abcd", strength):
        found, wanted = ({tuple(case[name] for name in names) for case in some} for some in (chosen, cases))
        assert found == wanted


def test_the_fast_cases_of_a_test_and_of_one_by_its_name(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  covering")
    pytester.makeconftest(
        "import pytest\n"
        "from tests.harness.covering import mark_the_rest_slow\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_the_rest_slow(items)"
    )
    file = pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.covering\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "@pytest.mark.parametrize('b', [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])\n"
        "def test_it(a, b): pass\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "def test_all(a): pass\n"
        "@pytest.mark.covering(of=['a'])\n"
        "@pytest.mark.parametrize('a', [1, 2])\n"
        "@pytest.mark.parametrize('b', range(5))\n"
        "def test_some(a, b): pass"
    )
    pytester.inline_run("-m", "not slow", file).assertoutcome(passed=3 + 2 + 2)
    pytester.inline_run(file).assertoutcome(passed=8 + 2 + 10)


def test_a_share_of_the_cases_is_another_one_in_each_test(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  covering")
    pytester.makeconftest("from tests.harness.covering import mark_the_rest_slow as pytest_collection_modifyitems")
    names = "abcdefgh"
    tests = (
        f"@pytest.mark.covering(share=3)\n@pytest.mark.parametrize('n', range(7))\ndef test_{name}(n): pass\n"
        for name in names
    )
    items, _ = pytester.inline_genitems(pytester.makepyfile("import pytest\n" + "".join(tests)))
    fast = {item.name for item in items if not item.get_closest_marker("slow")}
    chosen = {tuple(n for n in range(7) if f"test_{name}[{n}]" in fast) for name in names}
    assert chosen == {(0, 3, 6), (1, 4), (2, 5)}
