"""Steps of recurrent states, in plain PyTorch: see the reference."""

from pdkernels.reference.recurrent_state import gated_delta_, selective_state_, short_conv_, state_commit_, state_trim_

__all__ = ["gated_delta_", "selective_state_", "short_conv_", "state_commit_", "state_trim_"]
