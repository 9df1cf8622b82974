"""Hopper for Pallasite: target ``sm_90a`` and what only such chips have."""
