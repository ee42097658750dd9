"""The scripts that train tiny-trimode, tiny-jacobi, tiny-recurrent and tiny-deep, on models too small to learn anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pdkernels as pd
from pdkernels.models import ByteTokenizer, Transformer, TransformerConfig
from pdkernels.training import Chains, arithmetic, as_ids, chains

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def small() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=48,
    )
    return Transformer(config, tokenizer=ByteTokenizer(), end_tokens=ByteTokenizer.end_tokens)


def test_the_mask_token_is_one_more_id(small: Transformer) -> None:
    import train_tiny_trimode as script

    wider = script.with_mask_token(small)
    tokens = torch.tensor([[72, 101, 256, 5]])
    assert wider.mask_token == 257
    torch.testing.assert_close(wider(tokens)[..., :257], small(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("width", [4, 8])
def test_masked_positions_leave_the_prompt(width: int) -> None:
    import train_tiny_trimode as script

    generator = torch.Generator().manual_seed(1)
    kinds = set()
    for _ in range(40):
        masked, share = script.masked_positions(30, 7, width, generator)
        assert not masked[:7].any()
        assert 0 < share <= 1
        if share == 1:
            kinds.add("all")
            assert masked[7:].all()
        elif masked[7:].equal(torch.arange(7, 30) % width != 0):
            kinds.add("all but the first")
        else:
            kinds.add("by chance")
    assert kinds == {"all", "all but the first", "by chance"}


def test_answers_alone_are_the_fine_tuning_of_the_paper() -> None:
    """Section 5.2: no token of a prompt is masked, none is a label, and blocks start where decoding starts them."""
    import train_tiny_trimode as script

    whole, answers = (next(script.joint_batches(5, 1, 3, alone)) for alone in (False, True))
    problem = next(arithmetic(4))
    labels = [bytes(one.ar_labels[one.ar_samples == 0].clamp(max=255).tolist()) for one in (whole, answers)]
    assert labels[0].startswith((problem.prompt + problem.steps).encode()[1:])
    assert labels[1].startswith(problem.steps.encode())
    seen = answers.positions[answers.mask.dense()[0]]  # by the first noisy row: the prompt, and its own block
    first = len(problem.prompt)
    assert int(answers.positions[0]) == first and seen.tolist()[-first:] == list(range(first))
    assert len(seen) - first in script.WIDTHS


def test_the_rate_of_the_paper_stays_and_falls_at_the_end() -> None:
    import train_tiny_trimode as script

    rates = [script.wsd(300, 1e-5, last=0.3)(step) for step in range(301)]
    assert rates[10:241] == [1e-5] * 231 and rates[0] == pytest.approx(1e-6)
    assert rates[270] == pytest.approx(6.5e-6) and rates[300] == pytest.approx(3e-6)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_weight_decay_shrinks_what_has_no_gradient(small: Transformer) -> None:
    import training_run

    weights = list(small.parameters())
    before = [weight.detach().clone() for weight in weights]
    for optimizer in training_run.optimizers_of(small, weights, True, 0.1):
        optimizer.param_groups[0]["lr"] = 0.5
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    for weight, old in zip(weights, before):
        torch.testing.assert_close(weight.detach(), old * 0.95)


def test_a_joint_step_trains_every_weight(small: Transformer) -> None:
    import train_tiny_trimode as script

    model = script.with_mask_token(small)
    loss, facts = script.joint_step(model, next(script.joint_batches(3, 1, 0)), 1.0)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
    assert loss.item() == pytest.approx(facts["autoregressive"] + facts["masked"], rel=1e-5)


def test_masks_of_which_the_model_is_sure_hold_their_tokens(small: Transformer) -> None:
    import train_tiny_trimode as script

    model = script.with_mask_token(small)
    with torch.no_grad():  # a mask that resembles two bytes guesses one of them, here with 0.2 to 0.8
        for layer in model.layers:
            layer.output.mul_(40)
        model.embedding.mul_(20)
        model.embedding[257] = model.embedding[68:70].mean(0)
    batch = next(script.joint_batches(3, 1, 0))
    hidden = model.hidden(batch.tokens[None], positions=batch.positions, mask=batch.mask.plan())[0]
    sure = model.logits(hidden[batch.masked_rows]).softmax(-1).amax(-1)
    threshold = 0.5 + 0.5 * torch.rand((), generator=torch.Generator().manual_seed(7))
    rest = script.without_easy_masks(model, batch, torch.Generator().manual_seed(7))

    left = rest.tokens[batch.masked_rows] == script.MASK_TOKEN
    assert 0 < left.sum() < len(left)
    unambiguous = (sure - threshold).abs() > 1e-4
    assert torch.equal(left[unambiguous], (sure < threshold)[unambiguous])
    assert torch.equal(rest.tokens[batch.masked_rows[~left]], batch.masked_labels[~left])
    for name in ("masked_rows", "masked_labels", "masked_weights", "masked_samples"):
        assert torch.equal(getattr(rest, name), getattr(batch, name)[left])
    others = torch.ones(len(batch.tokens), dtype=torch.bool)
    others[batch.masked_rows] = False
    assert torch.equal(rest.tokens[others], batch.tokens[others])


def test_muon_trains_matrices_and_adamw_the_rest(small: Transformer) -> None:
    import training_run

    names = {id(parameter): name for name, parameter in small.named_parameters()}
    parameters = [parameter for name, parameter in small.named_parameters() if name != "layers.0.down"]
    adamw, muon = training_run.optimizers_of(small, parameters, True)
    trained = [{names[id(p)] for group in one.param_groups for p in group["params"]} for one in (adamw, muon)]
    matrices = {f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "output", "gate_up", "down")}
    assert trained[1] == matrices - {"layers.0.down"}
    assert trained[0] == set(names.values()) - matrices
    (alone,) = training_run.optimizers_of(small, parameters, False)
    assert len(alone.param_groups[0]["params"]) == len(parameters)


def test_muon_is_that_of_pytorch() -> None:
    """Which rounds to bfloat16: after six steps the ways they went differ by less than 2 % of their length."""
    import training_run

    drawn = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=drawn) for shape in ((40, 24), (24, 40))]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    optimizers = [
        training_run.Muon(ours),
        torch.optim.Muon(theirs, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(6):
        for a, b in zip(ours, theirs):
            a.grad = b.grad = torch.randn(a.shape, generator=drawn)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()
    for a, b, before in zip(ours, theirs, start):
        assert (a - b).norm() < 0.02 * (b - before).norm()


def test_the_drafter_learns_from_what_the_decoder_would_accept(small: Transformer) -> None:
    """Blocks that begin where a cycle of linear self-speculation begins have the same accepted prefix as there."""
    import train_tiny_trimode as script

    width = 4
    model = script.with_mask_token(small).requires_grad_(False)
    # Tied embeddings make a model repeat itself, these weights make it deviate, and a mask whose embedding is that of a byte
    # guesses that byte.
    for layer in model.layers:
        layer.output.mul_(10)
    model.embedding.mul_(20)
    model.embedding[257] = 0.9 * model.embedding[68]
    generator = torch.Generator().manual_seed(3)
    model.attach_adapter_(
        [(torch.randn(2, 32, generator=generator), torch.randn(32, 2, generator=generator)) for _ in model.layers], 0.3
    )
    prompt = torch.tensor([65, 66, 67, 68])
    result = pd.decoding.generate(
        model, prompt, "linear_self_speculation", block_size=width, max_new_tokens=60, end_tokens=(), trace=True
    )
    text, position, seen = torch.cat([prompt, result.tokens]), len(prompt), {}
    for step in result.stats.trace[0]:
        if position % width == 0 and position + width <= len(text):
            seen[position // width] = step.accepted - 1
        position += step.accepted
    assert len(seen) > 3

    _, _, accepted = script.judged_drafts(model, [(text, len(prompt))], width)
    assert {block: accepted[block - 1].item() for block in seen} == seen
    assert len(set(seen.values())) > 1


def test_windows_of_sums_begin_where_a_sum_does() -> None:
    import train_tiny_code as script

    sums = [problem.prompt + problem.steps for problem in islice(arithmetic(0), 60)]
    source = as_ids([b"x = 1\n" * 200])
    data = torch.cat([source, as_ids([text.encode() for text in sums])])
    beginnings = {tuple(text.encode()[:12]) for text in sums}
    stream = script.batches(data, len(source), 4, 64, torch.Generator().manual_seed(0))
    seen = [tuple(row[:12].tolist()) for batch in islice(stream, 30) for row in batch]
    assert set(batch.shape for batch in islice(stream, 3)) == {(4, 65)}
    of_sums = [row for row in seen if row in beginnings]
    assert len(of_sums) > 40
    # All others are source: nothing begins inside a sum.
    assert all(set(row) <= set(b"x = 1\n") for row in seen if row not in beginnings)


def test_scores_are_reported_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    import train_tiny_code
    import train_tiny_recurrent

    answers = {problem.prompt: problem.steps for problem in islice(arithmetic(0, held_out=True), 60)}
    wrong, calls, done = next(iter(answers)), [], []

    def generate(model: object, prompts: list[str], method: str, **options: object) -> SimpleNamespace:
        calls.append((method, options))
        text = ["no" if prompt == wrong else answers[prompt] for prompt in prompts]
        return SimpleNamespace(text=text, stats=SimpleNamespace(tokens=40, tokens_per_forward=2.5))

    monkeypatch.setattr(train_tiny_code, "generate", generate)
    problems = list(islice(arithmetic(0, held_out=True), 60))
    assert train_tiny_code.score(None, "jacobi", problems, done.append, block_size=8) == (59 / 60, 2.5)
    assert done == [25, 25, 10] and calls[0] == ("jacobi", {"max_new_tokens": 400, "block_size": 8})
    assert train_tiny_recurrent.solved_share(None, 2, done.append) == 0.5
    assert done[3:] == [2] and calls[-1][0] == "recurrent_static"


def test_only_what_follows_a_question_counts() -> None:
    import train_tiny_recurrent as script

    rows, counted = script.rows_of_sums(arithmetic(3), 5, 150)
    assert rows.shape == (5, 151) and counted.shape == (5, 150)
    for row, marks in zip(rows, counted, strict=True):
        text = "".join(chr(token) if token < 256 else "\0" for token in row.tolist())
        answer = "".join(letter for letter, mark in zip(text[1:], marks.tolist(), strict=True) if mark)
        assert text.index("?") < 20 and "?" not in answer and answer.count("\0") == text.count("\0")
    batch, marks = next(script.batches(2, 3, 40, 0))
    assert batch.shape == (5, 41) and marks[2:].all() and not marks[:2].all()


def test_a_recurrent_step_trains_every_weight_and_keeps_a_short_graph() -> None:
    import train_tiny_recurrent as script

    torch.manual_seed(0)
    config = replace(script.CONFIG, hidden_size=32, heads=2, head_dim=16, intermediate_size=48)
    model = script.RecurrentDepth(config)
    rows, counted = next(script.batches(2, 1, 40, 0))
    passes = []
    core = model.core
    model.core = lambda state, term, position: (passes.append(torch.is_grad_enabled()), core(state, term, position))[1]
    loss = script.loss_of(model, rows, counted, 5, 2, torch.Generator().manual_seed(0))
    loss.backward()
    assert passes == [False] * 3 + [True] * 2
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_the_shipped_model_thinks_better_when_it_thinks_longer() -> None:
    """And the sampler writes what token-by-token decoding writes."""
    model = pd.models.load("tiny-recurrent")
    short = (problem for problem in arithmetic(0, held_out=True) if len(problem.steps) < 56)
    problems = list(islice(short, 12))
    prompts = [problem.prompt for problem in problems]

    def right(method: str, **options: object) -> int:
        texts = pd.decoding.generate(model, prompts, method, max_new_tokens=56, **options).text
        return sum(problem.is_solved_by(text) for problem, text in zip(problems, texts, strict=True))

    hasty, thoughtful, sampled = (
        right("recurrent_static", recurrences=1),
        right("recurrent_static"),
        right("recurrent_diffusion"),
    )
    assert hasty <= 3 and thoughtful >= 8 and abs(sampled - thoughtful) <= 1


def small_deep(script: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return script.RecurrentDepth(replace(script.CONFIG, hidden_size=32, heads=2, head_dim=16, intermediate_size=48))


def test_rows_follow_a_link_with_each_recurrence() -> None:
    import train_tiny_deep as script

    rows = script.targets_of(Chains("", ("abc", "cc")), 4)
    assert [bytes(row[:-1]) for row in rows] == [b"ac", b"bc", b"cc", b"cc"] and {row[-1] for row in rows} == {256}
    for batch in islice(script.batches(3, 4, 0), 12):
        steps, asked = len(batch.targets), batch.inputs.shape[1]
        assert batch.targets.shape == (steps, 3, asked + 1) and batch.prompts.shape[0] == 3 and steps >= 2
        assert batch.prompts[:, -asked - 1 : -1].equal(batch.targets[0, :, :-1]), (
            "the first recurrence recalls the question"
        )


def test_nothing_counts_after_a_wrong_name() -> None:
    import train_tiny_deep as script

    targets = torch.tensor([1, 2, 3])[:, None, None]
    logits = torch.full((3, 1, 1, 4), 0.0)
    logits[0, ..., 1] = logits[1, ..., 3] = logits[2, ..., 3] = 5.0  # right, wrong, right but too late
    loss, right = script.loss_of(logits, targets)
    expected = torch.nn.functional.cross_entropy(logits[:2, 0, 0], targets[:2, 0, 0])
    assert right == 0.5 and loss == pytest.approx(expected.item())


def test_a_deep_step_is_decoding_with_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in the cache after its own recurrences, then the rows of answers after theirs."""
    import train_tiny_deep as script

    model, generator = small_deep(script), torch.Generator().manual_seed(0)
    batch = next(script.batches(2, 1, 1))._replace(prompt_recurrences=3)
    loss, _ = script.loss_of(script.logits_of(model, batch, generator), batch.targets)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())

    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda state, **given: state.zero_())
    logits = script.logits_of(model, batch, generator)
    cache = model.new_cache(2, batch.prompts.shape[1] + batch.inputs.shape[1])
    model(batch.prompts[:, :-1], cache=cache, recurrences=3, init_scale=0.0)
    cache.commit_(torch.full((2,), batch.prompts.shape[1] - 1))
    rows = torch.cat([batch.prompts[:, -1:], batch.inputs], 1)
    expected = model(rows, cache=cache, recurrences=len(batch.targets), init_scale=0.0)
    torch.testing.assert_close(logits[-1], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_shipped_model_of_chains_needs_its_recurrences() -> None:
    """One for each link; and the sampler works on many answers at once."""
    model = pd.models.load("tiny-deep")
    asked = list(islice(chains(0, held_out=True, hops=(18, 20)), 6))
    prompts = [one.prompt for one in asked]

    def right(method: str, **options: object) -> tuple[int, pd.decoding.DecodeResult]:
        found = pd.decoding.generate(model, prompts, method, max_new_tokens=48, **options)
        return sum(one.is_solved_by(text) for one, text in zip(asked, found.text, strict=True)), found

    assert right("recurrent_static", recurrences=4)[0] == right("recurrent_static", recurrences=12)[0] == 0
    assert right("recurrent_static", recurrences=22)[0] >= 5
    count, found = right("recurrent_diffusion", trace=True)
    widths = [len(step.tokens) for steps in found.stats.trace for step in steps]
    assert count >= 5 and sum(widths) > 5 * len(widths)
