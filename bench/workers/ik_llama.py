"""ik_llama.cpp, from a folder in which a user has built it. Its structures are read from its own header, since they change between versions."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.workers.engine import Tokens
from bench.workers.llama import LlamaCpp

NUMBERS: dict[str, Any] = {
    "bool": ctypes.c_bool, "float": ctypes.c_float, "int": ctypes.c_int, "int8_t": ctypes.c_int8, "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32, "size_t": ctypes.c_size_t, "llama_token": ctypes.c_int32, "llama_pos": ctypes.c_int32,
    "llama_seq_id": ctypes.c_int32,
}  # fmt: skip
POINTER = ctypes.c_void_p


def field_type(declared: str) -> Any:
    """Of a member's type in C. Pointers to anything but numbers are opaque, and so are callbacks."""
    words = [word for word in declared.replace("*", " ").split() if word != "const"]
    stars = declared.count("*")
    if words[0] == "enum":
        return ctypes.c_int
    if words[0].endswith("_callback"):
        return POINTER
    if stars and (words[0] not in NUMBERS):
        return POINTER
    found = NUMBERS[words[0]]
    for _ in range(stars):
        found = ctypes.POINTER(found)
    return found


def structure(header: str, name: str) -> Any:
    """The structure `name` of a header in C."""
    found = re.search(rf"struct {name} \{{(.*?)\n    \}}", header, re.DOTALL)
    if found is None:
        raise ValueError(f"the header has no structure {name}")
    members = re.sub(r"//[^\n]*", "", found.group(1)).split(";")
    fields = [re.fullmatch(r"\s*(.*?)(\w+)\s*", member, re.DOTALL) for member in members if member.strip()]
    return type(name, (ctypes.Structure,), {"_fields_": [(m[2], field_type(m[1])) for m in fields if m is not None]})


def header_of(built: Path) -> Path:
    """Of the source that a build folder was made from, or of a checkout that was built within."""
    cache = built / "CMakeCache.txt"
    source = re.search(r"^CMAKE_HOME_DIRECTORY:\w+=(.*)$", cache.read_text(), re.MULTILINE) if cache.exists() else None
    return (Path(source[1]) if source else built) / "include/llama.h"


def library(built: Path) -> Any:
    """Its functions under the names that llama_cpp gives them."""
    files = sorted(built.rglob("libllama.so"))
    if not files:
        raise FileNotFoundError(f"{built} has no libllama.so")
    header = header_of(built).read_text()
    model, context, batch = (structure(header, f"llama_{name}") for name in ("model_params", "context_params", "batch"))
    whole, text = ctypes.c_int32, ctypes.c_char_p
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_model_default_params": (model, []),
        "llama_context_default_params": (context, []),
        "llama_model_load_from_file": (POINTER, [text, model]),
        "llama_init_from_model": (POINTER, [POINTER, context]),
        "llama_model_get_vocab": (POINTER, [POINTER]),
        "llama_vocab_n_tokens": (whole, [POINTER]),
        "llama_free": (None, [POINTER]),
        "llama_batch_init": (batch, [whole, whole, whole]),
        "llama_batch_free": (None, [batch]),
        "llama_decode": (whole, [POINTER, batch]),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [POINTER]),
        "llama_kv_cache_clear": (None, [POINTER]),
        "llama_kv_cache_seq_rm": (ctypes.c_bool, [POINTER, whole, whole, whole]),
        "llama_state_seq_get_size": (ctypes.c_size_t, [POINTER, whole, ctypes.c_uint32]),
        "llama_state_seq_get_data": (ctypes.c_size_t, [POINTER, text, ctypes.c_size_t, whole, ctypes.c_uint32]),
        "llama_state_seq_set_data": (ctypes.c_size_t, [POINTER, text, ctypes.c_size_t, whole, ctypes.c_uint32]),
        "llama_print_system_info": (text, []),
        "llama_log_set": (None, [POINTER, POINTER]),
    }
    loaded = ctypes.CDLL(str(files[0]))
    functions = {}
    for name, (result, arguments) in types.items():
        functions[name] = getattr(loaded, name)
        functions[name].restype, functions[name].argtypes = result, arguments
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, text, POINTER)
    return SimpleNamespace(**functions, llama_log_callback=callback)


class IkLlama(LlamaCpp):
    """`spec["built"]` is the build folder. Its settings: `flash_attention`, and those of the model, such as `repack_tensors`."""

    def library(self) -> Any:
        return library(Path(self.spec["built"]))

    def about(self) -> str:
        return str(self.api.llama_print_system_info().decode().strip())

    def of_model(self) -> Any:
        given = self.api.llama_model_default_params()
        for name, value in self.setting.items():
            if name != "flash_attention":
                setattr(given, name, value)
        given.use_mmap = not given.repack_tensors  # as its own programs have it
        return given

    def of_context(self) -> Any:
        given = self.api.llama_context_default_params()
        given.flash_attn = self.setting.get("flash_attention", True)
        return given

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)

    def forget(self, sequence: int, first: int) -> None:
        self.api.llama_kv_cache_seq_rm(self.context, sequence, first, -1)

    def copy(self, batch: int) -> None:
        """Its sequences would hold the first one's tokens in common: clients with texts of their own cannot."""
        size = self.api.llama_state_seq_get_size(self.context, 0, 0)
        state = ctypes.create_string_buffer(size)
        size = self.api.llama_state_seq_get_data(self.context, state, size, 0, 0)
        for sequence in range(1, batch):
            if not self.api.llama_state_seq_set_data(self.context, state, size, sequence, 0):
                raise RuntimeError("the cache could not be copied")

    def answer(self, prompt: Tokens, new: int, lookup: bool) -> tuple[float, Tokens]:
        if lookup:
            raise NotImplementedError("its lookup is in its programs, not in its library")
        return super().answer(prompt, new, lookup)
