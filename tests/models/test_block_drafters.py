"""DSpark, DFlash 2 and XPress folders that the speculators library wrote: tensors, logits and greedy drafts against its own code, and what
is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.models import DFlash2Head, DSparkHead, JsonTokenizer, Transformer, XPressHead, load_drafter, save_drafter
from pdkernels.training import dflash_loss
from tests.models.test_eagle_folders import LLAMA3, SIZES, TARGET, without_data
from tests.support.drafters import dflash_head

BLOCK, MASK, TAPS, REDUCED = 4, 39, (1, 3, 4), 12
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dspark": ("dspark", {"markov_rank": 6}, {}),
    "dspark, reduced": ("dspark", {"markov_rank": 6, "draft_vocab_size": REDUCED}, {"rope_parameters": LLAMA3}),
    "dspark, gated": ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False}, {}),
    "dspark, rnn": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "draft_vocab_size": REDUCED}, WINDOWS),
    "dspark, rnn, masks": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False}, {}),
    "dspark, no bias": ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, {}),
    "dspark, no confidence": ("dspark", {"markov_rank": 6, "enable_confidence_head": False}, {"attention_bias": True}),
    "dflash2": ("dflash2", {"selector_rank": 6, "selector_top_k": 5, "conv_group_size": 8}, {}),
    "dflash2, three taps": (
        "dflash2",
        {"selector_rank": 6, "selector_top_k": 3, "conv_group_size": 32, "conv_kernel_size": 3},
        WINDOWS,
    ),
    "dflash2, from the anchor": (
        "dflash2",
        {"selector_rank": 6, "selector_top_k": 40, "conv_group_size": 1, "sample_from_anchor": True},
        {**WINDOWS, "rope_parameters": LLAMA3},
    ),
    "dflash2, one tap": (
        "dflash2",
        {"selector_rank": 6, "conv_group_size": 16, "conv_kernel_size": 1, "sliding_window_non_causal": False},
        WINDOWS,
    ),
    "xpress": ("xpress", {"xpress_rank": 8, "num_jacobi_passes": 3}, {}),
    "xpress, reduced": (
        "xpress",
        {"xpress_rank": 16, "xpress_mlp_ratio": 3, "num_jacobi_passes": 1, "draft_vocab_size": REDUCED},
        {"rope_parameters": LLAMA3},
    ),
    "xpress, from the anchor": ("xpress", {"xpress_rank": 8, "sample_from_anchor": True}, WINDOWS),
    "xpress, no passes": ("xpress", {"xpress_rank": 8, "num_jacobi_passes": 0}, {}),
}


@pytest.fixture(scope="module")
def target() -> Transformer:
    torch.manual_seed(3)
    model = Transformer(TARGET).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(4)  # so that its tokens differ from row to row
    return model


@pytest.fixture(scope="module")
def library() -> Any:
    pytest.importorskip("transformers", reason="speculators needs it")
    with without_data():
        pytest.importorskip("speculators", reason="compares with speculators where it is installed")
        from speculators.models.dflash import core
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
        from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
    kinds = {
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
        "xpress": (XPressDraftModel, XPressSpeculatorConfig),
    }
    return core, kinds


def made(library: Any, variant: str, target: Transformer, folder: Path) -> Any:
    """A model of the library with random weights, which it has saved."""
    import transformers

    kind, changes, layer_changes = VARIANTS[variant]
    model_class, config_class = library[1][kind]
    layer = transformers.Qwen3Config(
        **{**SIZES, "num_hidden_layers": 2}, tie_word_embeddings=False,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **layer_changes},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    given = {
        "draft_vocab_size": 40,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
    }
    torch.manual_seed(0)
    model = model_class(config_class(transformer_layer_config=layer, **{**given, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if name.startswith(("markov_head", "candidate_selector")) else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1))
        model.embed_tokens.weight.copy_(target.embedding)
        if model.use_draft_vocab:
            ids = torch.randperm(40)[:REDUCED].sort().values
            model.load_vocab_mappings(
                torch.zeros(40, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(REDUCED)
            )
        else:
            model.lm_head.weight.copy_(target.embedding)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def their_rows(library: Any, model: Any, features: torch.Tensor, known: int, monkeypatch: Any) -> tuple[Any, Any]:
    """Normed rows and logits of one block, after all rows of `features` ``(T, taps, hidden_size)``."""
    length = len(features)
    padded = torch.nn.functional.pad(features.flatten(1), (0, 0, 0, BLOCK + 1))[None]
    tokens = torch.full((1, length + BLOCK + 1), known)
    anchors = torch.tensor([length]), torch.tensor([True])
    monkeypatch.setattr(library[0], "select_anchors", lambda *_: anchors)
    hidden, logits, *_ = model._backbone_forward(
        padded, tokens, torch.ones_like(tokens), torch.zeros(1, length + BLOCK + 1, 32), torch.zeros_like(tokens), max_anchors=1
    )  # fmt: skip
    return hidden, logits


@torch.no_grad()
def their_scores(model: Any, hidden: torch.Tensor, logits: torch.Tensor, path: list[int], before: int) -> Any:
    """Their scores ``(vocabulary,)`` of the guess after `path`, which begins with the known token; -inf: no candidate."""
    first = 0 if model.config.sample_from_anchor else 1
    row = first + len(path) - 1
    if hasattr(model, "refiner_head"):  # the rounds of its training, in which it reads its own guesses
        refined, anchor = logits, torch.tensor([path[:1]])
        for _ in range(model.config.num_jacobi_passes):
            guesses = model._draft_to_verifier_ids(refined.argmax(-1))
            previous = torch.cat([anchor, guesses[:, :-1]], 1)
            if first:
                guesses[:, :1] = anchor
                previous = torch.cat([torch.tensor([[before]]), guesses[:, :-1]], 1)
            refined = logits + model.refiner_head.block_bias(previous, hidden)
        return refined[0, row]
    if hasattr(model, "candidate_selector"):
        place = slice(row, row + 1)
        ids, scores = model.candidate_selector.select(logits[:, place], hidden[:, place], torch.tensor([path[-1:]]))
        return torch.full((40,), -torch.inf).scatter(0, ids[0, 0], scores[0, 0])
    if model.markov_head is None:
        return logits[0, row]
    previous = [path[0]] * first + path
    previous += [0] * (BLOCK - len(previous))  # of later rows, which change nothing before them
    return (logits + model.markov_head.block_bias(prev_token_ids=torch.tensor([previous]), hidden_states=hidden))[
        0, row
    ]


def as_target_id(model: Any, draft_id: int) -> int:
    return draft_id if model.d2t is None else draft_id + int(model.d2t[draft_id])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_of_speculators(
    variant: str, library: Any, target: Transformer, tmp_path: Path, monkeypatch: Any
) -> None:
    """Logits after any token before, confidences, the greedy drafts of a text, and its tokens."""
    model = made(library, variant, target, tmp_path / "theirs")
    head = load_drafter(tmp_path / "theirs", target)
    assert isinstance(head, (DSparkHead, DFlash2Head, XPressHead))
    first, count = head.config.first, BLOCK - head.config.first
    generator = torch.Generator().manual_seed(1)
    for length in (1, 7):
        features = torch.randn(length, len(TAPS), 32, generator=generator)
        tokens = torch.randint(40, (count + 1,), generator=generator).tolist()
        hidden, logits = their_rows(library, model, features, tokens[0], monkeypatch)
        cache = head.new_cache(1, length + BLOCK)
        head.read(head.fused(features[None]), cache=cache)
        cache.commit_(torch.tensor([length]))
        rows = head(target.embed(torch.tensor([[tokens[0], *[MASK] * (BLOCK - 1)]])), cache=cache)
        torch.testing.assert_close(head.normed(rows), hidden, rtol=1e-4, atol=1e-4)
        if head.in_order:
            walk = head.walk(rows, torch.tensor([tokens[:1]]), target.embedding, torch.tensor([[7]]))
        for number in range(count):
            ours = head.logits(rows, target.embedding)[0, first + number]
            if head.in_order:
                ours = walk(number, torch.tensor([[tokens[number]]]))[0, 0]
            expected = their_scores(model, hidden, logits, tokens[: number + 1], 7)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        if isinstance(head, DSparkHead) and head.config.confidence:
            given = torch.tensor([[tokens[0]] * first + tokens[: BLOCK - first]])
            read = [hidden, model.markov_head.prev_embeddings(given)] if model.markov_head is not None else [hidden]
            with torch.no_grad():
                expected = model.confidence_head(torch.cat(read, -1))
            torch.testing.assert_close(head.confidence(rows, given), expected, rtol=1e-4, atol=1e-4)

    prompt, limit = [3, 1, 4, 1, 5], 24
    options: dict[str, Any] = {"max_new_tokens": limit, "end_tokens": ()}
    expected_tokens = generate(target, prompt, **options).tokens.tolist()
    found: Any = generate(target, prompt, "dflash", drafter=head, trace=True, **options)
    assert found.tokens.tolist() == expected_tokens
    text, differ = [*prompt, expected_tokens[0]], 0
    for step in found.stats.trace[0]:
        draft = list(step.draft)
        assert draft[0] == text[-1]
        with torch.inference_mode():
            features = target.tapped(torch.tensor([text[:-1]]), TAPS).features[0].clone()
        hidden, logits = their_rows(library, model, features.clone(), draft[0], monkeypatch)
        path = draft[:1]
        while len(path) < len(draft):
            scores = their_scores(model, hidden, logits, path, text[-2])
            path.append(as_target_id(model, int(scores.argmax())))
        assert draft == path
        plain = [as_target_id(model, int(row.argmax())) for row in logits[0, first : first + len(draft) - 1]]
        differ += plain != draft[1:]
        text += expected_tokens[len(text) - len(prompt) :][: step.accepted]
    assert len(text) == len(prompt) + limit
    matters = head.in_order and variant != "xpress, no passes"
    assert differ if matters else not differ, "the token before must matter"


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, library: Any, target: Transformer, tmp_path: Path) -> None:
    """What we write of a head has their tensors, and their config."""
    model = made(library, variant, target, tmp_path / "theirs")
    head: Any = load_drafter(tmp_path / "theirs", target)
    save_drafter(head, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    read = type(model.config).from_pretrained(tmp_path / "ours").to_dict()
    expected = model.config.to_dict()
    same = ("speculators_model_type", "transformer_layer_config", "draft_vocab_size", "block_size", "mask_token_id",
            "aux_hidden_state_layer_ids", "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
            "confidence_head_with_markov", "xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # fmt: skip
    assert {name: read.get(name) for name in same} == {name: expected.get(name) for name in same}
    again = load_drafter(tmp_path / "ours", target)
    assert again.config == head.config and type(again) is type(head)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())


BROKEN: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "another bias": ("dspark", {"markov_head_type": "lstm"}, NotImplementedError, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
    "rank": ("dspark", {"markov_rank": 7}, ValueError, r"markov_w1.weight must have shape \(40, 7\), got \(40, 8\)"),
    "negative rank": ("dspark", {"markov_rank": -1}, ValueError, "markov_rank must be an integer from 0"),
    "a confidence that reads nothing": ("dspark", {"markov_rank": 0}, ValueError, "confidence_reads_token must be False with markov_rank 0"),
    "no confidence": ("dspark", {"enable_confidence_head": False}, ValueError, "also confidence_head.proj"),
    "reduced vocabulary": ("dflash2", {"draft_vocab_size": 12}, ValueError, "draft_vocab_size must be 40, all tokens, got 12"),
    "groups": ("dflash2", {"conv_group_size": 5}, ValueError, "conv_group must divide the 32 channels, got 5"),
    "taps": ("dflash2", {"conv_kernel_size": 5}, ValueError, "conv_taps must be at most 4, got 5"),
    "candidates": ("dflash2", {"selector_top_k": 41}, ValueError, "candidates must be at most 40, all tokens, got 41"),
    "no candidates": ("dflash2", {"selector_top_k": 0}, ValueError, "selector_top_k must be an integer from 1"),
    "fields of another kind": ("dflash2", {"markov_rank": 6}, NotImplementedError, "config.json: 'markov_rank' must be absent"),
    "a field that nobody knows": ("dspark", {"markov_order": 2}, NotImplementedError, "'markov_order' must be absent: what it means is not known here, got 2"),
    "rank of a refiner": ("xpress", {"xpress_rank": 0}, ValueError, "refiner_rank must be at least 1, got 0"),
    "passes": ("xpress", {"num_jacobi_passes": -1}, ValueError, "num_jacobi_passes must be an integer from 0"),
    "another block": ("xpress", {"block_size": 7}, ValueError, r"mix_l must have shape \(8, 7, 7\), got \(8, 4, 4\)"),
    "another kind": ("dspark", {"speculators_model_type": "medusa"}, NotImplementedError, "must be one of eagle3, peagle, dflash, dspark, dflash2, xpress, got 'medusa'"),
    "a layer for multi-token prediction": ("dspark", {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}, NotImplementedError, "speculators_model_type must be one of eagle3, peagle, .*, got 'mtp'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_differs_is_named(what: str, target: Transformer, tmp_path: Path) -> None:
    variant, changes, error, words = BROKEN[what]
    save_drafter(our_head(variant, target), tmp_path / "head")
    change_config(tmp_path / "head", changes)
    with pytest.raises(error, match=words):
        load_drafter(tmp_path / "head", target)


def our_head(kind: str, target: Transformer, **changes: Any) -> Any:
    more = {"conv_group": 8} if kind == "dflash2" else {}
    return dflash_head(target, 0, TAPS, kind=kind, block_size=BLOCK, **{**more, **changes})


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("where", ["dflash_config", "outside"])
def test_a_released_checkpoint_of_dflash2(where: str, target: Transformer, tmp_path: Path) -> None:
    """As Z Lab publishes them: layers are counted from the first one's output, and there is neither embedding nor head."""
    head, folder = our_head("dflash2", target, own_head=False), tmp_path / "head"
    save_drafter(head, folder)
    written = json.loads((folder / "config.json").read_text())
    own = {name: written[name] for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
    config = {"architectures": ["DFlash2DraftModel"], **written["transformer_layer_config"], "num_target_layers": 6}
    config["dflash_config"] = {"mask_token_id": 0, "target_layer_ids": [tap - 1 for tap in TAPS], "block_size": BLOCK}
    (config["dflash_config"] if where == "dflash_config" else config).update(own)
    (folder / "config.json").write_text(json.dumps(config))
    found = load_drafter(folder, target)
    assert type(found) is DFlash2Head and found.config == head.config
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())
    for name, value in {"input_embedding_scale": 0.5, "output_multiplier": 2.0, "final_logit_softcapping": 30.0, "is_causal": True}.items():  # fmt: skip
        for part in (config, config["dflash_config"]):
            part[name] = value
            (folder / "config.json").write_text(json.dumps(config))
            with pytest.raises(NotImplementedError, match=f"{name} must be absent or .*, got {value}"):
                load_drafter(folder, target)
            del part[name]
    for part in (config, config["dflash_config"]):  # as the code of released checkpoints reads it
        part["is_causal"] = False
        (folder / "config.json").write_text(json.dumps(config))
        assert load_drafter(folder, target).config == head.config
    config["dflash_config"]["share_lm_head"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="dflash_config: 'share_lm_head' must be absent"):
        load_drafter(folder, target)
    del config["dflash_config"]["share_lm_head"]
    (folder / "config.json").write_text(json.dumps({**config, "num_target_layers": 7}))
    with pytest.raises(ValueError, match="drafter must be for 6 layers, the target's, got 7"):
        load_drafter(folder, target)


