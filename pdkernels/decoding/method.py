"""The registry entry of a decoding method: a few explicit facts, and the decoder's signature and docstring."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pdkernels.decoding.steps import Steps
from pdkernels.generation.params import SETTINGS, SamplingParams, names_of
from pdkernels.models.capabilities import Capability, capabilities
from pdkernels.models.protocols import BidirectionalModel, BlockCausalModel, CausalModel, PlanningModel, RecurrentModel

Wing = Literal["causal", "recurrent", "masked", "planned"]


class WingFacts(NamedTuple):
    """A wing of decoders: a trained model in the package that demonstrates it, and the members of a model that its
    methods use."""

    example: str
    protocol: type


WINGS: dict[Wing, WingFacts] = {
    "causal": WingFacts("tiny-code", CausalModel),
    "recurrent": WingFacts("tiny-recurrent", RecurrentModel),
    "masked": WingFacts("tiny-masked", BidirectionalModel),
    "planned": WingFacts("tiny-planned", PlanningModel),
}


class SharedOptions:
    """Options with one meaning in all methods, unless a method's docstring describes them.

    Args:
        mask_token: id of the mask token; None: the model's own.
        allow_mask_token: whether the model may emit its mask token; by default it cannot.
        recurrences: how many recurrences the prompt and every token get; None: as many as the model was trained for.
        init_scale: factor of a recurrent-depth model's initial states; 0 starts from zeros.
        kept_recurrences: how many recurrences of a token have their own K and V in the cache. Recurrence t of later
            tokens reads number t modulo this, or the last one of a token that stopped earlier. 1 shares one among all,
            0 keeps all.
        core_noise: share of noise, of standard deviation 1, in a state at the beginning of every recurrence but the
            first.
        core_noise_schedule: how that share falls with the number t of the recurrence: "harmonic" as 1 / (1 + t), "root"
            as the square root of that, "linear" down to 0 after the last recurrence, "constant" not at all.
        new_state: "fresh" starts a token's recurrences from the initial state of its position, "copied" from the last
            state of the token before it.
        page_size: slots per page of the KV cache; None keeps the cache contiguous.
    """


class Option(NamedTuple):
    """A keyword-only parameter of a decoder."""

    name: str
    type: str
    default: Any
    help: str
    shared: bool
    """Whether `SharedOptions` describes it instead of the decoder."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Its allowed strings, if these are a closed set."""
        return tuple(re.findall(r'"([^"]*)"', self.type)) if "Literal" in self.type else ()

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default!r}".replace("'", '"')


