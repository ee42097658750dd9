"""Drafters from folders."""
