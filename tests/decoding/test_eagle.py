"""EAGLE-3: the drafts and the steps of its plain form, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels.decoding import generate
from pdkernels.generation.noise import OWN
from pdkernels.generation.sampler import Sampler
from pdkernels.models import Transformer, TransformerConfig
from pdkernels.reference.eagle import eagle as plain
from pdkernels.reference.eagle import eagle_tree as plain_tree
from pdkernels.reference.sampling import uniforms
from tests.support.drafters import eagle_head, small_drafter
from tests.support.tri_mode import small_transformer

PROMPTS = [[3, 1, 4, 1, 5], [4], [2, 0]]
LIMIT = 10
VOCABULARY = 6  # so few that random drafts are often right


def a_model(seed: int = 0, layers: int = 4) -> Transformer:
    config = TransformerConfig(
        vocab_size=VOCABULARY, hidden_size=32, layers=layers, heads=2, kv_heads=1, head_dim=16, intermediate_size=24
    )
    torch.manual_seed(seed)
    model = Transformer(config).double()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 12
    return model.requires_grad_(False).eval()


def a_head(model: Any, seed: int = 0, **changes: Any) -> Any:
    return eagle_head(model, seed, (1, 2, 4), **changes)


class Plain:
    """The parts of a model and a head for the plain form, by forwards over whole texts."""

    def __init__(self, model: Any, head: Any, temperature: float, seed: int, banned: tuple[int, ...] = ()) -> None:
        self.model, self.head, self.sampler = model, head, Sampler(temperature)
        self.seeds, self.banned = torch.tensor([seed]), banned

    def logits(self, text: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(text[None])[0]
        return logits

    def features(self, text: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.head.fused(self.model.tapped(text[None], self.head.config.taps).features)[0]
        return fused

    def rows(self, tokens: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        embed = self.model.embed if self.head.embedding is None else self.head.embed
        cache = self.head.new_cache(1, len(tokens))
        found: torch.Tensor = self.head(embed(tokens[None]), read[None], cache=cache)[0]
        return found

    def guess(self, row: torch.Tensor, position: int) -> int:
        logits = self.head.logits(row[None, None])
        whole = logits.new_full((1, 1, self.model.config.vocab_size), -torch.inf)
        whole[..., self.head.vocabulary] = logits
        return self.draw(whole[0, 0], position)

    def guesses(self, row: torch.Tensor, position: int) -> list[tuple[int, float]]:
        """The head's best tokens, with the noise of their draws in their logits."""
        logits, ids = self.head.logits(row[None])[0].double(), self.head.vocabulary
        if self.sampler.temperature > 0:
            words = uniforms(self.seeds, OWN, torch.tensor(position), ids)
            logits = logits / self.sampler.temperature - (-words.log()).log()
        shares = logits.float().log_softmax(-1)
        order = sorted(range(len(ids)), key=lambda number: -float(shares[number]))[: self.branches]
        return [(int(ids[number]), float(shares[number])) for number in order]

    def draw(self, row: torch.Tensor, position: int) -> int:
        places = torch.tensor([[position]])
        return int(self.sampler.sample(row[None, None], places, self.seeds, OWN, self.banned))

    def run(self, prompt: list[int], limit: int, size: int, ends: tuple[int, ...] = ()) -> Any:
        with torch.inference_mode():
            parts = self.logits, self.features, self.rows, self.guess, self.draw
            return plain(*parts, prompt, limit, size, ends)

    def run_trees(
        self, prompt: list[int], limit: int, size: int, branches: int, nodes: int, ends: tuple[int, ...] = ()
    ) -> Any:
        self.branches = branches
        with torch.inference_mode():
            parts = self.logits, self.features, self.rows, self.guesses, self.draw
            return plain_tree(*parts, prompt, limit, size, branches, nodes, ends)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own embedding": {"own_embedding": True},
    "normed": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "whole vocabulary": {"draft_vocab_size": VOCABULARY, "norm_before_fc": True},
}


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_steps_of_the_plain_form(variant: str, temperature: float) -> None:
    several = 0
    for seed, size in ((0, 4), (1, 2), (3, 1)):
        model = a_model(seed)
        head = a_head(model, seed, **VARIANTS[variant])
        for prompt in PROMPTS:
            expected = Plain(model, head, temperature, seed).run(prompt, LIMIT, size)
            options = {"block_size": size, "temperature": temperature, "seed": seed, "end_tokens": (), "drafter": head}
            found = generate(model, prompt, "eagle", max_new_tokens=LIMIT, trace=True, **options)
            assert found.tokens.tolist() == expected.tokens and found.stats.accepted[0] == expected.accepted
            assert [list(step.draft) for step in found.stats.trace[0]] == expected.drafts
            several += sum(count > 1 for count in expected.accepted)
    assert several


