"""PEFT's adapter_config.json of a LoRA adapter: every field is followed, changes no forward, or is refused by name.

Source: github.com/huggingface/peft, `tuners/lora/config.py`, `tuners/lora/layer.py` and `tuners/tuners_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from pdkernels._validation import check, fail, message
from pdkernels.models.files.fields import OP, Fields, shown, some
from pdkernels.models.files.patterns import Budget, InvalidPattern, NamePatterns, Pattern, UnsupportedPattern

CONFIG = "adapter_config.json"

FOLLOWED = frozenset(
    "peft_type task_type r rank_pattern lora_alpha alpha_pattern use_rslora init_lora_weights target_modules "
    "exclude_modules layers_to_transform layers_pattern modules_to_save bias".split()
)
WITHOUT_EFFECT = frozenset(
    # Where the adapter comes from, how it was trained or initialised, and where computations run. `fan_in_fan_out` is
    # about Conv1D layers, which no model here has, and `bias` about what was trained: the file holds it.
    "auto_mapping peft_version base_model_name_or_path revision inference_mode lora_dropout fan_in_fan_out megatron_core "
    "loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config "
    "ensure_weight_tying".split()
)
REFUSED = frozenset(
    # With these fields an adapter computes something other than W + scale * B @ A, or names tensors that are not
    # modules.
    "use_dora use_qalora use_bdlora lora_bias alora_invocation_tokens target_parameters layer_replication "
    "trainable_token_indices megatron_config arrow_config monteclora_config velora_config kasa_config".split()
)

PLAIN, PISSA, OLORA = "plain", "pissa", "olora"
"""The part of a base weight that PEFT subtracts when it loads an adapter: nothing, the leading singular components, or
the leading part of a QR decomposition."""

_STARTS = {
    True: PLAIN,
    "gaussian": PLAIN,
    "eva": PLAIN,
    "mica": PLAIN,
    "lora_ga": PLAIN,
    False: PLAIN,
    "orthogonal": PLAIN,
    "pissa": PISSA,
    "olora": OLORA,
}
_NOT_ZERO = (False, "orthogonal", "pissa", "olora")
"""With these an adapted module without tensors in the file would still change."""
_CONVERT = "Merge it with PEFT, or save it with path_initial_model_for_weight_conversion."


class LoraSettings:
    """The settings of an adapter, for modules by the names that its file uses."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        kind = fields.get("peft_type")
        self._demand(kind == "LORA", "peft_type", "be 'LORA'", kind)
        for name in sorted(fields.values):
            value = fields.get(name)
            if name in REFUSED and value:
                self._demand(False, name, "be absent", value, "Merge it with PEFT.")
            if name not in FOLLOWED | WITHOUT_EFFECT | REFUSED and value:
                label = shown(name) if len(name) > 60 or not name.isprintable() else name
                self._demand(False, label, "be a field of PEFT's LoraConfig", value)
        task = fields.values.get("task_type", "CAUSAL_LM")
        self._demand(task == "CAUSAL_LM", "task_type", "be 'CAUSAL_LM'", task)
        bias = fields.get("bias", "none")
        self._demand(bias in ("none", "all", "lora_only"), "bias", "be 'none', 'all' or 'lora_only'", bias)
        fields.require(["target_modules"])
        self._rank, self._alpha = fields.integer("r", 8), fields.number("lora_alpha", 8.0)
        self._square_root = fields.flag("use_rslora", False, null=False)
        self._init = fields.get("init_lora_weights", True)
        self.start = self._start()
        budget = Budget()
        self._ranks = self._table("rank_pattern", budget)
        self._alphas = self._table("alpha_pattern", budget)
        self._targets = self._names("target_modules", budget)
        self._excluded = self._names("exclude_modules", budget)
        self.saved = self._listed("modules_to_save")
        self._layers = self._layer_numbers()

    @property
    def starts_at_zero(self) -> bool:
        """Whether a module without tensors in the file is unchanged."""
        return not any(self._init is other or self._init == other for other in _NOT_ZERO)

    def rank(self, module: str) -> int:
        return self._pattern(self._ranks, "rank_pattern", module).integer("value", self._rank)

    def scale(self, module: str) -> float:
        alpha = self._pattern(self._alphas, "alpha_pattern", module).number("value", self._alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self._square_root else alpha / rank

    def adapts(self, module: str, inner: bool) -> bool | None:
        """Whether PEFT adapts this module; None if that depends on a pattern that is not supported here. `inner`: it is
        neither the embedding nor the head."""
        saved = any(_named(name, self.saved) for name in _around(module))
        excluded = self._matches(self._excluded, "exclude_modules", module)
        if saved or excluded:
            return False
        if excluded is None:
            return None
        if isinstance(self._targets, str) and self._targets.lower() == "all-linear":
            return inner
        chosen = self._matches(self._targets, "target_modules", module)
        listed = not isinstance(self._targets, (str, Pattern)) and module not in self._targets
        if chosen and self._layers is not None and listed:
            # Without a pattern PEFT looks for a number behind two names.
            behind = 1 if self._fields.get("layers_pattern") else 2
            number = next((name for name in module.split(".")[behind:] if name.isdecimal()), None)
            return number is not None and int(number) in self._layers
        return chosen

    # ---- fields

    def _start(self) -> str:
        supported = isinstance(self._init, (bool, str)) and (self._init in _STARTS or str(self._init).lower() == OLORA)
        if not supported:
            label = "be True, False, 'gaussian', 'eva', 'orthogonal', 'mica', 'lora_ga', 'pissa' or 'olora'"
            self._demand(False, "init_lora_weights", label, self._init, _CONVERT)
        return _STARTS[self._init if self._init in _STARTS else OLORA]

    def _table(self, name: str, budget: Budget) -> NamePatterns:
        table = self._fields.part(name)
        check(not table.null, OP, f"{CONFIG}: {name}", "hold numbers", f"null for {some(table.null)}")
        values = table.values
        try:
            return NamePatterns(values, budget)
        except UnsupportedPattern as error:
            self._unsupported(name, values, error)

    def _pattern(self, table: NamePatterns, name: str, module: str) -> Fields:
        try:
            value = table.get(module)
        except UnsupportedPattern as error:
            self._unsupported(name, self._fields.get(name), error)
        return Fields({} if value is None else {"value": value}, f"{CONFIG}: {name}")

    def _names(self, name: str, budget: Budget) -> Any:
        """A list of names, or a pattern; a string if the pattern is not supported."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            return self._listed(name)
        if name == "target_modules" and value.lower() == "all-linear":
            return value
        try:
            return Pattern(value, budget) if value else frozenset()
        except UnsupportedPattern:
            return value

    def _matches(self, names: Any, field: str, module: str) -> bool | None:
        if isinstance(names, str):
            return None
        if not isinstance(names, Pattern):
            return _named(module, names)
        try:
            return names.matches(module, to_end=True)
        except UnsupportedPattern as error:
            self._unsupported(field, self._fields.get(field), error)

    def _listed(self, name: str) -> frozenset[str]:
        value = self._fields.values.get(name, [])
        valid = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        check(valid, OP, f"{CONFIG}: {name}", "be a list of names", shown(value))
        return frozenset(value)

    def _layer_numbers(self) -> frozenset[int] | None:
        value = self._fields.get("layers_to_transform")
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            check(type(number) is int, OP, f"{CONFIG}: layers_to_transform", "be numbers of layers", shown(number))
        pattern = self._fields.get("layers_pattern")
        names = pattern if isinstance(pattern, list) else [pattern] if pattern else []
        if numbers and any(name not in ("layers", "blocks") for name in names):
            self._demand(False, "layers_pattern", "be absent or name the list of layers ('layers')", pattern)
        return frozenset(numbers) if numbers else None

    # ---- refusals

    def _demand(self, condition: bool, field: str, expectation: str, actual: object, remedy: str = "") -> None:
        if not condition:
            raise NotImplementedError(message(OP, f"{CONFIG}: {field}", expectation, shown(actual), remedy))

    def _unsupported(self, field: str, value: object, error: UnsupportedPattern) -> NoReturn:
        label = f"{CONFIG}: {field}"
        if isinstance(error, InvalidPattern):
            fail(OP, label, "hold regular expressions", str(error))
        expectation = "hold patterns of names that can be matched in few steps"
        raise NotImplementedError(message(OP, label, expectation, f"{shown(value)} ({error})")) from None


def _named(module: str, names: frozenset[str]) -> bool:
    """Whether one of these names is the module's name, or its end after a dot."""
    segments = module.split(".")
    return any(".".join(segments[start:]) in names for start in range(len(segments)))


def _around(module: str) -> list[str]:
    """The module and those that contain it."""
    segments = module.split(".")
    return [".".join(segments[: end + 1]) for end in range(len(segments))]


def check_saved(settings: LoraSettings, modules: Iterable[str], in_file: Iterable[str]) -> None:
    """Checks that the file holds every module of `modules_to_save`. PEFT matches the ends of names."""
    ends = tuple(settings.saved)
    required = {module for module in modules if any(name.endswith(ends) for name in _around(module))} if ends else set()
    absent_modules = sorted(required - set(in_file))
    if absent_modules:
        fail(OP, f"{CONFIG}: modules_to_save", "name modules that the file holds", f"also {some(absent_modules)}")
