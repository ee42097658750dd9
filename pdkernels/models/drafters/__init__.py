"""Drafters that read the hidden states of their target."""

from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead
from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.folder import available_drafters, load_drafter, save_drafter

__all__ = [
    "DFlashConfig",
    "DFlashHead",
    "EagleConfig",
    "EagleHead",
    "available_drafters",
    "load_drafter",
    "save_drafter",
]
