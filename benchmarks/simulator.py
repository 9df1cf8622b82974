"""Speed of the simulator: a wgmma tile, how cost grows with the grid, warp-instructions per second.

    python benchmarks/simulator.py --json simulator.json

It needs no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import ml_dtypes
import numpy as np

sys.path.insert(0, str(harness.ROOT))

from examples.catalog import all_examples

import pallasite
import pallasite_simulator
from pallasite_simulator import Simulation, TensorArgument, TensorMap

TILE_M, TILE_N, DEPTH = 128, 128, 64
ROW_BYTES = 2 * DEPTH
A_BYTES, B_BYTES = TILE_M * ROW_BYTES, TILE_N * ROW_BYTES

EXAMPLES = ("softmax_bf16_16384", "transpose_f32", "pipelined_f32", "multicast_f32_cluster_4")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: ``seconds`` for one launch."""

    kernel: str
    blocks: int
    sanitizer: str
    processes: int
    warp_instructions: int
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """As shown in the table."""
        return (
            self.kernel,
            str(self.blocks),
            self.sanitizer,
            str(self.processes),
            str(self.warp_instructions),
            f"{self.seconds:.4f}",
            f"{self.seconds / self.blocks:.4f}",
            f"{self.warp_instructions / self.seconds:.0f}",
        )


HEADER = (
    "kernel",
    "blocks",
    "sanitizer",
    "processes",
    "warp instr.",
    "seconds",
    "per block",
    "warp instr./s",
)


