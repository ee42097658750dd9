"""The grammars of a session, checked against its method, its options and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkernels._validation import check, refuse, sentence
from pdkernels.decoding.method import Method
from pdkernels.generation.grammar_rows import GrammarRows, Text
from pdkernels.generation.session import Session
from pdkernels.grammar.canvases import MASK, filled
from pdkernels.grammar.grammar import ContextFreeGrammar, Grammar

_OP = "decoding.generate"


def opened(
    grammar: Grammar | Sequence[Grammar | None] | None,
    method: Method,
    session: Session,
    copies: int,
    options: dict[str, Any],
) -> GrammarRows | None:
    """The grammars of a session, checked; None without any.

    Raises:
        ValueError: a text that cannot be completed within the session's tokens.
        NotImplementedError: a method or an option that cannot follow a grammar.
    """
    if grammar is None:
        return None
    prompts = session.batch // copies
    grammars = [grammar] * prompts if isinstance(grammar, Grammar) else grammar
    check(len(grammars) == prompts, _OP, "grammar", f"have one for each of the {prompts} prompts", len(grammars))
    grammars = [item for item in grammars for _ in range(copies)]
    joint = [item for item in grammars if item is not None and item.fill == "joint"]
    fault = "a grammar with fill='joint' has one most probable completion"
    refuse(bool(joint) and session.params.temperature > 0, _OP, fault, "Use temperature 0, or fill='each'.")
    fault = f"method {method.name!r} writes token after token, so its grammar must have fill='each', got 'joint'"
    refuse(bool(joint) and not method.writes_in_parallel, _OP, fault)
    free = any(isinstance(item, ContextFreeGrammar) for item in grammars)
    if free and method.writes_in_parallel:
        fault = (
            f"method {method.name!r} does not follow Grammar.lark, whose texts can only be written token after token"
        )
        raise NotImplementedError(sentence(_OP, fault, "Use Grammar.ebnf."))
    for name in refused_options(method, options):
        raise NotImplementedError(sentence(_OP, f"method {method.name!r} does not follow a grammar with {name}"))
    ends = () if options.get("no_end") else session.end_tokens
    if method.wing == "planned":
        fault = "method 'planned' fills each chunk by itself, so its grammar must have fill='each', got 'joint'"
        refuse(bool(joint), _OP, fault)
        ends = (session.model.plan_tokens.pad,)  # a chunk ends with padding
    remedy = "Pass end_tokens, or use a method that fills a canvas."
    refuse(not ends and not method.fills_canvases, _OP, "a grammar needs an end token, which ends the text", remedy)
    model = session.model
    mask_token = options.get("mask_token")
    mask_token = getattr(model, "mask_token", None) if mask_token is None else mask_token
    rows = GrammarRows(
        [
            None if item is None else _opened(item, session, n, ends, method, mask_token)
            for n, item in enumerate(grammars)
        ],
        model.config.vocab_size,
        mask_token,
    )
    rows.whole = method.wing != "planned"
    return rows


def _opened(
    grammar: Grammar, session: Session, sequence: int, ends: tuple[int, ...], method: Method, mask_token: int | None
) -> Text:
    automaton, limit, start = grammar.for_model(session.model, ends), session.limits[sequence], 0
    if session.tails is not None:  # the grammar is that of the whole result
        texts = session.model.tokenizer.token_bytes()
        prompt = [token for token in session.prompts[sequence] if token < len(texts) and texts[token]]
        start = automaton.follow(0, prompt)
        fault = f"prompt {sequence} cannot be completed to a text of {grammar.source}"
        refuse(start < 0, _OP, fault)
        tail = session.tails[sequence]
        canvas = [MASK if token == mask_token else token for token in tail]
        refuse(not filled(automaton, canvas, start, limit - len(tail), with_tokens=False), _OP, fault)
        return Text(automaton, grammar.fill, start, limit, grammar.source)
    if method.wing == "planned":  # whose chunks are as long as the plan says
        return Text(automaton, grammar.fill, start, limit, grammar.source)
    least = automaton.distance(start)
    fault = f"{grammar.source} cannot be completed within max_new_tokens ({limit}): it takes {least} tokens at least"
    refuse(least > limit, _OP, fault)
    if not ends:
        fault = f"no text of {grammar.source} has exactly {limit} tokens, and no end token may end a shorter one"
        refuse(not filled(automaton, [MASK] * limit, start, 0, with_tokens=False), _OP, fault)
    return Text(automaton, grammar.fill, start, limit, grammar.source)


def refused_options(method: Method, options: dict[str, Any]) -> list[str]:
    """The options given that do not go with a grammar."""
    hooks = [name for name in ("logits_hook", "tokens_hook", "sampler") if options.get(name) is not None]
    if options.get("keep_changed"):
        hooks.append("keep_changed=True")
    return hooks
