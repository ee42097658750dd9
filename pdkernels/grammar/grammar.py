"""The public object for a language: what it is made from, and its automata over the tokens of models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec
from weakref import WeakKeyDictionary

from pdkernels import _host
from pdkernels._validation import check, check_choice, check_text, check_type, refuse, sentence
from pdkernels.grammar.budget import MAX_STEPS, Spent, bounded, current
from pdkernels.grammar.context_free import PrefixAutomaton, checked_rules, tokenizer_of
from pdkernels.grammar.ebnf import parsed_ebnf
from pdkernels.grammar.language import OP, TOO_LARGE, Alt, Expression, TooLarge, compiled, determinised, text
from pdkernels.grammar.regex import parsed
from pdkernels.grammar.schema import Schema, Size, parsed_schema
from pdkernels.grammar.schema_arrays import UnlistedItems
from pdkernels.grammar.schema_keywords import Unknown, warning_of
from pdkernels.grammar.vocabulary import Vocabulary, vocabulary_of

P = ParamSpec("P")
_FAR = 2**31 - 1
_MAX_WORK = 14_000_000  # 1.5 s of a slow core
_MAX_DEPTH = 64
_MAX_CHARACTERS = 100_000  # of a choice
_SIZES = ((256, 64, 2), (32, 64, 1), (8, 1, 0), (8, 0, 0))
"""What is tried in turn where an automaton is too large: bounds, levels of references, and those of free values."""
_MAX_TRIAL, _MAX_TRIALS = 120_000, 450_000  # steps of one, and of all: 0.5 s on a fast core, 1.5 s on a slow one

Fill = Literal["each", "joint"]


def _remembered(
    make: Callable[Concatenate[type[Grammar], P], Grammar],
) -> Callable[Concatenate[type[Grammar], P], Grammar]:
    """A grammar knows the call that made it, by which it is made again in another process."""

    @wraps(make)
    def made(cls: type[Grammar], /, *args: P.args, **options: P.kwargs) -> Grammar:
        grammar = make(cls, *args, **options)
        grammar._call = make.__name__, *copy.deepcopy((args, options))
        return grammar

    return made


def _again(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if options.get("unknown") == "warn" or (name == "json_schema" and "unknown" not in options):
        options = {**options, "unknown": "ignore"}  # it has been told
    return getattr(Grammar, name)(*args, **options)


class Grammar:
    """A language: `generate(grammar=..)` gives texts that belong to it, whatever the method.

    Make one by `Grammar.json_schema`, `Grammar.regex`, `Grammar.choice` or `Grammar.ebnf`. It holds an automaton over
    bytes; the automaton over the tokens of a model is made when the model is first used with it, and kept.

    Attributes:
        source: what it was made from, for messages.
        fill: how canvases are filled. "each": every position gets the token that is drawn from what the grammar allows
            there. "joint": the positions of a forward get the tokens of the most probable valid completion (DINGO), at
            temperature 0.

    Example:
        >>> import pdkernels as pd
        >>> model = pd.models.load("tiny-code")
        >>> grammar = pd.decoding.Grammar.regex("(yes|no), [0-9]{2}")
        >>> import re
        >>> result = pd.decoding.generate(model, "def ", grammar=grammar, max_new_tokens=16)
        >>> bool(re.fullmatch("(yes|no), [0-9]{2}", result.text))
        True
    """

    _call: tuple[str, Sequence[Any], Mapping[str, Any]] | None = None

    def __init__(self, expression: Expression, source: str, fill: Fill = "each") -> None:
        check_choice(OP, "fill", fill, ("each", "joint"))
        self.source, self.fill = source, fill
        with bounded():
            self.automaton: _host.ByteAutomaton = compiled(expression, source)
        self._made: WeakKeyDictionary[Any, dict[tuple[int, ...], _host.TokenAutomaton]] = WeakKeyDictionary()

    @classmethod
    @_remembered
    @bounded()
    def regex(cls, pattern: str, *, fill: Fill = "each") -> Grammar:
        """The texts that a regular expression in Python's syntax matches from end to end.

        ``\\d``, ``\\s`` and ``\\w`` are those of ASCII.

        Raises:
            ValueError: not a regular expression; one that matches nothing, or whose automaton is too large.
            NotImplementedError: lookaround, references to groups, anchors inside it, flags.
        """
        return cls(parsed(pattern), f"the pattern {_short(pattern)}", fill)

    @classmethod
    @_remembered
    @bounded()
    def choice(cls, texts: Sequence[str], *, fill: Fill = "each") -> Grammar:
        """One of some texts.

        >>> Grammar.choice(["red", "green"]).matches("red"), Grammar.choice(["red"]).matches("re")
        (True, False)
        """
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        check_type(is_list, OP, "choice", "be a list of strings", type(texts).__name__)
        for string in texts:
            check_type(isinstance(string, str), OP, "choice", "hold strings", type(string).__name__)
            check_text(OP, string, "choice")
        check(len(texts) > 0, OP, "choice", "hold a string", "none")
        large = len(texts) + sum(map(len, texts)) > _MAX_CHARACTERS
        refuse(large, OP, f"the choice of {len(texts)} strings has more than {_MAX_CHARACTERS} characters")
        return cls(Alt(tuple(map(text, texts))), f"the choice {_short(list(texts))}", fill)

    @classmethod
    @_remembered
    @bounded()
    def json_schema(
        cls,
        schema: Schema | str,
        *,
        whitespace: str | None = None,
        depth: int | None = 3,
        longest: int | None = None,
        texts: Literal["usual", "all"] = "usual",
        fit: bool = False,
        key_order: Literal["schema", "any"] = "schema",
        unknown: Literal["warn", "ignore", "refuse"] = "warn",
        fill: Fill = "each",
    ) -> Grammar:
        """JSON values that satisfy a schema: a dict, a bool, or JSON.

        A value of a recursive schema has at most `depth` levels of a reference
        inside itself.

        Args:
            schema: the schema. A keyword of JSON Schema that is not followed is refused.
            whitespace: None: at most one space after a comma or a colon. "compact": none. "single": one space after each
                of them, as `json.dumps` writes. "any": any around brackets, commas and colons, or what a regular
                expression says.
            depth: how often a ``$ref`` may occur inside itself. None: any number of times, and values without a schema
                have any depth too.
            longest: in place of each ``maxLength`` and ``maxItems`` that is larger. Each character up to such a bound
                is a state, so large ones need more states than an automaton may have.
            texts: "usual": those that one expects of a schema. No properties but the named ones where some are named, a
                schema without a type has the types that its keywords are for, whole numbers have no point, and
                characters are written as they are. "all": those of every value that satisfies it. Other properties
                follow the named ones where the schema allows them, ``1.0`` is an integer, numbers have up to 20 digits
                before the point, and characters beyond ASCII may be written as ``\\u00e9``.
            fit: where the automaton would be too large, a smaller language whose automaton is not, which a warning
                names: shorter bounds, as by `longest`, then fewer levels, as by `depth`. Strings of ``uniqueItems`` that
                are not listed then ascend by their first letters and digits; of other items there is one.
            key_order: of the properties that a schema names. "schema": as it names them. "any": each order, of objects
                that have at most 8 named ones.
            unknown: keywords and formats that JSON Schema does not have demand nothing, nor do those for values of other
                types. "warn" names them in a warning, with the keyword that a misspelt one may mean; "refuse" takes no
                schema that has them.

        Raises:
            ValueError: a schema that nothing satisfies, or whose automaton is too large; `fit` without a depth.
            NotImplementedError: a keyword of JSON Schema that is not followed; too many properties for any order; of any
                depth, a recursive reference whose texts are compared with those of another schema.

        >>> Grammar.json_schema({"type": "array", "items": {"type": "boolean"}}).matches("[true, false]")
        True
        """
        if whitespace is not None:
            check_type(isinstance(whitespace, str), OP, "whitespace", "be a str", type(whitespace).__name__)
        if longest is not None:
            check_type(type(longest) is int, OP, "longest", "be an int", type(longest).__name__)
            check(longest >= 1, OP, "longest", "be at least 1", longest)
        check_choice(OP, "unknown", unknown, ("warn", "ignore", "refuse"))
        check_choice(OP, "texts", texts, ("usual", "all"))
        check_choice(OP, "key_order", key_order, ("schema", "any"))
        check_type(type(fit) is bool, OP, "fit", "be a bool", type(fit).__name__)
        refuse(fit and depth is None, OP, "fit needs a depth, which it may lower, got depth=None", "Leave out fit.")
        annotated: Unknown = {}
        full_size = Size(longest, _checked_depth(depth))
        most = current().steps + _MAX_TRIALS
        size, sizes = full_size, _smaller(full_size) if fit else []
        while True:
            try:
                with current().at_most(min(_MAX_TRIAL, most - current().steps) if fit else MAX_STEPS):
                    rules, names = parsed_schema(
                        schema, whitespace, size, annotated, texts == "all", any_order=key_order == "any"
                    )
                    grammar = cls._of_rules(rules, names, f"the schema {_short(schema)}", fill)
                break
            except UnlistedItems:
                if not fit:
                    raise
                size, sizes = size._replace(ordered=True), [smaller._replace(ordered=True) for smaller in sizes]
            except (TooLarge, Spent):
                if not sizes:
                    raise
                size, *sizes = sizes
        warning = warning_of(annotated)
        if warning and unknown == "refuse":
            raise NotImplementedError(sentence(OP, warning))
        if warning and unknown == "warn":
            warnings.warn(sentence(OP, warning), stacklevel=4)
        if size != full_size:
            fault = "the schema needs too many states"
            if size == full_size._replace(ordered=True):
                fault = "the schema cannot be followed whole"
            warnings.warn(sentence(OP, f"{fault}: {_what_shrank(full_size, size)}"), stacklevel=4)
        return grammar

    @classmethod
    @_remembered
    @bounded()
    def ebnf(cls, rules: str, *, start: str = "start", depth: int | None = 3, fill: Fill = "each") -> Grammar:
        """The texts of a grammar in Lark's EBNF: rules ``name: expansions`` of strings, ``/patterns/``, names, groups,
        ``|``, ``?``, ``*``, ``+`` and ``~ n..m``.

        A grammar without recursion is followed exactly; of others, the texts in which no rule is more than `depth`
        times inside itself, or all of them with a `depth` of None.

        Raises:
            ValueError: not a grammar; one without a text, or whose automaton is too large.
            NotImplementedError: a directive, a flag of a pattern, templates; of any depth, a rule that begins with itself
                by way of another rule.

        >>> sums = Grammar.ebnf('start: term ("+" term)*\\nterm: /[0-9]/ | "(" start ")"')
        >>> sums.matches("1+(2+3)"), sums.matches("1+(2")
        (True, False)
        >>> deep = Grammar.ebnf('start: "[" start "]" | "x"', depth=None)
        >>> deep.matches("[" * 50 + "x" + "]" * 50), deep.matches("[[x]")
        (True, False)
        """
        expressions, names = parsed_ebnf(rules, start, _checked_depth(depth))
        return cls._of_rules(expressions, names, f"the grammar {_short(rules)}", fill)

    @classmethod
    def _of_rules(cls, rules: Sequence[Expression], names: Sequence[str], source: str, fill: Fill) -> Grammar:
        """A grammar of an expression, and of the rules that it calls, if there are any."""
        if len(rules) == 1:
            return cls(rules[0], source, fill)
        return PushdownGrammar(rules, names, source, fill)

    @classmethod
    @_remembered
    @bounded()
    def lark(cls, rules: str) -> Grammar:
        """The texts of a context-free grammar in the Lark format of llguidance, of any depth.

        For methods that write token after token. Nothing bounds how long a text gets: one that is not whole after
        `max_new_tokens` is an error. `ebnf` bounds the depth instead, and works in all methods.

        Raises:
            ValueError: not a grammar of llguidance.
            ImportError: the optional library llguidance is not installed.
        """
        return ContextFreeGrammar(rules)

    def matches(self, text: str) -> bool:
        """Whether a text belongs to the language."""
        return self.automaton.accepts(text.encode("utf-8", "surrogatepass"))

    def for_model(self, model: Any, end_tokens: Sequence[int]) -> _host.TokenAutomaton:
        """The automaton over a model's tokens.

        Raises:
            ValueError: tokens that write none of the texts; an end token that writes text; too many states for the
                vocabulary.
            NotImplementedError: a model without a tokenizer that knows the bytes of its tokens.
        """
        key = (model.config.vocab_size, *end_tokens)
        automata = self._made.setdefault(_owner(model), {}) if model.tokenizer is not None else {}
        if key not in automata:
            automata[key] = self._compiled(model, end_tokens)
        return automata[key]

    def nbytes(self, model: Any, end_tokens: Sequence[int]) -> int:
        """How many bytes its automata take, about; that over the model's tokens is made, if texts of it can end."""
        automaton = self.for_model(model, end_tokens) if end_tokens else None
        return 1024 * self.automaton.states + (8 * automaton.states * automaton.classes if automaton else 0)

    def _compiled(self, model: Any, end_tokens: Sequence[int]) -> _host.TokenAutomaton:
        vocabulary = self._checked_vocabulary(model, end_tokens)
        automaton = self.automaton.skipping(32) if vocabulary.skips_space else self.automaton
        try:
            token_automaton = _host.TokenAutomaton(automaton, vocabulary.tokens, list(end_tokens), _MAX_WORK)
        except _host.TooLarge:
            fault = f"{self.source} has too many states for a vocabulary of {len(vocabulary.tokens)} tokens"
            raise ValueError(sentence(OP, fault, TOO_LARGE)) from None
        if token_automaton.distance(0) == _FAR:
            raise ValueError(sentence(OP, f"the tokens of the model write no text of {self.source}"))
        return token_automaton

    @staticmethod
    def _checked_vocabulary(model: Any, end_tokens: Sequence[int]) -> Vocabulary:
        vocabulary = vocabulary_of(model)
        for token in end_tokens:
            token_bytes = vocabulary.tokens[token]
            check(
                not token_bytes,
                OP,
                "end_tokens",
                "write no text with a grammar",
                f"{token}, which writes {token_bytes!r}",
            )
        return vocabulary

    def __reduce__(self) -> tuple[Any, ...]:
        if self._call is None:
            fault = f"{self.source} cannot be pickled: it was not made by a method of Grammar"
            raise TypeError(sentence(OP, fault))
        return _again, self._call

    def __copy__(self) -> Grammar:
        return self

    def __deepcopy__(self, _: Any) -> Grammar:
        return self

    def __repr__(self) -> str:
        return f"Grammar({self.source})"


