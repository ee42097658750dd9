"""Gluon kernels for Hopper, one file per family. Each computes what the Triton kernel of its family does, which serves
all other calls."""

__all__: list[str] = []
