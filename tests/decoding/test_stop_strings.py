"""Stop strings that are, or contain, special tokens, and those that cross tokens and characters: against transformers' criterion."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels import models
from pdkernels.decoding import generate
from pdkernels.decoding.methods import METHODS
from pdkernels.generation.stops import first_stop
from pdkernels.models import JsonTokenizer
from tests.decoding.test_repetition import BATCH, NAMES, SIZES, with_text

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers: pip install tokenizers")


def words(size: int, special: list[int]) -> JsonTokenizer:
    """A word for each id, those of `special` as special tokens."""
    names = [f"<|{i}|>" if i in special else f"w{i}." for i in range(size)]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0."))
    made.add_special_tokens([names[i] for i in special])
    made.decoder = tokenizers.decoders.Fuse()
    return JsonTokenizer.of(made, "words")


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", [name for name in NAMES if METHODS[name].wing != "planned"])
def test_a_special_token_ends_a_text_in_every_method(method: str) -> None:
    model, options = with_text(method), SIZES.get(method, {}) | {"max_new_tokens": 8, "end_tokens": ()}
    whole = [tokens.tolist() for tokens in generate(model, BATCH, METHODS[method], **options).tokens]
    for at in (2, 5):
        chosen = whole[0][at]
        model.tokenizer = words(model.config.vocab_size, [chosen])
        before = model.tokenizer.decode_all(whole[0][at - 1 : at])
        for stop in (f"<|{chosen}|>", before[-1] + f"<|{chosen}|>", f"<|{chosen}|"):
            expected = []
            for tokens in whole:
                text = [model.tokenizer.decode_all(tokens[:end]) for end in range(len(tokens) + 1)]
                expected.append(next((tokens[:end] for end, part in enumerate(text) if stop in part), tokens))
            assert expected[0] != whole[0] or at == len(whole[0]) - 1
            result = generate(model, BATCH, METHODS[method], stop_strings=stop, **options)
            assert [tokens.tolist() for tokens in result.tokens] == expected
            assert all("<|" not in text for text in result.text)  # special tokens are not shown


def test_transformers_stops_at_the_same_token() -> None:
    transformers = pytest.importorskip("transformers")
    stopping = pytest.importorskip("transformers.generation.stopping_criteria")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|x|>"], show_progress=False
    )
    made.train_from_iterator(["stop stopper opera\n\n日本 été stop stopper\n"] * 6, trainer)
    ours = JsonTokenizer.of(made, "bytes")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    draw = torch.Generator().manual_seed(0)
    source = made.encode("stop stopper\n\nopera 日本 été s t o p <|end|><|x|> <|end|>\n é 日").ids
    found = 0
    for stop in ("stop", "<|end|>", "p<|end|>", "<|end|><|x|>", "\n\n", "é", "日本", "end|", " <|end|>\n", "t"):
        criterion = stopping.StopStringCriteria(theirs, [stop])
        for run in range(12):
            ids = [source[i] for i in torch.randint(len(source), (24,), generator=draw).tolist()]
            if run % 2 == 0:  # a run of real text
                start = int(torch.randint(len(source) - 10, (), generator=draw))
                ids[6:16] = source[start : start + 10]
            expected = next(
                (n for n in range(1, len(ids) + 1) if bool(criterion(torch.tensor([ids[:n]]), torch.empty(0)).any())),
                None,
            )
            assert first_stop(ids, 0, [stop], ours) == expected
            found += expected is not None
            if expected is not None:  # however many of them were known before
                assert first_stop(ids, expected - 1, [stop], ours) == expected
    assert found > 40


@pytest.mark.parametrize(
    ("stop", "words"), [("\ufffd", r"hold no U\+FFFD"), ("a\ud800", "hold only Unicode characters, got the surrogate")]
)
def test_strings_that_no_text_holds(stop: str, words: str) -> None:
    model: Any = with_text("autoregressive")
    with pytest.raises(ValueError, match=rf"pdkernels\.decoding\.generate: stop_strings must {words}"):
        generate(model, [1, 2], stop_strings=stop)


@pytest.mark.parametrize("prompt", ["1x;1w;\n", pytest.param("2r;5m;1u;\n", marks=pytest.mark.slow)])
def test_stop_strings_of_planned_texts(prompt: str) -> None:
    """The search is in the text alone: plans and tags are not part of it, even where they have no text at all."""
    model = models.load("tiny-planned")
    options = {"method": "planned", "max_new_tokens": 40}
    free = generate(model, prompt, **options)
    assert free.text is not None and chr(free.tokens[1]) in "15", "the plan begins with this digit"
    for at in range(len(free.text)):
        for stop in (free.text[at], free.text[max(0, at - 2) : at + 1], "no such"):
            found = generate(model, prompt, stop_strings=stop, **options)
            end = free.text.find(stop)
            # The line break between two chunks comes with the first token of the second one.
            end += len(stop) + stop.endswith("\n") if end >= 0 else 0
            assert found.text == (free.text if end < 0 else free.text[:end])
            assert found.stats.plans[0].reason == (free.stats.plans[0].reason if end < 0 else "stop")
            assert torch.equal(found.tokens, free.tokens[: len(found.tokens)])
