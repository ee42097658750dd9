"""Bridges to other libraries. Never imported by the rest of pdkernels."""

__all__: list[str] = []
