"""Primitives of JAX in terms of others, see :mod:`pallasite_std.passes.definitions`."""
