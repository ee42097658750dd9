"""Triton kernels, one file per family: tensors in, tensors out. Validation and autograd are in `pdkernels.ops`."""

__all__: list[str] = []
