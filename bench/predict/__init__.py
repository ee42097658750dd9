"""How long the kernels would take on a GPU, from their machine code: `python -m bench.predict`, no GPU needed."""
