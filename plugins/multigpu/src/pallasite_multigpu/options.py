"""Compiler parameters and options of the plugin."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallasite.plugin import InvalidTypeError, config, option


@dataclasses.dataclass(frozen=True)
class MultiGpuOptions:
    """Compiler parameters of the plugin ``multigpu``, keywords of ``CompilerParams``.

    Attributes:
      exit_barrier: whether devices wait for each other when the kernel ends, so that nobody's
        memory is used again before all are done with it; None: if it reads memory of others.
    """

    exit_barrier: bool | None = option(
        None,
        "whether devices wait for each other at the kernel's end; None: where it reads peers",
        keyword=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.exit_barrier, bool | None):
            raise InvalidTypeError(
                "exit_barrier is neither true nor false",
                got=repr(self.exit_barrier),
                expected="True, False, or None: where the kernel reads memory of other devices",
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
