"""The server as clients see it: OpenAI's own, and clients that do everything wrong."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding import Grammar, generate
from pdkernels.serve.log_probs import entries
from pdkernels.serve.messages import plain
from pdkernels.serve.stops import StopCut

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from tests.serve.clients import PROMPTS, TEMPLATE, Chatting, alone, client_of  # noqa: E402


def test_completions_of_the_openai_client(serve: Any) -> None:
    address, _ = serve(method="jacobi")
    client = client_of(address)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for prompt in PROMPTS:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        expected = generate(pd.models.load("tiny-code"), prompt, "jacobi", max_new_tokens=12)
        assert answer.choices[0].text == expected.text
        assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(expected.tokens)
        assert answer.choices[0].finish_reason == ("length" if len(expected.tokens) == 12 else "stop")
        pieces = list(client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    several = client.completions.create(model="tiny", prompt=PROMPTS[:3], max_tokens=8, temperature=0, echo=True)
    assert [choice.text for choice in several.choices] == [text + alone(text, 8) for text in PROMPTS[:3]]
    ids = client.completions.create(model="tiny", prompt=list(b"import os\n"), max_tokens=8, temperature=0)
    assert ids.choices[0].text == alone("import os\n", 8)


def test_sampling_and_filters_reach_the_method(serve: Any) -> None:
    address, _ = serve()
    client = client_of(address)
    more = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}
    answer = client.completions.create(
        model="tiny", prompt="import", max_tokens=16, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.5,
        presence_penalty=0.25, logit_bias={"10": -100}, extra_body=more,
    )  # fmt: skip
    expected = alone(
        "import", 16, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.5, presence_penalty=0.25,
        logit_bias={10: -100.0}, **more,
    )  # fmt: skip
    assert answer.choices[0].text == expected
    several = client.completions.create(model="tiny", prompt="import", max_tokens=8, temperature=1, n=3, seed=9)
    seeds = [pd.decoding.sequence_seed(9, number) for number in range(3)]
    assert [choice.text for choice in several.choices] == [
        alone("import", 8, temperature=1.0, seed=seed) for seed in seeds
    ]
    other = client.completions.create(
        model="tiny",
        prompt="import",
        max_tokens=8,
        temperature=0,
        extra_body={"method": "jacobi", "options": {"block_size": 4}},
    )
    assert other.choices[0].text == alone("import", 8)
    free = [
        client.completions.create(model="tiny", prompt="a", max_tokens=12, temperature=1).choices[0].text
        for _ in range(4)
    ]
    assert len(set(free)) > 1  # without a seed each is drawn anew


def test_chats_of_the_openai_client(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    messages: Any = [
        {"role": "system", "content": "import os"},
        {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f("}]},
    ]
    prompt = "<system>import os<user>def f(<assistant>"
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=10, temperature=0)
    assert answer.choices[0].message.content == alone(prompt, 10) and answer.usage.prompt_tokens == len(prompt)
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, temperature=0, tools=tools,
        extra_body={"chat_template_kwargs": {"shout": True}},
    )  # fmt: skip
    assert answer.choices[0].message.content == alone("<system>import os<user>def f([look]!<assistant>", 10)
    pieces = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == alone(prompt, 10)
    assert pieces[-2].choices[0].finish_reason in ("length", "stop") and pieces[-1].usage.completion_tokens == 10
    with pytest.raises(openai.BadRequestError, match="a part of type 'image_url' is not supported"):
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        client.chat.completions.create(model="tiny", messages=image)


def test_answers_of_a_form(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    messages: Any = [{"role": "user", "content": "def f("}]
    for method in ("autoregressive", "jacobi"):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=60,
            temperature=1,
            seed=3,
            response_format=form,
            extra_body={"method": method},
        )
        found = json.loads(answer.choices[0].message.content)
        assert isinstance(found["age"], int) and isinstance(found["ok"], bool)
    one = client.completions.create(
        model="tiny", prompt="def ", max_tokens=9, temperature=1, extra_body={"choice": ["red", "blue"]}
    )
    assert one.choices[0].text in ("red", "blue") and one.choices[0].finish_reason == "stop"
    two = client.completions.create(
        model="tiny", prompt="def ", max_tokens=9, temperature=1, extra_body={"regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", two.choices[0].text)


def test_log_probabilities_of_the_openai_client(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    answer = client.completions.create(
        model="tiny", prompt="import os", max_tokens=5, temperature=0, logprobs=2
    ).choices[0]
    expected = generate(pd.models.load("tiny-code"), "import os", max_new_tokens=5, logprobs=2)
    assert answer.logprobs.token_logprobs == expected.logprobs.tokens.tolist()
    assert "".join(answer.logprobs.tokens) == answer.text
    assert [max(top.values()) for top in answer.logprobs.top_logprobs] == expected.logprobs.top[:, 0].tolist()
    messages: Any = [{"role": "user", "content": "def f("}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert "".join(one.token for one in chat.logprobs.content) == chat.message.content
    assert all(
        len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in chat.logprobs.content
    )


def test_log_probabilities_are_of_the_text(serve: Any) -> None:
    """Without an end token, without what a stop string cuts off, with the bytes of tokens that are parts of characters."""
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    client = client_of(address)
    options: Any = {"model": "tiny", "prompt": "def ", "max_tokens": 12, "temperature": 0, "logprobs": 1}

    def both(**more: Any) -> Any:
        whole = client.completions.create(**options, **more).choices[0]
        pieces = list(client.completions.create(**options, stream=True, **more))
        assert "".join(piece.choices[0].text for piece in pieces) == whole.text
        assert pieces[-1].choices[0].logprobs == whole.logprobs and pieces[-1].choices[0].finish_reason
        assert all(piece.choices[0].logprobs is None for piece in pieces[:-1])
        assert len(whole.logprobs.tokens) == len(whole.logprobs.token_logprobs) == len(whole.logprobs.top_logprobs)
        return whole

    named = both(extra_body={"choice": ["nä", "nö"]})
    letter = named.text[1]
    first, second = letter.encode()
    assert named.logprobs.tokens == ["n", f"bytes:\\x{first:02x}", f"bytes:\\x{second:02x}"]
    assert named.logprobs.text_offset == [0, 1, 1]
    text = alone("def ", 12)
    cut = both(stop=[text[5:7]])
    assert "".join(cut.logprobs.tokens) == cut.text == text[: text.index(text[5:7])]
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=12, temperature=0, logprobs=True,
        top_logprobs=1, extra_body={"choice": ["nä", "nö"]}, stream=True,
    )  # fmt: skip
    content = [
        one for piece in chat for one in (piece.choices[0].logprobs.content if piece.choices[0].logprobs else [])
    ]
    assert bytes(byte for one in content for byte in one.bytes).decode() in ("nä", "nö")
    assert content[1].token == f"\\x{content[1].bytes[0]:02x}"


def test_the_chosen_token_is_told_and_special_ones_have_names() -> None:
    """The first one also where it is not among the likeliest, as in OpenAI's completions."""

    class Named:
        skips_first_space = True

        def token_bytes(self) -> list[bytes]:
            return [b"", b"", b" a", b"b"]

        def decode_all(self, ids: list[int]) -> str:
            return "".join(f"<{token}>" for token in ids)

    likely = pd.decoding.LogProbs(
        torch.tensor([-0.5, -3.0]), torch.tensor([[2, 0], [0, 1]]), torch.tensor([[-0.5, -1.0], [-1.0, -2.0]])
    )
    found = entries(False, Named(), [2, 3], "ab", likely)
    assert found["tokens"] == ["a", "b"]
    assert found["top_logprobs"] == [{"a": -0.5, "<0>": -1.0}, {"<0>": -1.0, "<1>": -2.0, "b": -3.0}]
    tops = [one["top_logprobs"] for one in entries(True, Named(), [2, 3], "ab", likely)["content"]]
    assert tops[1][0] == {"token": "<0>", "logprob": -1.0, "bytes": []} and [len(top) for top in tops] == [2, 2]
    inside = pd.decoding.LogProbs(
        torch.tensor([-0.5, -1.0, -0.125]), torch.tensor([[2], [0], [3]]), torch.tensor([[-0.5], [-1.0], [-0.125]])
    )
    assert entries(False, Named(), [2, 0, 3], "ab", inside)["top_logprobs"] == [
        {"a": -0.5},
        {"<0>": -1.0},
        {"b": -0.125},
    ]
    assert [one["token"] for one in entries(True, Named(), [2, 0, 3], "ab", inside)["content"]] == ["a", "<0>", "b"]


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_without_a_seed_draw_by_themselves(serve: Any, n: int) -> None:
    address, _ = serve()
    options: Any = {"model": "tiny", "max_tokens": 24, "temperature": 2, "n": n}
    create = client_of(address).completions.create

    def texts(**more: Any) -> list[str]:
        return [choice.text for choice in create(**options, **more).choices]

    assert len(set(texts(prompt=["def "] * 3))) == 3 * n
    assert texts(prompt=["def "] * 3, seed=4) == 3 * texts(prompt="def ", seed=4)


