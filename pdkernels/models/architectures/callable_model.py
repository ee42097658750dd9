"""A model made of a function from tokens to logits, for every method that needs no KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pdkernels._validation import check, check_choice, check_fits_memory, check_type, integer
from pdkernels.models.capabilities import Capability
from pdkernels.models.text.tokenizers import Tokenizer

__all__ = ["CallableConfig", "CallableModel", "TokenCache", "from_callable"]

_OP = "models.from_callable"

Predicts = Literal["next", "own"]


@dataclass(frozen=True)
class CallableConfig:
    """What a `CallableModel` reports about itself."""

    vocab_size: int
    predicts: Predicts
    max_positions: int | None = None

    @property
    def attention(self) -> Literal["bidirectional", "either"]:
        """Models whose rows predict their own token are bidirectional. If rows predict the next token, only the caller
        knows."""
        return "bidirectional" if self.predicts == "own" else "either"


class TokenCache:
    """A cache of the texts instead of K and V. Every forward runs over the full texts.

    Attributes:
        tokens: ``(batch, capacity + 1)`` int64; the last column takes padding that does not fit.
        lengths: ``(batch,)`` int64, the committed length of each text.
    """

    block_table: Tensor | None = None

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        check_fits_memory("CallableModel.new_cache", "capacity", capacity, 8 * batch * (capacity + 1), device)
        self.batch, self.capacity, self.device = batch, capacity, device
        self.tokens = torch.zeros(batch, capacity + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._most = 0  # upper bound of the lengths, so that the host does not query a GPU
        self._visible: tuple[Tensor, list[int]] | None = None

    def commit_(self, counts: Tensor) -> None:
        """Lengthens the texts."""
        self.lengths += counts

    def idle_row_(self, row: int) -> None:
        """Leaves a text with at most one token, whose content no longer matters."""
        self.lengths[row].clamp_(max=1)

    def copy_row_(self, row: int, other: TokenCache, other_row: int, length: int) -> None:
        """Replaces text `row` by the first `length` tokens of one of another cache."""
        self.tokens[row, :length] = other.tokens[other_row, :length]
        self.lengths[row].fill_(length)
        self._most, self._visible = max(self._most, length), None

    def append_(self, tokens: Tensor) -> Tensor:
        """Writes `tokens` ``(batch, T)`` after the committed ones. Returns the texts up to the known maximum length."""
        width = tokens.shape[1]
        longest = max(self.lengths.tolist()) if self.device.type == "cpu" else self._most
        self._most = min(longest + width, self.capacity)
        positions = self.lengths[:, None] + torch.arange(width, device=self.device)
        self.tokens.scatter_(1, positions.clamp(max=self.capacity), tokens.long())
        return self.tokens[:, : self._most]

    def shown(self, visible: Tensor) -> list[int]:
        """`visible` on the host, read once per tensor."""
        if self._visible is None or self._visible[0] is not visible:
            self._visible = visible, visible.tolist()
        return self._visible[1]


class CallableModel:
    """What `from_callable` returns."""

    keeps_rows = False

    def __init__(
        self,
        f: Callable[[Tensor], Any],
        config: CallableConfig,
        *,
        mask_token: int | None,
        end_tokens: tuple[int, ...],
        tokenizer: Tokenizer | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._f, self.config, self.mask_token, self.end_tokens = f, config, mask_token, end_tokens
        self.tokenizer, self.device, self.dtype = tokenizer, device, dtype

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Rows that predict their own token see the whole text. If rows predict the next token, only the caller
        knows."""
        predicts_own = self.config.predicts == "own"
        return frozenset(("bidirectional", "own_prediction") if predicts_own else ("causal", "bidirectional"))

    def new_cache(self, batch: int, capacity: int) -> TokenCache:
        """A cache for the texts of a generation."""
        return TokenCache(batch, capacity, self.device)

    def __call__(
        self, tokens: Tensor, *, cache: TokenCache, counts: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Logits of new rows, or of `rows` ``(batch, R)`` of them, from a function whose rows do not see later ones."""
        texts = cache.append_(tokens)
        if rows is None:
            rows = torch.arange(tokens.shape[1], device=self.device).expand(len(tokens), -1)
        at = (cache.lengths[:, None] + rows).clamp(max=texts.shape[1] - 1)
        logits = self._run(texts)
        return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))

    def recompute(
        self, tokens: Tensor, cache: TokenCache, starts: Tensor, *, counts: Tensor | None = None, visible: Tensor
    ) -> Tensor:
        """Logits of whole texts. Texts of different lengths run one length at a time, because rows see their whole
        text."""
        if counts is None:
            return self._run(tokens)
        lengths = [min(length, tokens.shape[1]) for length in cache.shown(visible)]
        logits: Tensor | None = None
        for length in sorted(set(lengths) - {0}):
            of_it = [sequence for sequence, other in enumerate(lengths) if other == length]
            group_logits = self._run(tokens[of_it, :length])
            if logits is None:
                logits = group_logits.new_zeros(*tokens.shape, group_logits.shape[-1])
            logits[of_it, :length] = group_logits
        if logits is None:
            return torch.zeros(*tokens.shape, self.config.vocab_size, dtype=self.dtype, device=self.device)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` itself: the function has already returned logits."""
        return hidden

    def _run(self, tokens: Tensor) -> Tensor:
        output = self._f(tokens)
        logits: Tensor = getattr(output, "logits", output)
        expected = (*tokens.shape, self.config.vocab_size)
        floats = isinstance(logits, Tensor) and logits.is_floating_point()
        actual = getattr(logits, "dtype", type(logits).__name__)
        check_type(floats, _OP, "f", "return logits, or an object with `.logits`", actual)
        check(tuple(logits.shape) == expected, _OP, "f", f"return logits of shape {expected}", tuple(logits.shape))
        check(logits.device == self.device, _OP, "f", f"return logits on {self.device}", logits.device, "Pass device=.")
        # Kernels take all floats except fp64, which is for models in fp64 throughout.
        if self.dtype == torch.float64 or logits.dtype == torch.float64:
            return logits.to(self.dtype)
        return logits


def from_callable(
    f: Callable[[Tensor], Any],
    *,
    vocab_size: int,
    mask_token: int | None = None,
    predicts: Predicts | None = None,
    end_tokens: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    max_positions: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CallableModel:
    """A model from a function of whole texts, for `generate` with every method that needs no KV cache.

    These are `autoregressive` and `jacobi` if `f` is causal and predicts the next token, and `llada`, `dream`,
    `slowfast` and ``fast_dllm(cache="none")`` if it fills in masks. Every forward runs `f` over the full texts.

    Args:
        f: ``f(tokens) -> logits``: int64 ``(batch, T)`` to ``(batch, T, vocab_size)``, or to an object with such
            `.logits`. A module, a function, a model of another library. A module runs in the mode that it has: call
            `.eval()` first, or dropout makes every forward another one.
        vocab_size: entries in a row of logits.
        mask_token: the id that `f` was trained to fill in.
        predicts: which token the logits of row i predict: "own", i itself, or "next", i + 1. None: "own" with a mask
            token, "next" without one.
        end_tokens: ids that end a text.
        tokenizer: for text as prompts and results.
        max_positions: the longest text that `f` takes.
        device: device of the tokens. None: that of the parameters of `f`, or the CPU.
        dtype: the dtype of the computation, which matters only for fp64. None: that of its parameters, or fp32.

    With "own" the causal methods are refused. With "next" the caller has to choose a method that fits: causality is not
    checked. In a batch of texts of different lengths, a method that fills masks calls `f` once per length, because `f`
    takes no padding mask.

    Raises:
        ValueError, TypeError: arguments; at the first forward, logits of another shape or device.

    Example:
        >>> import torch, pdkernels as pd
        >>> table = torch.eye(7).roll(1, 1)
        >>> model = pd.models.from_callable(lambda tokens: table[tokens], vocab_size=7)
        >>> pd.decoding.generate(model, [1, 2], "jacobi", max_new_tokens=6).tokens
        tensor([3, 4, 5, 6, 0, 1])
    """
    check_type(callable(f), _OP, "f", "be a function of tokens", type(f).__name__)
    size = integer(_OP, "vocab_size", vocab_size, 1)
    for name, ids in (("mask_token", () if mask_token is None else (mask_token,)), ("end_tokens", end_tokens)):
        check_type(isinstance(ids, Sequence), _OP, name, "be a sequence of ids", type(ids).__name__)
        for token in ids:
            check(integer(_OP, name, token, 0) < size, _OP, name, f"be below vocab_size ({size})", token)
    if predicts is None:
        predicts = "next" if mask_token is None else "own"
    check_choice(_OP, "predicts", predicts, get_args(Predicts))
    if max_positions is not None:
        max_positions = integer(_OP, "max_positions", max_positions, 1)
    weight = next((p for p in f.parameters() if p.is_floating_point()), None) if isinstance(f, nn.Module) else None
    if device is None:
        device = "cpu" if weight is None else weight.device
    if dtype is None:
        dtype = torch.float32 if weight is None else weight.dtype
    check_type(
        isinstance(dtype, torch.dtype) and dtype.is_floating_point, _OP, "dtype", "be a floating-point dtype", dtype
    )
    return CallableModel(
        f,
        CallableConfig(size, predicts, max_positions),
        mask_token=mask_token if mask_token is None else int(mask_token),
        end_tokens=tuple(map(int, end_tokens)),
        tokenizer=tokenizer,
        device=torch.device(device),
        dtype=dtype,
    )
