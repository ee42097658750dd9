"""`model.generate(..., custom_generate=pdkernels.integrations.transformers.generate)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from pdkernels._validation import check, fail
from pdkernels.decoding import find
from pdkernels.decoding import generate as decode
from pdkernels.integrations.transformers._model import wrap

OP = "generate"
# Processors that only repeat the generation config, and how a method takes them.
_SAMPLING = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}
_ENDS = ("MaxLengthCriteria", "EosTokenCriteria")


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    streamer: Any = None,
    method: str = "jacobi",
    method_options: Mapping[str, Any] | None = None,
    token_streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decodes with one of our methods instead of transformers' token-by-token decoding.

    Call it through transformers: ``model.generate(**inputs, custom_generate=generate, method="jacobi")``. Greedy settings give the
    tokens of transformers; with ``do_sample=True`` the draws are ours, with `temperature`, `top_k` and `top_p` for the methods
    that have them. Settings that cannot be followed are refused.

    Args:
        method: one of `pdkernels.decoding.available()`.
        method_options: options of the method, such as ``{"block_size": 16}``.
        token_streamer: a streamer for the new tokens of a single prompt. transformers 4.57 and 5.23 do not pass `streamer` to
            functions like this one.

    Returns:
        ``(batch, prompt + new)`` ids, padded with the pad token; with ``return_dict_in_generate=True`` an object with `sequences`, and
        `stats` of `pdkernels.decoding.generate`.

    Raises:
        NotImplementedError: logits processors, stopping criteria or modes that our methods do not support.
        ValueError: as in `pdkernels.decoding.generate`.

    Example:
        >>> import torch, transformers
        >>> from pdkernels.integrations.transformers import generate
        >>> config = transformers.Qwen3Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=16, intermediate_size=48)
        >>> model = transformers.Qwen3ForCausalLM(config).eval()
        >>> prompt = torch.tensor([[1, 2, 3]])
        >>> ours = model.generate(prompt, max_new_tokens=5, custom_generate=generate, method="jacobi")
        >>> torch.equal(ours, model.generate(prompt, max_new_tokens=5))
        True
    """
    config, known = generation_config, find(method)
    options = dict(method_options or {})
    beams = (getattr(config, "num_beams", None) or 1) == 1
    check(beams, OP, "num_beams", "be 1", config.num_beams, "Beams are decoded by transformers' own generate.")
    for processor in logits_processor or ():
        name = type(processor).__name__
        option = _SAMPLING.get(name)
        if option is None:
            _refuse("logits_processor", name)
        if option not in known.options:
            remedy = "transformers sets top_k=50 by default: pass top_k=0." if option == "top_k" else ""
            fail(OP, option, f"be off for method {method!r}, which does not have it", getattr(config, option), remedy)
        options.setdefault(option, getattr(config, option))
    for criterion in stopping_criteria or ():
        if type(criterion).__name__ not in _ENDS:
            _refuse("stopping_criteria", type(criterion).__name__)
    if getattr(config, "do_sample", False) and "temperature" in known.options:
        options.setdefault("temperature", config.temperature if config.temperature is not None else 1.0)
        options.setdefault("seed", int(torch.randint(2**31, ()).item()))  # as in transformers: a new one in each call
    elif getattr(config, "do_sample", False):
        fail(OP, "do_sample", f"be False for method {method!r}, which does not draw", True)
    seen = model_kwargs.get("past_key_values")
    empty = seen is None or seen.get_seq_length() == 0
    check(empty, OP, "past_key_values", "be empty", "a cache with tokens", "Our methods keep their own caches.")
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        left = bool((mask[:, :-1] <= mask[:, 1:]).all() and mask[:, -1].all())
        check(left, OP, "attention_mask", "hide only padding on the left", "another mask")
    prompts = [
        ids if mask is None else ids[row.bool()] for ids, row in zip(input_ids, input_ids if mask is None else mask)
    ]
    length = input_ids.shape[1]
    tell: Callable[[int, list[int], int], None] | None = None
    streamer = streamer or token_streamer
    if streamer is not None:
        check(len(prompts) == 1, OP, "streamer", "be for one prompt", f"one for {len(prompts)}")

        def put(sequence: int, ids: list[int], accepted: int) -> None:
            for token in ids:
                streamer.put(torch.tensor([token]))

        tell = put

    ends = _ids(config.eos_token_id)
    before = model.config._attn_implementation
    try:
        result = decode(
            wrap(model),
            prompts,
            known,
            max_new_tokens=config.max_length - length,
            end_tokens=ends,
            on_tokens=tell,
            **options,
        )
    finally:
        model.set_attn_implementation(before)
    if streamer is not None:
        streamer.end()
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    width = max(len(ids) for ids in result.tokens)
    out = torch.full((len(prompts), length + width), pad, dtype=input_ids.dtype, device=input_ids.device)
    out[:, :length] = input_ids
    for row, ids in zip(out, result.tokens):
        row[length : length + len(ids)] = ids.to(out)
    if getattr(config, "return_dict_in_generate", False):
        from transformers.generation import GenerateDecoderOnlyOutput

        said = GenerateDecoderOnlyOutput(sequences=out)
        said["stats"] = result.stats
        return said
    return out


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _refuse(argument: str, name: str) -> NoReturn:
    raise NotImplementedError(f"{OP}: {argument} must be none that decoding methods would have to ask, got {name}.")
