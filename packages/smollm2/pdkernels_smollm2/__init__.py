"""Weights that draft for SmolLM2-135M-Instruct: folders that pdkernels finds by the entry point of this package."""
