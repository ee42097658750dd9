"""Engines that bench/cpu_workers.py runs, each in a process of its own; their modules import nothing but the standard library."""
