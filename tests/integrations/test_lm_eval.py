"""lm-evaluation-harness: its requests, and scores against our own evaluation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pdkernels as pd

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
from lm_eval.api.instance import Instance

from pdkernels.integrations.lm_eval import HarnessModel
from tests.integrations.test_likelihood import directly

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lm_eval_sums.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lm_eval_sums", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(kind: Any, *args: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


@pytest.fixture(scope="module")
def code() -> HarnessModel:
    return HarnessModel("tiny-code", batch_size=3, max_new_tokens=24)


def test_likelihood_requests(code: HarnessModel) -> None:
    """Texts without a context follow the end token, spaces belong to the following word, windows add up."""
    requests = [ask("loglikelihood", "", "import os"), ask("loglikelihood", "import ", "os")]
    first, second = code.loglikelihood(requests, disable_tqdm=True)
    assert first[0] == pytest.approx(directly(code.model, [256], list(b"import os"))[0], abs=2e-4)
    assert second[0] == pytest.approx(directly(code.model, list(b"import"), list(b" os"))[0], abs=2e-4)
    (rolled,) = code.loglikelihood_rolling([ask("loglikelihood_rolling", "import os")])
    assert rolled == pytest.approx(first[0], abs=2e-4)
    text = "x = 1\n" * (code.model.config.max_positions // 6 + 20)
    (rolled,) = code.loglikelihood_rolling([ask("loglikelihood_rolling", text)])
    assert rolled < 0


def test_generations_end_at_the_stop_texts(code: HarnessModel) -> None:
    requests = [
        ask("generate_until", "import o", {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0}),
        ask("generate_until", "import o", {"until": [], "max_gen_toks": 8}),
        ask("generate_until", "def f(", {}),
    ]
    cut, whole, other = code.generate_until(requests)
    plain = pd.decoding.generate(code.model, ["import o", "import o", "def f("], max_new_tokens=24).text
    assert whole == pd.decoding.generate(code.model, "import o", max_new_tokens=8).text
    assert cut == whole.split("\n")[0] and other == plain[2]
    assert code.tokens_per_forward == 1.0  # one at a time, in whatever batch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 4}, "num_beams must be absent"),
        ({"top_h": 0.3}, "top_h"),
        ({"do_sample": True, "top_k": -1}, "top_k must be at least 1"),
        ({"max_gen_toks": 10**6}, "leave room"),
    ],
)
def test_generations_that_are_refused(code: HarnessModel, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=words):
        code.generate_until([ask("generate_until", "a", settings)])


def test_draws_and_what_else_is_refused() -> None:
    requests = [ask("generate_until", "import ", {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8})]
    first, again, other = (HarnessModel("tiny-code", seed=seed).generate_until(requests) for seed in (1, 1, 2))
    assert first == again != other
    texts = set()
    for filters in ({}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}):
        settings = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 8, **filters}
        lm = HarnessModel("tiny-code", seed=1)
        (text,) = lm.generate_until([ask("generate_until", "import ", settings)])
        drawn = {"max_new_tokens": 8, "temperature": 3.0, "seed": 1, **filters}
        assert text == pd.decoding.generate(lm.model, "import ", **drawn).text
        texts.add(text)
    assert len(texts) == 4
    off = {"do_sample": False, "temperature": 0.0, "top_k": 3, "top_p": 0.9, "max_gen_toks": 8}  # as tasks have it
    greedy = [
        HarnessModel("tiny-code").generate_until([ask("generate_until", "import ", it)])
        for it in (off, {"max_gen_toks": 8})
    ]
    assert greedy[0] == greedy[1]
    lm = HarnessModel("tiny-masked", method="llada", seed=1)
    (text,) = lm.generate_until([ask("generate_until", "1", {"do_sample": True, "min_p": 0.1, "max_gen_toks": 8})])
    drawn = {"max_new_tokens": 8, "temperature": 1.0, "min_p": 0.1, "seed": 1}
    assert text == pd.decoding.generate(lm.model, "1", "llada", **drawn).text
    with pytest.raises(ValueError, match="method 'autoregressive' has no option block_size"):
        HarnessModel("tiny-code", block_size=4)
    masked = HarnessModel("tiny-masked", method="llada")
    with pytest.raises(NotImplementedError, match="must be causal for rolling"):
        masked.loglikelihood_rolling([ask("loglikelihood_rolling", "a")])
    with pytest.raises(NotImplementedError, match="chat template"):
        masked.apply_chat_template([])


def test_greedy_texts_of_a_masked_model() -> None:
    lm = HarnessModel("tiny-masked", method="llada", likelihood_samples=4, check_greedy=True)
    written = pd.decoding.generate(lm.model, "12 + 30 = ?\n", "llada", max_new_tokens=6, end_tokens=()).text
    requests = [ask("loglikelihood", "12 + 30 = ?\n", text) for text in (written, "zzzzzz")]
    # The harness moves spaces and line ends from the end of a context to the text.
    asked = pd.decoding.generate(lm.model, "12 + 30 = ?", "llada", max_new_tokens=7, end_tokens=()).text
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [asked == "\n" + written, False]
    assert answers[0][0] > answers[1][0]


@pytest.mark.parametrize(
    ("model", "method", "canvas"),
    [("tiny-trimode", "autoregressive", None), ("tiny-trimode", "linear_self_speculation", None), ("tiny-masked", "fast_dllm", 128)],
)  # fmt: skip
def test_scores_are_those_of_our_evaluation(
    tmp_path: Path, monkeypatch: Any, model: str, method: str, canvas: Any
) -> None:
    """The same sums through the harness and through `pdkernels.evaluation`, and a choice that the model gets right."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problems, sums = 6, example()
    sums.write_tasks(tmp_path, problems, canvas=canvas)
    lm = HarnessModel(model, method=method, batch_size=problems, likelihood_samples=8)
    scores = sums.run(lm, tmp_path)
    task = pd.evaluation.make_task("sums", problems, canvas=canvas)
    texts = pd.decoding.generate(lm.model, task.prompts, method, max_new_tokens=task.limit).text
    right = [problem.is_solved_by(text) for problem, text in zip(task.problems, texts, strict=True)]
    assert scores["pdkernels_sums"] == sum(right) / problems
    assert scores["pdkernels_sums_choice"] >= 0.8


