"""Forwards of drafters and steps without a draft as ops: the bits, the drafts and the tokens that they have part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdkernels import _native
from pdkernels.decoding import generate
from pdkernels.decoding.causal import _features
from pdkernels.decoding.causal import eagle as eagle_steps
from pdkernels.decoding.costs import StepCosts
from pdkernels.generation.session import inference
from pdkernels.models import (
    DFlashConfig,
    DFlashHead,
    EagleConfig,
    EagleHead,
    MtpConfig,
    MtpHead,
    Transformer,
    TransformerConfig,
)
from pdkernels.models.architectures import greedy_steps
from pdkernels.models.architectures.windows import Window
from pdkernels.models.drafters import chain
from tests.models.test_whole_step import both, count_runs

pytestmark = pytest.mark.skipif(not _native.has_native(), reason="needs the compiled ops")

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
TARGET = TransformerConfig(layers=3, max_positions=128, **SIZES)
EAGLES = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True, "own_embedding": False},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
]


def target(dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(5)
    return Transformer(TARGET).to(dtype).requires_grad_(False).eval()


def body(layers: int, **options: Any) -> TransformerConfig:
    return TransformerConfig(layers=layers, max_positions=128, **(SIZES | options))


def eagle(model: Transformer, layers: int = 1, biased: bool = False, **options: Any) -> EagleHead:
    torch.manual_seed(6)
    of = body(layers, qkv_bias=biased, output_bias=biased)
    head = EagleHead(EagleConfig(of, taps=(0, 2, 3), draft_vocab_size=20, target_hidden_size=32, **options))
    head.vocabulary.copy_(torch.randperm(48)[:20].sort().values)
    return head.to(model.dtype).requires_grad_(False).eval()


def mtp(model: Transformer, hidden_first: bool = False) -> MtpHead:
    torch.manual_seed(7)
    head = MtpHead(MtpConfig(TARGET, hidden_first=hidden_first))
    for name, parameter in head.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, torch.Generator().manual_seed(len(name)))
    return head.to(model.dtype).requires_grad_(False).eval()


def dflash(model: Transformer, whole_blocks: bool = False, **options: Any) -> DFlashHead:
    torch.manual_seed(8)
    of, sizes = body(2, qk_norm=True, **options), {"block_size": 4, "mask_token": 0, "draft_vocab_size": 20}
    config = DFlashConfig(of, taps=(1, 3), whole_blocks=whole_blocks, **sizes)
    return DFlashHead(config).to(model.dtype).requires_grad_(False).eval()


def forwards(model: Transformer, head: Any) -> list[torch.Tensor]:
    """The features of two prompts, the drafter's rows of them, and those of one more row, of one sequence alone."""
    tokens = torch.arange(12).view(2, 6) * 3 % 48
    cache, own = model.new_cache(2, 16), head.new_cache(2, 16)
    hidden, taps = model.tapped(tokens, head.config.taps, cache=cache, counts=torch.tensor([6, 4]))
    features = head.fused(taps)
    if isinstance(head, DFlashHead):
        head.read(features, cache=own, counts=torch.tensor([6, 4]))
        own.commit_(torch.tensor([6, 4]))
        return [hidden, taps, head(model.embed(tokens[:, :4]), cache=own)]
    rows = head(model.embed(tokens), features, cache=own, counts=torch.tensor([6, 4]))
    own.commit_(torch.tensor([6, 4]))
    more = head(model.embed(tokens[:, :1]), rows[:, 3:4], cache=own, counts=torch.tensor([1, 0]))
    kept = [own.k[:, row, :length].clone() for row, length in enumerate((7, 4))]
    return [hidden, taps, rows[:1], rows[1:, :4], more, *kept]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [None, "q8_0"])
@pytest.mark.parametrize("options", EAGLES, ids=str)
def test_eagle_has_the_bits_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], packed: str | None, dtype: torch.dtype
) -> None:
    model = target(dtype)
    for layers in (1, 2):
        head = eagle(model, layers, biased=layers == 2, **options)
        head = head if packed is None else head.quantized(packed)
        runs = count_runs(monkeypatch)
        with inference():
            both(monkeypatch, lambda head=head: forwards(model, head))  # type: ignore[misc]
        assert len(runs) == 3


