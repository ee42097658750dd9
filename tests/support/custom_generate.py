"""Small models of transformers, and their own generate beside ours."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")

from pdkernels.integrations.transformers import generate  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402

FIVE, LATER = VERSION >= (5, 0), VERSION >= (5, 20)  # and between 5.15 and 5.23
V, NEW = 61, 12
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
REFUSALS = (NotImplementedError, ValueError)


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3)
    return model.eval()


@cache
def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**SIZES, bos_token_id=1, eos_token_id=None, pad_token_id=None)
    return randomised(getattr(transformers, f"{family}ForCausalLM")(config))


def prompts(rows: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, V, (rows, tokens), generator=torch.Generator().manual_seed(1))


BASE: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def theirs(ids: torch.Tensor | None = None, family: str = "Llama", **settings: Any) -> Any:
    return model_of(family).generate(prompts() if ids is None else ids, **(BASE | settings))


def ours(ids: torch.Tensor | None = None, family: str = "Llama", **settings: Any) -> Any:
    return theirs(ids, family, custom_generate=generate, **settings)


def an_end(step: int = 5) -> int:
    """A token that the model writes at this step, not before."""
    new = theirs()[0, 9:].tolist()
    return next(token for at, token in enumerate(new) if at >= step and token not in new[:at])