class ContextFreeGrammar(Grammar):
    """A grammar whose masks llguidance computes."""

    def __init__(self, rules: str) -> None:
        self._rules = checked_rules(rules)
        self.source, self.fill = f"the grammar {_short(rules)}", "each"
        self._tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()

    def matches(self, text: str) -> bool:
        tokens = [bytes([byte]) for byte in range(256)] + [b""]
        prefixes = PrefixAutomaton(tokenizer_of(tokens, [256]), self._rules, [256])
        state = prefixes.follow(0, list(text.encode("utf-8", "surrogatepass")))
        return state >= 0 and prefixes.accepting(state)

    def for_model(self, model: Any, end_tokens: Sequence[int]) -> Any:
        """A new automaton: it remembers the prefixes of one text."""
        tokens = self._checked_vocabulary(model, end_tokens)
        refuse(
            tokens.skips_space, OP, "Grammar.lark does not know tokenizers that leave out the first space", "Use ebnf."
        )
        tokenizers = self._tokenizers.setdefault(_owner(model), {})
        key = (model.config.vocab_size, *end_tokens)
        if key not in tokenizers:
            tokenizers[key] = tokenizer_of(tokens.tokens, end_tokens)
        return PrefixAutomaton(tokenizers[key], self._rules, end_tokens)


