"""Checkpoints of GPTQ and AWQ: codes of four or eight bits in 32-bit words, with a scale and a zero for each group of
inputs.

Sources: github.com/ModelCloud/GPTQModel (`dequantize_weight`, `convert_gptq_v1_to_v2_format_module`) and
github.com/casper-hansen/AutoAWQ (`dequantize_gemm`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdkernels._validation import check, message
from pdkernels.models.checkpoints.integers import (
    FLOATS,
    MATRIX,
    WORDS,
    Format,
    Integers,
    NamePattern,
    Needed,
    Role,
    Scheme,
    fields_of_words,
    group_size,
    groups_of,
    refuse,
    refuse_others,
    words_for,
)
from pdkernels.models.files.fields import OP, Fields, shown
from pdkernels.models.files.patterns import Budget

METHODS = ("gptq", "awq")
_UNPERMUTED = "Quantise the model with desc_act false."
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight consecutive outputs lies."""
# How the weights were found, or what other programs compute with.
_MAKING = """
    act_data_type act_dynamic act_group_aware act_group_size act_sym amp autoround_version backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
    disable_exllama do_fuse enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input exllama_config fuse_max_seq_len gradient_accumulate_steps hyb_act iters low_gpu_mem_usage lr max_input_length meta minmax_lr model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block modules_to_fuse mse nsamples offload_to_disk pack_impl pad_token_id provider quant_block_list quant_method quantizer
    scale_dtype seqlen static_attention_granularity static_kv_granularity supported_types to_quant_block_names
    static_groups sym tokenizer true_sequential uri use_cuda_fp16 use_exllama
""".split()
_NAMES = {"bits": ("bits", "w_bit"), "group_size": ("group_size", "q_group_size")}
_FORMATS = ("checkpoint_format", "format", "version")
_FOLLOWED = """
    act_bits bits checkpoint_format data_type desc_act dynamic extra_config format group_size is_marlin_format lm_head method
    modules_in_block_to_quantize modules_to_not_convert pack_dtype q_group_size regex_config rotation_configs static_attention_dtype static_kv_dtype super_bits super_group_size version
    w_bit zero_point
""".split()


@dataclass(frozen=True)
class Gptq:
    """Words hold consecutive inputs of `qweight`, and consecutive outputs of `qzeros`."""

    bits: int
    group: int
    minus_one: bool
    """Whether zeros are stored minus one: what "gptq" means, and "gptq_v2" does not."""
    ordered: bool
    """Whether `g_idx` must be there to say that inputs are in order."""

    @property
    def name(self) -> str:
        return f"gptq int{self.bits}"

    def tensors(self, outputs: int, width: int) -> Mapping[str, Needed]:
        groups = groups_of(width, self.group)
        return {
            "qweight": Needed((words_for(width, self.bits), outputs), WORDS),
            "qzeros": Needed((groups, words_for(outputs, self.bits)), WORDS),
            "scales": Needed((groups, outputs), FLOATS),
            "g_idx": Needed((width,), WORDS, optional=not self.ordered),
        }

    def read(self, tensor: Callable[[str], Tensor | None], outputs: int, width: int) -> Integers:
        code_words, zeros, scales = (tensor(name) for name in ("qweight", "qzeros", "scales"))
        assert code_words is not None and zeros is not None and scales is not None
        order = tensor("g_idx")
        if order is not None and not torch.equal(
            order, torch.arange(width, dtype=order.dtype, device=order.device) // (self.group or width)
        ):
            expectation, actual = "number the groups of inputs in their order", "another order (act-order)"
            raise NotImplementedError(message(MATRIX, "g_idx", expectation, actual, _UNPERMUTED))
        if self.minus_one:
            # In whole words, as the writer subtracts: a zero of 0 borrows from its neighbour.
            zeros = zeros + sum(1 << shift for shift in range(0, 31, self.bits))
        return Integers(
            fields_of_words(code_words.T, self.bits, width),
            scales.T,
            fields_of_words(zeros, self.bits, outputs).T,
            self.bits,
            self.group,
        )