@torch.inference_mode()
def plain_together(
    model: Any, head: Any, prompt: list[int], size: int, temperature: float, seed: int
) -> tuple[list[int], Any]:
    """Tokens, and the draft and what was accepted of every step of a P-EAGLE head, by forwards over whole texts."""
    one = Plain(model, head, temperature, seed)
    text, steps = [*prompt], []
    text.append(one.draw(one.logits(torch.tensor(text))[-1], len(text)))
    while len(text) < len(prompt) + LIMIT:
        width = min(size, len(prompt) + LIMIT - len(text))
        masks = max(0, width - 2)
        read = torch.cat([one.features(torch.tensor(text[:-1])), head.masks()[0].expand(masks, -1)])
        rows = one.rows(torch.tensor([*text[1:], *[head.config.mask_token] * masks]), read)[len(text) - 2 :]
        draft = [text[-1], *(one.guess(rows[n], len(text) + n) for n in range(width - 1))]
        told = one.logits(torch.tensor([*text[:-1], *draft]))[len(text) - 1 :]
        drawn = [one.draw(row, len(text) + n) for n, row in enumerate(told)]
        accepted = 1
        while accepted < width and draft[accepted] == drawn[accepted - 1]:
            accepted += 1
        steps.append((draft, accepted))
        text += drawn[:accepted]
    return text[len(prompt) :], steps


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_steps_of_the_plain_form_of_parallel_heads(size: int, temperature: float) -> None:
    seed, several = 4, 0
    model = a_model(seed)
    head = a_head(model, seed, mask_token=1, norm_before_fc=size == 3)
    head.mask_hidden.data *= 3
    options = {"block_size": size, "temperature": temperature, "end_tokens": (), "drafter": head, "trace": True}
    options |= {"max_new_tokens": LIMIT}
    together = generate(model, PROMPTS, "eagle", **options, seed=[seed] * len(PROMPTS))
    for number, prompt in enumerate(PROMPTS):
        tokens, steps = plain_together(model, head, prompt, size, temperature, seed)
        found = generate(model, prompt, "eagle", seed=seed, **options)
        assert found.tokens.tolist() == together.tokens[number].tolist() == tokens
        assert found.stats.accepted[0] == together.stats.accepted[number]
        assert [(list(step.draft), step.accepted) for step in found.stats.trace[0]] == steps
        several += sum(accepted > 1 for _, accepted in steps)
    assert several
    with pytest.raises(
        ValueError, match="a P-EAGLE head makes all guesses at once, so it drafts chains alone. Pass branches=1"
    ):
        generate(model, [1], "eagle", branches=2, drafter=head, max_new_tokens=4)


def test_parallel_heads_choose_their_lengths_and_are_lossless() -> None:
    model = a_model().float()
    head = a_head(model, mask_token=1)
    expected = generate(model, PROMPTS, max_new_tokens=30, end_tokens=()).tokens
    for size in ("auto", 5):
        found = generate(
            model, PROMPTS, "eagle", max_new_tokens=30, end_tokens=(), block_size=size, drafter=head
        ).tokens
        assert all(map(torch.equal, found, expected))


TREES = [(4, 2, 6), (6, 3, 12), (2, 4, 4), (4, 2, 4), (6, 3, 4)]  # of the last two a path may take every node


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("size", "branches", "nodes"), TREES)
def test_the_steps_of_the_plain_form_of_trees(size: int, branches: int, nodes: int, temperature: float) -> None:
    off_the_chain = 0
    for seed in range(2):
        model = a_model(seed)
        head = a_head(model, seed, **list(VARIANTS.values())[seed])
        options = {"branches": branches, "nodes": nodes, "block_size": size, "temperature": temperature, "seed": seed}
        options |= {"end_tokens": (), "drafter": head, "trace": True, "max_new_tokens": LIMIT}
        together = generate(model, PROMPTS, "eagle", **{**options, "seed": [seed] * len(PROMPTS)})
        for number, prompt in enumerate(PROMPTS[:2]):
            expected = Plain(model, head, temperature, seed).run_trees(prompt, LIMIT, size, branches, nodes)
            alone = generate(model, prompt, "eagle", **options)
            assert alone.tokens.tolist() == together.tokens[number].tolist() == expected.tokens
            assert alone.stats.accepted[0] == together.stats.accepted[number] == expected.accepted
            assert [list(step.draft) for step in alone.stats.trace[0]] == expected.drafts
            chain = Plain(model, head, temperature, seed).run(prompt, LIMIT, size)
            off_the_chain += expected.accepted != chain.accepted
    assert off_the_chain >= 1


