"""Lengths of drafts that pay: the tokens stay, the cost never exceeds that of decoding token by token, and good drafts become long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pdkernels as pd
from pdkernels.decoding import generate
from pdkernels.decoding.costs import StepCosts
from pdkernels.decoding.steps.lengths import SLACK, Lengths
from pdkernels.generation import row_times
from pdkernels.generation.row_times import fit_row_times
from pdkernels.models import from_callable
from tests.support.drafters import with_drafters
from tests.support.tri_mode import small_transformer

CREDIT = StepCosts.of_rows([1.0]).credit
# Of 1, 2, .. rows: as on a CPU, where every row costs; as on a GPU, where the first ones are free; nothing is worth a row.
TABLES = {"cpu": [1 + 0.25 * n for n in range(16)], "gpu": [1.0] * 16, "dear": [1.0 + n for n in range(16)]}


class Times:
    """A table in place of a measurement."""

    sequence = 0.0

    def __init__(self, costs: Sequence[float], packing: float = 0.0) -> None:
        self.costs, self.packing = costs, packing

    def between(self, rows: int) -> float:
        """The last rows cost alike."""
        more = max(0, rows - len(self.costs))
        return self.costs[rows - 1 - more] + more * (self.costs[-1] - self.costs[-2])


@pytest.fixture(params=TABLES)
def costs(request: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = TABLES[request.param]
    monkeypatch.setattr("pdkernels.decoding.costs.kept_row_times", lambda model: Times(found))
    monkeypatch.setattr("pdkernels.decoding.causal.eagle.guess_seconds", lambda drafter, batch: 0.05)
    monkeypatch.setattr("pdkernels.decoding.causal.eagle.draft_seconds", lambda drafter, rows: 0.05)
    monkeypatch.setattr("pdkernels.decoding.causal.draft_model.guess_seconds", lambda drafter, batch: 0.05)
    monkeypatch.setattr("pdkernels.decoding.causal.dflash.draft_seconds", lambda drafter, rows: 0.05)
    return found


METHODS: dict[str, dict[str, Any]] = {
    "jacobi": {},
    "lookup": {"draft": "lookup"},
    "suffix": {},
    "draft_model": {},
    "eagle": {},
    "dflash": {},
    "mtp": {},
}


def spent(
    accepted: list[int], rows: list[int], costs: Sequence[float], guess: float, draft: float = 0.0
) -> tuple[float, float]:
    """The cost of the steps, and that of decoding the same tokens one by one."""
    steps = (costs[count - 1] + guess * (count - 1) + draft * (count > 1) for count in rows)
    return sum(steps), sum(accepted) * costs[0]


@pytest.mark.covering
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_tokens_stay_and_cost_is_bounded(name: str, temperature: float, costs: list[float]) -> None:
    method, guess = ("jacobi" if name == "lookup" else name), 0.05 if name in ("draft_model", "eagle", "mtp") else 0.0
    model = with_drafters(small_transformer(1, 40, head_dim=16).float())
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 2, 6, 2]]
    drawn = {"temperature": temperature, "seed": 2, "max_new_tokens": 80, "end_tokens": ()}
    expected = generate(model, prompts, **drawn)
    for page_size in (None, 7):
        options = {"block_size": "auto", "page_size": page_size, **METHODS[name]}
        found = generate(model, prompts, method, trace=True, **options, **drawn)
        assert all(map(torch.equal, found.tokens, expected.tokens))
    for prompt in prompts:
        found = generate(model, prompt, method, trace=True, **options, **drawn)
        rows = [len(step.draft) for step in found.stats.trace[0]]
        cost, plain = spent(found.stats.accepted[0], rows, costs, guess, 0.05 * (name == "dflash"))
        assert cost <= plain * (1 + SLACK) + CREDIT * costs[0] + 1e-9


def test_a_drafter_that_is_right_gets_long_drafts(costs: list[float]) -> None:
    model = small_transformer(1, head_dim=16).float()
    model.drafters = {"draft_model": model}
    found = generate(model, [3, 1, 4], "draft_model", block_size="auto", max_new_tokens=161, end_tokens=(), trace=True)
    rows = [len(step.draft) for step in found.stats.trace[0]]
    if costs is TABLES["dear"]:
        assert max(rows) == 1
    else:
        assert rows[-2] >= 6 and found.stats.forwards <= 161 / 6 + 6
        fixed = [161 / size * (costs[size - 1] + 0.05 * (size - 1)) for size in range(1, 9)]
        assert spent([], rows, costs, 0.05)[0] <= 1.05 * min(fixed) + costs[0] * 4


def simulated(costs: Sequence[float], share: Any, tokens: int, seed: int) -> tuple[float, float, list[int]]:
    """The cost of drafting `tokens` tokens, each guess of which is right with a probability that may depend on the place in the
    text; that of decoding them one by one; and the rows of each step."""
    lengths = Lengths(StepCosts.of_rows(costs), len(costs), 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    written, cost, rows = 0, 0.0, []
    length, left, none = torch.tensor([0]), torch.tensor([tokens]), torch.tensor([0])
    lengths.choose_(length, none, left)
    while written < tokens:
        width = int(length)
        right = torch.rand(width, generator=generator).tolist()
        accepted = 1
        while accepted < width and right[accepted] < share(written + accepted):
            accepted += 1
        lengths.choose_(length, torch.tensor([accepted]), left)
        written, cost = written + accepted, cost + costs[width - 1]
        rows.append(width)
    return cost, written * costs[0], rows


@settings(max_examples=60)
@given(
    steps=st.lists(st.floats(0, 2), min_size=1, max_size=9),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_the_bound_holds_for_any_costs_and_any_text(steps: list[float], shares: list[float], seed: int) -> None:
    costs = [1.0]
    for step in steps:
        costs.append(costs[-1] + step)
    cost, plain, _ = simulated(costs, lambda at: shares[at // 40 % len(shares)], 200, seed)
    assert cost <= plain * (1 + SLACK) + CREDIT + 1e-6


def test_the_worst_text_keeps_98_percent_of_the_speed() -> None:
    """Of 32 tokens, the first of which comes with the prompt, and of any more: no guess is right, whatever rows cost."""
    for step in (0.01, 0.1, 0.25, 0.47, 1.0):
        costs = [1 + step * n for n in range(8)]
        for tokens in (31, 127):
            cost, plain, rows = simulated(costs, lambda at: 0.0, tokens, 0)
            assert plain / cost >= 0.98 and (max(rows) > 1 or step == 1.0)


@pytest.mark.covering
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("table", ["cpu", "gpu"])
def test_close_to_the_best_fixed_length(share: float, table: str) -> None:
    costs = [cost + 0.03 * n for n, cost in enumerate(TABLES[table][:8])]
    found = [simulated(costs, lambda at: share, 2000, seed) for seed in range(4)]
    cost = sum(each[0] / each[1] for each in found) / 4
    tokens = [sum(share**n for n in range(size)) for size in range(1, 9)]
    best = min(each / given for each, given in zip(costs, tokens, strict=True)) / costs[0]
    assert cost <= 1.05 * best and cost <= 1 / 0.98


def test_a_text_that_changes_is_followed() -> None:
    costs = [1 + 0.28 * n for n in range(8)]
    cost, plain, rows = simulated(costs, lambda at: 0.95 if at // 300 % 2 else 0.0, 1800, 0)
    assert cost < 0.85 * plain and rows[-1] > 3
    cost, plain, rows = simulated(costs, lambda at: 0.0, 600, 0)
    assert cost < 1.02 * plain and sum(count > 1 for count in rows) < 40


class Falling:
    """A drafter that is right less and less often: always at first, and never from token 150 on."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: torch.Tensor, *, cache: Any, rows: torch.Tensor, **given: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, cache=cache, rows=rows, **given)
        positions = cache.lengths[:, None] + rows
        wrong = (positions - 50) / 100 > positions * 0.6180339887 % 1  # spread evenly over the text
        return torch.where(wrong[..., None], logits.roll(1, -1), logits)