class PushdownGrammar(Grammar):
    """A grammar whose rules call each other. Its texts have no bound but the tokens that they may take.

    Args:
        rules: the whole grammar, and the rules that it calls by their numbers (`calls.call`).
        names: of the rules, for messages.
        source, fill: as of `Grammar`.
    """

    def __init__(self, rules: Sequence[Expression], names: Sequence[str], source: str, fill: Fill = "each") -> None:
        check_choice(OP, "fill", fill, ("each", "joint"))
        self.source, self.fill = source, fill
        with bounded():
            self._automata = [determinised(rule, source) for rule in rules]
        self.rules = _host.PushdownRules(self._automata)
        refuse(self.rules.empty, OP, f"no text satisfies {source}")
        if self.rules.looping >= 0:
            fault = f"{names[self.rules.looping]} begins with itself by way of other rules, or after what may be empty"
            raise NotImplementedError(sentence(OP, fault, "Pass a depth, or let it begin with something else."))
        self._bytes = _host.PushdownTokens(self.rules, [*(bytes([byte]) for byte in range(256)), b""], [256], _MAX_WORK)
        self._over: WeakKeyDictionary[Any, dict[tuple[int, ...], _host.PushdownTokens]] = WeakKeyDictionary()

    def matches(self, text: str) -> bool:
        states = _host.PushdownText(self._bytes)
        state = states.follow(0, list(text.encode("utf-8", "surrogatepass")))
        return state >= 0 and states.accepting(state)

    def for_model(self, model: Any, end_tokens: Sequence[int]) -> Any:
        """A new numbering of the states of one text; what the tokens do is kept, as by `Grammar`."""
        return _host.PushdownText(self._tokens_of(model, end_tokens))

    def nbytes(self, model: Any, end_tokens: Sequence[int]) -> int:
        """As of `Grammar`."""
        tokens = self._tokens_of(model, end_tokens) if end_tokens else None
        return 1024 * self.rules.states + (8 * tokens.states * tokens.classes if tokens else 0)

    def _tokens_of(self, model: Any, end_tokens: Sequence[int]) -> _host.PushdownTokens:
        key = (model.config.vocab_size, *end_tokens)
        compiled_tokens = self._over.setdefault(_owner(model), {}) if model.tokenizer is not None else {}
        if key not in compiled_tokens:
            compiled_tokens[key] = self._compiled_tokens(model, end_tokens)
        return compiled_tokens[key]

    def _compiled_tokens(self, model: Any, end_tokens: Sequence[int]) -> _host.PushdownTokens:
        vocabulary = self._checked_vocabulary(model, end_tokens)
        rules = self.rules
        if vocabulary.skips_space:
            rules = _host.PushdownRules([self._automata[0].skipping(32), *self._automata[1:]])
        try:
            tokens = _host.PushdownTokens(rules, vocabulary.tokens, list(end_tokens), _MAX_WORK)
        except _host.TooLarge:
            fault = f"{self.source} has too many states for a vocabulary of {len(vocabulary.tokens)} tokens"
            raise ValueError(sentence(OP, fault, TOO_LARGE)) from None
        least = _host.PushdownText(tokens).distance(0)
        refuse(least == _FAR, OP, f"the tokens of the model write no text of {self.source}")
        return tokens


