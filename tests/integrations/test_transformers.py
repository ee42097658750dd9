"""transformers on our kernels, against its own attention: the same logits, gradients and tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import pdkernels as pd

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import PdCache, from_transformers, generate, register, wrap  # noqa: E402
from pdkernels.integrations.transformers._plans import PlanMask  # noqa: E402
from tests.support.transformers_names import CACHE, VERSION  # noqa: E402

V, TOKENS = 61, 77
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 24, "layer_types": SLIDING, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
PLAIN = ["llama", "qwen3_moe"]


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    name, more = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.15)
    register()
    return model


def using(family: str, implementation: str) -> Any:
    model = model_of(family)
    model.set_attn_implementation(implementation)
    return model


def prompts(rows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(1, V, (rows, tokens), generator=torch.Generator().manual_seed(1))


def padded() -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, :11] = 0
    return mask


FORWARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": padded()},
    "packed": {"position_ids": torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None].expand(2, -1)},
}


def forward(family: str, implementation: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all rows that are not padding, and all gradients."""
    model = using(family, implementation)
    model.zero_grad()
    real = inputs.get("attention_mask", torch.ones(2, TOKENS)).bool()
    logits = model(prompts(), use_cache=False, **inputs).logits[real]
    logits.log_softmax(-1)[:, 5].sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("inputs", FORWARDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, inputs: str) -> None:
    (theirs, their_gradients), (ours, our_gradients) = (
        forward(family, implementation, FORWARDS[inputs]) for implementation in ("sdpa", "pdkernels")
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert (our_gradients - their_gradients).norm() <= 1e-5 * their_gradients.norm()


def written(family: str, implementation: str, new: int = 12, rows: int = 2, **options: Any) -> torch.Tensor:
    model = using(family, implementation)
    settings: dict[str, Any] = {"attention_mask": torch.ones(rows, TOKENS, dtype=torch.int64), **options}
    return model.generate(
        prompts(rows), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **settings
    )


@pytest.mark.parametrize("options", [{}, {"attention_mask": padded()}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_generate_on_their_caches(family: str, options: dict[str, Any]) -> None:
    assert torch.equal(written(family, "pdkernels", **options), written(family, "sdpa", **options))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", PLAIN)
def test_generate_on_our_cache(family: str, kind: Any) -> None:
    cache = PdCache(model_of(family).config, 2, TOKENS + 12, kind=kind, page_size=8)
    assert torch.equal(written(family, "pdkernels", **{CACHE: cache}), written(family, "sdpa"))
    assert cache.get_seq_length() == TOKENS + 11


def test_padding_and_beams_on_our_cache() -> None:
    config = model_of("qwen3").config
    padding = {"attention_mask": padded()}
    theirs = written("qwen3", "sdpa", **padding)
    assert torch.equal(written("qwen3", "pdkernels", **{CACHE: PdCache(config, 2, 100)}, **padding), theirs)
    theirs = written("qwen3", "sdpa", rows=1, num_beams=3)
    ours = written("qwen3", "pdkernels", rows=1, num_beams=3, **{CACHE: PdCache(config, 3, 100)})
    assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_crop_takes_tokens_back(kind: Any) -> None:
    model = using("qwen3", "pdkernels")
    tokens = prompts(1)
    cache = PdCache(model.config, 1, TOKENS, kind=kind)
    model(tokens[:, :20], **{CACHE: cache})
    model(tokens[:, 40:50], **{CACHE: cache})
    memory = cache.storage.k.data_ptr()
    cache.crop(-10)
    assert cache.get_seq_length() == 20
    logits = model(tokens[:, 20:26], **{CACHE: cache}).logits
    torch.testing.assert_close(logits, model(tokens[:, :26], use_cache=False).logits[:, 20:], atol=2e-5, rtol=0)
    assert cache.storage.k.data_ptr() == memory
    cache.reset()
    assert cache.get_seq_length() == 0


def test_what_our_cache_refuses() -> None:
    model = using("qwen3", "pdkernels")
    with torch.no_grad(), pytest.raises(ValueError, match="capacity must be at least 77"):
        model(prompts(), **{CACHE: PdCache(model.config, 2, 76)})
    with torch.no_grad(), pytest.raises(ValueError, match="batch must be that of the model's inputs, got 3 for 2"):
        model(prompts(), **{CACHE: PdCache(model.config, 3, 80)})
    with pytest.raises(ValueError, match="kind must be one of"):
        PdCache(model.config, 1, 8, kind="other")  # type: ignore[arg-type]
    holes = torch.ones(2, TOKENS, dtype=torch.int64)
    holes[0, 20:23] = 0
    with pytest.raises(ValueError, match="without padding for a paged cache"):
        written("qwen3", "pdkernels", **{CACHE: PdCache(model.config, 2, 100, kind="paged")}, attention_mask=holes)


def test_padding_on_the_left_of_a_paged_cache() -> None:
    cache = PdCache(model_of("qwen3").config, 2, 100, kind="paged")
    found = written("qwen3", "pdkernels", **{CACHE: cache}, attention_mask=padded())
    assert torch.equal(found, written("qwen3", "sdpa", attention_mask=padded()))


def test_a_tile_plan_of_the_caller() -> None:
    """The mask of a training sequence is passed through the model as a plan, without a hack."""
    mask = pd.masks.dual_stream(16, 4)
    tokens, positions = prompts(2, mask.shape[0]), mask.positions[None].expand(2, -1)
    ours = using("qwen3", "pdkernels")(tokens, position_ids=positions, use_cache=False, tile_plan=mask.plan(16, 16))
    dense = torch.where(mask.dense(), 0.0, -torch.inf)[None, None]
    theirs = using("qwen3", "sdpa")(tokens, position_ids=positions, use_cache=False, attention_mask=dense)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=0)


def test_a_mask_of_four_dimensions() -> None:
    visible = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(TOKENS, dtype=torch.bool)
    ours, theirs = (
        using("llama", name)(prompts(), attention_mask=visible, use_cache=False).logits
        for name in ("pdkernels", "sdpa")
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("plan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_forwards_compile_without_a_break(plan: bool) -> None:
    """Without a plan from the caller a traced mask is dense, and PyTorch's attention takes it."""
    model = using("qwen3", "pdkernels")
    options = {"tile_plan": pd.masks.causal(TOKENS).plan()} if plan else {}
    eager = model(prompts(), use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(prompts(), use_cache=False, **options).logits
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"dropout": 0.1}, "attention_dropout=0"),
    ],
)
def test_what_attention_refuses(options: dict[str, Any], words: str) -> None:
    attention = transformers.AttentionInterface()["pdkernels"]
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match=words):
        attention(torch.nn.Module(), q, q, q, None, **options)
    with pytest.raises(NotImplementedError, match="multiple of 8"):
        attention(torch.nn.Module(), q[..., :12], q[..., :12], q[..., :12], None)