def test_a_misspelt_argument_is_suggested() -> None:
    for name, meant in (("batchsize", "batch_size"), ("max_gen_toks", "max_new_tokens"), ("temp", "temperature")):
        with pytest.raises(ValueError, match=rf"no option {name}. Did you mean '{meant}'\?"):
            HarnessModel("tiny-code", **{name: 4})
    with pytest.raises(ValueError, match=r"no option stop\.$"):  # a task's own setting
        HarnessModel("tiny-code", stop="a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "auto"}, "dtype must name a dtype of torch, such as 'bfloat16', got 'auto'"),
        ({"batch_size": "auto"}, "batch_size must be a number, got 'auto'"),
        ({"batch_size": "auto:4"}, "batch_size must be a number, got 'auto:4'"),
    ],
)
def test_arguments_of_the_harness_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HarnessModel("tiny-code", **arguments)


def test_arguments_of_the_harness() -> None:
    import torch

    assert HarnessModel("tiny-code", dtype=torch.bfloat16).model.dtype == torch.bfloat16
    sizes = [HarnessModel("tiny-code", batch_size=size, max_batch_size=4).batch_size for size in ("2", 9)]
    assert sizes == [2, 4]
    model = pd.models.load("tiny-code")
    assert HarnessModel(model, dtype="float32", device="cpu").model is model
    for other in ({"dtype": "bfloat16"}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="be None, or that of the model"):
            HarnessModel(model, **other)


def test_chats_of_a_wrapped_model() -> None:
    pytest.importorskip("transformers")
    from pdkernels.integrations.transformers import wrap
    from tests.integrations.test_wrapped_given import CHAT, small, tokenizer

    lm = HarnessModel(wrap(small(), tokenizer()))
    chat = [{"role": "user", "content": "Hi there"}]
    assert lm.chat_template(True) == CHAT
    assert lm.apply_chat_template(chat) == "<s>[user] Hi there[assistant]"
