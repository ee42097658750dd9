"""Drafters that read the hidden states of their target."""

from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead
from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.mtp import MtpConfig, MtpHead

__all__ = ["DFlashConfig", "DFlashHead", "EagleConfig", "EagleHead", "MtpConfig", "MtpHead"]
