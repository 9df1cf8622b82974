"""Layouts under lane semantics."""
