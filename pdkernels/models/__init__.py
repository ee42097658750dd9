"""A lean transformer on our caches, the tiny trained models, and real checkpoints from a local folder."""

from pdkernels.models.hf import from_hf_config, from_hf_state_dict, to_hf_state_dict
from pdkernels.models.rope import YarnScaling
from pdkernels.models.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer
from pdkernels.models.transformer import Transformer, TransformerConfig
from pdkernels.models.zoo import available, load

__all__ = [
    "ByteTokenizer",
    "JsonTokenizer",
    "Tokenizer",
    "Transformer",
    "TransformerConfig",
    "YarnScaling",
    "available",
    "from_hf_config",
    "from_hf_state_dict",
    "load",
    "to_hf_state_dict",
]
