"""A transformer, a hybrid and a recurrent-depth model that run on our caches, the trained tiny models, and checkpoints
from local folders."""

from pdkernels.models.architectures.callable_model import CallableModel, from_callable
from pdkernels.models.architectures.config import ExpertsConfig, TransformerConfig
from pdkernels.models.architectures.gemma4 import Gemma4, Gemma4Config
from pdkernels.models.architectures.hybrid import Hybrid, HybridConfig
from pdkernels.models.architectures.packing import packed_rows_
from pdkernels.models.architectures.recurrent_depth import RecurrentDepth, RecurrentDepthConfig
from pdkernels.models.architectures.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    PartialRotation,
    ProportionalRotation,
    RopeScaling,
    YarnScaling,
)
from pdkernels.models.architectures.sampler_head import (
    SamplerConfig,
    SamplerHead,
    load_sampler,
    sampler_features,
    save_sampler,
    semantic_table,
)
from pdkernels.models.architectures.transformer import Transformer
from pdkernels.models.architectures.windows import Window
from pdkernels.models.checkpoints.drafters.folder import available_drafters, load_drafter, save_drafter
from pdkernels.models.checkpoints.gguf_save import save_gguf
from pdkernels.models.checkpoints.hf import from_hf_config, from_hf_state_dict, to_hf_state_dict
from pdkernels.models.checkpoints.huginn import (
    from_huginn_config,
    from_huginn_state_dict,
    to_huginn_config,
    to_huginn_state_dict,
)
from pdkernels.models.checkpoints.llada import from_llada_config, from_llada_state_dict, to_llada_state_dict
from pdkernels.models.checkpoints.request_adapters import load_adapter, unload_adapter
from pdkernels.models.checkpoints.zoo import available, load
from pdkernels.models.drafters import (
    DFlash2Config,
    DFlash2Head,
    DFlashConfig,
    DFlashHead,
    DSparkConfig,
    DSparkHead,
    EagleConfig,
    EagleHead,
    MtpConfig,
    MtpHead,
    XPressConfig,
    XPressHead,
)
from pdkernels.models.plan_tokens import PlanTokens
from pdkernels.models.protocols import (
    BidirectionalModel,
    BlockCausalModel,
    BlockModel,
    BranchingModel,
    CausalModel,
    LanguageModel,
    PlanningModel,
    RecurrentModel,
    RecurrentPartsModel,
    RecurrentWaveModel,
    SelfSpeculativeModel,
    TappedModel,
)
from pdkernels.models.text.chat import ChatTemplate
from pdkernels.models.text.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer

__all__ = [
    "BidirectionalModel",
    "BlockCausalModel",
    "BlockModel",
    "BranchingModel",
    "ByteTokenizer",
    "CallableModel",
    "CausalModel",
    "ChatTemplate",
    "DFlash2Config",
    "DFlash2Head",
    "DFlashConfig",
    "DFlashHead",
    "DSparkConfig",
    "DSparkHead",
    "EagleConfig",
    "EagleHead",
    "ExpertsConfig",
    "FactorScaling",
    "Gemma4",
    "Gemma4Config",
    "Hybrid",
    "HybridConfig",
    "JsonTokenizer",
    "LanguageModel",
    "LinearScaling",
    "Llama3Scaling",
    "MtpConfig",
    "MtpHead",
    "PartialRotation",
    "PlanTokens",
    "PlanningModel",
    "ProportionalRotation",
    "RecurrentDepth",
    "RecurrentDepthConfig",
    "RecurrentModel",
    "RecurrentPartsModel",
    "RecurrentWaveModel",
    "RopeScaling",
    "SamplerConfig",
    "SamplerHead",
    "SelfSpeculativeModel",
    "TappedModel",
    "Tokenizer",
    "Transformer",
    "TransformerConfig",
    "Window",
    "XPressConfig",
    "XPressHead",
    "YarnScaling",
    "available",
    "available_drafters",
    "from_callable",
    "from_hf_config",
    "from_hf_state_dict",
    "from_huginn_config",
    "from_huginn_state_dict",
    "from_llada_config",
    "from_llada_state_dict",
    "load",
    "load_adapter",
    "load_drafter",
    "load_sampler",
    "packed_rows_",
    "sampler_features",
    "save_drafter",
    "save_gguf",
    "save_sampler",
    "semantic_table",
    "to_hf_state_dict",
    "to_huginn_config",
    "to_huginn_state_dict",
    "to_llada_state_dict",
    "unload_adapter",
]
