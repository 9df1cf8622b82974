"""Special registers (PTX ISA, chapter 10)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave

_AXES = {"x": 0, "y": 1, "z": 2}


def known(name: str, component: str) -> bool:
    """Whether there is such a special register."""
    if component:
        return component in _AXES and name in _VECTORS
    return name in _SCALARS or name in _TIMES


def is_time(name: str) -> bool:
    """Whether its value depends on when it is read."""
    return name in _TIMES


def value(wave: Wave, name: str, component: str) -> tuple[Values, bool]:
    """Its value (for each lane of the wave, or a scalar), and whether it never changes."""
    if component:
        return _VECTORS[name](wave, _AXES[component]), True
    if name in _TIMES:
        return _TIMES[name](wave), False
    return _SCALARS[name](wave), True


def _extents(numbers: Array, extents: tuple[int, int, int], axis: int) -> Values:
    """A coordinate of linear numbers, x fastest."""
    stride = int(np.prod(extents[:axis]))
    return (numbers // stride % extents[axis]).astype(np.uint32)


def _thread(wave: Wave, axis: int) -> Values:
    return _extents(wave.lane_thread, wave.geometry.block, axis)


def _block(wave: Wave, axis: int) -> Values:
    return _extents(wave.blocks[wave.lane_block], wave.geometry.grid, axis)


def _rank(wave: Wave) -> Array:
    return wave.lane_block % wave.cluster_size


def _block_in_cluster(wave: Wave, axis: int) -> Values:
    return _extents(_rank(wave), wave.geometry.cluster, axis)


def _cluster(wave: Wave, axis: int) -> Values:
    return (_block(wave, axis) // wave.geometry.cluster[axis]).astype(np.uint32)


def _lane(wave: Wave) -> Array:
    return (wave.lane_thread % WARP).astype(np.uint32)


def _mask(compare: Callable[[Array, Array], Array]) -> Callable[[Wave], Values]:
    def build(wave: Wave) -> Values:
        lanes = np.arange(WARP)
        bits = compare(lanes[None, :], lanes[:, None]).astype(np.uint64) << lanes.astype(np.uint64)
        by_lane = bits.sum(axis=1).astype(np.uint32)
        return by_lane[wave.lane_thread % WARP]

    return build


RESERVED = 128
"""Where the part of reserved shared memory begins that programs may use (cooperative groups do, for
tiles of several warps); of what comes before, nothing is known."""

_VECTORS: dict[str, Callable[[Wave, int], Values]] = {
    "%tid": _thread,
    "%ntid": lambda wave, axis: np.uint32(wave.geometry.block[axis]),
    "%ctaid": _block,
    "%nctaid": lambda wave, axis: np.uint32(wave.geometry.grid[axis]),
    "%clusterid": _cluster,
    "%nclusterid": lambda wave, axis: np.uint32(wave.geometry.clusters[axis]),
    "%cluster_ctaid": _block_in_cluster,
    "%cluster_nctaid": lambda wave, axis: np.uint32(wave.geometry.cluster[axis]),
}

# Blocks are assigned to the multiprocessors of a chip round-robin; there is one grid.
_SCALARS: dict[str, Callable[[Wave], Values]] = {
    "%laneid": _lane,
    "%warpid": lambda wave: (wave.lane_thread // WARP).astype(np.uint32),
    "%nwarpid": lambda wave: np.uint32(wave.lanes_per_block // WARP),
    "%smid": lambda wave: (wave.blocks[wave.lane_block] % wave.program.multiprocessors).astype(
        np.uint32
    ),
    "%nsmid": lambda wave: np.uint32(wave.program.multiprocessors),
    "%gridid": lambda wave: np.uint64(1),
    "%cluster_ctarank": lambda wave: _rank(wave).astype(np.uint32),
    "%cluster_nctarank": lambda wave: np.uint32(wave.cluster_size),
    "%is_explicit_cluster": lambda wave: np.bool_(wave.geometry.explicit_cluster),
    "%lanemask_eq": _mask(np.equal),
    "%lanemask_le": _mask(np.less_equal),
    "%lanemask_lt": _mask(np.less),
    "%lanemask_ge": _mask(np.greater_equal),
    "%lanemask_gt": _mask(np.greater),
    "%dynamic_smem_size": lambda wave: np.uint32(
        wave.shared_bytes - wave.program.static_shared_bytes
    ),
    "%total_smem_size": lambda wave: np.uint32(wave.shared_bytes - wave.program.guard_bytes),
    "%aggr_smem_size": lambda wave: np.uint32(wave.memory.shared_limit),
    "%reserved_smem_offset_begin": lambda wave: np.uint32(0),
    "%reserved_smem_offset_end": lambda wave: np.uint32(1024),
    "%reserved_smem_offset_cap": lambda wave: np.uint32(1024),
    "%reserved_smem_offset_0": lambda wave: np.uint32(0),
    "%reserved_smem_offset_1": lambda wave: np.uint32(RESERVED),
    # As cooperative groups expect it of the driver.
    "%envreg0": lambda wave: np.uint32(0),
    "%envreg1": lambda wave: np.uint32(wave.program.grid_workspace >> 32),
    "%envreg2": lambda wave: np.uint32(wave.program.grid_workspace & 0xFFFFFFFF),
    "%current_graph_exec": lambda wave: np.uint64(0),
}

_TIMES: dict[str, Callable[[Wave], Values]] = {
    "%clock": lambda wave: np.uint32(wave.clock & 0xFFFFFFFF),
    "%clock_hi": lambda wave: np.uint32(wave.clock >> 32),
    "%clock64": lambda wave: np.uint64(wave.clock),
    "%globaltimer": lambda wave: np.uint64(time.time_ns()),
    "%globaltimer_lo": lambda wave: np.uint32(time.time_ns() & 0xFFFFFFFF),
    "%globaltimer_hi": lambda wave: np.uint32(time.time_ns() >> 32),
}
