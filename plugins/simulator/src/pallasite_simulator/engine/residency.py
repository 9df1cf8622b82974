"""How many blocks are on a chip at one time: what matters where running clusters can cancel others
that have not begun (PTX ISA 9.7.13.17)."""

from __future__ import annotations

from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.program import Program

_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor since compute capability 9.0, but for 12.0."""

_SMALL_SHARED_BYTES = 100 * 1024
_SYSTEM_BYTES = 1024
"""Shared memory of each block that belongs to the system."""

_REGISTERS = 65536
_THREADS = 2048
_SMALL_THREADS = 1536
_BLOCKS = 32
_SMALL_BLOCKS = 24


def blocks_per_multiprocessor(
    program: Program, geometry: Geometry, shared_bytes: int, *, allocated: bool = True
) -> int:
    """How many blocks of a kernel fit on one multiprocessor, at least one.

    The number of registers is that of ``.maxnreg``, or, where PTX does not say it, is taken to be
    no limit. Rules of instructions lower ``program.most_blocks`` for what blocks allocate while
    they run, which counts with ``allocated``.
    """
    small = program.module.target.startswith("sm_12")
    threads = -(-geometry.threads // 32) * 32
    limits = [
        _SMALL_BLOCKS if small else _BLOCKS,
        (_SMALL_THREADS if small else _THREADS) // threads,
        (_SMALL_SHARED_BYTES if small else _SHARED_BYTES) // (shared_bytes + _SYSTEM_BYTES),
        program.most_blocks if allocated else _BLOCKS,
    ]
    registers = program.function.directives.get("maxnreg")
    if registers:
        limits.append(_REGISTERS // (-(-registers[0] // 8) * 8 * threads))
    return max(1, min(limits))


def resident_blocks(program: Program, geometry: Geometry, shared_bytes: int) -> int:
    """How many blocks are on the chip at one time: whole clusters."""
    blocks = program.multiprocessors * blocks_per_multiprocessor(program, geometry, shared_bytes)
    cluster = geometry.cluster_size
    return max(1, blocks // cluster) * cluster
