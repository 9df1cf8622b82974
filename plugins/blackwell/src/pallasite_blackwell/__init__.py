"""Blackwell for Pallasite: tensor memory and the matrix instructions that use it."""
