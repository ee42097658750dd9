"""The page that replays a decoding: what its steps write, put together, is the result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import pdkernels as pd
from pdkernels.decoding.methods import METHODS
from pdkernels.generation import replay as _replay
from tests.support.errors import refused
from tests.support.plans import example

PROMPTS = ["482 + 967 = ?\n", "def f(x):\n"]
CANDIDATES = ["tiny-code", "tiny-masked", "tiny-recurrent", "tiny-trimode"]


def run(method: str, prompts: list[str] | str = PROMPTS, **options) -> pd.decoding.DecodeResult:
    known = METHODS[method]
    models = (pd.models.load(name) for name in known.models or CANDIDATES)
    model = example(known) if "drafter" in known.requires else next(filter(known.supports, models))
    return pd.decoding.generate(model, prompts, method, max_new_tokens=20, trace=True, **options)


def lanes_of(page: Path) -> list[tuple[dict, list[list[str | None]]]]:
    """The data of each sequence, and the lanes after the last step, as the page's script makes them."""
    text = page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    made = []
    for sequence in data["sequences"]:
        lanes: list[list[str | None]] = [[None] * lane["length"] for lane in sequence["lanes"]]
        for step in sequence["steps"]:
            for lane, position, token, _ in step["writes"]:
                lanes[lane][position] = token
        made.append((sequence, lanes))
    return made


def pieces(result: pd.decoding.DecodeResult, tokens: torch.Tensor) -> list[str]:
    decode = result._source.tokenizer.decode
    return [decode([token]) or {256: "⟨end⟩"}[token] for token in tokens.tolist()]


@pytest.mark.covering(share=3)
@pytest.mark.parametrize("method", [name for name in METHODS if not (METHODS[name].wing == "planned")])
def test_the_last_step_shows_the_result(method: str, tmp_path: Path) -> None:
    result = run(method)
    result.save_html(tmp_path / "page.html")
    pages = lanes_of(tmp_path / "page.html")
    assert len(pages) == 2
    for (sequence, lanes), tokens, steps in zip(pages, result.tokens, result.stats.trace):
        assert lanes == [pieces(result, tokens)]
        assert len(sequence["steps"]) == 1 + len(steps)
        # Only the very first token may come from the prompt's own forward.
        assert [write[1] for write in sequence["steps"][0]["writes"]] in ([], [0])


def test_accepted_drafts_are_those_of_the_stats() -> None:
    result = run("jacobi", "482 + 967 = ?\n")
    frames = _replay.frames(result.stats.trace[0], result._source.prompts[0], result._source.tokens[0])
    drafts = [sum(write.kind == _replay.DRAFT for write in frame.writes) for frame in frames[1:]]
    assert drafts == [accepted - 1 for accepted in result.stats.accepted[0]] and sum(drafts) > 0


def test_masks_inside_a_prompt() -> None:
    model = pd.models.load("tiny-masked")
    prompt = [*model.tokenizer.encode("12 + "), model.mask_token, model.mask_token, *model.tokenizer.encode(" = ")]
    result = pd.decoding.generate(model, prompt, "llada", max_new_tokens=4, infill=True, trace=True)
    source = result._source
    frames = _replay.frames(result.stats.trace[0], source.prompts[0], source.tokens[0])
    written = {write.position: write.token for frame in frames for write in frame.writes}
    assert [written[position] for position in range(len(source.tokens[0]))] == source.tokens[0]
    assert source.prompts[0] + source.tokens[0] == result.tokens.tolist()


def test_chunks_are_lanes(tmp_path: Path) -> None:
    model = pd.models.load("tiny-planned")
    from pdkernels.evaluation import held_out_orders

    prompts = [problem.prompt for problem in held_out_orders(2)]
    result = pd.decoding.generate(model, prompts, "planned", max_new_tokens=100, trace=True)
    result.save_html(tmp_path / "page.html")
    for number, (sequence, lanes) in enumerate(lanes_of(tmp_path / "page.html")):
        rounds = result.stats.plans[number].rounds
        assert [len(lane) for lane in lanes] == [length for plan in rounds for length in plan.lengths]
        assert all(None not in lane for lane in lanes) and len(lanes) > 1
        names = [lane["name"] for lane in sequence["lanes"]]
        assert names[0].startswith("round 1, chunk 1: ")
        # Each chunk is in the text as it was written.
        tags = model.plan_tokens
        names = {
            tags.chunk_open: "⟨chunk_open⟩",
            tags.chunk_close: "⟨chunk_close⟩",
            tags.pad: "⟨pad⟩",
            tags.sync: "⟨sync⟩",
        }
        names |= {tags.topic_open: "⟨topic_open⟩", tags.topic_close: "⟨topic_close⟩"}
        ids = result.tokens[number].tolist()
        whole = "".join(names[token] if token > 256 else model.tokenizer.decode([token]) for token in ids)
        assert all("".join(lane) in whole for lane in lanes)


def test_text_cannot_leave_its_element(tmp_path: Path) -> None:
    result = run("autoregressive", "</script><script>alert(1)//")
    result.save_html(tmp_path / "page.html", title="<b>a & b</b>")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and "alert(1)" not in text
    assert "<title>&lt;b&gt;a &amp; b&lt;/b&gt;</title>" in text
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", text), "the page loads nothing"
    assert "".join(lanes_of(tmp_path / "page.html")[0][0]["prompt"]) == "</script><script>alert(1)//"


def test_ids_without_a_tokenizer(tmp_path: Path) -> None:
    model = pd.models.from_callable(
        lambda tokens: torch.nn.functional.one_hot((tokens + 1) % 9, 9).float(), vocab_size=9
    )
    pd.decoding.generate(model, [3], max_new_tokens=3, trace=True).save_html(tmp_path / "page.html")
    assert lanes_of(tmp_path / "page.html")[0][1] == [["⟨4⟩", "⟨5⟩", "⟨6⟩"]]


def test_special_tokens_have_the_names_of_their_tokenizer(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "<|end|>": 1, "b": 2}, unk_token="a"))
    words.add_special_tokens(["<|end|>"])
    model = pd.models.from_callable(
        lambda tokens: torch.nn.functional.one_hot((tokens + 1) % 4, 4).float(),
        vocab_size=4,
        tokenizer=pd.models.JsonTokenizer.of(words, "words"),
        end_tokens=(3,),
    )
    result = pd.decoding.generate(model, [0], max_new_tokens=2, trace=True)
    result.save_html(tmp_path / "page.html")
    assert lanes_of(tmp_path / "page.html")[0][1] == [["<|end|>", "b"]]
    result = pd.decoding.generate(model, [2], max_new_tokens=1, trace=True)
    result.save_html(tmp_path / "page.html")
    assert lanes_of(tmp_path / "page.html")[0][1] == [["⟨end⟩"]]


def test_no_trace(tmp_path: Path) -> None:
    result = pd.decoding.generate(pd.models.load("tiny-code"), "a", max_new_tokens=1)
    with refused(r"save_html: the result has no trace to replay\. Call generate\(\.\.\., trace=True\)\."):
        result.save_html(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