def described(docstring: str | None) -> dict[str, str]:
    """The arguments that a docstring describes, each with its description in one line.

    >>> described('''Fill a session.
    ...
    ...     Args:
    ...         block_size: tokens of a draft,
    ...             the first included.
    ...         top_p, top_k: filters.
    ...
    ...     Returns:
    ...         Nothing.
    ... ''')
    {'block_size': 'tokens of a draft, the first included.', 'top_p': 'filters.', 'top_k': 'filters.'}
    """
    section = re.search(r"^Args:\n((?:    .*\n?|\n(?=    ))*)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    descriptions: dict[str, str] = {}
    for names, text in re.findall(
        r"^    (\w+(?:, \w+)*): *((?:.*\n?)(?:^     +.*\n?|^\n)*)", section[1] if section else "", re.MULTILINE
    ):
        descriptions |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return descriptions


def _written(annotation: Any) -> str:
    """A type as it is written in Python."""
    if annotation is type(None):
        return "None"
    if get_origin(annotation) is Callable:
        return "Callable[..., Any]"
    if isinstance(annotation, type):
        return annotation.__name__
    if "Literal" in repr(annotation) and str in map(type, get_args(annotation)):
        return f"Literal[{', '.join(map(json.dumps, get_args(annotation)))}]"
    if get_origin(annotation) is Sequence:
        return f"Sequence[{_written(get_args(annotation)[0])}]"
    return " | ".join(map(_written, get_args(annotation)))  # only unions are left


SHARED = described(SharedOptions.__doc__) | {name: SETTINGS[name].help for name in names_of("draw")}


@dataclass(frozen=True)
class Method:
    """A decoding method. Everything known about it is here, in its decoder's signature and in its decoder's docstrings.

    Attributes:
        name: as passed to `generate`.
        decode: fills a session; its keyword-only parameters are the options. One that spends more than a forward on a
            draft returns the forwards its sequences took part in, summed.
        wing: the decoders it belongs to. An evaluation compares the others with the first method of a wing.
        requires: capabilities of a model that it needs (`pdkernels.models.capabilities`).
        protocol: the members of a model that it uses; None: those of its wing.
        lossless: whether it guarantees the tokens of greedy decoding, with default options and at temperature 0. Causal
            methods do so for models without recurrences: on a recurrent-depth model the rows of a draft attend to each
            other before these have converged.
        steps: its step, if that needs no host: `pdkernels.integrations.device_loop` runs it on the device.
        verifies_drafts: whether it drafts tokens and verifies the drafts.
        models: the trained models that demonstrate it; none: its wing's example.
        widths: values of `block_size` in an evaluation; None is the fastest.
        in_default_evaluation: whether an evaluation includes it by default.
        title: its name in pictures.
        follows_adapters: whether texts may have adapters (`SamplingParams.adapter`).
        paper_settings: the options with which its paper reports it, and the sampling, for `generate`; empty if it has
            none. They were tuned on GPUs, for models of billions of parameters, so some defaults are others
            (docs/decoding.md).
    """

    name: str
    decode: Callable[..., int | None]
    wing: Wing = "causal"
    requires: frozenset[Capability] = frozenset({"causal"})
    protocol: type | None = None
    lossless: bool = False
    steps: type[Steps] | None = None
    verifies_drafts: bool = False
    models: tuple[str, ...] = ()
    widths: tuple[int | None, ...] = ()
    in_default_evaluation: bool = True
    title: str = ""
    follows_adapters: bool = True
    paper_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def model_protocol(self) -> type:
        """The members of a model that it uses."""
        return self.protocol or WINGS[self.wing].protocol

    @property
    def fills_prompts(self) -> bool:
        """Whether it can fill masks inside a prompt."""
        return self.wing == "masked"

    @property
    def fills_canvases(self) -> bool:
        """Whether its texts are canvases (`decoding/canvas/canvas.py`)."""
        return self.wing == "masked" or self.protocol is BlockCausalModel

    @property
    def writes_in_parallel(self) -> bool:
        """Whether tokens are final before those in front of them are."""
        return self.wing in ("masked", "planned") or (self.wing == "causal" and not self.lossless)

    @property
    def example(self) -> str:
        """A trained model that it is for."""
        return self.models[0] if self.models else WINGS[self.wing].example

    @property
    def summary(self) -> str:
        """Its summary: the first sentence of its decoder's module."""
        return (sys.modules[self.decode.__module__].__doc__ or "").partition("\n\n")[0].replace("\n", " ")

    @cached_property
    def options(self) -> dict[str, Option]:
        """By name."""
        own_texts = described(self.decode.__doc__)
        texts = SHARED | own_texts
        draws = [(name, SETTINGS[name].type, SETTINGS[name].default) for name in names_of("draw")]
        return {
            name: Option(name, kind, default, texts.get(name, ""), name not in own_texts)
            for name, kind, default in (*_keywords(self.decode), *draws)
        }

    def refusal(self, setting: str, value: Any) -> str:
        """Why it does not follow a setting of `SamplingParams` with this value; empty if it does."""
        if setting == "adapter" and not self.follows_adapters:
            return "it runs the parts of the model's layers by itself"
        if self.writes_in_parallel and (setting == "logits_processor" or _has_longer(setting, value)):
            return "it writes tokens in parallel, so a row has no prefix that is final"
        if self.wing == "planned" and setting in ("min_new_tokens", "forced_tokens", "begin_suppress_tokens"):
            return "its texts begin with a plan, in which tokens have other places"
        if self.wing == "planned" and setting == "logprobs":
            return "its chunks are put together once they are written"
        return ""

    def refusals(self, params: SamplingParams) -> dict[str, str]:
        """The settings of a request that it does not follow, each with a sentence that says so and why.

        >>> from pdkernels.decoding import find
        >>> find("llada").refusals(SamplingParams(bad_words=[[1], [2, 3]], top_k=2))["bad_words"].partition(":")[0]
        "method 'llada' does not follow bad_words of several tokens"
        """
        reasons = {name: self.refusal(name, value) for name, value in params.asked.items()}
        several = {"bad_words": " of several tokens"}
        return {
            name: f"method {self.name!r} does not follow {name}{several.get(name, '')}: {reason}"
            for name, reason in reasons.items()
            if reason
        }

    @property
    def writes_logprobs(self) -> bool:
        """Whether the log-probabilities of a token are those of the forward that wrote it: a pass over the text would
        compute other rows."""
        return self.writes_in_parallel or self.wing == "recurrent"

    @property
    def needs_mask_token(self) -> bool:
        """Whether it requires a model that fills in masks."""
        return "mask_token" in self.options

    def supports(self, model: object) -> bool:
        """Whether a model has the capabilities that it requires; members may still be missing."""
        return self.requires <= capabilities(model)


def _keywords(decode: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Name, type and default of each keyword-only parameter."""
    parameters = inspect.signature(decode, eval_str=True).parameters.values()
    return [(p.name, _written(p.annotation), p.default) for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _has_longer(setting: str, value: Any) -> bool:
    """Whether these are bad words of several tokens."""
    return setting == "bad_words" and any(len(ids) > 1 for ids in value)
