"""The interfaces that decoding methods require of a model: your own model needs only these members
(docs/own_models.md).

`requirements` reads the members and their keywords from a protocol, and `missing` compares a model with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, get_type_hints

import torch
from torch import Tensor, nn

from pdkernels._validation import check_type, refuse_foreign
from pdkernels.models.plan_tokens import PlanTokens


class Config(Protocol):
    """Sizes of a model. The optional `max_positions` is the longest text that the model was trained on."""

    @property
    def vocab_size(self) -> int: ...


class RowsConfig(Config, Protocol):
    """The attention and the prediction of rows."""

    @property
    def attention(self) -> str:
        """ "causal", "bidirectional", or "either" for a model whose caller decides."""
        ...

    @property
    def predicts(self) -> str:
        """ "next" if the logits of row i predict token i + 1, "own" if they predict token i."""
        ...


class LayersConfig(Config, Protocol):
    """The sizes that a drafter of hidden states must fit."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def layers(self) -> int: ...


class RecurrentConfig(Config, Protocol):
    """The config of a recurrent-depth model."""

    @property
    def mean_recurrence(self) -> int: ...


class LanguageModel(Protocol):
    """Members that all methods require. `tokenizer` may be None, `end_tokens` empty."""

    @property
    def config(self) -> Config: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def end_tokens(self) -> Sequence[int]: ...

    def new_cache(self, batch: int, capacity: int) -> Any:
        """An empty `pdkernels.cache.Cache`, or something with its `lengths`, `device` and `commit_`.

        For `page_size` it also takes ``kind="paged", page_size=n``, and the result has `reserve_`.
        """
        ...


class CausalModel(LanguageModel, Protocol):
    """For `autoregressive` and `jacobi`: a forward over new rows after a cached prefix."""

    def __call__(
        self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Logits ``(batch, R, vocab_size)`` of the given `rows` ``(batch, R)`` of `tokens` ``(batch, T)``; None: of
        all.

        Row i of sequence b is at position ``cache.lengths[b] + i`` and attends to everything up to itself. The rows
        after the first ``counts[b]`` are padding. `cache.commit_` then decides which rows become part of the prefix.
        """
        ...


class BranchingModel(CausalModel, Protocol):
    """For `jacobi_multiblock`: new rows that attend to each other under a mask."""

    def __call__(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: Any = None,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`mask` is a `TilePlan` of the new rows, `positions` ``(T,)`` their offsets from the cached length."""
        ...


class BlockModel(CausalModel, Protocol):
    """For `block_diffusion`: attention is bidirectional inside a block, and the head can be applied to hidden rows
    later."""

    def __call__(
        self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None, mask: Any = None, rows: Tensor | None = None
    ) -> Tensor: ...

    def hidden(self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None, mask: Any = None) -> Tensor:
        """``(batch, T, hidden_size)``, for `logits`; the arguments are those of a forward."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TappedModel(CausalModel, Protocol):
    """For `eagle`, `dflash` and `mtp`: forwards that also return the inputs of layers, and a head that can be applied
    to hidden rows later.

    A drafter without an embedding of its own also needs `embed`, from tokens to their embeddings. Trees need a `tapped`
    that also takes `mask` and `positions`, and a cache whose `commit_` takes a source index.
    """

    @property
    def config(self) -> LayersConfig: ...

    def hidden(self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None) -> Tensor:
        """``(batch, T, hidden_size)``, for `logits`; the arguments are those of a forward."""
        ...

    def tapped(self, tokens: Tensor, taps: Sequence[int], *, cache: Any, counts: Tensor | None = None) -> Any:
        """The hidden rows ``(batch, T, hidden_size)``, for `logits`, and the inputs ``(batch, T, len(taps),
        hidden_size)`` of the layers `taps`; the arguments are those of a forward."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class PlanningModel(BlockModel, Protocol):
    """For `planned`: a causal forward for plans, chunks under a mask, and the control tokens of plans."""

    @property
    def plan_tokens(self) -> PlanTokens | None: ...

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: Any = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """`positions` ``(batch, T)``: offsets from the cached length of rows that are not stored; of chunks written
        token by token also of those that are, in a cache with `copy_row_`."""
        ...


class SelfSpeculativeModel(BlockModel, BranchingModel, Protocol):
    """For linear and quadratic self-speculation: the model also drafts, optionally with an adapter."""

    @property
    def has_adapter(self) -> bool: ...

    def __call__(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: Any = None,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor: ...

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        mask: Any = None,
        positions: Tensor | None = None,
        adapted: bool | Tensor = False,
    ) -> Tensor:
        """`adapted`: the rows that use the adapter."""
        ...


class BidirectionalModel(LanguageModel, Protocol):
    """For `llada`, `dream`, `slowfast` and `fast_dllm`: bidirectional attention over the whole text."""

    @property
    def config(self) -> RowsConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def recompute(
        self, tokens: Tensor, cache: Any, starts: Tensor, *, counts: Tensor | None = None, visible: Tensor
    ) -> Tensor:
        """Hidden rows ``(batch, T, hidden_size)`` of `tokens` ``(batch, T)``, at positions ``starts[b]`` and after.

        A row attends to the first ``visible[b]`` positions of its sequence; positions outside `tokens` are read from
        the cache. A model that computes its rows from `tokens` alone must have ``keeps_rows = False``. A model whose
        cache keeps the other rows has ``keeps_rows = True``, which `fast_dllm` requires.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class BlockCausalModel(BidirectionalModel, Protocol):
    """For `fast_dllm_v2`: block-causal attention, and recomputation of blocks in the cache."""

    @property
    def keeps_rows(self) -> bool: ...

    def hidden(self, tokens: Tensor, *, cache: Any, counts: Tensor | None = None, mask: Any = None) -> Tensor: ...


class RecurrentModel(LanguageModel, Protocol):
    """For `recurrent_static` and `recurrent_self_speculation`: the caller sets the number of recurrences."""

    @property
    def config(self) -> RecurrentConfig: ...

    def __call__(
        self,
        tokens: Tensor,
        *,
        cache: Any,
        counts: Tensor | None = None,
        rows: Tensor | None = None,
        recurrences: int | None = None,
        seed: Any = 0,
    ) -> Tensor: ...


class RecurrentPartsModel(RecurrentModel, Protocol):
    """For `recurrent_adaptive`: the parts of a forward, as `RecurrentDepth` has them."""

    def context(self, rows: int, cache: Any = None, counts: Tensor | None = None) -> Any: ...

    def prelude(self, tokens: Tensor, context: Any) -> Tensor: ...

    def begin(self, embedding: Tensor, context: Any, seed: Any = 0) -> tuple[Tensor, Tensor]: ...

    def core(self, state: Tensor, term: Tensor, context: Any) -> Tensor: ...

    def coda(self, state: Tensor, context: Any) -> Tensor: ...


class RecurrentWaveModel(RecurrentPartsModel, Protocol):
    """For `recurrent_diffusion`: the last recurrence of a step is split before its last norm."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def exit_weight(self) -> Tensor: ...

    def embedding_term(self, embedding: Tensor) -> Tensor: ...

    def core_parts(self, state: Tensor, term: Tensor, context: Any) -> tuple[Tensor, Tensor]: ...


class Requirement(NamedTuple):
    """A member of a protocol."""

    path: tuple[str, ...]  # ("config", "vocab_size") is a member of a member
    keywords: tuple[str, ...]  # of a method


@cache
def requirements(protocol: type) -> tuple[Requirement, ...]:
    """The members of a protocol, starting with those of its bases.

    >>> [".".join(member.path) for member in requirements(CausalModel)]
    ['config', 'config.vocab_size', 'tokenizer', 'end_tokens', 'new_cache', '__call__']
    >>> requirements(CausalModel)[-1].keywords
    ('cache', 'counts', 'rows')
    """
    members: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            members |= {name: value for name, value in vars(base).items() if name == "__call__" or name[0] != "_"}
    required = []
    for name, member in members.items():
        if isinstance(member, property):
            required.append(Requirement((name,), ()))
            kind = get_type_hints(member.fget)["return"]
            if getattr(kind, "_is_protocol", False):
                required += [Requirement((name, *inner.path), inner.keywords) for inner in requirements(kind)]
        else:
            parameters = inspect.signature(member).parameters.values()
            required.append(Requirement((name,), tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)))
    return tuple(required)


