"""Planted faults of the decoders: each changes one line of a copy of the package, and the fast tests named beside it must fail.

    make mutations                                  all of them, some minutes
    python -m tests.harness.mutations NAME ...      some of them

Run it after a change that thins out tests. Kernels have planted faults of their own, in tests/gluonsim and tests/cudasim.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutations"


class Mutation(NamedTuple):
    line: str
    """A part of a line that is there once in the whole package, wherever its file lies."""
    fault: str
    """What takes its place."""
    tests: str
    """Files under tests/ that find it."""


MUTATIONS = {
    "the op of all layers shows a row more than its window": Mutation(
        "is None or window.chunked else window.size",
        "is None or window.chunked else window.size + 1",
        "models/test_whole_step_settings.py",
    ),
    "the op of all layers turns those with windows as the others": Mutation(
        "if windowed is None else (windowed.cos, windowed.sin)",
        "if True else (windowed.cos, windowed.sin)",
        "models/test_whole_step_settings.py",
    ),
    "a hybrid's whole forward takes padding into its states": Mutation(
        "StateStepArguments(step.pending_index, step.parents, step.counts, step.keep)",
        "StateStepArguments(step.pending_index, step.parents, None, step.keep)",
        "models/test_whole_step_hybrid.py",
    ),
    "a hybrid's whole forward rotates all of each head": Mutation(
        "config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.rotary_width",
        "config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.head_dim",
        "models/test_whole_step_hybrid.py",
    ),
    "jacobi draws with the noise of the position before": Mutation(
        "self.cache.lengths[:, None] + 1 + self.slot[: draft.shape[1]]",
        "self.cache.lengths[:, None] + self.slot[: draft.shape[1]]",
        "decoding/test_jacobi_sampling.py",
    ),
    "jacobi begins a block with a shorter draft": Mutation(
        "remainder.masked_fill_(remainder == 0, self.slots)",
        "remainder.masked_fill_(remainder == 0, max(1, self.slots - 1))",
        "decoding/test_jacobi.py",
    ),
    "linear drafts again with the noise of its first pass": Mutation(
        "self.forward += self.drafting", "self.forward += 0 * self.drafting", "decoding/test_linear_self_speculation.py"
    ),
    "a request that joins has no copies of its rows": Mutation(
        "replace(other._known[other_number], copied=False)",
        "replace(other._known[other_number], copied=True)",
        "decoding/test_block_states.py",
    ),
    "a request that joins goes on in the cycle before it": Mutation(
        "self.spans[row] = copy.copy(other.spans[other_row])",
        "self.spans[row] = self.spans[row]",
        "decoding/test_running_batch.py",
    ),
    "a row chooses among the experts of every block": Mutation(
        "ranked.masked_fill(outside[self.of_rows], -torch.inf)", "ranked", "models/test_llada2.py"
    ),
    "states are computed without the request's adapter": Mutation(
        "self._cache.adapt_((like.adapters or []) * self._states)",
        "self._cache.adapt_([])",
        "decoding/test_block_states.py",
    ),
    "rejection draws from the distance of the distributions": Mutation(
        "residual = (p - q).clamp(min=0)", "residual = (p - q).abs()", "decoding/test_linear_self_speculation.py"
    ),
    "linear drafts the last two tokens of a text": Mutation(
        "_FEWEST = 3", "_FEWEST = 2", "decoding/test_needless_forwards.py"
    ),
    "linear drafts past what is verified": Mutation(
        "needed = self.slot[1:] < self.entry.pending[:, None]",
        "needed = self.slot[1:] < self.entry.pending[:, None] + 9",
        "decoding/test_needless_forwards.py",
    ),
    "a spread remainder comes a step early": Mutation(
        "masks * (step + 1) // steps - masks * step // steps",
        "-(-masks * (step + 1) // steps) + (-masks * step // steps)",
        "decoding/test_llada.py",
    ),
    "an end token does not end a draft": Mutation(
        "masked_fill_(verdict.ended | failed, 0)", "masked_fill_(failed, 0)", "decoding/test_usual.py"
    ),
    "a request takes over too little of a page": Mutation(
        "copied = len(text) - len(pages) * pool.page_size", "copied = 1", "engine/test_engine.py"
    ),
    "a request that joins keeps the seed before it": Mutation(
        "self.steps.reseed(seed)", "self.steps.reseed(seed * 0)", "decoding/test_running_batch.py"
    ),
    "top_p leaves out the token that reaches the mass": Mutation(
        "(mass.cumsum(-1) - mass < self.top_p)", "(mass.cumsum(-1) < self.top_p)", "decoding/test_filters.py"
    ),
    "a batch draws with the sampler of a request that has left": Mutation(
        "self._rows[row], self._groups = sampler, None", "self._rows[row] = sampler", "decoding/test_row_samplers.py"
    ),
    "a repeated token of the prompt counts as the prompt's alone": Mutation(
        "prompt = self.filled & (table.gather(1, ids) == 0)",
        "prompt = self.filled & ~self.generated",
        "decoding/test_row_filters.py",
    ),
    "bad words ignore the first token of a text": Mutation(
        "masked_fill(there < 0, -1)", "masked_fill(there < 1, -1)", "decoding/test_row_filters.py"
    ),
    "end tokens come a token too late": Mutation(
        "rows.number < self.min_new_tokens", "rows.number <= self.min_new_tokens", "decoding/test_row_filters.py"
    ),
    "a stop string across two steps is missed": Mutation(
        "longest, first = max(map(len, stops)) + 8, checked",
        "longest, first = 0, checked",
        "decoding/test_stop_strings.py",
    ),
    "a cache keeps a page that it does not need": Mutation(
        "count = -(-length // self.page_size)", "count = length // self.page_size + 1", "cache"
    ),
    "a request knows the whole prompt of an earlier one": Mutation(
        "text if request.preempted else text[:-1])", "text)", "engine/test_engine.py"
    ),
    "recurrent states go back further than they can": Mutation(
        "if state.saved.earliest <= length", "if length > 0", "engine/test_prefix_tree.py"
    ),
    "a drafter keeps the rows of its guesses": Mutation(
        "self.drafted.lengths.copy_(read)", "read", "decoding/test_eagle.py"
    ),
    "a masked token that may be revised is reported as final": Mutation(
        "canvas.final_ends = [first] * len(canvas.starts)",
        "canvas.final_ends = [last] * len(canvas.starts)",
        "decoding/test_masked_options.py",
    ),
    "log-probabilities are those of the filtered model": Mutation(
        "return logits if unfiltered is None else unfiltered", "return logits", "decoding/test_request_options.py"
    ),
    "samples of one prompt continue from the first prompt of the batch": Mutation(
        "prompt = sequence // self._count", "prompt = 0", "decoding/test_request_options.py"
    ),
    "a chunk written token by token lies one position behind its place": Mutation(
        "lines.append([token, starts[chunk], position, text.number + 1, text.sequence])",
        "lines.append([token, starts[chunk] + 1, position, text.number + 1, text.sequence])",
        "decoding/test_planned_in_turn.py",
    ),
    "a chunk's copy of the text keeps the rows of the chunk before it": Mutation(
        "self._cache.copy_row_(row, self._trunk, text.sequence, text.cached)",
        "self._cache.lengths[row].fill_(text.cached)",
        "decoding/test_planned_in_turn.py",
    ),
    "a window is one position too short": Mutation(
        "return (positions + (1 - self.size)).clamp(min=0)",
        "return torch.minimum((positions + (2 - self.size)).clamp(min=0), positions)",
        "decoding/test_windows.py",
    ),
    "pages of a window take turns too early": Mutation(
        "-(-(window - 1 + 2 * drafts + BLOCK - 1) // page_size) + 1",
        "-(-(window - 1 + drafts) // page_size)",
        "cache/test_windowed.py",
    ),
    "rows of a long prompt are dropped that a draft may go back to": Mutation(
        "self.lengths + counts - (self.window - 1 + self.drafts)",
        "self.lengths + counts - self.window",
        "cache/test_windowed.py",
    ),
    "a window over a tree begins at a place, not at the first token of the path": Mutation(
        "return torch.where(after > 0, lengths[:, None] + behind, first)", "return first", "decoding/test_windows.py"
    ),
    "sinks are lost on a cache": Mutation(
        "visibility, self.cache, layer, self.counts, starts, sinks, self.softcap)",
        "visibility, self.cache, layer, self.counts, starts, None, self.softcap)",
        "models/test_window_families.py",
    ),
}


def lines(mutation: Mutation, root: Path = ROOT) -> list[Path]:
    """The files of the package that have the line, each as often as it is there."""
    files = sorted((root / "pdkernels").rglob("*.py"))
    return [file for file in files for _ in range(file.read_text().count(mutation.line))]


def copy_checkout() -> None:
    """A copy of what git knows and of the compiled libraries, made of links: a changed file is written anew."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    for file in [*files, *(ROOT / "pdkernels").glob("*.so")]:
        if file.is_file():
            target = COPY / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target)
    imported = run([sys.executable, "-c", "import pdkernels; print(pdkernels.__file__)"]).stdout.strip()
    if Path(imported) != COPY / "pdkernels" / "__init__.py":
        sys.exit(f"tests.harness.mutations: a copy of the package must be what is imported, got {imported!r}.")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(COPY), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)