# ---- our decoders on their models


@pytest.mark.parametrize("options", [{}, {"attention_mask": padded()}], ids=["plain", "padded"])
@pytest.mark.parametrize("method", ["autoregressive", "jacobi", "jacobi_multiblock"])
@pytest.mark.parametrize("family", PLAIN)
def test_custom_generate(family: str, method: str, options: dict[str, Any]) -> None:
    ours = written(family, "sdpa", custom_generate=generate, method=method, method_options={"block_size": 8} if method != "autoregressive" else None, **options)  # fmt: skip
    assert torch.equal(ours, written(family, "sdpa", **options))
    assert model_of(family).config._attn_implementation == "sdpa"


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_custom_generate_ends_streams_and_returns() -> None:
    plain = written("llama", "sdpa", rows=1)
    end = int(plain[0, TOKENS + 5])
    model, heard = using("llama", "sdpa"), Heard()
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    theirs = model.generate(prompts(1), **settings)
    ours = model.generate(
        prompts(1),
        custom_generate=generate,
        method="jacobi",
        token_streamer=heard,
        return_dict_in_generate=True,
        **settings,
    )
    assert torch.equal(ours.sequences, theirs) and ours.stats.forwards > 0
    assert (
        heard.ended and heard.tokens == theirs[0].tolist()
    )  # the prompt first, as with every streamer of transformers


