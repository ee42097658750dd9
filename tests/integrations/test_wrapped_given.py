"""Adapters, offloaded and quantized weights, half precision and tokenizers of transformers, through `wrap`."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pdkernels as pd

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
from pdkernels.integrations.transformers import from_transformers, quantize_linears_, wrap  # noqa: E402
from tests.integrations.test_shadow import PROMPT, ours, small, theirs  # noqa: E402
from tests.support.state import state_of  # noqa: E402
from tests.support.transformers_names import VERSION  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["LoraConfig", "LoHaConfig", "IA3Config"])
def test_adapters_of_peft(name: str) -> None:
    """The active adapter counts, also after another was activated, and none when they are switched off."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    more = {"feedforward_modules": []} if name == "IA3Config" else {"r": 4, "init_weights": False}
    more = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.5} if name == "LoraConfig" else more
    config = getattr(peft, name)(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    plain = theirs(small())
    model = peft.get_peft_model(small(), config)
    torch.manual_seed(1)
    model.add_adapter("other", config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("lora_", "hada_", "ia3_")):
                parameter.normal_(std=2.0)
    found = []
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        model.eval()
        found.append(theirs(model))
        model.train()
        before = state_of(model)
        assert ours(wrap(model)) == found[-1]
        assert state_of(model) == before
    assert found[0] != found[1] and plain not in found
    with model.disable_adapter():
        assert ours(wrap(model)) == plain
    with pytest.raises(
        NotImplementedError, match="from_transformers: model must be without adapters.*merge_and_unload"
    ):
        from_transformers(model)
    merged = model.merge_and_unload()
    assert ours(wrap(merged)) == ours(from_transformers(merged)) == found[1]


def test_adapters_outside_of_layers_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(small(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(
        NotImplementedError, match="wrap: model must have adapters in its layers, got .* with PROMPT_TUNING"
    ):
        wrap(model)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[3, 4])
    with pytest.raises(NotImplementedError, match="apply to all tokens, got .* with activated LoRA"):
        wrap(peft.get_peft_model(small(), config))


@pytest.mark.parametrize("way", ["cpu", "disk", "meta"])
@pytest.mark.parametrize("entry", [wrap, from_transformers])
def test_weights_that_are_elsewhere_are_refused(way: str, entry: Any, tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = small()
    if way == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif way == "disk":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        model.to("meta")
    with pytest.raises(
        NotImplementedError, match=r"model must hold all its weights, got LlamaForCausalLM .* offloaded\. Load"
    ):
        entry(model)


def test_a_dispatched_model_runs() -> None:
    """With accelerate's hooks on every module, and all weights in place: no hook runs the model's own modules."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = small()
    expected = theirs(model)
    accelerate.hooks.attach_align_device_hook_on_blocks(
        model, execution_device={name: torch.device("cpu") for name, _ in model.named_modules()}
    )
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda module, given, out: calls.append(module))
    assert ours(wrap(model)) == expected
    assert calls and not {id(module) for module in calls} & {id(module) for module in model.modules()}


class Int8Linear(torch.nn.Module):
    """Weights of 8 bits in buffers, as libraries for quantization keep them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("quantized", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.quantized * self.scale).T


def test_quantized_weights() -> None:
    """Weights alone are as good as any. Inputs quantized by what else is in a forward depend on more than tokens."""
    from torch.ao.quantization import quantize_dynamic

    model = small()
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.q_proj = Int8Linear(layer.mlp.up_proj), Int8Linear(layer.self_attn.q_proj)
    wrapped = wrap(model)
    assert ours(wrapped) == theirs(model)
    model.model.layers[0].self_attn.q_proj.scale = -model.model.layers[0].self_attn.q_proj.scale
    assert ours(wrapped) == theirs(model)
    with pytest.raises(
        NotImplementedError, match="compute the same from cached keys and values as from the whole text"
    ):
        wrap(quantize_dynamic(small(), {torch.nn.Linear}, torch.qint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text", "OlmoHybrid", "Bart", "Roberta"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """What computes the same is accepted in spite of rounding, and what does not is refused as in fp32."""
    if not hasattr(transformers, f"{name}Config") or (name == "OlmoHybrid" and VERSION < (5, 20)):
        pytest.skip("a newer architecture")
    more: dict[str, Any] = {"is_decoder": True}
    more |= {"layer_types": ["linear_attention", "full_attention"]} if name == "OlmoHybrid" else {}
    more |= {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32} if name == "Bart" else {}
    more |= {"decoder_attention_heads": 2, "encoder_attention_heads": 2} if name == "Bart" else {}
    model = small(name, **more).to(dtype)
    if name in ("Bart", "Roberta"):
        with pytest.raises(NotImplementedError, match="pdkernels.wrap: model must"):
            wrap(model)
        return
    tokens = torch.arange(24)[None] % 50
    logits, expected = wrap(model)(tokens), model(tokens).logits
    assert logits.dtype == dtype
    assert (logits - expected).norm() <= 0.05 * expected.norm()


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def tokenizer(template: str | None = CHAT) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = ["<s>", "</s>", "<unk>", "[user]", "[assistant]", "Hi", "there", "is", "one"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>", "<unk>", "[user]", "[assistant]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.chat_template = template
    return found


@pytest.mark.parametrize("entry", [wrap, from_transformers])
def test_texts_and_chats_as_the_tokenizer_encodes_them(entry: Any) -> None:
    """One token begins a text, and none is added before the one that a template writes."""
    model, theirs_ = small(), tokenizer()
    ours_ = entry(model, theirs_)
    messages = [{"role": "user", "content": "Hi there"}]
    rendered = theirs_.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert rendered == [0, 3, 5, 6, 4] and ours_.tokenizer.encode_chat(messages) == rendered
    assert ours_.tokenizer.encode("Hi there") == theirs_("Hi there")["input_ids"] == [0, 5, 6]
    options: dict[str, Any] = {"max_new_tokens": 6, "end_tokens": ()}
    for prompt, ids in ((messages, rendered), ("Hi there", [0, 5, 6])):
        result = pd.decoding.generate(ours_, prompt, "autoregressive", **options)
        assert result.tokens.tolist() == theirs(model, 6, ids)
        assert result.text == theirs_.decode(result.tokens, skip_special_tokens=True)


def test_a_tokenizer_without_a_template() -> None:
    model = wrap(small(), tokenizer(None))
    with pytest.raises(ValueError, match="messages need a tokenizer with a chat template"):
        pd.decoding.generate(model, [{"role": "user", "content": "Hi"}], "autoregressive", max_new_tokens=2)
    assert model.tokenizer.vocab_size == 9 and model.tokenizer.bos_token == 0 and model.tokenizer.end_tokens == (1,)
    stream = model.tokenizer.incremental()
    assert stream.feed([5]) + stream.feed([0, 6]) + stream.flush() == model.tokenizer.decode([5, 0, 6]) == "Hi there"
    assert model.tokenizer.decode_all([0, 5]) == "<s> Hi" and len(PROMPT) == 5


def changed(way: str) -> tuple[Any, Any]:
    """A model, wrapped, that is another one since then; and what has become of it."""
    model = small()
    if way in ("disabled", "merged", "unloaded", "switched"):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        model.add_adapter("other", config)
    wrapped = wrap(model)
    if way == "disabled":
        model.base_model.disable_adapter_layers()
    elif way == "switched":
        model.set_adapter("other")
    elif way == "merged":
        model.merge_adapter()
    elif way == "unloaded":
        model = model.merge_and_unload()
    elif way == "quantised":
        quantize_linears_(model, "int8")
    else:
        model.model.layers[1] = model.model.layers[0]
    return model, wrapped


@pytest.mark.parametrize("way", ["disabled", "switched", "merged", "unloaded", "quantised", "layers"])
def test_a_model_that_has_become_another_one_is_refused(way: str) -> None:
    """Its old tree would go on with other modules, or take an adapter twice."""
    _, wrapped = changed(way)
    for call in (lambda: ours(wrapped), lambda: wrapped(torch.tensor([PROMPT]))):
        with pytest.raises(ValueError, match="have the modules and adapters that it had when it was wrapped.*again"):
            call()


def test_merged_adapters_that_are_switched_off_are_refused() -> None:
    """A forward would take them out of the weights, and the next one of the model again."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    model = peft.get_peft_model(small(), config).eval()
    model.merge_adapter()
    expected = theirs(model)
    with model.disable_adapter(), pytest.raises(NotImplementedError, match=r"switched off.*unmerge_adapter"):
        wrap(model)
    assert theirs(model) == expected == ours(wrap(model))


@pytest.mark.parametrize("family", ["Llama", "lfm2"])
def test_a_wrapped_model_can_be_pickled(family: str, tmp_path: Path) -> None:
    """A process that has not wrapped a model yet reads it."""
    if family == "lfm2":
        architectures = pytest.importorskip("scripts.architectures")
        model = architectures.build(family, 0.4) if VERSION >= (5, 20) else pytest.skip("a newer architecture")
    else:
        model = small(family)
    wrapped = wrap(model, mask_token=7)
    wrapped.end_tokens = (5,)
    expected = ours(wrapped)
    copied = copy.deepcopy(wrapped)
    assert ours(copied) == expected and (copied.mask_token, copied.end_tokens) == (7, (5,))
    (tmp_path / "model").write_bytes(pickle.dumps(wrapped))
    code = f"import pickle\nfrom tests.integrations.test_shadow import ours\nprint(ours(pickle.load(open({str(tmp_path / 'model')!r}, 'rb'))))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip().splitlines()[-1:] == [str(expected)], run.stderr


@pytest.mark.parametrize("entry", [wrap, from_transformers])
@pytest.mark.parametrize("end", [1000, [-1, 5], 61])
def test_end_tokens_outside_the_vocabulary_never_end_a_text(entry: Any, end: Any) -> None:
    model = small(eos_token_id=end)
    converted = entry(model)
    assert converted.end_tokens == ((5,) if end == [-1, 5] else ())
    result = pd.decoding.generate(converted, PROMPT, max_new_tokens=6)
    assert result.tokens.tolist() == theirs(model, 6)[: len(result.tokens)]


def test_a_template_is_one_of_ours_as_well() -> None:
    """As lm-eval and the server read it: its source, and a text."""
    adapted = wrap(small(), tokenizer()).tokenizer
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "is"}]
    assert adapted.chat_template.chosen() == CHAT
    for prompt in (True, False):
        expected = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert adapted.chat_template.render(messages, add_generation_prompt=prompt) == expected
    assert wrap(small(), tokenizer(None)).tokenizer.chat_template is None


class Letters:
    """The least that `wrap` asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 50 for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + int(token) % 26) for token in ids)


def test_a_tokenizer_that_encodes_and_decodes_is_enough() -> None:
    model = wrap(small(), Letters())
    expected = pd.decoding.generate(model, "hello", max_new_tokens=6).text
    with pd.Engine(model, max_new_tokens=16) as engine:
        handle = engine.submit("hello", max_new_tokens=6)
        assert "".join(piece.text or "" for piece in handle) == expected == handle.result().text
    assert "".join(piece.text or "" for piece in pd.decoding.stream(model, "hello", max_new_tokens=6)) == expected


def test_an_error_says_that_a_model_must_be_wrapped() -> None:
    remedy = r"Pass pdkernels\.integrations\.transformers\.wrap\(model, tokenizer\)\.$"
    with pytest.raises(TypeError, match=rf"got LlamaForCausalLM\. {remedy}"):
        pd.decoding.generate(small(), PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(("token", "kind"), [("<mask>", TypeError), (10**6, ValueError), (-1, ValueError)])
def test_a_mask_token_is_an_id_of_the_model(token: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"pdkernels\.wrap: mask_token must be"):
        wrap(small(), mask_token=token)
