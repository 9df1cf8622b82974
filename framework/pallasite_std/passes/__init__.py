"""Passes of the standard library."""
