"""Grammars on the command line, in a chat, and through transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pdkernels as pd
from pdkernels import cli
from pdkernels.decoding import Grammar
from pdkernels.decoding.causal.block_diffusion import BlockSteps

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"]}
RUN = ["generate", "--prompt", "x = ", "--max-new-tokens", "20"]


NESTED = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, [*arguments], env={"COLUMNS": "200"})


def test_generate(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "b.lark").write_text('start: "<" start ">" | "<0>"')
    (tmp_path / "a.lark").write_text('start: "<" /[0-9]/ ">"')
    for given, pattern in (
        (["--json-schema", json.dumps(SCHEMA)], r'\{"a": ?\d{1,2}\}'),
        (["--json-schema", str(tmp_path / "a.json")], r'\{"a": ?\d{1,2}\}'),
        (["--json-schema", json.dumps(SCHEMA), "--whitespace", "compact", "--key-order", "any"], r'\{"a":\d{1,2}\}'),
        (["--json-schema", json.dumps(NESTED), "--depth", "any"], r"\[*\]*"),
        (["--json-schema", json.dumps(NESTED), "--depth", "0"], r"\[\]"),
        (["--ebnf", str(tmp_path / "b.lark"), "--depth", "any"], r"<+0>+"),
        (["--regex", "[0-9]{3};"], r"[0-9]{3};"),
        (["--choice", "red", "--choice", "blue"], "red|blue"),
        (["--ebnf", str(tmp_path / "a.lark")], "<[0-9]>"),
    ):
        for method in ("jacobi", "autoregressive"):
            result = run(*RUN, "--method", method, *given, "--check")
            assert result.exit_code == 0, result.output
            assert re.search(rf"x = ({pattern})\s", result.output), result.output


def test_refused(tmp_path: Path) -> None:
    for given, words in (
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--json-schema", str(tmp_path / "none.json")], "cannot be read: No such file"),
        (["--json-schema", "{"], "the schema is not JSON"),
        (["--regex", "a", "--key-order", "any"], "--key-order is an option of --json-schema"),
        (["--whitespace", "any"], "--whitespace is an option of --json-schema"),
        (["--regex", "a", "--depth", "any"], "--depth is an option of --json-schema and --ebnf"),
        (["--json-schema", "{}", "--depth", "-1"], "--depth must be a number or 'any', got '-1'"),
        (["--json-schema", "{}", "--depth", "65"], "depth must be in 0 .. 64"),
        (["--json-schema", "{}", "--key-order", "no"], "--key-order must be one of"),
        (["--json-schema", "{}", "--whitespace", "x"], "whitespace matches characters that are no space in JSON"),
        (["--regex", "a{30}"], "cannot be completed within --max-new-tokens (20)"),
    ):
        result = run(*RUN, *given)
        assert result.exit_code != 0 and words in " ".join(result.output.split()), result.output


def test_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pd.models.load("tiny-code")

    class Chatty(type(made.tokenizer)):  # type: ignore[misc]
        def encode_chat(self, messages: Any) -> list[int]:
            return self.encode("".join(message["content"] for message in messages) + "> ")

    made.tokenizer = Chatty()
    monkeypatch.setattr(pd.models, "load", lambda name, **_: made)
    answer = CliRunner().invoke(
        cli.app, ["chat", "--model", "m", "--choice", "yes!", "--choice", "no!"], input="Is it?\n"
    )
    assert answer.exit_code == 0, answer.output
    assert "yes!" in answer.output or "no!" in answer.output
    short = ["chat", "--model", "m", "--regex", "a{30}", "--max-new-tokens", "4"]
    assert "cannot be completed" in CliRunner().invoke(cli.app, short, input="Is it?\n").output


def test_the_engine_takes_grammars_of_every_kind_of_method(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.choice(["yes", "no"])
    with monkeypatch.context() as patched, pd.Engine(pd.models.load("tiny-trimode")) as engine:
        patched.setattr(BlockSteps, "follows_grammars", False)
        fault = "'block_diffusion' does not follow a grammar in a running batch"
        with pytest.raises(NotImplementedError, match=fault):
            engine.submit("x", "block_diffusion", max_new_tokens=8, grammar=grammar)
    with pd.Engine(pd.models.load("tiny-trimode")) as engine:
        made = [
            engine.submit("x", method, max_new_tokens=8, grammar=grammar)
            for method in ("jacobi", "linear_self_speculation", "block_diffusion")
        ]
        assert all(one.result().text in ("yes", "no") for one in made)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers", minversion="4.57")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"\u0120": 1, **{chr(n): n - 31 for n in range(33, 127)}} | {
        "ab": 96,
        '{"': 97,
        '":': 98,
        "true": 99,
        "<end>": 0,
    }
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = transformers.LlamaConfig(vocab_size=128, intermediate_size=48, **sizes, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def test_custom_generate(theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    from pdkernels.integrations.transformers import generate
    from scripts.custom_generate import write

    model, tokenizer = theirs
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    write(tmp_path / "strategy")
    ids = torch.tensor([[40, 41, 42]])
    grammar = Grammar.regex(r'\{"(ab|c)": (true|[0-9]{2})\}')
    for sampled in ({}, {"do_sample": True, "top_k": 0}):
        for given in (
            {"method_options": {"grammar": grammar, "tokenizer": tokenizer}},
            {"method": "autoregressive", "grammar": grammar, "method_options": {"tokenizer": tokenizer}},
            {
                "grammar": grammar,
                "tokenizer": tokenizer,
                "custom_generate": str(tmp_path / "strategy"),
                "trust_remote_code": True,
            },
        ):
            found = model.generate(ids, max_new_tokens=20, **{"custom_generate": generate, **given, **sampled})
            text = tokenizer.decode(found[0, 3:], skip_special_tokens=True)
            assert grammar.matches(text), text
    assert len(grammar._made) == 1  # though transformers' tokenizer is adapted in every call
    with pytest.raises(ValueError, match="a grammar needs the tokenizer of the model"):
        model.generate(ids, max_new_tokens=20, custom_generate=generate, grammar=grammar)
    both = {"grammar": grammar, "method_options": {"grammar": grammar, "tokenizer": tokenizer}}
    with pytest.raises(ValueError, match="method_options must not hold a grammar beside another one"):
        model.generate(ids, max_new_tokens=20, custom_generate=generate, **both)
