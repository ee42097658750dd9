"""Decoding methods on tasks of lm-evaluation-harness that are made here: held-out sums, worked out or chosen from two results.

    python examples/lm_eval_sums.py --model tiny-trimode --method autoregressive --method linear_self_speculation

A task of the harness is a data file and a YAML file that says what to ask and how to score. These two are written into a folder
and read back offline, as any local task is:

    python -m pdkernels.integrations.lm_eval --model pdkernels --model_args pretrained=tiny-trimode,method=jacobi \\
        --include_path FOLDER --tasks pdkernels_sums
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from pdkernels.evaluation import make_task

TASKS = ("pdkernels_sums", "pdkernels_sums_choice")

COMMON = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""

WRITTEN = """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [], max_gen_toks: %d}
process_results: !function scoring.last_line
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""

CHOSEN = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""

# The harness imports this from the folder: the last line is the result, exactly.
SCORING = """def last_line(doc, results):
    lines = results[0].strip().splitlines()
    return {"acc": float(bool(lines) and lines[-1] == doc["answer"])}
"""


def write_tasks(folder: Path, problems: int, seed: int = 0, canvas: int | None = None) -> None:
    """The sums of `pdkernels.evaluation.make_task` as two tasks of the harness."""
    task = make_task("sums", problems, seed, canvas=canvas)
    with open(folder / "sums.jsonl", "w") as file:
        for problem in task.problems or []:
            right, wrong = (f"answer {problem.result + off}\n" for off in (0, 7))
            row = {"question": problem.prompt, "answer": right.strip(), "choices": [problem.steps, problem.steps.replace(right, wrong)]}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    for name, rest in zip(TASKS, (WRITTEN % task.limit, CHOSEN)):
        (folder / f"{name}.yaml").write_text(COMMON.format(task=name, data=folder / "sums.jsonl") + rest)
    (folder / "scoring.py").write_text(SCORING)


def run(lm: Any, folder: Path, tasks: tuple[str, ...] = TASKS) -> dict[str, float]:
    """The accuracy of a `HarnessModel` on the tasks of a folder."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
    )
    return {name: found["results"][name]["acc,none"] for name in tasks}


def main(
    model: str = "tiny-trimode",
    method: Annotated[list[str], typer.Option()] = ["autoregressive", "linear_self_speculation"],  # noqa: B006
    problems: int = 20,
    canvas: Annotated[int | None, typer.Option(help="for masked-diffusion models: 128")] = None,
) -> None:
    """Score decoding methods on held-out sums with lm-evaluation-harness."""
    from pdkernels.integrations.lm_eval import HarnessModel

    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), problems, canvas=canvas)
        for name in method:
            lm = HarnessModel(model, method=name)
            scores = run(lm, Path(folder))
            print(f"{name}: {scores}, {lm.tokens_per_forward:.2f} tokens per forward")


if __name__ == "__main__":
    typer.run(main)
