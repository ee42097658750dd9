"""Checkpoints: one module for each format or family."""
