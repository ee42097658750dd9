"""Predicts the times of the kernels on a GPU from their machine code: `python -m bench.predict`. It needs no GPU."""