@pytest.mark.parametrize("table", ["cpu", "gpu"])
def test_auto_notices_that_acceptance_falls(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of trained heads does far into a text: drafts become shorter, and then there are but tries of one guess."""
    costs = TABLES[table]
    monkeypatch.setattr("pdkernels.decoding.costs.kept_row_times", lambda model: Times(costs))
    monkeypatch.setattr("pdkernels.decoding.causal.draft_model.guess_seconds", lambda drafter, batch: 0.05)
    model = small_transformer(1, head_dim=16).float()
    options = {"max_new_tokens": 400, "end_tokens": (), "trace": True, "drafter": Falling(model)}
    expected = generate(model, [3, 1, 4], max_new_tokens=400, end_tokens=()).tokens
    found = generate(model, [3, 1, 4], "draft_model", block_size="auto", **options)
    assert torch.equal(found.tokens, expected)
    accepted, rows = found.stats.accepted[0], [len(step.draft) for step in found.stats.trace[0]]
    places = torch.tensor(accepted).cumsum(0).tolist()
    early = [row for row, place in zip(rows, places, strict=True) if 20 <= place < 50]
    late = [row for row, place in zip(rows, places, strict=True) if 200 <= place < 400]
    assert sum(early) / len(early) > 4 and max(late) <= 2
    # Where rows are free a try costs a guess alone, so there are more of them.
    assert spent([], late, costs, 0.05)[0] < 1.03 * len(late) * costs[0]
    fixed = generate(model, [3, 1, 4], "draft_model", block_size=max(rows), **options)
    widths = [len(step.draft) for step in fixed.stats.trace[0]]
    auto, longest = spent(accepted, rows, costs, 0.05)[0], spent([], widths, costs, 0.05)[0]
    assert auto < 0.9 * longest


def test_what_packing_costs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of several sequences share a forward without padding: one that costs more than its guesses can gain is not tried."""
    model = small_transformer(1, head_dim=16).float()
    prompts, longest = [[3, 1, 4] * 6, [2, 7] * 8], list[int]()
    for packing in (0.0, 1.5):
        times = Times([1 + 0.05 * n for n in range(16)], packing)
        monkeypatch.setattr("pdkernels.decoding.costs.kept_row_times", lambda model, times=times: times)
        options: dict[str, Any] = {"max_new_tokens": 40, "end_tokens": (), "trace": True}
        found = generate(model, prompts, "jacobi", draft="lookup", block_size="auto", **options)
        longest.append(max(len(step.draft) for steps in found.stats.trace for step in steps))
    assert longest[0] > 1 and longest[1] == 1


# ---- times that are kept


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(row_times, "_kept", {})
    return tmp_path / "pdkernels" / "step_minima.json"


def test_times_are_measured_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = small_transformer(0, head_dim=16).float(), small_transformer(0, 40, head_dim=16).float()
    measured: list[Any] = []
    whole = row_times._row_seconds

    def measure(model: Any, *given: Any, **options: Any) -> Any:
        measured.append(model)
        return whole(model, *given, **options)

    monkeypatch.setattr(row_times, "_row_seconds", measure)
    first = row_times.kept_row_times(model)
    assert (
        row_times.kept_row_times(small_transformer(5, head_dim=16).float()) == first and len(measured) == 3
    )  # rows, sequences, sequences with different numbers of rows
    row_times._kept.clear()  # as in another process
    assert row_times.kept_row_times(model) == first and len(measured) == 3
    row_times.kept_row_times(other), row_times.kept_row_times(model.bfloat16())
    assert len(measured) == 9 and len(json.loads(home.read_text())) == 3
    home.write_text("{")
    row_times._kept.clear()
    row_times.kept_row_times(model)
    assert len(measured) == 12 and len(json.loads(home.read_text())) == 1


def test_models_without_parameters_of_their_own_are_told_apart(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped models of one shape whose layers differ, and functions, of which no two are one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="4.57")
    from pdkernels.integrations.transformers import wrap

    def wrapped(inner: int) -> Any:
        sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=inner)).eval())

    table = torch.eye(7)
    functions = [from_callable(lambda tokens: table[tokens], vocab_size=7) for _ in range(2)]
    models = [wrapped(48), wrapped(64), pd.quantize(wrapped(64), "int8"), *functions]
    measured: list[Any] = []

    def measure(model: Any, rows: list[int], *_: Any) -> Any:
        measured.append(model)
        return {count: [float(count)] for count in rows}

    monkeypatch.setattr(row_times, "_row_seconds", measure)
    for model in [*models, *models, wrapped(48)]:
        row_times.kept_row_times(model)
    assert measured == [model for model in models for _ in range(2)]
    assert len(json.loads(home.read_text())) == 3