def main() -> None:
    """Measures everything, prints a table, writes JSON."""
    arguments = harness.parser(__doc__ or "").parse_args()
    rows = [*tiles(arguments.repeats), *examples(max(1, arguments.repeats // 4))]
    harness.print_table(HEADER, [row.cells() for row in rows])
    harness.write_json(arguments.json, "simulator", rows)


def tiles(repeats: int) -> Iterator[Row]:
    """A 128 x 128 x 64 product of bfloat16 by TMA and wgmma in each block of growing grids."""
    cases = [(n, checks, 1) for checks in (False, True) for n in (1, 4, 16, 64, 256, 1024)]
    for blocks, checks, processes in [*cases, (4096, False, 1), (4096, False, 2)]:
        call, verify = tile_call(blocks, checks, processes)
        few = repeats if blocks < 1024 else 3
        yield measure("tile", blocks, checks, call, few, processes)
        verify()


def examples(repeats: int) -> Iterator[Row]:
    """Whole kernels."""
    for example in all_examples():
        if example.name not in EXAMPLES:
            continue
        inputs = [np.asarray(one) for one in example.make_inputs(jax.random.key(0))]
        compiled = pallasite.compile(example.function, *inputs)
        blocks = math.prod(compiled.launch.grid)
        for checks in (False, True):
            simulate = functools.partial(
                pallasite_simulator.simulate,
                compiled,
                *inputs,
                sanitize=checks,
                processes=1,
                progress=False,
            )
            yield measure(example.name, blocks, checks, simulate, repeats)


def measure(
    kernel: str,
    blocks: int,
    checks: bool,
    simulate: Callable[..., Simulation],
    repeats: int,
    processes: int = 1,
) -> Row:
    """The median of several launches, after one that counts warp instructions."""
    first = simulate(statistics=True)
    assert not first.findings and first.statistics is not None
    seconds = median_time(functools.partial(simulate, statistics=False), repeats)
    issued = first.statistics.warp_instructions
    return Row(kernel, blocks, "on" if checks else "off", processes, issued, seconds)


def median_time(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tile_call(
    blocks: int, checks: bool, processes: int
) -> tuple[Callable[..., Simulation], Callable[[], None]]:
    """Runs the product, in which block n multiplies all of A by its own rows of B; and a check."""
    random = np.random.default_rng(0)
    a = random.standard_normal((TILE_M, DEPTH)).astype(ml_dtypes.bfloat16)
    b = random.standard_normal((blocks * TILE_N, DEPTH)).astype(ml_dtypes.bfloat16)
    c = np.full((TILE_M, blocks * TILE_N), np.nan, np.float32)

    def tile_map(array: np.ndarray, box: int) -> TensorArgument:
        descriptor = TensorMap(
            address=0,
            element_type=9,
            sizes=(DEPTH, len(array)),
            strides=(ROW_BYTES,),
            box=(DEPTH, box),
            element_strides=(1, 1),
            swizzle=3,
        )
        return TensorArgument(array, descriptor)

    call = functools.partial(
        pallasite_simulator.run_ptx,
        tile_ptx(),
        [tile_map(a, TILE_M), tile_map(b, TILE_N), c, np.int32(blocks * TILE_N)],
        grid=blocks,
        block=128,
        shared_memory_bytes=A_BYTES + B_BYTES + 16,
        sanitize=checks,
        progress=False,
        processes=processes,
    )

    def verify() -> None:
        expected = a.astype(np.float64) @ b.astype(np.float64).T
        np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-3)

    return call, verify


def tile_ptx() -> str:
    """One warpgroup: two accumulators of 64 x 128, four steps of 16 along the depth."""
    lines = [
        ".version 8.6",
        ".target sm_90a",
        ".address_size 64",
        ".extern .shared .align 1024 .b8 memory[];",
        ".visible .entry tile(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128],"
        " .param .u64 c, .param .u32 columns)",
        ".reqntid 128",
        "{",
        ".reg .pred %p, %done;",
        ".reg .b32 %base, %barrier, %thread, %row, %column, %columns, %place;",
        ".reg .b64 %map, %c, %at, %left, %right, %wide;",
        ".reg .f32 %f<128>;",
        "mov.u32 %base, memory;",
        f"add.u32 %barrier, %base, {A_BYTES + B_BYTES};",
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %column, %ctaid.x;",
        f"mul.lo.u32 %column, %column, {TILE_N};",
        "setp.ne.u32 %p, %thread, 0;",
        "@%p bra READY;",
        "mbarrier.init.shared::cta.b64 [%barrier], 1;",
        "fence.mbarrier_init.release.cluster;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier], {A_BYTES + B_BYTES};",
    ]
    copy = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [{place}], [%map, {{0, {row}}}], [%barrier];"
    )
    lines += [
        "mov.b64 %map, a;",
        "cvta.param.u64 %map, %map;",
        copy.format(place="%base", row="0"),
        f"add.u32 %place, %base, {A_BYTES};",
        "mov.b64 %map, b;",
        "cvta.param.u64 %map, %map;",
        copy.format(place="%place", row="%column"),
        "READY:",
        "bar.sync 0;",
        "WAIT:",
        "mbarrier.try_wait.parity.shared::cta.b64 %done, [%barrier], 0;",
        "@!%done bra WAIT;",
        "wgmma.fence.sync.aligned;",
    ]
    # Rows of 128 bytes in groups of 8, swizzled over 128 bytes.
    descriptor = (1 << 62) | ((1024 >> 4) << 32) | (1 << 16)
    for half in range(2):
        accumulators = ", ".join(f"%f{64 * half + n}" for n in range(64))
        for step in range(DEPTH // 16):
            for register, offset in (
                ("%left", half * 64 * ROW_BYTES + 32 * step),
                ("%right", A_BYTES + 32 * step),
            ):
                lines += [
                    f"add.u32 %place, %base, {offset};",
                    "shr.u32 %place, %place, 4;",
                    "and.b32 %place, %place, 0x3fff;",
                    "cvt.u64.u32 %wide, %place;",
                    f"or.b64 {register}, %wide, {descriptor};",
                ]
            lines.append(
                "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
                f" {{{accumulators}}}, %left, %right, {int(step > 0)}, 1, 1, 0, 0;"
            )
    lines += [
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "ld.param.u64 %c, [c];",
        "ld.param.u32 %columns, [columns];",
        # Row 16 * warp + lane / 4, columns 2 * (lane % 4) and the next.
        "shr.u32 %row, %thread, 5;",
        "shl.b32 %row, %row, 4;",
        "bfe.u32 %place, %thread, 2, 3;",
        "add.u32 %row, %row, %place;",
        "and.b32 %place, %thread, 3;",
        "shl.b32 %place, %place, 1;",
        "add.u32 %column, %column, %place;",
        "mad.lo.u32 %place, %row, %columns, %column;",
        "mul.wide.u32 %at, %place, 4;",
        "add.u64 %c, %c, %at;",
        "mul.wide.u32 %wide, %columns, 32;",
    ]
    for half in range(2):
        for rows in range(2):
            for piece in range(TILE_N // 8):
                first = 64 * half + 4 * piece + 2 * rows
                lines.append(f"st.global.v2.f32 [%c+{32 * piece}], {{%f{first}, %f{first + 1}}};")
            lines.append("add.u64 %c, %c, %wide;")
        # From row 16 of the first half, past the other warps' rows, to row 64.
        lines += ["mad.lo.u64 %c, %wide, 6, %c;"] * (half == 0)
    lines += ["ret;", "}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
