"""lm-evaluation-harness on our models against its own model of transformers: the same checkpoint, the same answers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM

from pdkernels.decoding import generate
from pdkernels.integrations.lm_eval import HarnessModel
from pdkernels.integrations.lm_eval.__main__ import with_device
from pdkernels.models.checkpoints.gguf_tokenizer import _LLAMA3
from tests.models.test_zoo import write
from tests.support.checkpoints import QWEN2, random_checkpoint

POSITIONS = 48
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "def read(x)"},
    {"role": "assistant", "content": "return x"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def checkpoint(folder: Path, bos: str | None, begins: bool) -> Path:
    """A small random Qwen2 with a byte-level tokenizer that may have a BOS token and put it before every text."""
    folder.mkdir()
    fields = {**QWEN2, "vocab_size": 300, "max_position_embeddings": POSITIONS, "eos_token_id": 0}
    write(folder, fields, random_checkpoint(fields, dtype=torch.float32))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Transformers has these parts for every Qwen2.
    pattern = tokenizers.Regex(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"))
    parts = [tokenizers.pre_tokenizers.Split(pattern, "isolated")]
    parts.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer, made.normalizer = tokenizers.pre_tokenizers.Sequence(parts), tokenizers.normalizers.NFC()
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["def read(self):\n    return self\n"] * 4, trainer)
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", 1)]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({} if bos is None else {"bos_token": bos})))
    return folder


def ask(kind: Any, *args: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


PAIRS = [
    ("", "def read"),
    ("", "<|begin|>def"),
    ("def read(self):\n", "    return self"),
    ("def ", "read"),
    ("<|begin|>def", " read(x)"),
    ("return self\n" * 12, " return x"),
    ("x" * (POSITIONS - 2), "yz"),
    ("x" * (POSITIONS - 1), "yz"),
    ("a", "b" * (POSITIONS - 2)),
    ("naïve ", "日本 é"),
]
TEXTS = ["def read(self):\n    return self\n", "x", "def read " * 40, "<|begin|>return", "y" * POSITIONS]
KINDS: dict[str, tuple[str | None, bool, dict[str, Any]]] = {
    "no BOS": (None, False, {}),
    "BOS not added": ("<|begin|>", False, {}),
    "BOS added": ("<|begin|>", True, {}),
    "asked to add": ("<|begin|>", False, {"add_bos_token": True}),
    "asked not to add": ("<|begin|>", True, {"add_bos_token": False}),
    "other prefix": ("<|begin|>", True, {"prefix_token_id": 40}),
}


@pytest.fixture(params=KINDS, scope="module")
def both(request: Any, tmp_path_factory: Any) -> tuple[HarnessModel, Any]:
    bos, begins, options = KINDS[request.param]
    if options.get("add_bos_token", begins) and not hasattr(huggingface, "has_bos_prefix"):
        pytest.skip("this version puts BOS before a text whatever the tokenizer and the text say")
    folder = checkpoint(tmp_path_factory.mktemp("lm") / "model", bos, begins)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2, **options)
    return HarnessModel(str(folder), batch_size=2, **options), theirs


def test_likelihoods(both: Any) -> None:
    ours, theirs = both
    assert ours.prefix_token_id == theirs.prefix_token_id and ours.eot_token_id == theirs.eot_token_id
    for text in [part for pair in PAIRS for part in pair] + TEXTS:
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(text, add_special_tokens=False)
    requests = [ask("loglikelihood", *pair) for pair in PAIRS]
    found = ours.loglikelihood(requests, disable_tqdm=True)
    # One at a time: their shortcut for choices of one token takes a longer text with the same beginning for one of them.
    expected = [theirs.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    for (log_prob, greedy), (reference, flag) in zip(found, expected, strict=True):
        assert log_prob == pytest.approx(reference, abs=2e-3, rel=1e-4) and greedy == flag
    rolling = [ask("loglikelihood_rolling", text) for text in TEXTS]
    found, expected = (lm.loglikelihood_rolling(rolling, disable_tqdm=True) for lm in both)
    assert found == pytest.approx(expected, abs=5e-3, rel=1e-4)


def test_generations(both: Any) -> None:
    ours, theirs = both
    prompts = ["def read(self", "<|begin|>def", "return self\n" * 12, "é"]
    plain = [
        text
        for text in ours.generate_until([ask("generate_until", p, {"until": [], "max_gen_toks": 12}) for p in prompts])
    ]
    seen = ["".join(filter(str.isascii, text)) for text in plain]
    stops = [["\n"], [seen[0][2:4] or "x", "no such"], [seen[2][-1:] or "x"], ["<|begin|>"]]
    requests = [
        ask("generate_until", prompt, {"until": list(stop), "max_gen_toks": 12, "do_sample": False})
        for prompt in prompts
        for stop in [[], *stops]
    ]
    copies = [ask("generate_until", r.args[0], {**r.args[1], "until": list(r.args[1]["until"])}) for r in requests]
    expected = []
    for copy in copies:  # one at a time: their padding of a batch changes the texts a little
        expected += theirs.generate_until([copy], disable_tqdm=True)
    assert ours.generate_until(requests) == expected
    assert any(plain)


def test_chats_have_one_bos(both: Any) -> None:
    ours, theirs = both
    for chat, prompt in ((CHAT[:2], True), (CHAT, False)):
        text = ours.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        if ours.bos_token_id is not None and ours.custom_prefix_token_id is None:
            assert ours.tok_encode(text).count(1) == 1
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE


def test_tokens_per_forward_are_those_of_a_sequence(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", None, False)
    requests = [ask("generate_until", "def " * n, {"until": [], "max_gen_toks": 6}) for n in (1, 3, 5, 2, 4)]
    for size in (1, 4):
        lm = HarnessModel(str(folder), batch_size=size)
        lm.generate_until(requests)
        assert lm.tokens_per_forward == 1.0
    lm = HarnessModel("tiny-code", batch_size=5, method="jacobi", block_size=8)
    lm.generate_until(requests)
    prompts = [request.args[0] for request in requests]
    stats = generate(lm.model, prompts, "jacobi", max_new_tokens=6, block_size=8).stats
    assert lm.tokens_per_forward == pytest.approx(stats.tokens_per_forward) and 1 < stats.tokens_per_forward < 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix_token_id": 300}, "prefix_token_id must be an id below 300, got 300"),
        ({"add_bos_token": True}, "add_bos_token needs a tokenizer with a BOS token"),
        ({"blok_size": 3}, "method 'autoregressive' has no option blok_size"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        HarnessModel(str(checkpoint(tmp_path / "model", None, False)), **options)
    with pytest.raises(ValueError, match="text must have at most 48 tokens"):
        HarnessModel(str(tmp_path / "model")).loglikelihood([ask("loglikelihood", "", "x" * 60)], disable_tqdm=True)


def test_the_device_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = ["--model", "pdkernels", "--tasks", "gsm8k"]
    assert with_device(plain) == [*plain, "--device", "cpu"] and with_device(["run", *plain])[-1] == "cpu"
    for chosen in (["ls", "tasks"], [*plain, "--device=cuda:1"], ["--config", "run.yaml"], ["--help"], []):
        assert with_device(chosen) == chosen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert with_device(plain) == plain


@pytest.mark.slow
def test_the_documented_command(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "examples" / "lm_eval_sums.py"
    spec = importlib.util.spec_from_file_location("lm_eval_sums", source)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.write_tasks(tmp_path, 2)
    command = [sys.executable, "-m", "pdkernels.integrations.lm_eval", "--model", "pdkernels"]
    command += ["--model_args", "pretrained=tiny-trimode,method=jacobi,block_size=16"]
    command += ["--include_path", str(tmp_path), "--tasks", "pdkernels_sums"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pdkernels_sums" in done.stdout and "acc" in done.stdout
