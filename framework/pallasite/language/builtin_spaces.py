"""The core's implementation of the hook ``pallasite_memory_spaces``."""

from __future__ import annotations

from pallasite.language.memory import GMEM, REGS, SMEM
from pallasite.language.memory_space import MemorySpace


def pallasite_memory_spaces() -> list[MemorySpace]:
    """Global memory, shared memory, registers."""
    return [GMEM, SMEM, REGS]
