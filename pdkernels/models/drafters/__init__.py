"""Drafters that read the hidden states of their target."""

from pdkernels.models.drafters.eagle import EagleConfig, EagleHead

__all__ = ["EagleConfig", "EagleHead"]
