"""Small models that plan: random weights, with a bias towards the grammar of plans in the rows of the head."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdkernels.decoding import Method, generate
from pdkernels.models import PlanTokens, Transformer, TransformerConfig, load
from pdkernels.reference.planned import PlannedResult, planned
from pdkernels.reference.sampling import without
from tests.support.base import CachedFake, streams
from tests.support.drafters import with_drafters

WORDS, END, MASK = range(10, 15), 15, 22
TAGS = PlanTokens(16, 17, 18, 19, 20, 21, digits=range(10), unit=1)
SYNC, OPEN, CLOSE = TAGS.sync, TAGS.topic_open, TAGS.topic_close
VOCABULARY = 23


def _bigrams() -> Tensor:
    """``(now, next)``: roughly what follows a token in a plan."""
    bias = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    digits, words = list(range(10)), list(WORDS)
    bias[END, OPEN] = bias[SYNC, OPEN] = 9.0
    bias[OPEN, words], bias[OPEN, digits[1:6]] = 6.0, 4.0
    bias[10:15, 1:6], bias[10:15, 10:15] = torch.tensor([5.0, 6.0, 6.5, 6.0, 5.5]), 4.0
    bias[digits, CLOSE] = 8.0
    bias[0:10, 0:2] = 4.0
    bias[CLOSE, OPEN], bias[CLOSE, SYNC], bias[CLOSE, END] = 7.5, 7.2, 6.0
    return bias


@lru_cache
def planning_model(seed: int, predicts: str = "own", head_dim: int = 8, dtype: str = "float64") -> Transformer:
    """Its tokens depend on the whole context, and most of its plans are well formed."""
    torch.manual_seed(seed)
    rest = 16
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY + rest,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        intermediate_size=24,
        tied_head=False,
    )
    tags = PlanTokens(*TAGS.control, digits=TAGS.digits, unit=2, predicts=predicts)  # type: ignore[arg-type]
    model = Transformer(config, mask_token=MASK, plan_tokens=tags, end_tokens=(END,)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.35)
        # One-hot parts of the embeddings reach the head as they are; the rest is random.
        for layer in model.layers:
            layer.output[:VOCABULARY] = 0.0
            layer.down[:VOCABULARY] = 0.0
        model.embedding[:, :VOCABULARY] = 12.0 * torch.eye(VOCABULARY)
        assert model.head is not None
        model.head[:, :VOCABULARY] = _bigrams().T / 2
        model.head[:, VOCABULARY:] *= 0.5
    return model.to(getattr(torch, dtype)).requires_grad_(False)


def example(method: Method) -> Any:
    """A trained model for a method, with a random drafter if it needs one; a recurrent one thinks less than it was trained to."""
    model = load(method.example)
    if method.wing == "recurrent":
        model.config = replace(model.config, mean_recurrence=5)
    return with_drafters(model) if "drafter" in method.requires else model


class Scripted(CachedFake):
    """Writes plans from a list, one token per request, and `guess` wherever a mask is.

    There its largest logits are those of control tokens and the mask. For one sequence; its hidden states are logits.
    """

    device, dtype = torch.device("cpu"), torch.float32
    mask_token, end_tokens = MASK, (END,)

    def __init__(
        self, script: list[int], guess: int = 10, plan_tokens: PlanTokens = TAGS, tokenizer: Any = None
    ) -> None:
        self.config = SimpleNamespace(vocab_size=VOCABULARY, predicts="next", attention="causal")
        self.left, self.guess, self.plan_tokens, self.tokenizer = list(script), guess, plan_tokens, tokenizer
        self.fed: list[list[int]] = []

    def __call__(self, *arguments: Any, rows: Any = None, **options: Any) -> Tensor:
        return self.hidden(*arguments, **options)

    def hidden(
        self, tokens: Tensor, *, cache: Any, counts: Any = None, mask: Any = None, positions: Any = None
    ) -> Tensor:
        self.fed.append(tokens[0].tolist())
        out = torch.zeros(*tokens.shape, VOCABULARY)
        if counts is not None and not counts.any():
            out[..., [MASK, END, *TAGS.control]] = 9.0
            out[..., TAGS.pad] = 0.0
            out[..., self.guess] = 3.0
        else:
            out[..., self.left.pop(0)] = 5.0
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def written(script: list[int], **options: Any) -> tuple[list[int], Any]:
    """The new tokens of a scripted model, and the report."""
    result = generate(Scripted(script), [11], **({"method": "planned", "max_new_tokens": 60} | options))
    return result.tokens.tolist(), result.stats.plans[0]


def plain(model: Transformer) -> Any:
    """The interface of the reference; no row predicts the mask token."""

    def forward(tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        return without(model(tokens, positions=positions, mask=mask), MASK)

    return forward


def references(
    model: Transformer, batch: list[list[int]], limit: int, reference: Any = planned, **options: Any
) -> list[PlannedResult]:
    return [
        reference(plain(model), prompt, limit, model.plan_tokens, mask_token=MASK, **own)
        for prompt, own in streams(batch, {"end_tokens": (END,)} | options)
    ]


def assert_same(result: Any, expected: list[PlannedResult]) -> None:
    """Tokens, rounds, reasons, forwards and, if there is a trace, what each step filled."""
    for index, want in enumerate(expected):
        assert result.tokens[index].tolist() == want.tokens
        report = result.stats.plans[index]
        assert report.reason == want.reason
        assert [(r.plan, r.topics, r.lengths, r.steps, r.stop) for r in report.rounds] == [
            (r.plan, [item.topic for item in r.items], [len(c) for c in r.chunks], r.steps, r.stop) for r in want.rounds
        ]
        plan, steps = want.forwards
        assert report.forwards["plan"] + report.forwards["refresh"] == plan and report.forwards["chunks"] == steps
        assert report.critical_path == plan + steps
        assert result.stats.accepted[index] == [len(step.committed) for step in want.trace]
        if result.stats.trace is not None:
            assert [tuple(step) for step in result.stats.trace[index]] == [tuple(step) for step in want.trace]