def test_sampling_settings_reach_the_method() -> None:
    model = using("llama", "sdpa")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
    settings |= {"custom_generate": generate, "method": "autoregressive"}
    seen = []
    for seed, temperature in ((3, 2.0), (3, 2.0), (4, 2.0), (3, 1e-3)):
        torch.manual_seed(seed)
        seen.append(model.generate(prompts(1), temperature=temperature, top_k=0, **settings))
    first, again, other, cold = seen
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(cold, written("llama", "sdpa", rows=1, new=8))
    with pytest.raises(TypeError, match="method must fit the model"):
        model.generate(prompts(1), **settings | {"method": "llada"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 2}, "num_beams must be 1"),
        ({"guidance_scale": 2.0}, "guidance_scale must be"),
        ({"encoder_repetition_penalty": 2.0}, "encoder_repetition_penalty must be"),
        ({"attention_mask": torch.ones(1, TOKENS).index_fill(1, torch.tensor([4]), 0)}, "padding on the left"),
    ],
)
def test_settings_that_no_method_follows_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=words):
        options = {"eos_token_id": 3, **settings}
        using("llama", "sdpa").generate(
            prompts(1), max_new_tokens=4, pad_token_id=0, custom_generate=generate, method="jacobi", **options
        )


@pytest.mark.parametrize(("method", "page_size"), [("llada", None), ("slowfast", None), ("dream", None), ("fast_dllm", None), ("fast_dllm", 8)])  # fmt: skip
def test_a_bidirectional_model_of_theirs(method: str, page_size: int | None) -> None:
    """The same tokens and forwards as with the same weights in our own model."""
    theirs = model_of("qwen3")
    own = from_transformers(theirs)
    config = {**vars(own.config), "attention": "bidirectional", "predicts": "own"}
    ours = pd.models.Transformer(pd.models.TransformerConfig(**config), mask_token=V - 1).requires_grad_(False)
    ours.load_state_dict(own.state_dict())
    wrapped = wrap(theirs, mask_token=V - 1, attention="bidirectional")
    batch = [[3, 1, 4, 1, 5], [9, 2, 6]]
    options: dict[str, Any] = {"max_new_tokens": 12, "end_tokens": ()} | ({"page_size": 8} if page_size else {})
    a, b = (pd.decoding.generate(model, batch, method, **options) for model in (wrapped, ours))
    assert [x.tolist() for x in a.tokens] == [x.tolist() for x in b.tokens]
    assert a.stats.forwards == b.stats.forwards


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_converted_models(family: str) -> None:
    theirs = using(family, "sdpa")
    torch.testing.assert_close(from_transformers(theirs)(prompts()), theirs(prompts()).logits, atol=2e-5, rtol=0)


def test_what_wrap_refuses() -> None:
    with pytest.raises(TypeError, match="decoder of transformers"):
        wrap(torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="model_type"):
        from_transformers(transformers.AutoModelForCausalLM.from_config(transformers.Cohere2Config(**SIZES)))
    longest = SIZES["max_position_embeddings"] if VERSION >= (5, 0) else 24
    assert wrap(model_of("mistral")).config.max_positions == longest, "windows end texts under transformers 4 alone"


def test_a_slice_of_a_whole_mask_keeps_its_plan() -> None:
    """Layers of earlier versions cut their mask to the keys that there are."""
    plan = pd.masks.causal(4).plan()
    mask = PlanMask(1, 4, 4, 0, plan, torch.device("cpu"))
    mask.step = object()
    for cut in (mask[:, :, :, :4], mask.detach()):
        assert cut is not mask and cut.plan is plan and cut.step is mask.step and cut.offset == 0
