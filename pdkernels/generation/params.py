"""What a caller may ask of a generation: one value, checked once when it is made, then carried whole from door to
decoder.

A setting is a field of `SamplingParams`, and says everything about itself there: what it means, its range, whether it
draws, filters, stops or reports, whether the rows of a running batch may differ in it, and its names elsewhere.
`generate`, `Engine.submit`, the server's fields, the options of the command line, lm-eval, transformers and the tables
of the docs all read these fields, so a new setting is written here and where tokens are chosen (`sampler.py`,
`filters.py` or `stops.py`), and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal, NamedTuple

import torch

from pdkernels._validation import check, check_fits_float, check_text, check_type, plain
from pdkernels.grammar.grammar import Grammar
from pdkernels.ops.filter_logits import LARGEST

MAX_POSITIONS = 2**24
"""Limit of a text, regardless of the model."""
MAX_SCALE = 1e30
"""Limit of what logits and states are multiplied with or divided by, which leaves them finite in float32."""

Functions = Callable[..., Any] | Sequence[Callable[..., Any]] | None
Effect = Literal["model", "draw", "filter", "stop", "report"]
Kind = Literal[
    "number",
    "integer",
    "integers",
    "sequences",
    "numbers by token",
    "tokens by place",
    "strings",
    "functions",
    "grammar",
    "name",
]
"""The form of a value, which says how a command line or a JSON body writes it."""
Check = Callable[[str, str, Any], Any]
"""From the name of an op, that of a setting and its value to the value as it is kept. Raises TypeError or
ValueError."""


class Setting(NamedTuple):
    """What there is to know of a field of `SamplingParams`."""

    name: str
    type: str
    """As it is written in Python."""
    help: str
    default: Any
    kind: Kind
    effect: Effect
    """"model": computes the logits; "draw": chooses among tokens; "filter": changes logits; "stop": ends a text; "report": adds to the result."""
    check: Check
    minimum: float | None
    maximum: float | None
    """The range, both ends included, of a number or integer; None: unlimited."""
    neutral: tuple[Any, ...]
    """Values that change nothing, the default included: some exist only elsewhere, such as transformers'
    ``top_k=0``."""
    per_row: bool
    """Whether rows of one running batch may have values of their own; else these requests have different batches."""
    wire: str
    """Its field in a request of the server; empty: it cannot be sent."""
    wire_range: tuple[float, float] | None
    """The server's range, such as OpenAI's, where it is narrower."""
    transformers: str
    """Its name in transformers' `GenerationConfig`; empty: it has none."""
    aliases: tuple[str, ...]
    """What other libraries call it."""

    def changes(self, value: Any) -> bool:
        """Whether a value asks for something.

        >>> SETTINGS["top_k"].changes(0), SETTINGS["top_k"].changes(5)
        (False, True)
        """
        return not any(value is neutral or value == neutral for neutral in self.neutral)

    def neutralised(self, value: Any) -> Any:
        """A value as `SamplingParams` takes it: the default for what asks for nothing, of which some forms exist only
        elsewhere.

        >>> SETTINGS["top_k"].neutralised(0), SETTINGS["top_k"].neutralised(5)
        (None, 5)
        """
        return value if self.changes(value) else self.default

    @property
    def wire_bounds(self) -> tuple[float | None, float | None]:
        """The range of its field in a request of the server, which includes neutral numbers.

        >>> SETTINGS["top_k"].wire_bounds, SETTINGS["presence_penalty"].wire_bounds
        ((0, 16777216), (-2, 2))
        """
        minimum, maximum = self.wire_range or (self.minimum, self.maximum)
        if minimum is not None:
            minimum = min([minimum, *(value for value in self.neutral if isinstance(value, (int, float)))])
        return minimum, maximum