def test_a_field_of_a_request_wins_over_the_servers_options(serve: Any) -> None:
    served = {
        "options": {"temperature": 0.9, "top_p": 0.5},
        "sampling": {"temperature": 0.2, "top_k": 3, "repetition_penalty": 1.3},
    }
    address, _ = serve(**served)
    client = client_of(address)

    def text(**fields: Any) -> str:
        made: str = (
            client.completions.create(model="tiny", prompt="import", max_tokens=16, seed=4, **fields).choices[0].text
        )
        return made

    same = {"repetition_penalty": 1.3, "seed": 4}
    assert text() == alone("import", 16, temperature=0.9, top_p=0.5, top_k=3, **same)
    assert text(temperature=2.0) == alone("import", 16, temperature=2.0, top_p=0.5, top_k=3, **same)
    off = {"extra_body": {"top_k": 0, "repetition_penalty": 1.0}}
    assert text(top_p=1.0, **off) == alone("import", 16, temperature=0.9, seed=4)
    assert text(temperature=0.0) == alone("import", 16, repetition_penalty=1.3)
    # Another method has the suggested settings, but not the options of the server's.
    other = alone("import", 16, temperature=0.2, top_k=3, **same)
    assert text(extra_body={"method": "jacobi"}) == other


def test_the_page_is_told_what_a_canvas_holds_while_it_fills(serve: Any) -> None:
    model, prompt = pd.models.load("tiny-masked"), "482 + 967 = ?"
    expected = generate(model, prompt, "llada", max_new_tokens=12).text
    address, _ = serve(model=model, method="llada")
    answer = httpx.post(f"{address}/replay", json={"prompt": prompt, "max_tokens": 12, "stream": True}, timeout=60)
    *shown, last = [json.loads(line) for line in answer.text.splitlines()]
    assert last["page"].startswith("<!doctype html>") and shown[-1] == {"text": expected, "after": []}
    # A character is a token here, so what stands at a position is what comes there, or nothing.
    texts = [new["text"] + "".join("\0" if one is None else one for one in new["after"]) for new in shown]
    assert all(one in ("\0", final) for text in texts for one, final in zip(text, expected, strict=False))
    assert any("\0" in text.rstrip("\0") for text in texts)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_provisional_text_of_a_method_that_fills_positions_in_any_order(serve: Any, chat: bool) -> None:
    model = pd.models.load("tiny-masked")
    prompt = "482 + 967 = ?"
    expected = generate(model, "<user>" + prompt if chat else prompt, "llada", max_new_tokens=12).text
    model.tokenizer = Chatting(model.tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    address, _ = serve(model=model, method="llada")
    client = client_of(address)
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "stream": True, "extra_body": {"provisional": True}}
    if chat:
        pieces = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
        news = [piece.choices[0].delta for piece in pieces]
        texts = [new.content for new in news]
    else:
        news = [piece.choices[0] for piece in client.completions.create(prompt=prompt, **options)]
        texts = [new.text for new in news]
    assert "".join(text or "" for text in texts) == expected
    at, shown = 0, 0
    for text, new in zip(texts, news, strict=True):
        at += len(text or "")
        standing = (new.model_extra or {}).get("provisional")
        if standing is not None:
            assert not text
            # A character is a token here, so what stands at a position is what comes there, or nothing.
            written = "".join("\0" if one is None else one for one in standing)
            assert all(one in ("\0", final) for one, final in zip(written, expected[at:], strict=False))
            shown += 1
    assert shown > 0
    several = client.completions.create(prompt=prompt, n=2, seed=1, **options)
    both = ["", ""]
    for piece in several:
        both[piece.choices[0].index] += piece.choices[0].text
    assert both == [
        generate(model, prompt, "llada", max_new_tokens=12, seed=pd.decoding.sequence_seed(1, number)).text
        for number in range(2)
    ]


