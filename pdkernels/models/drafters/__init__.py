"""Drafters that read the hidden states of their target."""

from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.folder import load_drafter, save_drafter

__all__ = ["EagleConfig", "EagleHead", "load_drafter", "save_drafter"]
