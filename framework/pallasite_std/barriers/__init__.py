"""Barriers: their kinds, their allocation, and what primitives do to them."""
