"""Primitives over references, by subject; each module says how its arguments are bound."""
