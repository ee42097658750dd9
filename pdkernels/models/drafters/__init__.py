"""Drafters that read the hidden states of their target."""

from pdkernels.models.drafters.dflash import DFlashConfig, DFlashHead
from pdkernels.models.drafters.dflash2 import DFlash2Config, DFlash2Head
from pdkernels.models.drafters.dspark import DSparkConfig, DSparkHead
from pdkernels.models.drafters.eagle import EagleConfig, EagleHead
from pdkernels.models.drafters.mtp import MtpConfig, MtpHead
from pdkernels.models.drafters.xpress import XPressConfig, XPressHead

__all__ = [
    "DFlash2Config",
    "DFlash2Head",
    "DFlashConfig",
    "DFlashHead",
    "DSparkConfig",
    "DSparkHead",
    "EagleConfig",
    "EagleHead",
    "MtpConfig",
    "MtpHead",
    "XPressConfig",
    "XPressHead",
]
