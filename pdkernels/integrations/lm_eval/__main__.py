"""The command line of lm-evaluation-harness with the model "pdkernels" registered.

The harness's own default device is a GPU, whether there is one or not; here it is the CPU where torch finds none.
"""

import sys

import torch
from lm_eval.__main__ import cli_evaluate

import pdkernels.integrations.lm_eval  # noqa: F401  registers the model


def with_device(arguments: list[str]) -> list[str]:
    """The arguments of a run, with ``--device cpu`` where they name no device and there is no GPU."""
    runs = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    names = {argument.split("=")[0] for argument in arguments}
    # A file of settings may name a device, and gives way to options.
    chosen = names & {"--device", "--config", "-C", "-h", "--help"}
    return arguments if not runs or chosen or torch.cuda.is_available() else [*arguments, "--device", "cpu"]


if __name__ == "__main__":
    sys.argv[1:] = with_device(sys.argv[1:])
    cli_evaluate()