@pytest.mark.parametrize("method", ["llada", "fast_dllm", "block_diffusion"])
def test_grammars_of_methods_that_fill_canvases(serve: Any, method: str) -> None:
    """Schemas and expressions over HTTP, streamed with what stands at other places."""
    model = pd.models.load("tiny-trimode" if method == "block_diffusion" else "tiny-masked")
    prompt = "482 + 967 = ?"
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    nested: dict[str, Any] = {**schema, "properties": {"sum": {"type": "integer"}, "more": {"$ref": "#"}}}
    deep: Any = {"type": "json_schema", "json_schema": {"name": "nested", "schema": nested, "depth": "any"}}
    asked: list[tuple[Grammar, dict[str, Any]]] = [
        (Grammar.json_schema(schema, unknown="ignore"), {"response_format": form}),
        (Grammar.regex("[0-9]+(x|yz)"), {"extra_body": {"regex": "[0-9]+(x|yz)"}}),
        (Grammar.json_schema(nested, depth=None), {"response_format": deep}),
    ]
    expected = [
        generate(model, f"<user>{prompt}", method, max_new_tokens=16, grammar=grammar).text for grammar, _ in asked
    ]
    model.tokenizer = Chatting(model.tokenizer, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    address, _ = serve(model=model, method=method)
    chat = client_of(address).chat.completions
    for (_, body), text in zip(asked, expected, strict=True):
        given: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": prompt}]}
        assert chat.create(**given, **body).choices[0].message.content == text
        shown = {**body, "extra_body": {**body.get("extra_body", {}), "provisional": True}}
        news = [piece.choices[0].delta for piece in chat.create(**given, stream=True, **shown)]
        assert "".join(new.content or "" for new in news) == text
        assert any((new.model_extra or {}).get("provisional") for new in news)
    assert isinstance(json.loads(str(expected[0]))["sum"], int)


def test_stop_strings_are_left_out(serve: Any) -> None:
    address, _ = serve()
    client = client_of(address)
    whole = alone("class Node:", 60, end_tokens=())
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    options: dict[str, Any] = {"model": "tiny", "prompt": "class Node:", "max_tokens": 60, "temperature": 0}
    answer = client.completions.create(stop=[stop, "no such text"], **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    pieces = list(client.completions.create(stop=stop, stream=True, **options))
    assert "".join(piece.choices[0].text for piece in pieces) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_that_of_the_whole_text(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        text = "".join(chance.choice("ab") for _ in range(chance.randint(0, 12)))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randint(1, 4))) for _ in range(chance.randint(0, 3))]
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
        expected = (
            text if not ends else text[: min(text[: ends[0]].find(stop) for stop in stops if stop in text[: ends[0]])]
        )
        cut, at, got = StopCut(stops), 0, ""
        while at < len(text):
            size = chance.randint(1, 3)
            got, at = got + cut.feed(text[at : at + size]), at + size
        assert got + cut.flush() == expected