def test_end_tokens_in_trees() -> None:
    ended = 0
    for seed in range(2):
        model = a_model(seed)
        head = a_head(model, seed)
        for end in set(generate(model, PROMPTS[0], max_new_tokens=LIMIT, end_tokens=()).tokens.tolist()):
            expected = Plain(model, head, 0.0, seed).run_trees(PROMPTS[0], LIMIT, 5, 3, 9, (end,))
            options = {"block_size": 5, "branches": 3, "nodes": 9, "drafter": head, "end_tokens": (end,)}
            found = generate(model, PROMPTS[0], "eagle", max_new_tokens=LIMIT, **options)
            assert found.tokens.tolist() == expected.tokens and found.stats.accepted[0] == expected.accepted
            ended += len(expected.tokens) < LIMIT
    assert ended > 3


def test_end_tokens_in_drafts() -> None:
    ended = 0
    for seed in range(6):
        model = a_model(seed)
        head = a_head(model, seed)
        free = generate(model, PROMPTS[0], max_new_tokens=LIMIT, end_tokens=()).tokens.tolist()
        for end in set(free):
            expected = Plain(model, head, 0.0, seed).run(PROMPTS[0], LIMIT, 5, (end,))
            found = generate(
                model, PROMPTS[0], "eagle", max_new_tokens=LIMIT, end_tokens=(end,), block_size=5, drafter=head
            )
            assert found.tokens.tolist() == expected.tokens and found.stats.accepted[0] == expected.accepted
            ended += len(expected.tokens) < LIMIT
    assert ended > 3


def test_a_head_that_knows_the_model_is_accepted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    head = a_head(model, draft_vocab_size=VOCABULARY)
    greedy = generate(model, PROMPTS[0], max_new_tokens=21, end_tokens=()).tokens.tolist()
    known = [*PROMPTS[0], *greedy]

    def guess(self: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[known[int(position)] for position in positions[0]]])

    monkeypatch.setattr("pdkernels.decoding.causal.eagle.EagleSteps._guess", guess)
    found = generate(model, PROMPTS[0], "eagle", max_new_tokens=21, end_tokens=(), block_size=5, drafter=head)
    assert found.tokens.tolist() == greedy and found.stats.accepted[0] == [5, 5, 5, 5] and found.stats.forwards == 5


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [None, 3])
def test_lossless_in_every_dtype(dtype: torch.dtype, page_size: int | None) -> None:
    for seed in range(2):
        model = a_model(seed).to(dtype)
        head = a_head(model, seed)
        for drawn in ({}, {"temperature": 0.9, "seed": seed, "top_k": 6, "top_p": 0.9}):
            expected = generate(model, PROMPTS, max_new_tokens=20, end_tokens=(), **drawn).tokens
            for size, tree in ((2, {}), (6, {}), (3, {"branches": 2}), (6, {"branches": 3, "nodes": 15})):
                options = {"block_size": size, "drafter": head, "page_size": page_size, **tree, **drawn}
                found = generate(model, PROMPTS, "eagle", max_new_tokens=20, end_tokens=(), **options).tokens
                assert all(map(torch.equal, found, expected))


def test_wrapped_models() -> None:
    transformers = pytest.importorskip("transformers", reason="wraps a model of transformers")
    from pdkernels.integrations.transformers import wrap

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=24, initializer_range=0.3,
    )  # fmt: skip
    model = wrap(transformers.LlamaForCausalLM(config).eval())
    head = eagle_head(model, 0, (1, 2, 3))
    expected = generate(model, PROMPTS, max_new_tokens=20, end_tokens=()).tokens
    found = generate(model, PROMPTS, "eagle", max_new_tokens=20, end_tokens=(), drafter=head).tokens
    assert all(map(torch.equal, found, expected))


