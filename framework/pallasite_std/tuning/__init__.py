"""Choosing the fastest of several configurations by measuring them, with a cache on disk."""

from __future__ import annotations

from pallasite_std.tuning.policy import autotune as autotune
from pallasite_std.tuning.policy import choose as choose
from pallasite_std.tuning.tuner import AutotuneWarning as AutotuneWarning
