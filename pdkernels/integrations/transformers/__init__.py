"""transformers on our kernels: an attention implementation, a cache, decoding methods, and its models in our decoders.

- `register()` makes ``attn_implementation="pdkernels"`` work, for training, prefill and decoding.
- `PdCache` is a cache that is written in place.
- `generate` is for ``model.generate(custom_generate=generate)``.
- `renoise` is the sampler of DiffusionGemma.
- `wrap(model)` prepares any decoder of transformers for `pdkernels.decoding.generate`; `from_transformers(model)`
  converts one.
- `quantize_linears_(model)` quantises the matrices of one in its place, `pdkernels.quantize(wrap(model))` those of a
  copy.

Needs transformers 4.57 or 5.x.
"""

from pdkernels.integrations.transformers._cache import PdCache
from pdkernels.integrations.transformers._generate import generate
from pdkernels.integrations.transformers._model import WrappedModel, from_transformers, register, wrap
from pdkernels.integrations.transformers._quantized import QuantizedLinear, quantize_linears_
from pdkernels.integrations.transformers._renoise import RenoiseDraws, RenoiseResult, renoise

__all__ = [
    "PdCache",
    "QuantizedLinear",
    "RenoiseDraws",
    "RenoiseResult",
    "WrappedModel",
    "from_transformers",
    "generate",
    "quantize_linears_",
    "register",
    "renoise",
    "wrap",
]
