"""Benchmarks: `pytest bench --benchmark-only`, tables by `python -m bench.report`."""
