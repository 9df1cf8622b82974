"""Compiler parameters and options of the plugin."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallasite.plugin import config, option


@dataclasses.dataclass(frozen=True)
class MultiGpuOptions:
    """Compiler parameters of the plugin ``multigpu``."""

    exit_barrier: bool | None = option(
        None, "whether devices wait for each other at the kernel's end; None: where it reads peers"
    )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not seconds >= 0 or math.isinf(seconds):
        raise ValueError
    return seconds


config.declare(
    config.Option(
        "peer_timeout",
        "PALLASITE_PEER_TIMEOUT",
        lambda: 120.0,
        _seconds,
        "seconds, 0 for ever",
        "how long a kernel waits for its peers on other devices before it gives up",
        affects_code=False,
    )
)


def peer_timeout() -> float:
    """How long kernels wait for their peers, in seconds; 0 for ever."""
    seconds: float = config.get("peer_timeout")
    return seconds
