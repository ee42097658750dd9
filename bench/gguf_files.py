"""GGUF files to measure: another file in a format of its own, and random weights in the shape of a larger model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

EMBEDDING = "token_embd.weight"
QWEN3_1_7B = {
    "block_count": 28,
    "context_length": 40960,
    "embedding_length": 2048,
    "feed_forward_length": 6144,
    "attention.head_count": 16,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
}
LLADA_8B = {
    "context_length": 4096,
    "embedding_length": 4096,
    "feed_forward_length": 12288,
    "attention.head_count": 32,
    "attention.head_count_kv": 32,
    "rope.dimension_count": 128,
    "vocab_size": 126464,
}
LLADA_MASK = 126336
# Codes are any; a scale makes weights of a deviation of about 0.02. Where a block's scale lies, and what it is; Q6_K also has scales of 8 bits.
_SCALES = {
    "Q8_0": (slice(0, 2), 0.02 / 74),
    "Q4_0": (slice(0, 2), 0.02 / 4.6),
    "Q6_K": (slice(208, 210), 0.02 / 18.5 / 16),
}


def requantized(file: Path, format: str, folder: Path) -> Path:
    """A copy of the file with all matrices in another format but the embedding, which is left alone as llama.cpp's own tool does."""
    import gguf
    import numpy

    reader, kind = gguf.GGUFReader(file), gguf.GGMLQuantizationType[format]
    path = folder / f"{file.stem}-{format}.gguf"
    writer = gguf.GGUFWriter(path, bytes(reader.fields["general.architecture"].parts[-1]).decode())
    _copy_fields(reader, writer, format, "")
    for tensor in reader.tensors:
        if tensor.name == EMBEDDING:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, numbers.astype(numpy.float32))
    _write(writer)
    return path


def random_weights(file: Path, format: str, folder: Path, sizes: dict[str, int] = QWEN3_1_7B) -> Path:
    """Random weights in the shape of Qwen3-1.7B, with the tokenizer of `file`: what it writes is no text, what it costs is the same."""
    import gguf
    import numpy

    reader, draw = gguf.GGUFReader(file), numpy.random.default_rng(0)
    path = folder / f"random-{sizes['embedding_length']}-{format}.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    _copy_fields(reader, writer, format, "tokenizer.")
    for name, size in sizes.items():
        writer.add_uint32(f"qwen3.{name}", size)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    vocabulary = next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == EMBEDDING)
    for tensor, shape in _tensors(sizes, vocabulary):
        if len(shape) == 1:
            writer.add_tensor(tensor, numpy.ones(shape, dtype=numpy.float32))
            continue
        _add_random(writer, tensor, shape, "Q8_0" if tensor == EMBEDDING else format, draw)
    _write(writer)
    return path


def random_llada(layers: int, format: str, folder: Path) -> Path:
    """Random weights in the shape of some layers of LLaDA-8B with its embedding and head, which is Q6_K as llama.cpp's own tool has it. Without a tokenizer."""
    import gguf
    import numpy

    draw, path = numpy.random.default_rng(0), folder / f"random-llada-{layers}-{format}.gguf"
    writer = gguf.GGUFWriter(path, "llada")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format}"])
    for name, size in {"block_count": layers, **LLADA_8B}.items():
        writer.add_uint32(f"llada.{name}", size)
    writer.add_float32("llada.rope.freq_base", 500000.0)
    writer.add_float32("llada.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("llada.attention.causal", False)
    writer.add_bool("diffusion.shift_logits", False)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_uint32("tokenizer.ggml.mask_token_id", LLADA_MASK)
    sizes = {"block_count": layers, "attention.key_length": 128, **LLADA_8B}
    for tensor, shape in [
        *_tensors(sizes, LLADA_8B["vocab_size"]),
        ("output.weight", (LLADA_8B["vocab_size"], LLADA_8B["embedding_length"])),
    ]:
        if tensor.endswith(("_q_norm.weight", "_k_norm.weight")):
            continue  # of Qwen3
        if len(shape) == 1:
            writer.add_tensor(tensor, numpy.ones(shape, dtype=numpy.float32))
        else:
            _add_random(writer, tensor, shape, "Q6_K" if tensor == "output.weight" else format, draw)
    _write(writer)
    return path


def _add_random(writer: Any, tensor: str, shape: tuple[int, ...], format: str, draw: Any) -> None:
    import gguf
    import numpy

    kind = gguf.GGMLQuantizationType[format]
    columns, bytes_each = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // columns, bytes_each), dtype=numpy.uint8)
    where, scale = _SCALES[format]
    if format == "Q6_K":
        blocks[..., 192:208] = 16
    blocks[..., where] = numpy.frombuffer(numpy.float16(scale).tobytes(), dtype=numpy.uint8)
    writer.add_tensor(tensor, blocks.reshape(shape[0], -1), raw_dtype=kind)


def _tensors(sizes: dict[str, int], vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, dim = sizes["embedding_length"], sizes["feed_forward_length"], sizes["attention.key_length"]
    heads, kv_heads = dim * sizes["attention.head_count"], dim * sizes["attention.head_count_kv"]
    layer: dict[str, tuple[int, ...]] = {
        **{"attn_norm": (width,), "attn_q": (heads, width), "attn_k": (kv_heads, width), "attn_v": (kv_heads, width)},
        **{"attn_q_norm": (dim,), "attn_k_norm": (dim,), "attn_output": (width, heads), "ffn_norm": (width,)},
        **{"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)},
    }
    yield EMBEDDING, (vocabulary, width)
    for number in range(sizes["block_count"]):
        for name, shape in layer.items():
            yield f"blk.{number}.{name}.weight", shape
    yield "output_norm.weight", (width,)


def _copy_fields(reader: Any, writer: Any, format: str, prefix: str) -> None:
    """Those whose names begin so, and the format, which OpenVINO's reader asks for."""
    import gguf

    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{format}"])
    for field in reader.fields.values():
        own = field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type")
        if not own and field.name.startswith(prefix):
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
