"""In which order kernels use the tensor core: its products, and loads of their accumulators.

Kernels run on the simulator with loads as late as they can be: behind a wait for products, warps
wait until no other thread can go on. What is issued before them then does not depend on them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import BLOCK_CELLS, CELL, COLUMNS, SPACE
from pallasite_simulator import executor
from pallasite_simulator.engine.observer import AsyncOperation, Observer
from pallasite_simulator.launch import Launch, run


@dataclasses.dataclass(frozen=True)
class Use:
    """A product that writes an accumulator, or a load of one.

    Attributes:
      product: whether it is a product.
      block: of the wave.
      columns: the first and the last of tensor memory.
    """

    product: bool
    block: int
    columns: tuple[int, int]


@dataclasses.dataclass
class Tile:
    """Places, in the order of all uses, of what is done with an accumulator: first and last."""

    columns: tuple[int, int]
    products: tuple[int, int]
    loads: tuple[int, int] | None = None


class Trace(Observer):
    """Keeps the uses of accumulators, in the order in which they are issued."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def async_access(
        self,
        operation: AsyncOperation,
        kind: str,
        space: str,
        offsets: Any,
        size: int,
        owners: Any = None,
    ) -> None:
        name = operation.instruction.name
        product = name.startswith("tcgen05.mma") and kind == "write"
        if space != SPACE or not (product or name.startswith("tcgen05.ld")):
            return
        first = np.asarray(offsets) // CELL
        last = first + max(size // CELL, 1) - 1
        blocks = first // BLOCK_CELLS
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            columns = int((first[mine] % COLUMNS).min()), int((last[mine] % COLUMNS).max())
            self.uses.append(Use(product, block, columns))


def late_loads(ptx: str, shared: int) -> str:
    """PTX in which warps that load wait, behind each barrier, until no other thread can go on.

    They try to wait for a barrier on which nobody arrives, which ends without success when the
    simulator finds nothing else to do.

    Args:
      ptx: of one kernel with dynamic shared memory.
      shared: bytes of shared memory that the kernel does not use: the barrier is behind them.
    """
    found = re.search(r"^\.extern \.shared .*\b(\w+)\[\]", ptx, re.MULTILINE)
    assert found is not None, "no dynamic shared memory"
    barrier = f"[{found[1]}+{shared}]"
    body = ptx.index("{", ptx.index(".entry")) + 1
    start = f"""
    {{ .reg .b32 late; .reg .pred first; mov.u32 late, %tid.x; setp.eq.u32 first, late, 0;
    @first mbarrier.init.shared::cta.b64 {barrier}, 1; }}
    """
    wait = f"{{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, {barrier}, 0; }}"
    lines = []
    waited = False
    for line in ptx[body:].splitlines():
        waited |= "mbarrier.try_wait" in line
        if waited and line.lstrip().startswith("tcgen05.ld"):
            lines.append(wait)
            waited = False
        lines.append(line)
    return "\n".join([ptx[:body], start, *lines, ""])


def traced(compiled: Any, *inputs: Any, blocks: Sequence[int] | None = None) -> list[Use]:
    """Runs a compiled kernel on arrays, loads as late as can be; how it used accumulators."""
    shared = -(-compiled.launch.shared_memory_bytes // 8) * 8
    compiled = dataclasses.replace(
        compiled,
        ptx=late_loads(compiled.ptx, shared),
        launch=dataclasses.replace(compiled.launch, shared_memory_bytes=shared + 8),
    )
    trace = Trace()
    arrays = executor.Arrays(compiled, inputs)
    launch: Launch = executor.make_launch(compiled, arrays, blocks=blocks)
    run(dataclasses.replace(launch, make_observer=lambda: trace), raise_findings=False)
    return trace.uses


def tiles(uses: Sequence[Use], block: int) -> list[Tile]:
    """What a block computed in tensor memory, in the order of the first products.

    Products to the same columns are of one tile until these are loaded.
    """
    found: list[Tile] = []
    current: dict[tuple[int, int], Tile] = {}
    for place, use in enumerate(uses):
        if use.block != block:
            continue
        if use.product:
            tile = current.get(use.columns)
            if tile is None or tile.loads is not None:
                tile = current[use.columns] = Tile(use.columns, (place, place))
                found.append(tile)
            tile.products = (tile.products[0], place)
            continue
        for columns, tile in current.items():
            if columns[0] <= use.columns[0] and use.columns[1] <= columns[1]:
                tile.loads = ((tile.loads or (place, place))[0], place)
    return found


def overlaps(uses: Sequence[Use]) -> tuple[int, int]:
    """For how many tiles the next one's products began before the last load, and of how many.

    Counted are tiles that another one of the same block follows.
    """
    begun = count = 0
    for block in sorted({use.block for use in uses}):
        made = tiles(uses, block)
        for tile, following in zip(made, made[1:], strict=False):
            if tile.loads is not None:
                count += 1
                begun += following.products[0] < tile.loads[1]
    return begun, count
