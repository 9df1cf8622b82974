"""Blackwell for Pallasite: targets ``sm_100a``, ``sm_103a`` and ``sm_120a``."""
