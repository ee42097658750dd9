"""How many examples of a property the tests draw."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("options", "many"), [(["-m", "not slow"], 20), ([], 200)])
def test_the_fast_tests_draw_a_part(options: list[str], many: int, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  slow")
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    file = pytester.makepyfile(
        "import pytest\n"
        "from hypothesis import given, settings, strategies as st\n"
        "drawn = []\n"
        "@pytest.mark.parametrize('case', 'ab')\n"
        "@settings(max_examples=200)\n"
        "@given(st.integers())\n"
        "def test_many(case, number): drawn.append(case)\n"
        "@settings(max_examples=4)\n"
        "@given(st.integers())\n"
        "def test_few(number): drawn.append('few')\n"
        f"def test_numbers(): assert [*map(drawn.count, ('a', 'b', 'few'))] == [{many}, {many}, 4]"
    )
    pytester.inline_run(*options, file).assertoutcome(passed=4)
