"""llama.cpp's diffusion example (examples/diffusion), in the process of llama-cpp-python, whose libllama it calls."""

from __future__ import annotations

import ctypes

from bench.workers.engine import Tokens
from bench.workers.llama import LlamaCpp

_GENERATE = "_Z18diffusion_generateP13llama_contextPKiPiiRK16diffusion_paramsRi"
_BY_CONFIDENCE, _BLOCKS = 4, 1  # of its enumerations: which positions are filled, and how many a step fills


class Parameters(ctypes.Structure):
    """`diffusion_params` of its header."""

    _fields_ = (
        ("steps", ctypes.c_int32), ("temperature", ctypes.c_float), ("mask_token_id", ctypes.c_int32),
        ("step_callback", ctypes.c_void_p), ("step_callback_user_data", ctypes.c_void_p), ("seed", ctypes.c_int32),
        ("visual_mode", ctypes.c_bool), ("shift_logits", ctypes.c_bool), ("top_p", ctypes.c_float), ("top_k", ctypes.c_int32),
        ("algorithm", ctypes.c_int), ("schedule", ctypes.c_int), ("cfg_scale", ctypes.c_float), ("eps", ctypes.c_float),
        ("block_length", ctypes.c_int32), ("alg_temp", ctypes.c_float), ("add_gumbel_noise", ctypes.c_bool),
        ("max_length", ctypes.c_int32),
    )  # fmt: skip


class LlamaDiffusion(LlamaCpp):
    """`spec["built"]` is a shared library of the example's diffusion.cpp."""

    def canvas(self, tokens: Tokens, candidates: int) -> float:
        """The library alone, as a caller would use it who reads the logits of the last rows only."""
        self.open(len(tokens), 1, len(tokens))
        for i, token in enumerate(tokens):
            self.put(i, token, i, 0, i + candidates >= len(tokens))
        return self.timed(lambda: self.chosen(len(tokens), candidates))[0]

    def denoise(self, prompt: Tokens, new: int, steps: int, mask: int) -> tuple[float, Tokens]:
        """All in one block, the cheapest of its samplers: no cut of the distribution, no temperature."""
        length = len(prompt) + new
        self.open(length, 1, length)
        generate = ctypes.CDLL(self.spec["built"])[_GENERATE]
        found, written = (ctypes.c_int32 * length)(), ctypes.c_int32()
        given = Parameters(
            steps=steps, mask_token_id=mask, top_p=1.0, algorithm=_BY_CONFIDENCE, schedule=_BLOCKS, block_length=length,
            max_length=length,
        )  # fmt: skip
        arguments = (ctypes.c_int32 * len(prompt))(*prompt), found, ctypes.c_int32(len(prompt))

        def run() -> None:
            context = ctypes.cast(self.context, ctypes.c_void_p)
            generate(context, *arguments, ctypes.byref(given), ctypes.byref(written))

        took, _ = self.timed(run)
        if written.value != length or mask in found:
            raise RuntimeError("diffusion_generate left masks")
        return took / steps, list(found)[len(prompt) :]
