"""Prompts with a `suffix`: the tokens that published models were trained on, and answers before it."""

from __future__ import annotations

from typing import Any

import pytest

import pdkernels as pd
from pdkernels.models.text.tokenizers import JsonTokenizer
from pdkernels.serve.errors import Refused
from pdkernels.serve.infill import infilled

httpx = pytest.importorskip("httpx")
tokenizers = pytest.importorskip("tokenizers")


def tokenizer_of(*special: str, bos: str | None = None, prepends: bool = False) -> JsonTokenizer:
    """A token for each letter, behind those that are special; `prepends`: a space before a text, as SentencePiece
    does."""
    letters = {letter: number for number, letter in enumerate(["<unk>", "<s>", *"▁☺abcdef"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    if prepends:
        normal = tokenizers.normalizers
        made.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    if bos is not None:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    found = JsonTokenizer.__new__(JsonTokenizer)
    found._keep(made, "made.json", (), None)
    found.bos_token_id = None if bos is None else made.token_to_id(bos)
    return found


@pytest.mark.parametrize(
    ("special", "bos", "expected"),
    [
        # As the model cards have it: README of Qwen2.5-Coder, "Fill in the middle".
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], None, "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], None, "<fim_prefix>ab<fim_suffix>cd<fim_middle>"),
        (["<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"], "<s>", "<s><\uff5cfim▁begin\uff5c>ab<\uff5cfim▁hole\uff5c>cd<\uff5cfim▁end\uff5c>"),
        # mistral_common, `encode_fim`.
        (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "<s>", "<s>[SUFFIX]cd[PREFIX]ab"),
    ],
)  # fmt: skip
def test_prompts_are_those_of_training(special: list[str], bos: str | None, expected: str) -> None:
    tokenizer = tokenizer_of(*special, bos=bos)
    for prompt in ("ab", tokenizer.encode("ab", add_special_tokens=False)):
        ids, ends = infilled(tokenizer, prompt, "cd")
        assert "".join(tokenizer._tokenizer.id_to_token(token) for token in ids) == expected and ends == []


def test_code_llama_has_a_space_before_the_prompt_alone() -> None:
    """Its paper's code: [bos, PRE] + encode(prefix) + [SUF] + encode without the implicit space (suffix) + [MID]."""
    tokenizer = tokenizer_of("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", bos="<s>", prepends=True)
    ids, ends = infilled(tokenizer, "ab", "cd")
    names = [tokenizer._tokenizer.id_to_token(token) for token in ids]
    assert names == ["<s>", "▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>"]
    assert ends == [tokenizer.id_of("▁<EOT>")]


def test_a_tokenizer_without_such_tokens_is_refused() -> None:
    with pytest.raises(Refused, match="no tokens to fill in"):
        infilled(tokenizer_of("<|fim_prefix|>"), "ab", "cd")


def test_answers_before_a_suffix(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = tokenizer_of("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    address, engine = serve(model=model)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    plain = {**body, "prompt": infilled(model.tokenizer, "ab", "cd")[0]}
    found, expected, other = (
        httpx.post(f"{address}/v1/completions", json=one, timeout=60).json()
        for one in ({**body, "prompt": "ab", "suffix": "cd"}, plain, {**body, "prompt": "ab", "suffix": ""})
    )
    assert found["choices"] == expected["choices"] and found["usage"]["prompt_tokens"] == 7
    assert other["usage"]["prompt_tokens"] == 2
    for more in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        answer = httpx.post(f"{address}/v1/completions", json={**body, "prompt": "ab", "suffix": "cd", **more})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "suffix": "b"}
    assert "suffix is not supported" in httpx.post(f"{address}/v1/chat/completions", json=chat).text


@pytest.mark.parametrize("name", ["priority", "prompt_logprobs"])
def test_what_is_not_followed_is_refused_by_name(serve: Any, name: str) -> None:
    address, _ = serve()
    for path, body in (
        ("completions", {"prompt": "ab"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("responses", {"input": "a"}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ):
        answer = httpx.post(f"{address}/v1/{path}", json={"model": "tiny", name: 1, **body})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
