"""vLLM's side of the attention backend: the supported cases, and the metadata of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from vllm.v1.attention import backend as base

from pdkernels._validation import integer, message, sentence
from pdkernels.integrations.vllm._ragged import RaggedBatch

OP = 'attention_backend="CUSTOM"'
# Optional parts of a step that change the visibility or the location of keys. None of them is supported.
OF_A_STEP = {
    "mm_req_doc_ranges": "tokens of an image that see each other",
    "dcp_local_seq_lens": "keys that are split across ranks",
    "encoder_seq_lens": "keys of an encoder",
}


def refuse(name: str, given: object) -> NoReturn:
    raise NotImplementedError(
        sentence(OP, f"{name} is not supported, got {given}", "Choose another attention backend of vLLM.")
    )


@dataclass
class Metadata(base.AttentionMetadata):  # type: ignore[misc]
    """Metadata of one step."""

    num_actual_tokens: int
    batch: RaggedBatch


class Builder(base.AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Builds the metadata of a step, which all layers share."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Nothing here waits for the device: the number of tokens is read on the host."""
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(message(OP, "causal", "be one flag for all requests", "one for each"))
        for name, what in OF_A_STEP.items():
            given = getattr(common, name, None)
            if given is not None and len(given) > 0:
                refuse(name, what)
        requests = common.num_reqs
        batch = RaggedBatch(
            common.query_start_loc[: requests + 1],
            int(common.query_start_loc_cpu[requests]),
            common.max_query_len,
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            causal=common.causal,
        )
        return Metadata(common.num_actual_tokens, batch)


class Attention(base.AttentionImpl):  # type: ignore[misc]
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
            "attn_type": None if attn_type == "decoder" else attn_type,
            "kv_cache_dtype": None if kv_cache_dtype in AttentionBackend.supported_kv_cache_dtypes else kv_cache_dtype,
            "chunk_lookback": None if others.pop("chunk_lookback", -1) == -1 else "a lookback",
            **{name: given for name, given in others.items() if given is not False},
        }
        for name, given in refused.items():
            if given is not None:
                refuse(name, given)
        # Set by vLLM before this runs.
        for name, what in (("dcp_world_size", "decode"), ("pcp_world_size", "prefill")):
            if getattr(self, name, 1) > 1:
                refuse(f"{what}_context_parallel_size", getattr(self, name))
        if not AttentionBackend.supports_head_size(head_size):
            raise NotImplementedError(message(OP, "head_size", "be a multiple of 8 in [16, 512]", head_size))
        if sliding_window is not None:
            sliding_window = integer(OP, "sliding_window", sliding_window, 1)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.window = sliding_window

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all new tokens of the batch; their keys and values are stored in the same pass."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(sentence(OP, "output_scale is not supported"))
        if (width := getattr(layer, "head_size_v", self.head_size)) != self.head_size:
            raise NotImplementedError(message(OP, "head_size_v", f"be {self.head_size}, the head_size", width))
        if attn_metadata is None:  # a step that measures memory
            return output.zero_()
        if self.window is not None and not attn_metadata.batch.causal:
            words = f"sliding_window={self.window} is supported for causal attention only"
            raise NotImplementedError(sentence(OP, words))
        shape = (-1, self.num_heads, self.head_size)
        attn_metadata.batch.attend(
            query.view(shape),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size),
            kv_cache,
            output.view(shape),
            self.scale,
            self.window,
        )
        return output


class AttentionBackend(base.AttentionBackend):  # type: ignore[misc]
    """`speculative_attention_append_` on vLLM's caches: reads and stores in one pass, for prompts, drafts and single
    tokens alike."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float32", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [base.MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(16, 257, 8))

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False
