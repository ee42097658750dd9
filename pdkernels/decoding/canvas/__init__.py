"""Shared by decoders that fill masks: the canvas of a batch, forwards over it, its record, and steps that need no
host."""
