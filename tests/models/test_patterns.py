"""Patterns from files match what `re` matches, in bounded time."""

from __future__ import annotations

import random
import re
import time
import warnings

import pytest

from pdkernels.models.files.patterns import Budget, InvalidPattern, NamePatterns, Pattern, UnsupportedPattern

ATOMS = ["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "(a|b)", "(|a)", "(?:ab)", r"\w", "_", "1", "^", "$", r"\b", r"\B", r"\Z"]  # fmt: skip
ATOMS += ["(?=a)", "(?!b)", "[a-b_]", r"[\d.]"]
REPEATS = ["*", "+", "?", "{2}", "{1,2}", "{,1}", "{1,}", "*?"]
TEXTS = ["", "a", "ab", "a.b", "b1_a", "aab.ab", "1", "aaaa"]


def made(rng: random.Random, depth: int = 0) -> str:
    words = ""
    for _ in range(rng.randint(1, 4)):
        atom = rng.choice(ATOMS)
        if depth < 2 and rng.random() < 0.3:
            atom = f"({made(rng, depth + 1)}{'|' + made(rng, depth + 1) if rng.random() < 0.5 else ''})"
        words += atom + (rng.choice(REPEATS) if rng.random() < 0.35 else "")
    return words


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_patterns_match_what_re_matches(count: int) -> None:
    rng, matched = random.Random(1), 0
    for _ in range(count):
        words = made(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = re.compile(words)
        except re.error:
            with pytest.raises(InvalidPattern):
                Pattern(words, Budget())
            continue
        ours = Pattern(words, Budget())
        for text in TEXTS[r"\B" in words :]:  # whether \B matches an empty text depends on Python's version
            assert ours.matches(text) == bool(theirs.match(text)), (words, text)
            assert ours.matches(text, to_end=True) == bool(theirs.fullmatch(text)), (words, text)
            matched += ours.matches(text)
    assert matched > count


NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 12)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm")
] + ["lm_head", "model.embed_tokens"]
KEYS = [
    "q_proj", "model.layers.0.self_attn.q_proj", "^model.layers.[0-9].*", r".*\.self_attn\..*", r"layers\.\d+\.mlp", "proj",
    r"model\.layers\.(0|12)\..*_proj", "layers.1", "model.layers.1.", "up.proj", "a)|(lm_head", r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)",
    r"\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj|k_proj)", r"^(?!.*(?:mlp|visual)).*\.(?:q_proj|o_proj|up_proj)", "",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_names_match_as_in_peft(key: str) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    table = NamePatterns({key: 1})
    for name in NAMES:
        assert table.key(name) == (key if get_pattern_key([key], name) == key else None)
        if key != "a)|(lm_head":  # only together with PEFT's parentheses
            assert Pattern(key, Budget()).matches(name, to_end=True) == bool(re.fullmatch(key, name))


@pytest.mark.parametrize(
    "words", ["(|)" * 20 + "b", "(a+)+b", "(a*)*" * 50, "(.*)*" * 100 + "x", "(a|a)*" * 30 + "x", "(a?){50}a{50}", "(?=(?=(.*)*b)a)*" * 5]
)  # fmt: skip
@pytest.mark.parametrize("text", ["a" * 60, "model.layers.0.self_attn.q_proj"])
def test_patterns_that_take_re_for_ever(words: str, text: str) -> None:
    start = time.perf_counter()
    try:
        Pattern(words, Budget()).matches(text)
        NamePatterns({words: 1}).get(text)
    except UnsupportedPattern:
        pass
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("(q", InvalidPattern),
        ("q)", InvalidPattern),
        ("[q", InvalidPattern),
        ("*q", InvalidPattern),
        ("a{2,1}", InvalidPattern),
        (r"(a)\1", UnsupportedPattern),
        ("(?<=a)b", UnsupportedPattern),
        ("(?i)a", UnsupportedPattern),
        ("(" * 200 + ")" * 200, UnsupportedPattern),
        ("a" * 5000, UnsupportedPattern),
        ("((a{99}){99}){99}", UnsupportedPattern),
        ("((){9999}){9999}", UnsupportedPattern),
    ],
)
def test_what_is_not_matched(words: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Pattern(words, Budget())
