"""The input and output of every decoding loop: packed prompts, a cache, the record of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from pdkernels._validation import refuse, sentence
from pdkernels.cache import PagePool
from pdkernels.generation.filters import Filters
from pdkernels.generation.grammar_rows import GrammarRows
from pdkernels.generation.logprobs import WrittenLogProbs
from pdkernels.generation.noise import checked_seeds
from pdkernels.generation.params import DEFAULTS, SamplingParams
from pdkernels.generation.result import OnTokens, PlanReport
from pdkernels.generation.sampler import Sampler
from pdkernels.generation.stops import Stops
from pdkernels.generation.traces import TraceStep


@contextmanager
def inference() -> Iterator[None]:
    """The context of all decoding. Autocast is off, because caches have the model's dtype."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def is_end(tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Which of `tokens` are among `ends` (1-D), elementwise."""
    return (tokens.unsqueeze(-1) == ends).any(-1)


def has_no_choice(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Which of `tokens` ``(batch, R)`` were chosen from a row of `logits` ``(batch, R, V)`` that has no distribution.

    The op and argmax select a NaN first, else a +inf; of a row without a possible token the op gives -1 and argmax a
    -inf.

    >>> rows = torch.tensor([[[1.0, torch.nan], [torch.inf, 1.0], [-torch.inf, -torch.inf], [-torch.inf, 1.0]]])
    >>> has_no_choice(rows, rows.argmax(-1))
    tensor([[ True,  True,  True, False]])
    """
    chosen = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return (tokens < 0) | (chosen - chosen != 0)  # NaN or infinite; `isfinite` launches twice as many kernels


def flag_no_choice(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` ``(batch, R)`` for the host, with -1 as the first one if its row of `logits` ``(batch, 1, V)`` has no
    distribution."""
    first = tokens[:, :1]
    return torch.cat([first.masked_fill(has_no_choice(logits, first), -1), tokens[:, 1:].clamp(min=0)], 1)


def accepted_without_choice(logits: torch.Tensor, predictions: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Which sequences, ``(batch,)``, accepted a draft from rows without a distribution; the rows after `accepted`
    ``(batch,)`` are irrelevant."""
    row = torch.arange(predictions.shape[1], device=accepted.device)
    return (has_no_choice(logits, predictions) & (row < accepted[:, None])).any(1)


def to_device_async(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Rows as an int64 tensor on the device, in one copy that the host does not wait for."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


_BLOCK = 256  # no published model is trained on longer blocks


class NoChoice(ValueError):
    """Logits from which no token can be chosen."""


class Session:
    """One call of `generate`: its inputs on the device, its growing output on the host.

    A loop reads its device once per step, and that read brings all tokens to the host; the record is built from these
    host copies, so nothing here touches the device after the prompt is packed.
    """

    def __init__(
        self,
        model: Any,
        prompts: list[list[int]],
        max_new_tokens: int,
        end_tokens: tuple[int, ...],
        on_tokens: OnTokens | None,
        trace: bool,
        tails: Sequence[list[int]] | None = None,
        params: SamplingParams = DEFAULTS,
    ) -> None:
        """`tails`: what each text holds after its prompt, masks included, before its `max_new_tokens` new tokens.
        `params`: the request; what is resolved for this model has arguments of its own."""
        self.model, self.params = model, params
        self.prompts = prompts
        self.batch = len(prompts)
        self.longest = max(len(prompt) for prompt in prompts)
        self.tails = tails
        self.limits = [len(tail) + max_new_tokens for tail in tails or [[]] * self.batch]
        self.max_new_tokens = max(self.limits)
        self.end_tokens = end_tokens
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.accepted: list[list[int]] = [[] for _ in prompts]
        self.trace: list[list[Any]] | None = [[] for _ in prompts] if trace else None
        self.given = 0  # how many of `tokens` were in the prompts
        self.forwards = 0
        self.recurrences, self.counts_recurrences = 0, False  # set by methods that choose how often a model's core runs
        self.plans: list[PlanReport] | None = None  # set by methods that plan
        # A function of the tokens, and of `decode`, that replaces the plain decoding of all tokens.
        self.text_of: Callable[..., str] | None = None
        self.canvas: Any = None  # the host's half of a canvas, of steps that fill one
        self.callback_seconds = 0.0
        self.filters = Filters()  # of methods whose texts are canvases; those on a cache have a model that applies them
        self.likely: WrittenLogProbs | None = None
        self.adapters: list[Any] | None = None  # of each sequence, None for the model alone
        self.keeps_windows = False  # whether layers with a window may keep only what rows to come can see
        self.pool: PagePool | None = None  # where the cache of a running batch takes its pages from
        self.grammar: GrammarRows | None = None
        self.stops = Stops()
        self.stopped = [False] * self.batch  # by one of these
        self.on_tokens = on_tokens
        self.on_provisional: Callable[[list[int | None]], None] | None = None  # of a request in a running batch

    def block(self, size: int) -> int:
        """A block of `size` tokens, limited to about the requested length."""
        return min(size, max(self.max_new_tokens, _BLOCK))

    @property
    def sampler(self) -> Sampler:
        """What draws its tokens."""
        return Sampler.of(self.params)

    @property
    def seeds(self) -> torch.Tensor:
        """The seed of each sequence, int64 ``(batch,)`` on the host."""
        return checked_seeds("decoding.generate", self.params.seed, self.batch)

    @property
    def written(self) -> list[list[int]]:
        """The result of each sequence: its new tokens, or its whole text if masks inside the prompt were filled."""
        if self.tails is None:
            return self.tokens
        return [prompt + tokens for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]

    @property
    def listens(self) -> bool:
        """Whether a callback wants tokens as soon as they are final."""
        return self.on_tokens is not None

    def new_cache(
        self,
        page_size: int | None,
        extra: int = 0,
        copies: int = 1,
        drafts: int = 0,
        pooled: bool = True,
        **options: Any,
    ) -> Any:
        """A cache with room for every prompt, all its new tokens and `extra` more, `copies` times; paged if `page_size`
        is given.

        Up to `drafts` rows of a forward may be rejected, which matters to recurrent states and windows. If not `pooled`,
        it takes no pages from the pool of the session. The `options` are the model's own.
        """
        batch, length = copies * self.batch, self.max_new_tokens + extra
        paged: dict[str, Any] = {} if page_size is None else {"kind": "paged", "page_size": page_size}
        pool = self.pool if pooled else None
        if pool is not None:
            paged = {"pool": pool}
        elif drafts and self.keeps_windows:
            paged["drafts"] = drafts
        cache = self.model.new_cache(batch, self.longest + length, **paged, **options)
        if page_size is not None and pool is None:
            # All pages at once, so that the loop never needs the host-side allocator.
            cache.reserve_([len(prompt) + length for prompt in self.prompts] * copies)
        if drafts and hasattr(cache, "reserve_drafts_"):
            cache.reserve_drafts_(drafts)
        return self._adapted(cache, copies)

    def _adapted(self, cache: Any, copies: int) -> Any:
        if self.adapters is not None:
            fault = f"a cache of {type(cache).__name__} does not follow adapters"
            refuse(not hasattr(cache, "adapt_"), "decoding.generate", fault, "Leave out the option that asks for it.")
            cache.adapt_(self.adapters * copies)
        return cache

    def packed_prompts(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts as rows ``(batch, width)`` with zeros after them, and their lengths ``(batch,)``."""
        rows = [prompt + [0] * (width - len(prompt)) for prompt in self.prompts]
        lengths = [len(prompt) for prompt in self.prompts]
        return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)

    def ends_on(self, device: torch.device) -> torch.Tensor | None:
        """The end tokens as a tensor; None if there are none."""
        return torch.tensor(self.end_tokens, dtype=torch.int64, device=device) if self.end_tokens else None

    def ragged(self, counts: torch.Tensor) -> torch.Tensor | None:
        """`counts` of the prompts' forward, or None where all prompts are equally long and every row counts."""
        return None if all(len(prompt) == self.longest for prompt in self.prompts) else counts

    def record_first(self, sequence: int, token: int) -> None:
        """Records the token from the prompt's forward."""
        self.emit(sequence, [token], 0)

    def log_step(
        self, sequence: int, draft: list[int], predictions: list[int] | None, accepted: int, next_token: int
    ) -> None:
        """Records a verified draft: ``draft[0]`` is on record since the previous step, the rest and the next token are
        new.

        An `accepted` of -1 means that the model's logits gave no choice.
        """
        if self.stopped[sequence]:
            return
        if accepted < 0:
            self.fail_without_choice(sequence)
        self.accepted[sequence].append(accepted)
        if self.trace is not None and predictions is not None:
            self.trace[sequence].append(TraceStep(draft, predictions, accepted))
        new = draft[1:accepted]
        if draft[accepted - 1] not in self.end_tokens:
            new.append(next_token)
        self.emit(sequence, new, accepted - 1)

    def emit(self, sequence: int, new: list[int], accepted_drafts: int) -> None:
        """Records new tokens of a sequence, the first `accepted_drafts` of them accepted drafts; -1 is no choice."""
        if self.stopped[sequence]:
            return
        if new and min(new) < 0:
            self.fail_without_choice(sequence)
        new = self.extend(sequence, new)
        self.report(sequence, new, min(accepted_drafts, len(new)))

    def extend(self, sequence: int, new: list[int]) -> list[int]:
        """Puts tokens on record, up to the one that ends the text, and returns those; `stopped` says whether one
        did."""
        recorded = self.tokens[sequence]
        end = None
        if self.stops.any:
            tokens = [*recorded, *new]
            end = self.stops.first(self.prompts[sequence], tokens, len(recorded), self.model.tokenizer, self.text_of)
        accepted = list(new) if end is None else new[: end - len(recorded)]
        self.tokens[sequence] += accepted
        self.stopped[sequence] = end is not None
        return accepted

    def stop_(self, remaining: list[Any], *device: torch.Tensor) -> None:
        """Writes 0 for the sequences that one of `stops` has ended, into what is `left` of each on the host and on the
        device."""
        for sequence, stopped in enumerate(self.stopped):
            if stopped:
                remaining[sequence] = type(remaining[sequence])(0)
                for tensor in device:
                    tensor[sequence] = 0

    def plain(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the last forward before filters, if log-probabilities are wanted: `logits` where there are no
        filters."""
        unfiltered: torch.Tensor | None = getattr(self.model, "plain", None) if self.likely is not None else None
        return logits if unfiltered is None else unfiltered

    def note(self, unfiltered: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, where: torch.Tensor) -> None:
        """Keeps the log-probabilities of tokens that a forward writes, if they are wanted; see
        `WrittenLogProbs.write_`."""
        if self.likely is not None:
            self.likely.write_(unfiltered, ids, positions, where)

    def forced(self, rooms: Sequence[int]) -> list[list[int]]:
        """The tokens after those on record that the grammars leave no choice about, of each sequence at most as many as
        its room."""
        if self.grammar is None:
            return [[] for _ in rooms]
        return [
            self.grammar.drafted(sequence, self.tokens[sequence], room) if room > 0 else []
            for sequence, room in enumerate(rooms)
        ]

    def report(self, sequence: int, new: list[int], accepted_drafts: int) -> None:
        """Passes tokens to the callback, as its own list."""
        if self.on_tokens is not None:
            started = time.perf_counter()
            self.on_tokens(sequence, new, accepted_drafts)
            self.callback_seconds += time.perf_counter() - started

    def fail_without_choice(self, sequence: int) -> NoReturn:
        """Raises for logits from which no token can be chosen."""
        count = len(self.tokens[sequence])
        fault = f"the model's logits leave no token to choose: NaN, +inf or only -inf in sequence {sequence}, after {count} new tokens"
        remedy = "Look for NaN in its weights, for overflow in fp16, or for a mask or hook that forbids every token."
        raise NoChoice(sentence("decoding.generate", fault, remedy))