def test_a_folder_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    folder, letters = tmp_path / "head", "abcdefghijklmnopqrstuvwxyz'{}:;,.()=*#1234579"[:40]
    target: Any = Transformer(TARGET).requires_grad_(False)
    save_drafter(our_head("dspark", target), folder)

    def written(order: str) -> Path:
        tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(order)}, [])).save(
            str(folder / "tokenizer.json")
        )
        return folder

    target.tokenizer = JsonTokenizer(written(letters) / "tokenizer.json")
    load_drafter(folder, target)
    with pytest.raises(
        ValueError, match="drafter must have the target's tokenizer, got another one in its tokenizer.json"
    ):
        load_drafter(written(letters[::-1]), target)
    target.tokenizer = None  # then nothing can be compared
    load_drafter(folder, target)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_map_that_holds_no_integers_is_refused(dtype: torch.dtype, target: Transformer, tmp_path: Path) -> None:
    save_drafter(our_head("dspark", target), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    state = load_file(file)
    save_file({**state, "d2t": torch.zeros_like(state["d2t"], dtype=dtype)}, file)
    with pytest.raises(ValueError, match=f"d2t must hold integers, got {dtype}"):
        load_drafter(tmp_path / "head", target)
    largest = torch.full_like(state["d2t"], torch.iinfo(torch.int64).max)
    save_file({**state, "d2t": largest}, file)
    with pytest.raises(ValueError, match="d2t must lead to ids in 0 .. 39"):
        load_drafter(tmp_path / "head", target)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "xpress"])