@pytest.mark.parametrize("packed", [None, "q8_0", "q4_0"])
@pytest.mark.parametrize("hidden_first", [False, True])
def test_mtp_has_the_bits_of_its_parts(monkeypatch: pytest.MonkeyPatch, hidden_first: bool, packed: str | None) -> None:
    model = target()
    head, runs = mtp(model, hidden_first), count_runs(monkeypatch)
    head = head if packed is None else head.quantized(packed)
    with inference():
        both(monkeypatch, lambda: forwards(model, head))
    assert len(runs) == 3


@pytest.mark.parametrize("windows", [(), (None, Window(2)), (Window(3), Window(3))], ids=str)
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_dflash_has_the_bits_of_its_parts(monkeypatch: pytest.MonkeyPatch, whole_blocks: bool, windows: Any) -> None:
    """Rows of layers with windows that do not see their whole block have a plan of their own."""
    model = target(torch.bfloat16)
    head, runs = dflash(model, whole_blocks, windows=windows), count_runs(monkeypatch)
    with inference():
        both(monkeypatch, lambda: forwards(model, head))
    assert len(runs) == 1 + (whole_blocks or not windows)


def test_taps_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = target(), torch.arange(10).view(2, 5)

    def tapped(**options: Any) -> list[torch.Tensor]:
        cache = model.new_cache(2, 16)
        return [*model.tapped(tokens, [3, 0, 2, 2], cache=cache, **options), cache.k.clone()]

    runs = count_runs(monkeypatch)
    with inference():
        both(monkeypatch, tapped)
        both(monkeypatch, lambda: tapped(positions=torch.tensor([0, 1, 1, 2, 2])))
        assert len(runs) == 2
        hidden, features = tapped()[:2]
        assert torch.equal(features[:, :, 0], hidden) and torch.equal(features[:, :, 1], model.embed(tokens))


def chain_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The guesses of every chain that ran as an op."""
    counted, op = [], chain._run

    def run(*arguments: Any) -> Any:
        found = op(*arguments)
        counted.append(found.shape[1])
        return found

    monkeypatch.setattr(chain, "_run", run)
    return counted


PROMPTS = [[3, 9, 27, 33], [5, 1], [7, 7, 7, 2, 40, 12]]


def drafted(model: Transformer, method: str, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    """Tokens and drafts."""
    prompts = [prompts] if isinstance(prompts[0], int) else prompts
    found = generate(model, prompts, method, max_new_tokens=24, trace=True, **options)
    traces = found.stats.trace
    assert traces is not None
    drafts = [[(step.draft, step.accepted) for step in steps] for steps in traces]
    return list(zip([one.tolist() for one in found.tokens], drafts, strict=True))


@pytest.mark.parametrize("kind", ["eagle", "eagle, own rows normed", "mtp", "eagle, packed", "eagle, bfloat16"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_chain_drafts_what_single_forwards_draft(monkeypatch: pytest.MonkeyPatch, kind: str, batched: bool) -> None:
    model = target(torch.bfloat16 if "bfloat16" in kind else torch.float32)
    if kind == "mtp":
        head: Any = mtp(model)
    else:
        head = eagle(model, **({"norm_output": True, "own_embedding": False} if "own rows" in kind else {}))
        head = head.quantized("q8_0") if "packed" in kind else head
    prompts = PROMPTS if batched else PROMPTS[0]
    options = {"drafter": head, "block_size": 5}
    chains = chain_runs(monkeypatch)
    found = drafted(model, head.method, prompts, **options)
    assert chains
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    ran = len(chains)
    assert drafted(model, head.method, prompts, **options) == found and len(chains) == ran


@pytest.mark.parametrize("why", ["draws", "hook", "method", "class"])
def test_what_draws_or_was_changed_is_no_chain(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    model, chains = target(), chain_runs(monkeypatch)
    head = eagle(model)
    drawn = {"temperature": 1.0, "seed": 3} if why == "draws" else {}
    if why == "hook":
        head.register_forward_hook(lambda module, given, rows: -rows)
    elif why == "method":
        head.logits = lambda hidden: -EagleHead.logits(head, hidden)  # type: ignore[method-assign]
    elif why == "class":
        head.__class__ = type("Mine", (EagleHead,), {"logits": lambda self, hidden: -EagleHead.logits(self, hidden)})
    found = drafted(model, "eagle", PROMPTS[0], drafter=head, block_size=4, **drawn)
    assert not chains
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert drafted(model, "eagle", PROMPTS[0], drafter=head, block_size=4, **drawn) == found


def test_a_chain_without_a_choice_goes_on_guess_by_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a smaller model has read is then as if it had never begun."""
    model, run, failed = target(), greedy_steps.GreedySteps.run, []

    def without_choice(self: Any, steps: int) -> Any:
        entries = run(self, steps)
        if entries is not None and steps > 1:
            entries[-1][0][1] = -1
            failed.append(1)
        return entries

    options = {"drafter": target(), "block_size": 5}
    expected = drafted(model, "draft_model", **options)
    monkeypatch.setattr(greedy_steps.GreedySteps, "run", without_choice)
    assert drafted(model, "draft_model", **options) == expected and failed


