"""Capabilities: literals that a model declares and that decoding methods require."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pdkernels._validation import check

Capability = Literal["causal", "block_causal", "bidirectional", "own_prediction", "recurrent", "plan_tokens", "drafter"]

CAPABILITIES: dict[Capability, str] = {
    "causal": "the logits of a row, which sees what comes before it, predict the next token",
    "block_causal": "new rows see each other as a mask says, and everything cached",
    "bidirectional": "rows see the whole text, and predict masked tokens",
    "own_prediction": "the logits of a row predict its own token; otherwise the next one",
    "recurrent": "the caller chooses the number of recurrences",
    "plan_tokens": "the model writes plans with control tokens",
    "drafter": "the model's attribute `drafters` names drafters, by method",
}
assert set(CAPABILITIES) == set(get_args(Capability))


def capabilities(model: Any) -> frozenset[Capability]:
    """The attribute `capabilities` of `model`, or, without one, the capabilities that follow from its config; and
    "drafter".

    >>> import pdkernels as pd
    >>> sorted(capabilities(pd.models.load("tiny-trimode"))), sorted(capabilities(pd.models.load("tiny-recurrent")))
    (['block_causal', 'causal'], ['causal', 'recurrent'])
    """
    stated = getattr(model, "capabilities", None)
    names = of_config(model) if stated is None else frozenset(stated)
    if getattr(model, "drafters", None):
        names |= {"drafter"}
    unknown = sorted(names - set(CAPABILITIES))
    check(not unknown, "decoding", "model.capabilities", f"be of {', '.join(CAPABILITIES)}", ", ".join(unknown))
    return names


def of_config(model: Any) -> frozenset[Capability]:
    """The capabilities that follow from `config.attention`, `config.predicts`, `config.mean_recurrence` and
    `plan_tokens`."""
    config = getattr(model, "config", None)
    names: set[Capability] = set()
    attention, predicts_own = getattr(config, "attention", "causal"), getattr(config, "predicts", "next") == "own"
    if hasattr(config, "mean_recurrence"):
        names |= {"causal", "recurrent"}
    else:
        if attention != "bidirectional":
            names.add("block_causal")
            if not predicts_own:
                names.add("causal")
        if attention != "causal":
            names.add("bidirectional")
    if predicts_own:
        names.add("own_prediction")
    if getattr(model, "plan_tokens", None) is not None:
        names.add("plan_tokens")
    return frozenset(names)


def rows_ahead(model: Any) -> int:
    """The offset of the token that the logits of a row predict: 0 for its own, 1 for the next."""
    return 0 if "own_prediction" in capabilities(model) else 1