def test_fields_that_ask_for_nothing_change_nothing(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer)
    address, _ = serve(model=model)
    create, options = client_of(address).chat.completions.create, {"model": "tiny", "max_tokens": 10, "temperature": 0}
    messages: Any = [{"role": "user", "content": "def f("}]
    nothing: Any = {
        "user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "metadata": {"d": "e"}, "store": False,
        "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True,
    }  # fmt: skip
    answer = create(messages=messages, **options, **nothing)
    assert answer.choices[0].message.content == alone("<user>def f(<assistant>", 10)
    # A probability mass of 0 is that of the likeliest token.
    answer = create(messages=messages, top_p=0, seed=3, **options | {"temperature": 1.5})
    assert answer.choices[0].message.content == alone("<user>def f(<assistant>", 10)


def test_messages_as_openai_has_them(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE + "{# tool_calls #}")
    address, _ = serve(model=model)
    client = client_of(address)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    assert answer.choices[0].message.content == alone("<system>short<user><assistant><tool>4<assistant>", 10)
    for message in ({"content": "a"}, {"role": "user"}, {"role": "user", "content": 5}, {"role": 5, "content": "a"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=[messages[0], message])
        assert refused.value.param == f"messages.1.{'content' if message.get('role') == 'user' else 'role'}"
    knowing = Chatting(pd.models.load("tiny-code").tokenizer, TEMPLATE + "{# developer #}").chat_template
    assert plain(messages[:1], knowing.source)[0]["role"] == "developer"


def test_an_answer_without_a_limit_ends_where_the_model_does(serve: Any) -> None:
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    most = model.config.max_positions
    address, _ = serve(model=model, engine={"max_new_tokens": 64, "max_prompt_tokens": most})
    create = client_of(address).chat.completions.create
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x" * (most - 5)}], "temperature": 0}
    usage = create(**body, extra_body={"options": {}}).usage
    assert usage.completion_tokens <= 5 and usage.prompt_tokens == most - 5
    with pytest.raises(
        openai.BadRequestError, match=f"takes {most} tokens; the prompt has {most - 5}, and 6 more"
    ) as over:
        create(**body, max_tokens=6)
    assert over.value.code == "context_length_exceeded" and over.value.param == "messages"
