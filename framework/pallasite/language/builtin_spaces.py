"""The core's implementation of the hooks ``pallasite_memory_spaces`` and ``pallasite_names``."""

from __future__ import annotations

from pallasite.language import PUBLIC_NAMES
from pallasite.language.memory import GMEM, REGS, SMEM
from pallasite.language.memory_space import MemorySpace


def pallasite_memory_spaces() -> list[MemorySpace]:
    """Global memory, shared memory, registers."""
    return [GMEM, SMEM, REGS]


def pallasite_names() -> dict[str, str]:
    """What plugins cannot replace."""
    return PUBLIC_NAMES
