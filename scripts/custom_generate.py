"""Writes our decoders as a generation strategy of the Hugging Face Hub: FOLDER/README.md and FOLDER/custom_generate.

    python scripts/custom_generate.py [--to FOLDER]

Uploaded as a repository, or from the folder itself, it runs as ``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GENERATE = '''"""`model.generate(..., custom_generate="this repository", trust_remote_code=True)`: decoding with pdkernels."""

import copy

from pdkernels.integrations.transformers import generate as decode


def generate(model, tokenizer=None, stop_strings=None, generation_config=None, method_options=None, **arguments):
    """The arguments of `model.generate`, and `method`, `method_options`, `drafter` and `grammar`: see the README."""
    config = generation_config if generation_config is not None else model.generation_config
    stop_strings = config.stop_strings if stop_strings is None else stop_strings
    if config.stop_strings is not None:  # transformers passes on no tokenizer for those in a config
        generation_config = copy.deepcopy(config)
        generation_config.stop_strings = None
    if stop_strings is not None or arguments.get("grammar") is not None:
        if tokenizer is None:
            raise ValueError("pdkernels.generate: stop_strings and grammars need the tokenizer. Pass tokenizer=.")
        method_options = {"tokenizer": tokenizer, **(method_options or {})}
    return model.generate(
        generation_config=generation_config,
        stop_strings=stop_strings,
        method_options=method_options,
        custom_generate=decode,
        **arguments,
    )
'''

README = """---
library_name: transformers
license: apache-2.0
tags:
  - custom_generate
---

# Decoding with pdkernels

Any decoder of transformers, with several tokens per forward where drafts are accepted: the tokens of greedy decoding, and under
`do_sample=True` the law of the model with the settings of its generation config.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
inputs = tokenizer("def add(a, b):", return_tensors="pt")
model.generate(**inputs, max_new_tokens=64, custom_generate="FOLDER OR REPOSITORY", trust_remote_code=True)
```

| argument | |
|---|---|
| `method` | a decoding method; without one that of the drafter, or "jacobi" with drafts that are looked up in the text |
| `drafter` | an EAGLE-3 or DFlash head, or a small model with the same vocabulary, or the path of one |
| `assistant_model` | the same as a small model in `drafter` |
| `method_options` | its options, such as `{"block_size": 8}`, and `trace` and `overflow` |
| `grammar` | a `pdkernels.decoding.Grammar` of the new text |
| `tokenizer` | for `stop_strings` and `grammar` |
| all others | those of `generate`: followed, or refused by name |

With `return_dict_in_generate=True` the result also has `stats`: forwards, and the tokens of each.
"""


def write(folder: Path) -> None:
    """The files of the repository."""
    code = folder / "custom_generate"
    code.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(README)
    (code / "generate.py").write_text(GENERATE)
    (code / "requirements.txt").write_text("pdkernels\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "dist" / "custom-generate", help="default: %(default)s")
    write(parser.parse_args().to)


if __name__ == "__main__":
    main()
