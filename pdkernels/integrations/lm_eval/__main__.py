"""The command line of lm-evaluation-harness with the model "pdkernels" registered.

The harness's default device is a GPU even if there is none; here it is the CPU if torch finds no GPU.
"""

import sys

import torch
from lm_eval.__main__ import cli_evaluate

import pdkernels.integrations.lm_eval  # noqa: F401  registers the model


def with_device(arguments: list[str]) -> list[str]:
    """The arguments of a run, with ``--device cpu`` where they name no device and there is no GPU."""
    runs = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    names = {argument.split("=")[0] for argument in arguments}
    # A file of settings may name a device; options override it.
    chosen = names & {"--device", "--config", "-C", "-h", "--help"}
    return arguments if not runs or chosen or torch.cuda.is_available() else [*arguments, "--device", "cpu"]


if __name__ == "__main__":
    sys.argv[1:] = with_device(sys.argv[1:])
    cli_evaluate()
