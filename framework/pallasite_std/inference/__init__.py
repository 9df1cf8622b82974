"""Inference rules of the built-in primitives, by subject."""
