"""Triton kernels, one file a family: tensors in, tensors out. Validation and autograd stand in `pdkernels.ops`."""

__all__: list[str] = []
