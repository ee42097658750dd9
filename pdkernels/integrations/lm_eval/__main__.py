"""The command line of lm-evaluation-harness with the model "pdkernels" registered."""

from lm_eval.__main__ import cli_evaluate

import pdkernels.integrations.lm_eval  # noqa: F401  registers the model

if __name__ == "__main__":
    cli_evaluate()