def _owner(model: Any) -> Any:
    """The tokenizer of a model. One of transformers, which is adapted anew in each call of `custom_generate`, has it as
    `given`."""
    return getattr(model.tokenizer, "given", model.tokenizer)


def _smaller(full_size: Size) -> list[Size]:
    """Sizes to try where the automaton of a schema is too large, each smaller than the one before."""
    sizes = [full_size]
    for longest, depth, free in _SIZES:
        bound = longest if full_size.longest is None or longest is None else min(longest, full_size.longest)
        assert full_size.depth is not None
        size = Size(
            full_size.longest if bound is None else bound, min(depth, full_size.depth), min(free, full_size.free)
        )
        sizes += [size] if size != sizes[-1] else []
    return sizes[1:]


def _what_shrank(full_size: Size, size: Size) -> str:
    changes = {
        f"a value without a schema has at most {size.free} arrays and objects inside each other": size.free
        < full_size.free,
        f"maxLength and maxItems are at most {size.longest}": size.longest != full_size.longest,
        f"a reference is at most {size.depth} times inside itself": size.depth != full_size.depth,
        "items of uniqueItems that are not listed ascend by their first letters and digits, or are one": size.ordered,
    }
    return ", ".join(change for change, applies in changes.items() if applies)


def _checked_depth(depth: int | None) -> int | None:
    if depth is None:
        return None
    check_type(type(depth) is int, OP, "depth", "be an int", type(depth).__name__)
    check(0 <= depth <= _MAX_DEPTH, OP, "depth", f"be in 0 .. {_MAX_DEPTH}", depth)
    return depth


def _short(value: object) -> str:
    excerpt = " ".join(str(value).split()) if isinstance(value, str) else repr(value)
    return repr(excerpt[:60] + "...") if len(excerpt) > 63 else repr(excerpt) if isinstance(value, str) else excerpt