def setting(
    default: Any,
    kind: Kind,
    effect: Effect,
    check: Check,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    neutral: tuple[Any, ...] = (),
    per_row: bool = False,
    wire: str = "",
    wire_range: tuple[float, float] | None = None,
    transformers: str = "",
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field of `SamplingParams`; the arguments are those of `Setting`."""
    values = locals() | {"neutral": (default, *neutral)}
    return dataclasses.field(default=default, metadata=values)


# ------------------------------------------------------------------------------------------------------------- checks


def _number(op: str, name: str, value: Any) -> float:
    check_type(
        isinstance(value, (int, float)) and type(value) is not bool, op, name, "be a number", type(value).__name__
    )
    check_fits_float(op, name, value)
    check(math.isfinite(value), op, name, "be finite", value)
    check(abs(value) <= LARGEST, op, name, "be finite in float32", value)
    return float(value)


def _temperature(op: str, name: str, value: Any) -> float:
    check_type(
        isinstance(value, (int, float)) and type(value) is not bool, op, name, "be a number", type(value).__name__
    )
    check(0 <= value < math.inf, op, name, "be finite and at least 0", value)
    check(value == 0 or value >= 1 / MAX_SCALE, op, name, f"be 0 or at least {1 / MAX_SCALE:g}", value)
    check(value <= MAX_SCALE, op, name, f"be at most {MAX_SCALE:g}", value)
    check_fits_float(op, name, value)
    return float(value)


def _share(op: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    check_type(
        isinstance(value, (int, float)) and type(value) is not bool, op, name, "be a number", type(value).__name__
    )
    check(0 <= value <= 1, op, name, "be in 0 .. 1", value)
    return float(value)


def _share_above_0(op: str, name: str, value: Any) -> float | None:
    share = _share(op, name, value)
    check(share != 0, op, name, "be above 0", value)
    return share


def _factor(op: str, name: str, value: Any) -> float:
    check_type(type(value) in (int, float), op, name, "be a number", type(value).__name__)
    check(0 < value < math.inf, op, name, "be finite and above 0", value)
    check_fits_float(op, name, value)
    check(1 / MAX_SCALE <= value, op, name, f"be at least {1 / MAX_SCALE:g}", value)
    check(value <= LARGEST, op, name, "be finite in float32", value)
    return float(value)


def _count(minimum: int, optional: bool = False) -> Check:
    def check_count(op: str, name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        check_type(type(value) is int, op, name, "be an int", type(value).__name__)
        check(value >= minimum, op, name, f"be at least {minimum}", value)
        check(value <= MAX_POSITIONS, op, name, f"be at most {MAX_POSITIONS}", value)
        return int(value)

    return check_count


def _items(op: str, name: str, value: Any, expectation: str) -> list[Any]:
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, torch.Tensor))
    is_list = is_list and getattr(value, "ndim", 1) > 0
    check_type(is_list, op, name, f"be {expectation}", type(value).__name__)
    return list(value)


def _token(op: str, name: str, value: Any) -> int:
    value = plain(value)
    check_type(type(value) is int, op, name, "hold ints", type(value).__name__)
    check(value >= 0, op, name, "hold ids from 0 on", value)
    return int(value)


def _tokens(op: str, name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token(op, name, token) for token in _items(op, name, value, "a sequence of ints"))


def _optional_tokens(op: str, name: str, value: Any) -> tuple[int, ...] | None:
    return None if value is None else _tokens(op, name, value)


def _sequences(op: str, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    kind = "a sequence of lists of ints"
    sequences = tuple(
        tuple(_token(op, name, token) for token in _items(op, name, ids, kind)) for ids in _items(op, name, value, kind)
    )
    check(all(sequences), op, name, "hold no empty list", "one")
    return sequences


def _bias(op: str, name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    check_type(isinstance(value, Mapping), op, name, "map tokens to numbers", type(value).__name__)
    return {_token(op, name, token): _number(op, name, plain(bias)) for token, bias in value.items()}


def _forced(op: str, name: str, value: Any) -> dict[int, int] | None:
    if value is None:
        return None
    check_type(isinstance(value, Mapping), op, name, "map places in the new text to tokens", type(value).__name__)
    places = {plain(place): token for place, token in value.items()}
    for place in places:
        check_type(type(place) is int, op, name, "have ints as places", type(place).__name__)
        check(0 <= place <= MAX_POSITIONS, op, name, f"have places in 0 .. {MAX_POSITIONS}", place)
    return {place: _token(op, name, token) for place, token in places.items()}


def _strings(op: str, name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _items(op, name, value, "strings")
    for string in strings:
        check_type(isinstance(string, str), op, name, "be strings", type(string).__name__)
        check(string != "", op, name, "not be empty", repr(string))
        check_text(op, string, name)
        # A character whose last byte is missing decodes to it.
        check("\ufffd" not in string, op, name, "hold no U+FFFD, which stands for bytes of no character", repr(string))
    return tuple(strings)


def _functions(op: str, name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    if value is None:
        return ()
    # transformers' lists are functions too; their items are what counts.
    functions = (
        [value]
        if callable(value) and not isinstance(value, list)
        else _items(op, name, value, "a function or a list of functions")
    )
    for function in functions:
        check_type(callable(function), op, name, "hold functions", type(function).__name__)
    return tuple(functions)


def _seconds(op: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    check_type(type(value) in (int, float), op, name, "be a number of seconds", type(value).__name__)
    check_fits_float(op, name, value)
    check(0 <= value < math.inf, op, name, "be finite and at least 0", value)
    return float(value)


def _seed(op: str, name: str, value: Any) -> int | tuple[int, ...]:
    if isinstance(value, int) and type(value) is not bool:
        return value
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
    seeds = tuple(map(plain, value)) if is_list else ()
    valid = is_list and all(type(seed) is int for seed in seeds)
    check_type(valid, op, name, "be an int or a list of ints", type(value).__name__)
    return seeds


def _grammar(op: str, name: str, value: Any) -> Any:
    """Its prompts are counted where they are known."""
    if value is None or isinstance(value, Grammar):
        return value
    grammars = _items(op, name, value, "a Grammar, or a list with one (or None) for each prompt")
    for grammar in grammars:
        check_type(grammar is None or isinstance(grammar, Grammar), op, name, "hold Grammars", type(grammar).__name__)
    return tuple(grammars)


def _names(op: str, name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    names = _items(op, name, value, "a name, or a list with one (or None) for each prompt")
    for each in names:
        check_type(each is None or isinstance(each, str), op, name, "hold names", type(each).__name__)
    return tuple(names)


# -------------------------------------------------------------------------------------------------------------- value


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The settings of a request, checked when it is made. All have a neutral default.

    Raises:
        TypeError, ValueError: a setting of the wrong type or out of range.

    Example:
        >>> params = SamplingParams(temperature=0.7, top_p=0.9, stop_strings="END")
        >>> params.stop_strings, params.replace(seed=3).asked
        (('END',), {'temperature': 0.7, 'top_p': 0.9, 'seed': 3, 'stop_strings': ('END',)})
    """

    op: InitVar[str] = "SamplingParams"  # whose arguments they are, for errors

    # fmt: off
    adapter: str | Sequence[str | None] | None = setting(
        None, "name", "model", _names,
        "the LoRA adapter that computes a text with the model, by its name in `model.adapters` (`pdkernels.models.load_adapter`), or one (or "
        "None) for each prompt; None: the model alone.",
        per_row=True, wire="adapter",
    )
    temperature: float = setting(
        0.0, "number", "draw", _temperature, "sampling temperature; 0 is greedy.",
        minimum=0, maximum=MAX_SCALE, per_row=True, wire="temperature", transformers="temperature", aliases=("do_sample",),
    )
    top_k: int | None = setting(
        None, "integer", "draw", _count(1, optional=True),
        "sample from the tokens whose logits are at least the k-th largest; None: from all.",
        minimum=1, maximum=MAX_POSITIONS, neutral=(0,), per_row=True, wire="top_k", transformers="top_k",
    )
    top_p: float | None = setting(
        None, "number", "draw", _share,
        "sample from the most probable tokens that together have this mass, of the distribution that `temperature` and `top_k` leave, "
        "the one that reaches it included, except in recurrent methods; None: from all.",
        minimum=0, maximum=1, neutral=(1,), per_row=True, wire="top_p", transformers="top_p",
    )
    min_p: float | None = setting(
        None, "number", "draw", _share,
        "sample from the tokens with at least this share of the largest probability; None: from all.",
        minimum=0, maximum=1, neutral=(0,), per_row=True, wire="min_p", transformers="min_p",
    )
    typical_p: float | None = setting(
        None, "number", "draw", _share_above_0,
        "sample from the tokens whose surprise is closest to the entropy, until they have this mass; None: from all. Applied last.",
        minimum=0, maximum=1, neutral=(1,), per_row=True, wire="typical_p", transformers="typical_p",
    )
    seed: int | Sequence[int] = setting(
        0, "integer", "draw", _seed,
        "seed of all random numbers: an int, from which each sequence derives its own stream (`sequence_seed`), or a list with one seed "
        "per sequence.",
        per_row=True, wire="seed", wire_range=(-(2**63), 2**63 - 1),
    )
    repetition_penalty: float = setting(
        1.0, "number", "filter", _factor,
        "above 1, tokens that a row sees become less likely: their positive logits are divided by this, negative ones multiplied. For this "
        "and the filters below, every method decodes the model with the filtered logits, so lossless methods stay lossless: each "
        "row of a draft is filtered for its own prefix. They need the logits of all rows of a forward.",
        minimum=1 / MAX_SCALE, maximum=LARGEST, wire="repetition_penalty", transformers="repetition_penalty",
    )
    presence_penalty: float = setting(
        0.0, "number", "filter", _number,
        "is subtracted from the logits of the tokens generated so far, those of the prompt excepted.",
        wire="presence_penalty", wire_range=(-2, 2),
    )
    frequency_penalty: float = setting(
        0.0, "number", "filter", _number, "the same, times the number of times that a token was generated.",
        wire="frequency_penalty", wire_range=(-2, 2),
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, "numbers by token", "filter", _bias, "maps tokens to numbers that are added to their logits.",
        neutral=({},), wire="logit_bias", wire_range=(-100, 100), aliases=("sequence_bias",),
    )
    bad_words: Sequence[Sequence[int]] = setting(
        (), "sequences", "filter", _sequences, "lists of tokens that a text must not contain; the prompt may begin one.",
        neutral=(None, []), wire="bad_words_ids", transformers="bad_words_ids",
    )
    min_new_tokens: int = setting(
        0, "integer", "filter", _count(0), "end tokens are impossible before this many new tokens.",
        minimum=0, maximum=MAX_POSITIONS, neutral=(None,), wire="min_tokens", transformers="min_new_tokens",
    )
    forced_tokens: Mapping[int, int] | None = setting(
        None, "tokens by place", "filter", _forced, "maps places in the new text, from 0, to the tokens that must be there.",
        neutral=({},), wire="forced_tokens",
    )
    suppress_tokens: Sequence[int] = setting(
        (), "integers", "filter", _tokens, "tokens that are impossible.",
        neutral=(None, []), wire="suppress_tokens", transformers="suppress_tokens",
    )
    begin_suppress_tokens: Sequence[int] = setting(
        (), "integers", "filter", _tokens, "tokens that are impossible as the first new one.",
        neutral=(None, []), wire="begin_suppress_tokens", transformers="begin_suppress_tokens",
    )
    logits_processor: Functions = setting(
        None, "functions", "filter", _functions,
        "a function, or a list of them, from a prefix ``(1, n)`` and its logits ``(1, V)`` to other logits, such as transformers' "
        "`LogitsProcessorList`: after all filters above. It is called for each row of a draft, with the row's own prefix, so it must "
        "depend on these arguments alone. That is slow: the host waits for every forward.",
        neutral=((), []),
    )
    grammar: Grammar | Sequence[Grammar | None] | None = setting(
        None, "grammar", "filter", _grammar,
        "a `Grammar` that every text belongs to, or one (or None) for each prompt. A sequence ends with its end token, or with the last "
        "of its `max_new_tokens`, and is a whole text of the grammar then. With `infill` the grammar is that of the whole "
        "result, in method \"planned\" that of each chunk.",
    )
    max_new_tokens: int = setting(
        128, "integer", "stop", _count(0),
        "each sequence gets exactly this many new tokens, or fewer if something stops it.",
        minimum=0, maximum=MAX_POSITIONS, per_row=True, wire="max_tokens", wire_range=(1, MAX_POSITIONS), transformers="max_new_tokens",
        aliases=("max_completion_tokens", "max_gen_toks", "max_length"),
    )
    end_tokens: Sequence[int] | None = setting(
        None, "integers", "stop", _optional_tokens,
        "ids that end a sequence and are kept as its last token. None: those of the model; ``()``: none.",
        wire="stop_token_ids", transformers="eos_token_id",
    )
    stop_strings: Sequence[str] = setting(
        (), "strings", "stop", _strings,
        "a sequence ends with the token that completes one of these in its new text; they are kept in it, as end tokens are. They are "
        "searched for in special tokens too, although `text` leaves those out.",
        neutral=(None, []), per_row=True, wire="stop", transformers="stop_strings",
    )
    stop_sequences: Sequence[Sequence[int]] = setting(
        (), "sequences", "stop", _sequences, "the same for lists of tokens.",
        neutral=(None, []), per_row=True, wire="stop_sequences",
    )
    stopping_criteria: Functions = setting(
        None, "functions", "stop", _functions,
        "a function, or a list of them, from a text ``(1, n)``, prompt included, and None to whether it ends, such as transformers' "
        "`StoppingCriteriaList`. It is asked about every new token.",
        neutral=((), []), per_row=True,
    )
    max_time: float | None = setting(
        None, "number", "stop", _seconds,
        "seconds after which texts end, with the tokens that the step under way makes final.",
        minimum=0, per_row=True, wire="max_time", transformers="max_time",
    )
    n: int = setting(
        1, "integer", "report", _count(1),
        "texts of each prompt. The result has them one after another, each with the seed of its place in this batch; causal methods "
        "compute the prompt's rows once.",
        minimum=1, maximum=MAX_POSITIONS, per_row=True, wire="n", wire_range=(1, 128), transformers="num_return_sequences",
    )
    logprobs: int | None = setting(
        None, "integer", "report", _count(0, optional=True),
        "also return the log-probabilities of the new tokens and of this many most probable ones at each place: of the model's own "
        "distribution, before penalties, temperature and filters, as vLLM does by default. One more pass over the text "
        "computes them, which the stats do not count. In methods that fill masks and in those that choose recurrences they are of "
        "the forward that wrote the token.",
        minimum=0, maximum=MAX_POSITIONS, per_row=True, wire="logprobs", wire_range=(0, 20),
    )
    # fmt: on

    def __new__(cls, **settings: Any) -> SamplingParams:
        params = object.__new__(cls)
        passed = frozenset(settings) - {"op"}
        if passed == SETTINGS.keys():  # by dataclasses.replace, which passes those that nobody did
            passed = frozenset(name for name in passed if SETTINGS[name].changes(settings[name]))
        params.__dict__["_explicit"] = passed
        return params

    def __post_init__(self, op: str) -> None:
        for setting in SETTINGS.values():
            value = getattr(self, setting.name)
            if value is not setting.default:
                object.__setattr__(self, setting.name, setting.check(op, setting.name, plain(value)))

    def replace(self, op: str = "SamplingParams", **settings: Any) -> SamplingParams:
        """A copy with other settings, which are checked, in the name of `op`."""
        passed = {name: getattr(self, name) for name in self.explicit}
        return SamplingParams(op=op, **(passed | settings))

    def shortened(self, most: int) -> SamplingParams:
        """A copy with at most `most` new tokens, and a minimum that fits into them.

        >>> SamplingParams(max_new_tokens=9, min_new_tokens=5).shortened(3).asked
        {'min_new_tokens': 3, 'max_new_tokens': 3}
        """
        most = min(self.max_new_tokens, most)
        least: dict[str, Any] = {"min_new_tokens": most} if self.min_new_tokens > most else {}
        return self.replace(max_new_tokens=most, **least)

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the settings that were passed, also of those that change nothing."""
        names: frozenset[str] = self.__dict__["_explicit"]
        return names

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that change something."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if SETTINGS[name].changes(value)}


SETTINGS: dict[str, Setting] = {
    field.name: Setting(field.name, str(field.type), **field.metadata) for field in dataclasses.fields(SamplingParams)
}
"""By name, in the order in which filters are applied."""

DEFAULTS = SamplingParams()

ALIASES: dict[str, str] = {
    alias: setting.name
    for setting in SETTINGS.values()
    for alias in (setting.wire, setting.transformers, *setting.aliases)
    if alias not in ("", setting.name)
}
"""What other libraries call a setting."""


def names_of(effect: Effect) -> tuple[str, ...]:
    """Names of the settings with one effect.

    >>> names_of("draw")
    ('temperature', 'top_k', 'top_p', 'min_p', 'typical_p', 'seed')
    """
    return tuple(setting.name for setting in SETTINGS.values() if setting.effect == effect)


def tokens_of(value: Any, kind: Kind) -> Iterable[int]:
    """The token ids in a checked value.

    >>> list(tokens_of(((1, 2), (3,)), "sequences")), list(tokens_of({4: 0.5}, "numbers by token")), list(tokens_of(0.5, "number"))
    ([1, 2, 3], [4], [])
    """
    if not value or kind not in ("integers", "sequences", "numbers by token", "tokens by place"):
        return ()
    if kind == "sequences":
        return (token for ids in value for token in ids)
    ids: Iterable[int] = value.values() if kind == "tokens by place" else value
    return ids


def take_params(op: str, params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """`params` with the settings among `options`, which are taken out of them; numbers of NumPy become Python's.

    >>> options = {"block_size": 4, "top_k": 2}
    >>> take_params("decoding.generate", None, options).top_k, options
    (2, {'block_size': 4})
    """
    check_type(
        params is None or isinstance(params, SamplingParams), op, "params", "be SamplingParams", type(params).__name__
    )
    options.update({name: plain(value) for name, value in options.items()})
    settings = {name: options.pop(name) for name in SETTINGS.keys() & options.keys()}
    return (
        SamplingParams(op=op, **settings) if params is None else params.replace(op, **settings) if settings else params
    )