def missing(model: object, protocol: type) -> str:
    """The first thing that a model lacks for a protocol: "the member `logits`", "the argument `visible` of
    `recompute`"; "" for nothing.

    >>> class Half:
    ...     config, tokenizer, end_tokens = torch.finfo(torch.float32), None, ()
    >>> missing(Half(), CausalModel)
    'the member `config.vocab_size`'
    """
    for path, keywords in requirements(protocol):
        value: Any = model
        for name in path:
            if not hasattr(value, name):
                return f"the member `{'.'.join(path)}`"
            value = getattr(value, name)
        if keywords and (keyword := lacking(model, path[-1], keywords)):
            return f"the argument `{keyword}` of `{path[-1]}`"
    return ""


def check_language_model(op: str, model: Any) -> None:
    """Raises TypeError, with what to do, for what is no model, or one of transformers."""
    is_model, actual = hasattr(model, "config"), type(model).__name__
    remedy = "Load one with pdkernels.models.load"
    remedy += ", or make one of a function with pdkernels.models.from_callable." if callable(model) else "."
    check_type(is_model, op, "model", "be a model", actual, remedy)
    refuse_foreign(op, "model", model)


def lacking(model: Any, method: str, keywords: Sequence[str]) -> str:
    """The first of `keywords` that a method does not accept; "" if it accepts all, or any keyword."""
    name = "forward" if method == "__call__" and isinstance(model, nn.Module) else method
    function = getattr(type(model), name, None)
    if inspect.isfunction(function) and name not in getattr(model, "__dict__", {}):
        return _lacking(function, tuple(keywords))
    return _lacking.__wrapped__(getattr(model, name), tuple(keywords))


def keeps_windows(model: Any) -> bool:
    """Whether layers, of a model or a drafter, have windows, and `new_cache` can be told how many rows may be rejected,
    so that these layers keep only what rows to come can see."""
    config = getattr(model.config, "body", model.config)
    return bool(getattr(config, "windows", ())) and not lacking(model, "new_cache", ("drafts",))


@lru_cache(maxsize=256)
def _lacking(function: Any, keywords: tuple[str, ...]) -> str:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    return next((name for name in keywords if name not in parameters), "")
