"""Which schemas of MaskBench and of the JSON Schema test suite compile, and which texts of their instances are taken.

    git clone https://github.com/guidance-ai/jsonschemabench
    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m bench.maskbench --maskbench jsonschemabench/maskbench/data --suite JSON-Schema-Test-Suite/tests [--schemas 500] [--seed 0]

Of each engine: schemas that compile, the CPU seconds of that, valid instances that it refuses and invalid ones that it takes, of the schemas
that it compiles. An instance is written as `json.dumps` does, with its keys as they are; an engine may take it with spaces or without.
The data sets are not ours and are not committed, only the counts. llguidance, xgrammar and outlines-core are measured where
they are installed (`--engine`); the last one compiles in a process of its own, of at most 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_report import table
from bench.records import write
from pdkernels.decoding import Grammar

RESULTS = Path(__file__).resolve().parent / "results/maskbench.json"
LIMIT = 2
"""CPU seconds of a schema: one that takes longer is late."""
_MEMORY = 8 << 30
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}

Accepts = Callable[[bytes], bool]
Engine = Callable[[Any], Accepts]


class Case(NamedTuple):
    """A schema, and values with whether they satisfy it."""

    schema: Any
    instances: list[tuple[Any, bool]]


class Late(Exception):
    """A schema takes longer than it may."""


def ours(**options: Any) -> Engine:
    def compiled(schema: Any) -> Accepts:
        try:
            return Grammar.json_schema(schema, unknown="ignore", **options).automaton.accepts
        except ValueError as error:
            if "no text satisfies" in str(error):
                return lambda text: False
            raise

    return compiled


def llguidance() -> Engine:
    import llguidance as library

    class Bytes:
        bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
        tokens = [*(bytes([byte]) for byte in range(256)), b"\xff"]

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    tokenizer = library.LLTokenizer(library.TokenizerWrapper(Bytes()))

    def compiled(schema: Any) -> Accepts:
        matcher = library.LLMatcher(
            tokenizer, library.LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def accepts(text: bytes) -> bool:
            fresh = matcher.deep_copy()
            whole = fresh.validate_tokens(list(text)) == len(text) and fresh.consume_tokens(list(text))
            return bool(whole and fresh.is_accepting())

        return accepts

    return compiled


def xgrammar() -> Engine:
    import xgrammar as library  # type: ignore[import-not-found]

    tokens = [bytes([byte]) for byte in range(256)]
    vocabulary = library.TokenizerInfo([*tokens, b"</s>"], vocab_size=257, stop_token_ids=[256])
    compiler = library.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compiled(schema: Any) -> Accepts:
        made = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)

        def accepts(text: bytes) -> bool:
            matcher = library.GrammarMatcher(made)
            return all(matcher.accept_token(byte) for byte in text) and matcher.accept_token(256)

        return accepts

    return compiled


def outlines_core() -> Engine:
    import outlines_core as library  # type: ignore[import-not-found]
    from outlines_core.json_schema import build_regex_from_schema  # type: ignore[import-not-found]

    vocabulary = library.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})

    def compiled(schema: Any) -> Accepts:
        index = library.Index(build_regex_from_schema(json.dumps(schema)), vocabulary)

        def accepts(text: bytes) -> bool:
            state = index.get_initial_state()
            for byte in text:
                state = index.get_next_state(state, byte)
                if state is None:
                    return False
            return bool(index.is_final_state(state))

        return accepts

    return compiled


ENGINES: dict[str, Callable[[], Engine]] = {
    "pdkernels": ours,
    "pdkernels, fit": lambda: ours(fit=True),
    "pdkernels, all texts, fit": lambda: ours(texts="all", fit=True),
    "llguidance": llguidance,
    "xgrammar": xgrammar,
    "outlines-core": outlines_core,
}
APART = ("outlines-core",)


def of_maskbench(folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Schemas that are drawn at random, the same for the same seed."""
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    for file in files[:count]:
        found = json.loads(file.read_text())
        yield Case(found["schema"], [(test["data"], test["valid"]) for test in found.get("tests", [])])


def of_suite(folder: Path, draft: str) -> Iterator[Case]:
    """The required part of a draft."""
    for file in sorted((folder / draft).glob("*.json")):
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict) and "$schema" not in schema:
                schema = {"$schema": DRAFTS[draft], **schema}
            yield Case(schema, [(test["data"], test["valid"]) for test in case["tests"]])


