"""Every method writes texts of a grammar, or refuses it; lossless ones write those of autoregressive decoding under it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.grammar_rows import GrammarRows
from pdkernels.generation.prefixes import Prefixes
from tests.support.drafters import dflash_head, eagle_head, mtp_head, small_drafter
from tests.support.grammars import all_grammars

PATTERN = r'\{"name": "[^"\\\x00-\x1f]{0,12}", "age": (0|[1-9]\d{0,2})\}'
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS if name != "planned"),
    ("jacobi", {"window": 7}),
    ("jacobi", {"draft": "lookup"}),
    ("linear_self_speculation", {"threshold": 0.5}),
    ("linear_self_speculation", {"verification": "rejection"}),
    ("quadratic_self_speculation", {"ensemble_weight": 0.5}),
    ("block_diffusion", {"refresh": "bidirectional", "threshold": None, "steps_per_block": 3}),
    ("fast_dllm_v2", {"steps": 2}),
    ("llada", {"block_size": 8, "guidance": 1.5}),
    ("llada", {"remasking": "random"}),
    ("llada", {"no_end": True}),
    ("llada", {"late_end": True}),
    ("dream", {"algorithm": "origin"}),
    ("dream", {"algorithm": "confidence_threshold", "top_k": 5}),
    ("dream", {"steps": 3, "top_p": 0.9}),
    ("slowfast", {"prompt_interval": 3}),
    ("dllm_cache", {"guidance": 1.0}),
    ("fast_dllm", {"block_size": 8}),
    ("recurrent_self_speculation", {"verification_threshold": 0.1}),
    ("recurrent_adaptive", {"criterion": "kl"}),
    ("recurrent_diffusion", {"headway": 3}),
]


@cache
def model(name: str) -> Any:
    return pd.models.load(name)


def drafter(method: str, name: str) -> dict[str, Any]:
    """The option of a method that needs a second model."""
    made = {"draft_model": small_drafter, "eagle": eagle_head, "dflash": dflash_head, "mtp": mtp_head}.get(method)
    return {} if made is None else {"drafter": made(model(name))}


def written(method: str, grammar: Any, prompt: Any = ("ab = ", "x"), **options: Any) -> Any:
    chosen = METHODS[method]
    options = {"max_new_tokens": 34, **drafter(method, chosen.example), **options}
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    return generate(model(chosen.example), prompt, method, grammar=grammar, **options)


@pytest.mark.covering(of=["method", "temperature"], share=3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "options"), FORMS, ids=lambda value: str(value))
def test_texts_belong_to_the_grammar(method: str, options: dict[str, Any], temperature: float) -> None:
    chosen = METHODS[method]
    for fill in ("each", "joint"):
        if fill == "joint" and (temperature or not chosen.writes_in_parallel):
            continue
        grammar = Grammar.regex(PATTERN, fill=fill)  # type: ignore[arg-type]
        try:
            result = written(method, grammar, temperature=temperature, **options)
        except ValueError as error:
            assert options.get("no_end") and "has exactly 34 tokens" in str(error)
            result = written(method, grammar, temperature=temperature, **{**options, "max_new_tokens": 28})
        assert all(re.fullmatch(PATTERN, text) for text in result.text), result.text


@pytest.mark.parametrize(
    "options", [{"temperature": 1.2, "seed": 5, "top_k": 4, "top_p": 0.9}, pytest.param({}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["tiny-trimode", pytest.param("tiny-jacobi", marks=pytest.mark.slow)])
def test_lossless_methods_write_what_autoregressive_does(name: str, options: dict[str, Any]) -> None:
    grammar, schema = Grammar.regex(PATTERN), Grammar.json_schema({"type": "array", "items": {"enum": ["ab", 7, None]}})
    prompts = ["ab = ", "def f(x):\n", "12"]
    asked = {"max_new_tokens": 40, "grammar": [grammar, schema, None], **options}
    expected = generate(model(name), prompts, **asked)
    for method, more in FORMS:
        chosen = METHODS[method]
        plain = "verification" not in more and "ensemble_weight" not in more
        if chosen.wing != "causal" or not chosen.lossless or not plain:
            continue
        more = {**more, **drafter(method, name)}
        if chosen.needs_mask_token and model(name).mask_token is None:
            continue
        found = generate(model(name), prompts, method, **asked, **more)
        assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens], (method, more)
    assert re.fullmatch(PATTERN, expected.text[0]) and isinstance(json.loads(expected.text[1]), list)
    assert expected.text[2] == generate(model(name), prompts, max_new_tokens=40, **options).text[2]
    alone = {**asked, "grammar": schema, "seed": [pd.decoding.sequence_seed(options.get("seed", 0), 1)], "page_size": 4}
    assert generate(model(name), prompts[1], "jacobi", **alone).tokens.tolist() == expected.tokens[1].tolist()


def test_forced_tokens_are_drafted_and_counted() -> None:
    grammar = Grammar.regex(PATTERN)
    one_by_one = max(map(len, written("autoregressive", grammar).tokens))
    for method, options, share in (
        ("autoregressive", {}, 0.6),
        ("draft_model", {"block_size": 8}, 0.6),
        ("eagle", {"block_size": 8}, 0.6),
        ("dflash", {}, 0.7),
        ("mtp", {"block_size": 8}, 0.6),
        ("recurrent_diffusion", {}, 4.0),
        ("recurrent_self_speculation", {"draft_recurrences": 8}, 1.5),
        ("jacobi", {"window": 8}, 0.5),
        ("jacobi", {"draft": "lookup"}, 0.5),
        ("jacobi", {}, 0.5),
        ("jacobi_multiblock", {}, 0.6),
        ("suffix", {}, 0.5),
        ("linear_self_speculation", {}, 0.5),
        ("linear_self_speculation", {"threshold": 0.5}, 1.5),
        ("quadratic_self_speculation", {}, 0.5),
    ):
        result = written(method, grammar, **options)
        assert result.stats.forwards < share * one_by_one, (method, options, result.stats.forwards, one_by_one)
        # {"name": " and ", "age": have 19 bytes.
        # What comes after a drafter's guess is its guess too.
        least = 9 if method == "recurrent_self_speculation" else 12
        assert all(least <= count <= 22 for count in result.stats.forced), (method, options, result.stats.forced)
    for method in ("recurrent_static", "recurrent_adaptive"):
        assert written(method, grammar).stats.forced == [0, 0]
    assert generate(model("tiny-recurrent"), "a", grammar=grammar, max_new_tokens=30).stats.forced == [0]
    assert written("linear_self_speculation", grammar, verification="rejection", temperature=1.0).stats.forced == [0, 0]
    assert generate(model("tiny-code"), "a", max_new_tokens=3).stats.forced is None


def law(name: str, grammar: str, limit: int, prompt: str) -> dict[tuple[int, ...], float]:
    """The probability of each text: by enumeration with Python's `re`, from the model's own logits."""
    found: dict[tuple[int, ...], float] = {}
    alphabet = [ord(one) for one in "abc"]
    end = model(name).end_tokens[0]
    texts = [
        "".join(map(chr, one))
        for length in range(limit + 1)
        for one in itertools.product(alphabet, repeat=length)
        if re.fullmatch(grammar, "".join(map(chr, one)))
    ]

    def spread(prefix: tuple[int, ...], share: float) -> None:
        if len(prefix) == limit or (prefix and prefix[-1] == end):
            found[prefix] = share
            return
        start = "".join(map(chr, prefix))
        able = {token for token in alphabet if any(text.startswith(start + chr(token)) for text in texts)}
        able |= {end} if start in texts else set()
        ids = torch.tensor([model(name).tokenizer.encode(prompt) + list(prefix)])
        cache = model(name).new_cache(1, ids.shape[1])
        with torch.inference_mode():
            logits = model(name)(ids, cache=cache)[0, -1].double()
        shares = {token: math.exp(logits[token]) for token in able}
        total = sum(shares.values())
        for token, mass in shares.items():
            spread((*prefix, token), share * mass / total)

    spread((), 1.0)
    return found


@pytest.mark.parametrize(("method", "name"), [("autoregressive", "tiny-code"), ("jacobi", "tiny-code")])
def test_law_of_sampling_by_enumeration(method: str, name: str) -> None:
    grammar, limit, count = "(a|b)*c?(ab)?", 3, 1200
    expected = law(name, grammar, limit, "x = ")
    result = generate(
        model(name), ["x = "] * count, method, grammar=Grammar.regex(grammar), temperature=1.0, max_new_tokens=limit
    )
    seen: dict[tuple[int, ...], int] = {}
    for ids in result.tokens:
        seen[tuple(ids.tolist())] = seen.get(tuple(ids.tolist()), 0) + 1
    assert set(seen) <= set(expected)
    square = sum((seen.get(text, 0) - count * share) ** 2 / (count * share) for text, share in expected.items())
    degrees = len(expected) - 1
    assert square < degrees + 4 * math.sqrt(2 * degrees) + 10, (square, degrees)


@pytest.mark.parametrize("method", [name for name, known in METHODS.items() if known.wing == "masked"])
def test_infilling(method: str) -> None:
    mask = model("tiny-masked").mask_token
    encode = model("tiny-masked").tokenizer.encode
    for options in ({}, {"temperature": 1.0}):
        prompt = [*encode('{"a": '), mask, mask, *encode(', "b": "'), mask, mask, mask, *encode('"}')]
        schema = {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a", "b"],
        }
        grammar = Grammar.json_schema(schema)
        result = written(method, grammar, prompt, infill=True, max_new_tokens=0, **options)
        value = json.loads(result.text)
        assert type(value["a"]) is int and len(result.text) == len(prompt)
        with pytest.raises(ValueError, match="prompt 0 cannot be completed"):
            written(method, Grammar.regex("[a-z]*"), prompt, infill=True, max_new_tokens=0)
        longer = written(
            method,
            Grammar.regex(r"x=\d\d;(y=\d;)?"),
            [*encode("x="), mask, *encode("3")],
            infill=True,
            max_new_tokens=6,
            **options,
        )
        assert re.fullmatch(r"x=\d\d;(y=\d;)?", longer.text)


def test_most_probable_completion() -> None:
    """A canvas filled in one step by `joint` has the most probable text of all, by enumeration."""
    lively = model("tiny-masked")
    grammar, prompt = Grammar.regex("(ab|ba|cc)[ab]", fill="joint"), "def "
    for options in ({"no_end": True, "steps": 1},):
        result = generate(lively, prompt, "llada", grammar=grammar, max_new_tokens=3, **options)
        ids = lively.tokenizer.encode(prompt)
        canvas = torch.tensor([ids + [lively.mask_token] * 3])
        start = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            hidden = lively.recompute(
                canvas,
                lively.new_cache(1, canvas.shape[1]),
                start,
                counts=None,
                visible=torch.tensor([canvas.shape[1]]),
            )
            logs = lively.logits(hidden)[0, len(ids) :].double().log_softmax(-1)
        texts = [a + b for a in ("ab", "ba", "cc") for b in "ab"]
        best = max(texts, key=lambda text: sum(logs[n, ord(one)].item() for n, one in enumerate(text)))
        assert result.text == best


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"threshold": 0.3},
        {"steps_ratio": 0.2},
        {"sparse": True, "cache": "drop_finished"},
        {"top_k": 3, "temperature": 0.7},
        {"chunks": "autoregressive"},
        {"chunks": "autoregressive", "temperature": 1.0},
    ],
)
def test_chunks_of_plans(options: dict[str, Any]) -> None:
    """Every chunk is a text of the grammar, up to its padding."""
    planner = model("tiny-planned")
    tags = planner.plan_tokens
    grammar = Grammar.regex("[a-z]{1,4}( [a-z]+)*|[0-9]+")
    prompts = ["describe: red box", "list: a b c"]
    result = written("planned", grammar, prompts, max_new_tokens=80, **options)
    chunks = 0
    for ids in result.tokens:
        inside: list[int] | None = None
        for token in ids.tolist():
            if token == tags.chunk_open:
                inside = []
            elif token == tags.chunk_close and inside is not None:
                text = bytes(one for one in inside if one != tags.pad).decode()
                assert grammar.matches(text) and tags.pad not in inside[: len(text)], inside
                inside, chunks = None, chunks + 1
            elif inside is not None:
                inside.append(token)
    assert chunks > 0
    with pytest.raises(ValueError, match="the plan asks for a chunk of .* takes 70 at least"):
        written("planned", Grammar.regex("x{70}"), prompts, max_new_tokens=80, **options)


def test_texts_end_within_the_limit() -> None:
    """A grammar of long texts gives whole ones at any limit that has one, and is refused below."""
    grammar = Grammar.regex(r'"[a-z]{3,}"')
    for method in (
        "autoregressive",
        "jacobi",
        "quadratic_self_speculation",
        "block_diffusion",
        "llada",
        "recurrent_static",
    ):
        for limit in (5, 9):
            for temperature in (0.0, 1.5):
                result = written(method, grammar, max_new_tokens=limit, temperature=temperature)
                assert all(re.fullmatch(r'"[a-z]{3,}"', text) for text in result.text), (method, limit)
        with pytest.raises(
            ValueError, match=r"cannot be completed within max_new_tokens \(4\): it takes 5 tokens at least"
        ):
            written(method, grammar, max_new_tokens=4)


def test_refusals() -> None:
    grammar = Grammar.regex("a+")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"grammar": "a+"}, TypeError, "grammar must be a Grammar, or a list with one (or None) for each prompt, got str"),
        ({"grammar": [grammar]}, ValueError, "have one for each of the 2 prompts, got 1"),
        ({"grammar": grammar, "end_tokens": ()}, ValueError, "a grammar needs an end token"),
        ({"grammar": grammar, "end_tokens": (97,)}, ValueError, "write no text with a grammar"),
        ({"grammar": Grammar.regex("a+", fill="joint")}, ValueError, "must have fill='each'"),
        ({"grammar": Grammar.regex("a+", fill="joint"), "method": "llada", "temperature": 1.0}, ValueError, "most probable completion"),
        ({"grammar": grammar, "method": "dream", "logits_hook": lambda *given: given[-1]}, NotImplementedError, "does not follow a grammar with logits_hook"),
        ({"grammar": grammar, "suppress_tokens": [97]}, ValueError, "no token to choose"),
    ]  # fmt: skip
    for options, kind, words in cases:
        method = options.pop("method", "autoregressive")
        with pytest.raises(kind, match=re.escape(words)):
            written(method, **options)
    with pytest.raises(ValueError, match="fill must be one of 'each', 'joint'"):
        Grammar.regex("a", fill="all")  # type: ignore[arg-type]


def test_context_free_grammars_of_any_depth() -> None:
    pytest.importorskip("llguidance")
    rules = 'start: value\nvalue: "[" [value ("," value)*] "]" | /[0-9]/'
    grammar = Grammar.lark(rules)
    assert grammar.matches("[1,[2,[]]]") and not grammar.matches("[1,[2") and not grammar.matches("12")
    nested = Grammar.lark('start: "[" start "]" | "(" start ")" | /[0-9]{1,2}/')
    for name, options in (("tiny-code", {}), ("tiny-trimode", {"temperature": 1.0, "seed": 7})):
        start = {"forced_tokens": dict(enumerate(map(ord, "[([([("))), "logit_bias": dict.fromkeys(range(48, 58), 3.0)}
        asked = {"grammar": [nested, None], "max_new_tokens": 20, **start, **options}
        expected = generate(model(name), ["((", "x = "], **asked)
        assert re.fullmatch(r"\[\(\[\(\[\([(\[]*[0-9]{1,2}[)\]]*\)\]\)\]\)\]", expected.text[0])
        for method, more in FORMS:
            chosen = METHODS[method]
            plain = "verification" not in more and "ensemble_weight" not in more
            if chosen.wing != "causal" or not chosen.lossless or not plain:
                continue
            if chosen.needs_mask_token and model(name).mask_token is None:
                continue
            found = generate(model(name), ["((", "x = "], method, **asked, **more, **drafter(method, name))
            assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens], method
    with pytest.raises(ValueError, match=r"could not be completed within max_new_tokens \(2\)"):
        written("autoregressive", Grammar.lark('start: "abc"'), max_new_tokens=2)
    with pytest.raises(NotImplementedError, match=r"'llada' does not follow Grammar.lark"):
        written("llada", nested)
    with pytest.raises(ValueError, match="unfolds to more than"):
        Grammar.lark("start: /(a{1000}){1000}/")
    with pytest.raises(ValueError, match='unknown name: "b"'):
        Grammar.lark("start: b")


def test_a_model_without_bytes_is_refused() -> None:
    class Words:
        vocab_size, end_tokens = 257, (256,)

        def encode(self, text: str) -> list[int]:
            return [1]

        def decode(self, ids: Any) -> str:
            return ""

    made = pd.models.load("tiny-code")
    made.tokenizer = Words()
    with pytest.raises(NotImplementedError, match="Words without token_bytes"):
        generate(made, "a", grammar=Grammar.regex("a"))
    made.tokenizer = None
    with pytest.raises(NotImplementedError, match="the model has no tokenizer"):
        generate(made, [1], grammar=Grammar.regex("a"))


def test_tokens_that_cannot_write_it_are_refused() -> None:
    class Capitals(type(model("tiny-code").tokenizer)):  # type: ignore[misc]
        def token_bytes(self) -> list[bytes]:
            return [one if one.isupper() else b"" for one in super().token_bytes()]

    made = pd.models.load("tiny-code")
    made.tokenizer = Capitals()
    with pytest.raises(ValueError, match="the tokens of the model write no text of the pattern '\\[A-Z\\]\\+1'"):
        generate(made, "a", grammar=Grammar.regex("[A-Z]+1"))
    assert generate(made, "a", grammar=Grammar.regex("[A-Z]{3}|[a-z]{2}"), max_new_tokens=5).text.isupper()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_change_no_token(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of autoregressive decoding that share forwards are those that do not, in batches too."""
    grammars = [Grammar.regex(PATTERN), Grammar.choice(["import os", "impossible"]), None]
    asked = {"grammar": grammars, "temperature": temperature, "seed": 11, "max_new_tokens": 30}
    found = generate(model("tiny-code"), ["ab = ", "x", "def f(x):"], **asked)
    with monkeypatch.context() as patch:
        patch.setattr("pdkernels.decoding.causal.autoregressive._FORCED", 1)
        expected = generate(model("tiny-code"), ["ab = ", "x", "def f(x):"], **asked)
    assert [ids.tolist() for ids in found.tokens] == [ids.tolist() for ids in expected.tokens]
    assert expected.stats.forced == [0, 0, 0] and found.stats.forced[0] >= 12 and found.stats.forced[2] == 0
    assert found.stats.accepted[2] == expected.stats.accepted[2] == [1] * len(expected.stats.accepted[2])


