"""Thoughts come apart from the text, and end where their budget does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.models import ByteTokenizer, from_callable
from pdkernels.models.text.chat import ChatTemplate
from tests.serve.clients import Chatting, client_of

openai = pytest.importorskip("openai")
ASKED: Any = [{"role": "user", "content": "Hi"}]
CODE: Any = [{"role": "user", "content": "class Node:"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' }}"


def speaking(said: str, template: str, positions: int = 400) -> Any:
    """A model that writes a character of `said` at each position after a prompt of 2, whatever stands before it."""
    table = 9 * torch.nn.functional.one_hot(torch.tensor([0, *said.encode(), *[256] * positions]), 257).float()
    return from_callable(
        lambda tokens: table[: tokens.shape[1]].expand(len(tokens), -1, -1),
        vocab_size=257, end_tokens=[256], tokenizer=Chatting(ByteTokenizer(), template), max_positions=positions,
    )  # fmt: skip


def asked(client: Any, stream: bool = False, **more: Any) -> tuple[str, str, str, Any]:
    """The thought, the content, the finish reason, and the usage."""
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 60, "temperature": 0}
    if not stream:
        whole = client.chat.completions.create(**options | more)
        choice = whole.choices[0]
        thought = getattr(choice.message, "reasoning_content", "")
        assert thought == getattr(choice.message, "reasoning", "")
        return thought, choice.message.content, choice.finish_reason, whole.usage
    pieces = list(client.chat.completions.create(**options | more, stream=True, stream_options={"include_usage": True}))
    deltas = [piece.choices[0].delta for piece in pieces[:-1]]
    thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert thought == "".join(getattr(delta, "reasoning", "") for delta in deltas)
    text = "".join(delta.content or "" for delta in deltas)
    return thought, text, pieces[-2].choices[0].finish_reason, pieces[-1].usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("template", "said", "thought", "content"),
    [
        ("{{ messages[0].content }}", "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
        ("{{ messages[0].content }}", "Yes.", "", "Yes."),
        ("{{ messages[0].content }}", "<think>Well. </th", "Well. </th", ""),
        ("{{ messages[0].content }}{# [THINK] #}", "[THINK]a[/THINK]b", "a", "b"),
        ("{{ messages[0].content }}{# [THINK] #}", "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_a_thought_comes_apart(serve: Any, stream: bool, template: str, said: str, thought: str, content: str) -> None:
    """Each token is a character, so a tag falls into many pieces."""
    address, _ = serve(model=speaking(said, template))
    found = asked(client_of(address), stream)
    assert found[:3] == (thought, content, "stop")
    inside = len(said) - len(content) - 2 * ("\n\n" in said) - 6 if thought else 0  # without what only begins a tag
    inside += not content  # the end token
    assert found[3].completion_tokens_details.reasoning_tokens == inside


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_budget_closes_the_thought(serve: Any, stream: bool) -> None:
    """The answer goes on after the tag as it does after a prompt that has it, with the same tokens."""
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    address, engine = serve(model=model)
    client = client_of(address)

    def text_after(written: str, most: int, **more: Any) -> str:
        prompt = f"class Node:<think>{written}"
        options: Any = {"model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0, **more}
        return str(client.completions.create(**options).choices[0].text)

    for more in ({}, {"temperature": 0.9, "seed": 5}):
        for budget in (0, 1, 7):
            spent = text_after("", budget, **more) if budget else ""
            after = text_after(f"{spent}</think>\n\n", 50 - budget - 10, **more)
            extra: Any = {"thinking_token_budget": budget}
            found = asked(client, stream, max_tokens=50 - 10 * (not budget), messages=CODE, extra_body=extra, **more)
            assert (found[0], found[1]) == (spent.strip(), after.lstrip()) and found[2] == "length"
            assert found[3].completion_tokens == 50 - 10 * (not budget)
        without = asked(client, stream, max_tokens=20, messages=CODE, **more)[:3]
        assert (
            asked(client, stream, max_tokens=20, extra_body={"thinking_token_budget": 20}, messages=CODE, **more)[:3]
            == without
        )
    assert engine.metrics().batches <= 2 and "error" not in engine.metrics().finished


@pytest.mark.parametrize(
    ("template", "body", "words"),
    [
        (TEMPLATE, {"reasoning_effort": "low"}, "does not know reasoning_effort"),
        (TEMPLATE + "{# enable_thinking #}", {"reasoning_effort": "low"}, "chat_template_kwargs has enable_thinking"),
        (TEMPLATE, {"thinking_token_budget": 447}, "thinking_token_budget must leave room in 448 tokens"),
        (TEMPLATE, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (TEMPLATE, {"thinking_token_budget": 4, "presence_penalty": 1}, "thinking_token_budget and presence_penalty exclude"),
        (TEMPLATE, {"thinking_token_budget": 4, "response_format": {"type": "json_object"}}, "and response_format exclude"),
        (TEMPLATE, {"thinking_token_budget": 4, "logprobs": True}, "thinking_token_budget and logprobs exclude"),
        (TEMPLATE, {"thinking_token_budget": 4, "stop_sequences": [[1, 2]]}, "thinking_token_budget and stop_sequences exclude"),
        (TEMPLATE, {"priority": 1}, "priority: Input should be 0"),
        (TEMPLATE, {"prompt_logprobs": 1}, "prompt_logprobs is not supported here"),
        (TEMPLATE, {"suffix": "x"}, "suffix is not supported here"),
    ],
)  # fmt: skip
def test_what_is_refused(refusing: Any, template: str, body: Any, words: str) -> None:
    client, model = refusing
    model.tokenizer.chat_template = ChatTemplate(template)
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASKED, "max_tokens": 5} | body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.json()


def test_effort_reaches_templates_that_know_it(refusing: Any) -> None:
    client, model = refusing
    model.tokenizer.chat_template = ChatTemplate("{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}.")
    more = ChatTemplate("{% if enable_thinking is defined and not enable_thinking %}no{% endif %}.")
    for template, effort, tokens in ((None, "high", 5), (None, "none", 5), (more, "none", 3)):
        model.tokenizer.chat_template = template or model.tokenizer.chat_template
        body = {"model": "tiny", "messages": ASKED, "max_tokens": 1, "reasoning_effort": effort}
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == tokens


def test_ends_and_the_prompt_by_fields_of_vllm(refusing: Any) -> None:
    client, _ = refusing

    def text(**body: Any) -> Any:
        answer = client.post("/v1/completions", json={"model": "tiny", "temperature": 0, "max_tokens": 6} | body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]

    assert text(prompt="xxxximport os", truncate_prompt_tokens=9) == text(prompt="import os")
    assert text(prompt="x" * 500, truncate_prompt_tokens=-1)[1] == 448
    kept = text(prompt="import os")[0]
    assert (
        text(prompt="import os", ignore_eos=True, stop_token_ids=[ord(kept[2])])[0] == kept[: kept.index(kept[2]) + 1]
    )


@pytest.fixture(scope="module")
def refusing() -> Any:
    from fastapi.testclient import TestClient

    from pdkernels.engine import Engine
    from pdkernels.serve import create_app

    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    with TestClient(create_app(Engine(model, max_new_tokens=64), "tiny"), raise_server_exceptions=False) as client:
        yield client, model


def test_end_tokens_may_be_tokens_like_others(serve: Any) -> None:
    address, _ = serve(model=speaking("Yes.", "{{ messages[0].content }}"))
    assert asked(client_of(address))[3].completion_tokens == 5
    assert asked(client_of(address), extra_body={"ignore_eos": True})[2:][1].completion_tokens == 60


def test_a_form_comes_after_the_thought_that_the_prompt_opens(serve: Any) -> None:
    """The grammar has the thought end, and the answer be of the form within the tokens there are."""
    address, _ = serve(model=speaking("xxxxxxxHm.</think>\n\nNo form.", "{{ messages[0].content }}{{ '<think>' }}"))
    thought, text, _, _ = asked(client_of(address), extra_body={"choice": ["red", "blue"]})
    assert (thought, text in ("red", "blue")) == ("Hm.", True)
    thought, text, _, _ = asked(client_of(address), max_tokens=20, extra_body={"regex": "[0-9]{4}"})
    assert text.isdigit() and len(text) == 4


def test_tokens_that_were_known_are_counted(serve: Any) -> None:
    address, _ = serve()
    client, options = client_of(address), {"model": "tiny", "prompt": "x = 1\n" * 40, "max_tokens": 2, "temperature": 0}
    first, second = (client.completions.create(**options).usage.prompt_tokens_details for _ in range(2))
    assert first.cached_tokens == 0 and second.cached_tokens >= 192


def test_thoughts_go_back_into_the_template() -> None:
    """By the names of all clients."""
    from pdkernels.serve.messages import plain
    from pdkernels.serve.messages_api import chat_messages
    from pdkernels.serve.responses import messages_of
    from tests.support.chat_templates import QWEN3

    user: Any = {"role": "user", "content": "Hi"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
    chats: list[list[dict[str, Any]]] = [
        [user, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}],
        [user, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}],
        messages_of([user, thought, {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}]),
        chat_messages([user, {"role": "assistant", "content": blocks}]),
    ]
    for chat in chats:
        text = ChatTemplate(QWEN3).render(plain(chat, QWEN3), add_generation_prompt=False)
        assert text.endswith("<think>\nHm.\n</think>\n\nYes.<|im_end|>\n")