def test_packed_there_and_back(kind: str, target: Transformer, tmp_path: Path) -> None:
    rank = {"dspark": {"markov_rank": 32}, "dflash2": {}, "xpress": {"refiner_rank": 32}}[kind]
    head = pd.quantize(our_head(kind, target, **rank), "q8_0", skip="down")
    save_drafter(head, tmp_path / "head")
    found: Any = load_drafter(tmp_path / "head", target)
    hidden, known = torch.randn(1, BLOCK, 32), torch.tensor([[5]])
    with torch.inference_mode():
        rows = [one.walk(hidden, known, target.embedding)(0, known) for one in (head, found)]
    assert torch.equal(*rows)
    plain = generate(target, [1, 2, 3], max_new_tokens=12, end_tokens=()).tokens
    assert torch.equal(
        generate(target, [1, 2, 3], "dflash", drafter=found, max_new_tokens=12, end_tokens=()).tokens, plain
    )


def test_what_training_does_not_compute_is_refused(target: Any) -> None:
    """Their losses have further terms, without which such a head would learn something else."""
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    for kind in ("dspark", "dflash2", "xpress"):
        head = our_head(kind, target)
        features, logits = torch.randn(1, 9, 3, 32), torch.randn(1, 9, head.config.draft_vocab_size)
        scored, anchors = torch.ones(1, 9, dtype=torch.bool), torch.tensor([2])
        with pytest.raises(
            NotImplementedError, match="dflash_loss: head must be a plain DFlashHead, got DSpark|DFlash2|XPress"
        ):
            dflash_loss(head, tokens, features, logits, scored, anchors, embedding=target.embedding)