def taken(accepts: Accepts, value: Any) -> bool:
    forms: tuple[dict[str, Any], ...] = (
        {},
        {"ensure_ascii": False},
        {"separators": (",", ":")},
        {"separators": (",", ":"), "ensure_ascii": False},
    )
    return any(accepts(json.dumps(value, **form).encode("utf-8", "surrogatepass")) for form in forms)


class Tried(NamedTuple):
    """What an engine does with a schema."""

    compiled: bool
    seconds: float
    verdicts: list[bool]
    """Of each instance, whether it takes it."""


def tried(engine: Engine, case: Case) -> Tried | None:
    """None: it takes too long."""
    started = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    try:
        accepts = engine(case.schema)
    except Late:
        return None
    except Exception:
        return Tried(False, time.process_time() - started, [])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    seconds = time.process_time() - started
    return Tried(True, seconds, [taken(accepts, value) for value, _ in case.instances])


def tried_apart(engine: Engine, case: Case) -> Tried | None:
    """In a process of its own, for engines that no signal interrupts and that may take all memory."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT, used + LIMIT))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(theirs, "w") as pipe:
            json.dump(tried(engine, case), pipe)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found = json.loads(text) if text else None
    return Tried(*found) if found else None


def measured(name: str, cases: list[Case]) -> dict[str, Any]:
    """Counts of an engine, and the times of its compiles."""
    names = ("compiled", "late", "valid", "valid_refused", "invalid", "invalid_taken")
    counts, seconds, engine = dict.fromkeys(names, 0), list[float](), ENGINES[name]()
    for case in cases:
        found = (tried_apart if name in APART else tried)(engine, case)
        if found is None:
            counts["late"] += 1
            continue
        seconds.append(found.seconds)
        counts["compiled"] += found.compiled
        for (_, valid), verdict in zip(case.instances, found.verdicts):
            counts["valid" if valid else "invalid"] += 1
            if verdict != valid:
                counts["valid_refused" if valid else "invalid_taken"] += 1
    seconds.sort()
    quantiles = {
        f"p{share}_ms": round(1e3 * seconds[min(len(seconds) - 1, share * len(seconds) // 100)], 2)
        for share in (50, 99)
    }
    return {**counts, **quantiles, "max_ms": round(1e3 * seconds[-1], 1), "schemas": len(cases)}


def report(found: dict[str, Any]) -> str:
    """A table of the counts."""
    lines = []
    for row in found["rows"]:
        refused = f"{row['valid_refused']} of {row['valid']}"
        taken_wrongly = f"{row['invalid_taken']} of {row['invalid']}"
        times = (
            f"{row['p50_ms']:.1f}" if row["p50_ms"] else "below 4",
            f"{row['p99_ms']:,.0f}",
            f"{row['max_ms']:,.0f}",
        )
        compiled = f"{row['compiled']} of {row['schemas']}" + (f", {row['late']} late" if row["late"] else "")
        lines.append([row["set"], row["engine"], compiled, refused, taken_wrongly, *times])
    head = [
        "schemas of",
        "engine",
        "compiled",
        "valid ones refused",
        "invalid ones taken",
        "p50, ms",
        "p99, ms",
        "most, ms",
    ]
    return f"{table(head, lines)}\n\nCPU time of one thread; {', '.join(f'{name} {number}' for name, number in found['versions'].items())}"


def counts(path: Path = RESULTS) -> str:
    return report(json.loads(path.read_text())) if path.exists() else "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.maskbench", description=__doc__.partition("\n")[0])
    parser.add_argument("--maskbench", type=Path)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="append", choices=list(ENGINES))
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    sets: dict[str, list[Case]] = {}
    if chosen.maskbench:
        sets["MaskBench"] = list(of_maskbench(chosen.maskbench, chosen.schemas, chosen.seed))
    for draft in DRAFTS if chosen.suite else ():
        sets[draft] = list(of_suite(chosen.suite, draft))

    def stop(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGVTALRM, stop)
    warnings.simplefilter("ignore")
    found = json.loads(chosen.to.read_text()) if chosen.to.exists() else {"rows": [], "versions": {}}
    rows = {(row["set"], row["engine"]): row for row in found["rows"]}
    for engine in chosen.engine or ENGINES:
        package = engine.partition(",")[0]
        for name, cases in sets.items():
            rows[name, engine] = {"set": name, "engine": engine, "seed": chosen.seed, **measured(engine, cases)}
            found["versions"][package] = version(package)
            print(rows[name, engine], flush=True)
            found["rows"] = sorted(
                rows.values(),
                key=lambda row: (["MaskBench", *DRAFTS].index(row["set"]), list(ENGINES).index(row["engine"])),
            )
            write(chosen.to, found)
    print(report(found))


if __name__ == "__main__":
    main()
