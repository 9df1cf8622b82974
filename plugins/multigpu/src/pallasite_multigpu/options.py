"""Compiler parameters and options of the plugin."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import option


@dataclasses.dataclass(frozen=True)
class MultiGpuOptions:
    """Compiler parameters of the plugin ``multigpu``."""

    exit_barrier: bool | None = option(
        None, "whether devices wait for each other at the kernel's end; None: where it reads peers"
    )