@dataclass(frozen=True)
class Awq:
    """Words hold eight consecutive outputs, in an order of their own."""

    group: int
    name: str = "awq int4"

    def tensors(self, outputs: int, width: int) -> Mapping[str, Needed]:
        check(outputs % 8 == 0, MATRIX, "outputs", "be a multiple of 8 in the format of AWQ", outputs)
        size = self.group or width
        check(width % size == 0, MATRIX, "width", f"be a multiple of group_size ({size}) in the format of AWQ", width)
        groups = width // size
        return {
            "qweight": Needed((width, outputs // 8), WORDS),
            "qzeros": Needed((groups, outputs // 8), WORDS),
            "scales": Needed((groups, outputs), FLOATS),
        }

    def read(self, tensor: Callable[[str], Tensor | None], outputs: int, width: int) -> Integers:
        code_words, zeros, scales = (tensor(name) for name in ("qweight", "qzeros", "scales"))
        assert code_words is not None and zeros is not None and scales is not None
        codes, zero_codes = (
            fields_of_words(packed_words, 4, outputs).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T
            for packed_words in (code_words, zeros)
        )
        return Integers(codes, scales.T, zero_codes, 4, self.group)


@dataclass(frozen=True)
class Linears:
    """Linear layers in `model.layers`, of LLaDA in `model.transformer.blocks`, but for some, and the head where the
    configuration says so.

    What excludes a module depends on the program: a part of its name (AutoAWQ, vLLM, transformers 4), its beginning as
    a pattern (transformers 5.15), or that up to a dot, or its end (5.23). Where they differ, the tensors of the file
    decide.
    """

    format: Format
    head: bool
    only: tuple[str, ...] | None
    """Names inside a layer."""
    excluded: tuple[NamePattern, ...]

    def format_of(self, module: str, role: Role = "linear") -> Format | None:
        if role == "head":
            return self.format if self.head else None
        match = re.fullmatch(r".*\b(?:layers|blocks)\.\d+\.(.+)", module)
        if match is None or (self.only is not None and match[1] not in self.only):
            return None
        excluded = any(entry.text in module for entry in self.excluded) and any(
            module.endswith(entry.text) or entry.matches_part(module) for entry in self.excluded
        )
        return None if excluded else self.format

    def may_hold_numbers(self, module: str) -> bool:
        return any(entry.text in module or entry.matches(module) for entry in self.excluded)


def read(fields: Fields, method: str) -> Scheme:
    """What a quantization_config with this quant_method says."""
    refuse_others(fields, (*_MAKING, *_FOLLOWED))
    bits, group = _one(fields, _NAMES["bits"]), _one(fields, _NAMES["group_size"], 128)
    packing = str(_one(fields, _FORMATS, "gemm" if method == "awq" else "gptq")).lower()
    for name, only in (
        ("desc_act", (True, False) if method == "gptq" else (False,)),
        ("is_marlin_format", (False,)),
        ("pack_dtype", ("int32",)),
        ("zero_point", (True, False)),  # the words of zeros are there either way, and decide
        ("data_type", ("int", "int_sym", "int_asym")),
        ("act_bits", (16, 32)),
        ("lm_head", (True, False)),
    ):
        value = fields.get(name, only[0])
        if not (value is None and (False in only or name in ("data_type", "act_bits"))) and not any(
            value is one or (value == one and type(value) is str) for one in only
        ):
            refuse(fields, name, f"be {' or '.join(map(str, only))}", value)
    alias = fields.get("method") or method  # GPTQModel writes it under two names
    if str(alias).lower() != method:
        refuse(fields, "method", f"be absent or {method}, the quant_method", alias)
    for name in ("dynamic", "extra_config", "regex_config"):
        if fields.get(name):
            refuse(fields, name, "be absent: all matrices have one format", fields.get(name))
    for name in ("rotation_configs", "static_attention_dtype", "static_kv_dtype", "super_bits", "super_group_size"):
        if fields.get(name):
            refuse(fields, name, "be absent", fields.get(name))
    if str(fields.get("backend")).lower() == "llm-awq":
        refuse(fields, "backend", "be another than llm-awq, whose words have another order", "llm-awq")
    packings = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    if packing not in packings:
        refuse(fields, next(name for name in _FORMATS if name in fields.values), f"be {' or '.join(packings)}", packing)
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed or type(bits) is not int:
        refuse(fields, "bits", f"be {' or '.join(map(str, allowed))}", bits)
    size = group_size(fields, "group_size", group)
    form: Format = Awq(size)
    if method == "gptq":
        form = Gptq(bits, size, packing == "gptq", bool(fields.get("desc_act", False)))
    name, budget = "modules_to_not_convert", Budget()
    excluded = tuple(NamePattern(fields, name, entry, budget) for entry in fields.texts(name))
    return Linears(form, bool(fields.get("lm_head", False)), _inside(fields), excluded)


def _inside(fields: Fields) -> tuple[str, ...] | None:
    """A list of lists of names."""
    blocks = fields.get("modules_in_block_to_quantize")
    if blocks is None:
        return None
    entries = blocks if isinstance(blocks, list) else [None]
    names = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry])]
    module_names = tuple(name for name in names if isinstance(name, str))
    where = f"{fields.where}: modules_in_block_to_quantize"
    check(len(module_names) == len(names), OP, where, "hold lists of names", shown(blocks))
    return module_names


def _one(fields: Fields, names: tuple[str, ...], default: object = None) -> object:
    """The field under any of its names."""
    stated = [(name, fields.get(name)) for name in names if name in fields.values]
    empty = next((name for name in names if name in fields.null), None)
    if empty is not None:
        refuse(fields, empty, "hold a value", None)
    if not stated:
        if default is None:
            fields.require(names[:1])
        return default
    same = all(str(value).lower() == str(stated[0][1]).lower() for _, value in stated)
    check(same, OP, f"{fields.where}: {stated[-1][0]}", f"be that of {stated[0][0]}", shown(stated[-1][1]))
    return stated[0][1]