@pytest.mark.parametrize("method", ["jacobi", "block_diffusion", "llada", "dream"])
def test_texts_are_read_before_a_forward(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU runs it while the host computes what is allowed."""
    seen: list[str] = []

    def noted(owner: Any, name: str, word: str) -> None:
        plain = getattr(owner, name)

        def spy(*given: Any, **named: Any) -> Any:
            seen.append(word)
            return plain(*given, **named)

        monkeypatch.setattr(owner, name, spy)

    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    noted(Prefixes, "read", "r")
    kind = type(model(METHODS[method].example))
    noted(kind, "_forward", "f"), noted(kind, "recompute", "f")
    noted(GrammarRows, "words", "w")
    written(method, Grammar.regex("[a-z]{4,9}"), "ab = ", max_new_tokens=12)
    assert re.fullmatch("(f*rf+w)+f*", "".join(seen)), "".join(seen)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "planned"])
def test_all_grammars_with_all_methods(method: str) -> None:
    oracle = pytest.importorskip(
        "tests.support.grammar_oracle", reason="jsonschema is not installed", exc_type=ImportError
    )
    valid = refused = 0
    for number, (name, grammar) in enumerate(all_grammars().items()):
        options = {"temperature": 1.0, "seed": number} if number % 2 else {}
        try:
            result = written(method, grammar, "ab = ", max_new_tokens=80, **options)
        except ValueError as error:
            assert "cannot be completed within max_new_tokens (80)" in str(error), name
            refused += 1
            continue
        assert oracle.fault(name, result.text) == "", (name, result.text)
        valid += 1
    assert valid >= 100 and refused <= 5, (valid, refused)


def test_a_grammar_can_be_pickled() -> None:
    """By the call that made it, in another process as well; without the warnings of that."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItem": 2}
    with pytest.warns(UserWarning, match="minItem") as told:
        listed = Grammar.json_schema(schema, whitespace="compact")
    assert [warning.filename for warning in told] == [__file__]
    deep = Grammar.ebnf('start: "[" start "]" | "x"', depth=None)
    cases = [(listed, "[1,2]"), (deep, "[[x]]"), (Grammar.regex("a+b"), "aab"), (Grammar.choice(["x", "y"], fill="joint"), "y")]  # fmt: skip
    for grammar, text in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = pickle.loads(pickle.dumps(grammar))
        assert other.matches(text) and not other.matches(f"{text}!") and (other.source, other.fill) == (grammar.source, grammar.fill)  # fmt: skip
        assert copy.deepcopy(grammar) is grammar and copy.copy(grammar) is grammar
    schema["minItems"] = 3  # afterwards
    assert pickle.loads(pickle.dumps(listed)).matches("[1,2]")