def test_a_changed_drafter_or_target_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    head = eagle(model, own_embedding=False)
    first = drafted(model, "eagle", PROMPTS[0], drafter=head, block_size=5)
    with torch.no_grad():
        head.head = torch.nn.Parameter(head.head.flip(0), requires_grad=False)  # type: ignore[union-attr]
        model.embedding.data = model.embedding.flip(0).contiguous()  # type: ignore[union-attr, assignment]
    found = drafted(model, "eagle", PROMPTS[0], drafter=head, block_size=5)
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert found == drafted(model, "eagle", PROMPTS[0], drafter=head, block_size=5) != first


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {"block_size": "auto"}),
        ("dflash", {"block_size": "auto"}),
        ("jacobi", {"draft": "lookup", "block_size": "auto"}),
        ("suffix", {"block_size": "auto"}),
        ("draft_model", {"block_size": "auto"}),
        ("draft_model", {"block_size": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("listens", [False, True])
def test_steps_without_a_draft_are_one_op(
    monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], listens: bool
) -> None:
    model, counted, steps = target(), [], greedy_steps._run

    def run(*arguments: Any) -> Any:
        entries = steps(*arguments)
        counted.append(len(entries))
        return entries

    monkeypatch.setattr(greedy_steps, "_run", run)
    if method in ("eagle", "dflash"):
        options = options | {"drafter": eagle(model) if method == "eagle" else dflash(model)}
    elif method == "draft_model":
        options = options | {"drafter": target()}
        torch.nn.init.normal_(options["drafter"].layers[1].down, std=0.3)
    expected = [generate(model, prompt, "autoregressive", max_new_tokens=24).tokens.tolist() for prompt in PROMPTS]
    for prompts in (PROMPTS[:1], PROMPTS):
        counted.clear()
        heard: list[Any] = []
        callback = {"on_tokens": lambda *event, heard=heard: heard.append(event)} if listens else {}
        found = generate(model, prompts, method, max_new_tokens=24, **options, **callback)
        assert [one.tolist() for one in found.tokens] == expected[: len(prompts)]
        assert sum(counted) > 0 and listens == bool(heard)


@pytest.mark.parametrize("accepting", [False, True])
def test_a_pause_is_counted_as_its_steps_are(monkeypatch: pytest.MonkeyPatch, accepting: bool) -> None:
    """Several steps at a time choose the drafts that step by step chooses."""
    model = target()
    head = eagle(model)
    if accepting:  # one that says what it is told
        torch.nn.init.zeros_(head.layers[0].output)
    for name, costs in (
        ("step_costs", StepCosts.of_rows([1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14])),
        ("draft_seconds", 0.05),
        ("guess_seconds", 0.05),
    ):
        monkeypatch.setattr(eagle_steps, name, lambda *sizes, costs=costs: costs)
    options = {"drafter": head, "block_size": "auto"}
    many = [drafted(model, "eagle", prompt, **options) for prompt in PROMPTS]
    assert {len(draft) for one in many for draft, _ in one[0][1]} > {1}
    monkeypatch.setattr(_features, "UNWATCHED", 1)
    assert [drafted(model, "eagle", prompt, **options) for prompt in PROMPTS] == many
    monkeypatch.setenv("PDKERNELS_WHOLE_STEP", "0")
    assert [drafted(model, "eagle", prompt, **options) for prompt in PROMPTS] == many