def test_a_busy_machine_is_not_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards that took long once: an hour later the least times count, and a week later the newest."""
    model = small_transformer(0, head_dim=16).float()
    clock, slowness, measured = [1e9], [5.0], list[float]()

    def measure(
        model: Any, rows: list[int], prefix: int, repeats: int, batch: int, patience: float, packed: bool = False
    ) -> Any:
        measured.append(clock[0])
        return {count: [slowness[0] * (1.5 + 9 / 8 if packed else 1 + count * batch / 8)] for count in rows}

    def found() -> list[float]:
        row_times._kept.clear()  # as in another process
        times = row_times.kept_row_times(model)
        return [times.between(1), times.sequence, times.packing]

    monkeypatch.setattr(row_times, "_row_seconds", measure)
    monkeypatch.setattr(row_times.time, "time", lambda: clock[0])
    idle = [1.125, 0.0, 0.5]
    busy = found()
    assert busy == [5 * each for each in idle] and len(measured) == 3
    slowness[0], clock[0] = 1.0, 1e9 + 3599
    assert found() == busy and len(measured) == 3
    clock[0] += 2
    assert found() == idle and found() == idle and len(measured) == 6
    slowness[0], clock[0] = 7.0, clock[0] + 3601
    assert found() == idle and len(measured) == 9
    clock[0] = 1e9 + 7 * 86400 + 1
    assert found() == [7 * each for each in idle] and len(measured) == 12
    slowness[0], clock[0] = 2.0, 1e9  # the clock was put back
    assert found() == [2 * each for each in idle] and len(measured) == 15


@pytest.mark.parametrize("damaged", ["[1, 2]", '{"NAME": [[1, 2], [1.0, 1.0], 1.0]}', '{"NAME": [[1, 2], [1.0], 1.0, 1.0, 1e9, 1e9]}', '{"NAME": [[1, 2], [1.0, NaN], 1.0, 1.0, 1e9, 1e9]}', '{"NAME": [[1, 2], [1.0, "2"], 1.0, 1.0, 1e9, 1e9]}', '{"NAME": [[1, 2], [1.0, 1.0], 1.0, 1e9, 1e9]}', '{"NAME": 3}'])  # fmt: skip
def test_damaged_records_are_measured_again(damaged: str, home: Path) -> None:
    model = small_transformer(0, head_dim=16).float()
    home.parent.mkdir()
    home.write_text(damaged.replace("NAME", row_times._name_of(model)))
    assert row_times.kept_row_times(model).rows == (1, 2, 4, 8, 16, 32)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(row_times, "_kept", {})
    assert row_times.kept_row_times(small_transformer(0, head_dim=16).float()).at(1) > 0


def test_every_method_measures(home: Path) -> None:
    """With real times, whatever they are."""
    model = with_drafters(small_transformer(1, head_dim=16).float())
    expected = generate(model, [3, 1, 4], max_new_tokens=16, end_tokens=()).tokens
    for name, options in METHODS.items():
        method = "jacobi" if name == "lookup" else name
        found = generate(model, [3, 1, 4], method, block_size="auto", max_new_tokens=16, end_tokens=(), **options)
        assert torch.equal(found.tokens, expected)
    assert len(json.loads(home.read_text())) == 5  # the model, its small drafter, its heads
    generate(model, [[3, 1, 4], [1, 5]], "linear_self_speculation", block_size="auto", max_new_tokens=8)


@pytest.mark.parametrize(
    "method", ["jacobi", "suffix", "draft_model", "eagle", "dflash", "mtp", "linear_self_speculation"]
)
def test_other_words_are_refused(method: str) -> None:
    model = with_drafters(small_transformer(1, head_dim=16).float())
    with pytest.raises(
        ValueError, match=f"pdkernels.decoding.{method}: block_size must be an int or 'auto', got 'best'"
    ):
        generate(model, [1], method, block_size="best", max_new_tokens=4)
    with pytest.raises(TypeError, match="block_size must be an int or 'auto', got float"):
        generate(model, [1], method, block_size=2.0, max_new_tokens=4)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        generate(model, [1], method, block_size=0, max_new_tokens=4)


def test_the_fit_is_what_is_asked_for() -> None:
    fit = fit_row_times([1, 2, 4, 8], [1.0, 1.0, 2.0, 4.0])
    assert [fit.at(rows) for rows in (1, 2, 4, 8)] == pytest.approx([1.0, 1.0, 2.0, 4.0])


def test_measured_times_are_kept_as_they_are() -> None:
    """A line through all of them would make two rows as dear as the line says, not as they are."""
    measured = fit_row_times([1, 2, 4, 8, 16], [13.5, 15.1, 18.2, 29.2, 52.1])
    assert [measured.between(rows) for rows in measured.rows] == list(measured.seconds)
    assert measured.between(3) == pytest.approx(16.65) and measured.between(24) == pytest.approx(75.0)


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash"])
def test_a_pause_keeps_nothing_for_the_drafter(
    method: str, costs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without a draft run the model alone, but for the one before the next draft; what they wrote is missing in the drafter."""
    model = with_drafters(small_transformer(1, 40, head_dim=16).float())
    tapped, plain, kinds = model.tapped, model.hidden, list[str]()

    def counted(kind: str, forward: Any) -> Any:
        return lambda *given, **options: kinds.append(kind) or forward(*given, **options)

    monkeypatch.setattr(model, "tapped", counted("tapped", tapped), raising=False)
    monkeypatch.setattr(model, "hidden", counted("plain", plain), raising=False)
    expected = generate(model, [3, 1, 4], max_new_tokens=90, end_tokens=()).tokens
    kinds.clear()
    found = generate(model, [3, 1, 4], method, block_size="auto", max_new_tokens=90, end_tokens=(), trace=True)
    assert torch.equal(found.tokens, expected)
    widths = [len(step.draft) for step in found.stats.trace[0]]
    own = kinds[1:]  # after the prompt's
    assert len(own) == len(widths)
    for number, (kind, width) in enumerate(zip(own, widths, strict=True)):
        assert width == 1 or kind == "tapped"
        assert width == 1 or number == 0 or own[number - 1] == "tapped"
    assert "plain" in own
