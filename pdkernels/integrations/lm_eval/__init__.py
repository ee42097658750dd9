"""lm-evaluation-harness on our models and decoding methods.

Importing this module registers the model "pdkernels": ``lm_eval.simple_evaluate("pdkernels", model_args={"pretrained":
"tiny-trimode"}, tasks=...)``, or ``python -m pdkernels.integrations.lm_eval --model pdkernels ...`` for its command
line.

Needs lm-eval 0.4.13.
"""

from pdkernels.integrations.lm_eval._model import HarnessModel

__all__ = ["HarnessModel"]