def failed(*tests: str) -> str:
    """The first of these tests that fails in the copy; empty if none does."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    answer = run(command)
    if answer.returncode not in (0, 1):
        raise RuntimeError(answer.stdout[-2000:] + answer.stderr[-2000:])
    reported = [text for text in answer.stdout.splitlines() if text.startswith(("FAILED ", "ERROR "))]
    return reported[0].split(" - ")[0].split(" ", 1)[1] if reported else ""


def found(mutation: Mutation) -> str:
    """The test that fails with the fault and passes without it; empty if there is none."""
    (file,) = lines(mutation, COPY)
    sound = file.read_text()
    file.unlink()  # a link to the file of the checkout
    file.write_text(sound.replace(mutation.line, mutation.fault))
    try:
        test = failed("-m", "not slow", *(f"tests/{name}" for name in mutation.tests.split()))
    finally:
        file.write_text(sound)
    return test if test and not failed(test) else ""


def main(names: list[str]) -> None:
    copy_checkout()
    missed = []
    for name in names or MUTATIONS:
        start = time.monotonic()
        test = found(MUTATIONS[name])
        print(f"{time.monotonic() - start:5.1f} s  {name}: {test or 'NOT FOUND'}", flush=True)
        missed += [] if test else [name]
    if missed:
        sys.exit(f"tests.harness.mutations: {len(missed)} of {len(names or MUTATIONS)} planted faults were not found.")


if __name__ == "__main__":
    main(sys.argv[1:])
