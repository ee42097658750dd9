"""transformers' lists of logits processors and stopping criteria, as filters, hooks and stops of
`pdkernels.decoding.generate`.

A processor that has a filter of ours becomes that. If there are others, all become hooks: they run in the order of the
list, each on one row, after the padded prompt and the tokens generated before the row, as in transformers' own loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdkernels._validation import message
from pdkernels.generation.logprobs import scored
from pdkernels.generation.params import SETTINGS
from pdkernels.generation.session import inference

_OP = "generate"

# Of draws; in this order, and after all others.
WARPERS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "LogitNormalization",
)
# The settings that are followed as such where transformers made these of its own.
NATIVE = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoBadWordsLogitsProcessor": "bad_words",
    "MinLengthLogitsProcessor": "min_new_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model once per token",
    "SynthIDTextWatermarkLogitsProcessor": "it counts the tokens of one text",
    "EncoderRepetitionPenaltyLogitsProcessor": "it is for a whole batch",
    "EncoderNoRepeatNGramLogitsProcessor": "it is for a whole batch",
}


class PaddedHook:
    """Processors for the rows of a batch: `input_ids` ``(batch, n)`` are its padded prompts, `lengths` those without
    padding."""

    def __init__(self, processors: Sequence[Any], input_ids: Tensor, lengths: Sequence[int]) -> None:
        self.processors, self._ids, self._lengths = processors, input_ids, lengths

    def for_sequence(self, sequence: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The hook for the rows of one sequence."""
        prompt, length = self._ids[sequence][None], self._lengths[sequence]
        processors = [_of_sequence(processor, sequence) for processor in self.processors]

        def hook(ids: Tensor, scores: Tensor) -> Tensor:
            text = torch.cat([prompt.to(ids), ids[:, length:]], 1)
            for processor in processors:
                scores = processor(text, scores)
            return scores

        return hook

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return self.for_sequence(0)(ids, scores)


class PaddedCriterion:
    """A stopping criterion that sees texts with the padding of their prompts."""

    def __init__(self, criterion: Any, input_ids: Tensor, real: Tensor) -> None:
        self._criterion = criterion
        self._prompts = [(ids[seen].tolist(), ids) for ids, seen in zip(input_ids, real, strict=True)]

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        text = ids[0].tolist()
        # Equal prompts without their padding may differ in it, which a criterion could only read by mistake.
        match = max((pair for pair in self._prompts if text[: len(pair[0])] == pair[0]), key=lambda pair: len(pair[0]))
        new = torch.tensor(text[len(match[0]) :], device="cpu").to(match[1])
        return self._criterion(torch.cat([match[1], new])[None], scores)


def split(processors: Iterable[Any], callers: Iterable[Any]) -> tuple[list[Any], bool]:
    """The processors that become hooks, and whether the warpers are among them: where one of those is not ours, all
    are.

    `callers`: those that the caller of transformers' `generate` passed. Only those that it made itself have options.
    """
    items, caller_items = list(processors or ()), list(callers or ())
    names = ["" if any(item is caller_item for caller_item in caller_items) else type(item).__name__ for item in items]
    for item in items:
        if reason := _STATEFUL.get(name := type(item).__name__):
            expectation = "hold functions of a row and its prefix"
            raise NotImplementedError(
                message(_OP, "logits_processor", expectation, name, f"{reason[0].upper()}{reason[1:]}.")
            )
    first = next((place for place, name in enumerate(names) if name in WARPERS), len(names))
    if not all(name in WARPERS for name in names[first:]):
        return items, True
    if all(name in NATIVE for name in names[:first]):
        return [], False
    return items[:first], False


def options(
    config: Any, processors: Iterable[Any], callers: Iterable[Any], input_ids: Tensor, lengths: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """Settings of `pdkernels.decoding.generate`, and whether draws are filtered by hooks alone."""
    hooks, native = split(processors, callers)
    if hooks:
        return {"logits_processor": [PaddedHook(hooks, input_ids, lengths)]}, native
    processor_of = {NATIVE.get(type(item).__name__): item for item in processors or ()}
    settings = {name: getattr(config, SETTINGS[name].transformers) for name in processor_of if name}
    if "bad_words" in settings:  # of which the processor leaves out end tokens alone
        settings["bad_words"] = [list(word) for word in processor_of["bad_words"].sequence_bias]
    if "min_new_tokens" in settings:
        settings["min_new_tokens"] = max((config.min_length or 0) - input_ids.shape[1], config.min_new_tokens or 0)
    return settings, False


def _of_sequence(processor: Any, sequence: int) -> Any:
    """A processor that knows the place or the padding of its row in a batch, for one sequence."""
    allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
    ignored: Any = getattr(processor, "prompt_ignore_length", None)
    padded = isinstance(ignored, Tensor) and len(ignored) > 1
    if allowed is None and not padded:
        return processor
    processor_copy = copy.copy(processor)
    if allowed is not None:
        prompt = sequence // processor._num_beams  # from 5.24 on, that of num_return_sequences as well
        processor_copy._num_beams, processor_copy._prefix_allowed_tokens_fn = 1, lambda _, ids: allowed(prompt, ids)
    if padded:
        processor_copy.prompt_ignore_length = ignored[sequence : sequence + 1]
    return processor_copy


@inference()
def plain_logits(model: Any, prompts: list[list[int]], texts: list[list[int]]) -> list[Tensor]:
    """The model's logits of each new token, float32 ``(batch, V)``: 0 for texts that have ended."""
    lengths = torch.tensor([len(text) for text in texts], device="cpu")
    columns: list[Tensor] = []
    for first, logits, _ in scored(model, prompts, texts):
        for place, rows in enumerate(logits.float().unbind(1), first):
            ended = lengths.to(rows.device) <= place
            columns.append(rows.masked_fill(ended[:, None], 0).clone())
    return columns
