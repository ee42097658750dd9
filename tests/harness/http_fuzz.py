"""Schemathesis against the server's own OpenAPI description: `make fuzz-http`.

    python -m tests.harness.http_fuzz [--seconds 240] [--st PATH]

Starts a server of tiny-code with a chat template and tools, and asks it what the description lets one ask, and what it does not: every
answer must have a status and a form that the description names, none is a 5xx, what breaks a schema is refused, and methods that a route
does not take are refused with those that it does. Schemathesis is installed into a temporary environment, unless `--st` names it.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pdkernels as pd
from pdkernels.serve import create_app
from tests.serve.clients import Chatting
from tests.serve.conftest import serving

PIN = "schemathesis==4.32.5"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# It counts 413 as if the request had been taken.
SETTINGS = """[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
"""
EXCLUDED = "positive_data_acceptance"
"""Names of tools in messages, texts of grammars and the like are not in the description."""


def installed(folder: Path) -> Path:
    """Schemathesis in an environment of its own."""
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", PIN], check=True)
    return folder / "bin/st"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--st", type=Path, metavar="PATH", help="schemathesis' command, if it is there")
    given = parser.parse_args()
    model = pd.models.load("tiny-code")
    model.tokenizer = Chatting(model.tokenizer, TEMPLATE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = given.st or installed(folder / "environment")
        (folder / "schemathesis.toml").write_text(SETTINGS)
        engine = pd.Engine(model, max_new_tokens=32, max_prompt_tokens=512)
        address = stack.enter_context(serving(create_app(engine, "tiny")))
        options = ["--max-time", str(given.seconds), "--continue-on-failure", "--exclude-checks", EXCLUDED]
        config = ["--config-file", str(folder / "schemathesis.toml")]
        sys.exit(
            subprocess.run(
                [command, *config, "run", f"{address}/openapi.json", *options], cwd=folder, check=False
            ).returncode
        )


if __name__ == "__main__":
    main()
