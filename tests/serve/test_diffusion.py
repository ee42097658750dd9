"""What OpenAI's clients ask of methods that fill masks: each field is followed, as `generate` follows it, or refused by name; streamed and not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pdkernels as pd
from pdkernels.decoding import generate, sequence_seed
from tests.serve.clients import client_of

openai = pytest.importorskip("openai")
PROMPT, LIMIT, SEED = "482 + 967 = ?\n", 20, 5
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny-masked", "llada", {}),
    ("tiny-masked", "llada", {"block_size": 4, "speculate": 3}),
    ("tiny-masked", "fast_dllm", {"block_size": 8}),
    ("tiny-masked", "fast_dllm", {"block_size": 8, "cache": "none"}),
    ("tiny-masked", "dream", {}),
    ("tiny-masked", "slowfast", {"prompt_interval": 4, "gen_interval": 2, "transfer_ratio": 0.5}),
    ("tiny-masked", "dllm_cache", {"guidance": 0.5, "guidance_interval": 2}),
    ("tiny-masked", "slowfast", {}),
    ("tiny-trimode", "fast_dllm_v2", {"block_size": 8, "small_block_size": 4, "threshold": 0.6}),
    ("tiny-trimode", "fast_dllm_v2", {"block_size": 8, "small_block_size": 8, "threshold": 0.6, "speculate": 3}),
    ("tiny-trimode", "block_diffusion", {"block_size": 8}),
    ("tiny-trimode", "block_diffusion", {"block_size": 8, "threshold": 0.99, "speculate": 3}),
]
Answers = tuple[list[str], list[str]]


class Asking:
    """Asks a server with one method, and the library for the same."""

    def __init__(self, serve: Any, name: str, method: str, options: dict[str, Any]) -> None:
        self.model, self.method, self.options = pd.models.load(name), method, options
        self.client = client_of(serve(model=self.model, method=method)[0])

    def ids(self, text: str) -> list[int]:
        assert self.model.tokenizer is not None
        return [int(token) for token in self.model.tokenizer.encode(text)]

    def alone(self, prompt: str = PROMPT, **settings: Any) -> str:
        given = {"max_new_tokens": LIMIT, "seed": SEED, "temperature": 1.0, **self.options, **settings}
        text = generate(self.model, prompt, self.method, **given).text
        assert isinstance(text, str)
        return text

    def asked(self, more: dict[str, Any], **given: Any) -> dict[str, Any]:
        usual = {"model": "tiny", "prompt": PROMPT, "max_tokens": LIMIT, "seed": SEED, "temperature": 1.0}
        return {**usual, **given, "extra_body": {"options": self.options, **more}}

    def answers(self, more: dict[str, Any], **given: Any) -> Answers:
        """Texts and reasons, the same in a stream."""
        whole = self.client.completions.create(**self.asked(more, **given)).choices
        texts, reasons = dict[int, str](), dict[int, str]()
        for piece in self.client.completions.create(stream=True, **self.asked(more, **given)):
            for choice in piece.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
        assert [texts[one.index] for one in whole] == [one.text for one in whole]
        assert [reasons[one.index] for one in whole] == [one.finish_reason for one in whole]
        return [one.text for one in whole], [one.finish_reason for one in whole]

    def refusal(self, more: dict[str, Any], **given: Any) -> str:
        """The same in a stream."""
        messages = []
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                list(self.client.completions.create(stream=stream, **self.asked(more, **given)))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
        return messages[0]


@pytest.mark.parametrize(("name", "method", "options"), CASES)
def test_fields_of_a_completion(serve: Any, name: str, method: str, options: dict[str, Any]) -> None:
    asking = Asking(serve, name, method, options)
    whole = asking.alone(end_tokens=())
    seeds = [sequence_seed(SEED, number) for number in range(3)]
    several = [asking.alone(end_tokens=(), seed=seed) for seed in seeds]
    assert asking.answers({"ignore_eos": True}, n=3) == (several, ["length"] * 3)
    found = whole[9:11]
    assert asking.answers({"ignore_eos": True}, stop=[found, "no such text"]) == (
        [whole[: whole.index(found)]],
        ["stop"],
    )
    (end,) = asking.ids(whole[10])
    assert asking.answers({"ignore_eos": True, "stop_token_ids": [end]}) == (
        [asking.alone(end_tokens=(end,))],
        ["stop"],
    )
    if not (options.get("speculate") and method == "block_diffusion"):
        given = {"ignore_eos": True, "stop_token_ids": [end], "min_tokens": 15}
        late = asking.alone(end_tokens=(end,), min_new_tokens=15)
        assert len(asking.ids(late)) >= 15 and asking.answers(given)[0] == [late]
    else:
        words = "speculate must be 0 with a grammar, a bias, penalties, excluded tokens or min_tokens, got 3"
        assert words in asking.refusal({"min_tokens": 15, "stop_token_ids": [end]})
        assert words in asking.refusal({}, frequency_penalty=0.5)
    assert asking.answers({}, max_tokens=1) == ([asking.alone(max_new_tokens=1)], ["length"])
    assert asking.answers({"ignore_eos": True}, echo=True)[0] == [PROMPT + whole]
    assert "max_tokens: Input should be greater than or equal to 1" in asking.refusal({}, max_tokens=0)
    assert "best_of must be n" in asking.refusal({}, best_of=2)
    assert "this model has no tokens to fill in the middle" in asking.refusal({}, suffix="x")
    # Also while its method runs another request.
    assert f"method {method!r} does not follow logprobs" in asking.refusal({}, logprobs=2)


@pytest.mark.parametrize(("name", "method", "options"), CASES[1::2])
def test_requests_of_other_lengths_beside_each_other(
    serve: Any, name: str, method: str, options: dict[str, Any]
) -> None:
    asking, limits = Asking(serve, name, method, options), [3, LIMIT, 9, LIMIT, 1, 17]

    def answer(number: int) -> Answers:
        return asking.answers({}, prompt=PROMPT[number:], max_tokens=limits[number], seed=number)

    with ThreadPoolExecutor(len(limits)) as pool:
        found = list(pool.map(answer, range(len(limits))))
    for number, (limit, (texts, _)) in enumerate(zip(limits, found, strict=True)):
        assert texts == [asking.alone(PROMPT[number:], max_new_tokens=limit, seed=number)]


def test_a_method_that_does_not_run_in_an_engine(serve: Any) -> None:
    asking = Asking(serve, "tiny-trimode", "block_diffusion", {})
    message = asking.refusal({"method": "jacobi_multiblock"})
    assert "method must let requests join and leave a batch, got jacobi_multiblock" in message
    assert "block_diffusion" in message and "fast_dllm_v2" in message


def test_an_engine_that_runs_a_method_refuses_its_log_probabilities() -> None:
    """They would be those of no forward."""
    with pd.Engine(pd.models.load("tiny-trimode")) as engine:
        running = engine.submit(PROMPT, "block_diffusion", max_new_tokens=LIMIT)
        with pytest.raises(NotImplementedError, match="'block_diffusion' does not follow logprobs in a running batch"):
            engine.submit(PROMPT, "block_diffusion", max_new_tokens=LIMIT, logprobs=1)
        running.result(60)