def test_packed_heads() -> None:
    model = a_model().float()
    head = a_head(model).quantized("int8", group=32)
    expected = generate(model, PROMPTS, max_new_tokens=20, end_tokens=()).tokens
    found = generate(model, PROMPTS, "eagle", max_new_tokens=20, end_tokens=(), drafter=head)
    assert all(map(torch.equal, found.tokens, expected))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_mask_token_is_not_emitted(temperature: float) -> None:
    model = a_model()
    model.mask_token = int(generate(model, [3], max_new_tokens=1, end_tokens=()).tokens)
    head = a_head(model)
    for allowed in (False, True):
        options = {"temperature": temperature, "allow_mask_token": allowed, "end_tokens": (), "max_new_tokens": 20}
        expected = generate(model, [3], **options).tokens.tolist()
        assert generate(model, [3], "eagle", drafter=head, **options).tokens.tolist() == expected
        assert temperature > 0 or (model.mask_token in expected) == allowed


def test_rows_that_wait_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a draft costs no forward of the head: its rows wait, and are in the head's cache when it drafts again."""
    from pdkernels.decoding.causal.eagle import EagleSteps
    from pdkernels.decoding.steps.contract import next_entry
    from pdkernels.generation.session import Session, inference

    model = a_model()
    head, read = a_head(model, draft_vocab_size=VOCABULARY), []
    whole = EagleSteps._read

    def counted(self: Any) -> torch.Tensor:
        read.append(self.fresh.tolist())
        return whole(self)

    monkeypatch.setattr(EagleSteps, "_read", counted)

    def steps_with(widths: list[int]) -> EagleSteps:
        with inference():
            session = Session(model, PROMPTS, 40, (), None, False)
            steps = EagleSteps(session, block_size=4, drafter=head)
            steps.start(session)
            for width in widths:
                steps.entry.pending.clamp_(max=width)
                next_entry(steps, steps.entry.rows())
        return steps

    waiting = steps_with([1] * 5)
    assert read == [] and waiting.fresh.tolist() == [6, 6, 6]
    waiting = steps_with([1] * 5 + [4])
    assert read == [[6, 6, 6]]
    length = waiting.drafted.lengths.tolist()
    reading = steps_with([1, 1])
    with inference():
        reading._read()
        for _ in range(3):
            reading.entry.pending.clamp_(max=1)
            next_entry(reading, reading.entry.rows())
            reading._read()
    assert reading.drafted.lengths.tolist() == length
    for row, rows in enumerate(length):
        for ours, theirs in zip(waiting.drafted.row(row, rows), reading.drafted.row(row, rows), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    read.clear()
    steps_with([1] * 24)
    assert len(read) == 1 and read[0] == [20, 20, 20]  # all that there is room for


@pytest.mark.parametrize(
    ("drafter", "kind", "words"),
    [
        ("none", TypeError, "got 'eagle', which requires drafter"),
        ("a model", TypeError, "pdkernels.decoding.eagle: drafter must be an EagleHead, got Transformer"),
        ("hidden size", ValueError, "drafter must be for a hidden size of 32, the model's, got 16"),
        ("vocabulary", ValueError, "drafter must be for 6 tokens, the model's, got 13"),
        ("layers", ValueError, r"drafter must read layers in 0 .. 4, the model's, got 6"),
    ],
)
def test_what_is_refused(drafter: str, kind: type[Exception], words: str) -> None:
    model, other = a_model(), small_transformer(0)
    given: dict[str, Any] = {
        "none": None,
        "a model": small_drafter(model),
        "hidden size": eagle_head(model, target_hidden_size=16, own_embedding=True),
        "vocabulary": eagle_head(other),
        "layers": eagle_head(a_model(layers=6)),
    }
    with pytest.raises(kind, match=words):
        generate(model, [1], "eagle", max_new_tokens=4, drafter=given[drafter])


def test_models_without_hidden_states_are_refused() -> None:
    from tests.support.causal import SCRIPTS, FakeModel

    with pytest.raises(TypeError, match=r"model must have the member `config.hidden_size`"):
        generate(FakeModel(SCRIPTS["sticky"]), [1], "eagle", max_new_tokens=4, drafter=eagle_head(a_model()))
