"""Machine code of generated kernels for Blackwell: many configurations of one GEMM.

A warp copies, a warp multiplies, a warpgroup writes; blocks compute one tile, or many with two
accumulators. Of each configuration the machine code must have no spills, no local memory, no copy,
product or commit under a predicate of single lanes, and at most 12 instructions for each of the
tensor core's (products, and copies of block scales) in the loop that issues them. What a branch of
single lanes skips is only counted: ptxas makes predicates of short branches. No GPU is needed.

    python benchmarks/blackwell_generated.py --count 50 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from machine_code import Code, read_code

import pallasite
from pallasite import gpu as plgpu

MOST_INSTRUCTIONS = 12
"""For each of the tensor core's: Triton and CuTe DSL make 11.8 for each product."""

ROWS = 128
SHARED = 225 * 1024


@dataclasses.dataclass(frozen=True)
class Elements:
    """What is multiplied: ``scale`` and ``block`` are those of block scales, if there are any."""

    a: str
    b: str
    accumulator: str = "float32"
    scale: str | None = None
    block: int = 0

    @property
    def bits(self) -> int:
        """Of an element."""
        return 4 if "4_" in self.a else 8 * jnp.dtype(self.a).itemsize


F8, F8_WIDE, F4 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
E8 = "float8_e8m0fnu"
ELEMENTS = (
    Elements("float16", "float16"),
    Elements("float16", "float16", "float16"),
    Elements("bfloat16", "bfloat16"),
    Elements("float32", "float32"),
    Elements(F8, F8),
    Elements(F8_WIDE, F8, "float16"),
    Elements("int8", "uint8", "int32"),
    Elements(F8, F8_WIDE, scale=E8, block=32),
    Elements(F4, F4, scale=E8, block=32),
    Elements(F4, F4, scale=E8, block=16),
    Elements(F4, F4, scale=F8, block=16),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A kernel.

    Attributes:
      tile_n: columns of a tile of 128 rows, or of 256 for pairs.
      step: bytes of a row of an operand in one step.
      stages: steps in flight.
      b_turned: columns of b are contiguous.
      persistent: blocks compute many tiles, with two accumulators.
      width: columns that are written at a time.
      warpgroup: whether layouts are inferred.
    """

    elements: Elements
    tile_n: int = 128
    step: int = 128
    stages: int = 4
    pair: bool = False
    b_turned: bool = True
    persistent: bool = True
    width: int = 64
    warpgroup: bool = True

    @property
    def depth(self) -> int:
        """Elements of one step."""
        return self.step * 8 // self.elements.bits

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return 2 if self.pair else 1

    @property
    def scales(self) -> int:
        """Groups of four scales of a row in one step."""
        return self.depth // self.elements.block // 4 if self.elements.block else 0

    def is_possible(self) -> bool:
        """Whether the chip can do it."""
        columns = self.tile_n // self.blocks
        shared = self.stages * (ROWS + columns) * self.step + 2 * ROWS * self.width * 4
        accumulators = (1 + self.persistent) * self.tile_n
        if self.elements.block:
            shared += self.stages * 512 * self.scales * (1 + -(-self.tile_n // ROWS))
            # Scales of b fill whole groups of rows, and leave no room beside 512 columns.
            fits = not self.tile_n % ROWS and accumulators <= 256
            fits &= self.b_turned and not self.pair and self.depth >= 4 * self.elements.block
        else:
            fits = self.b_turned or self.elements.bits in (8, 16)
        if not self.b_turned:
            # Rows of b are whole swizzles.
            fits &= columns * self.elements.bits // 8 in (64, 128, 256)
        return fits and shared <= SHARED and accumulators <= 512 and self.tile_n % self.width == 0

    def shapes(self, m: int, n: int, k: int) -> list[jax.ShapeDtypeStruct]:
        """Of the inputs: a, b, and the scales of both in the order of the tensor core."""
        chosen = self.elements
        b_shape = (n, k) if self.b_turned else (k, n)
        found = [((m, k), chosen.a), (b_shape, chosen.b)]
        if chosen.scale is not None:
            groups = k // chosen.block // 4
            found += [((size // ROWS, groups, 32, 16), chosen.scale) for size in (m, n)]
        return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in found]

    def kernel(self, m: int, n: int, k: int, multiprocessors: int = 148) -> Callable[..., Any]:
        """The kernel for matrices of whole tiles."""
        rows, tiles_n = ROWS * self.blocks, n // self.tile_n
        tiles = m // rows * tiles_n
        grid = min(multiprocessors // self.blocks, tiles) if self.persistent else tiles
        semantics = plgpu.LoweringSemantics
        made: Callable[..., Any] = plgpu.kernel(
            _Body(self, k // self.depth, tiles, tiles_n).run,
            out_type=jax.ShapeDtypeStruct((m, n), jnp.dtype(self.elements.accumulator)),
            grid=(grid,),
            grid_names=("blocks",),
            cluster=(self.blocks,),
            cluster_names=("pair",),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=self._scratch(),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=semantics.Warpgroup if self.warpgroup else semantics.Lane
            ),
        )
        return made

    def _scratch(self) -> dict[str, Any]:
        columns, chosen = self.tile_n // self.blocks, self.elements
        b_shape = (columns, self.depth) if self.b_turned else (self.depth, columns)
        slots = 1 + self.persistent
        found: dict[str, Any] = {
            "a_smem": self._operand((ROWS, self.depth), chosen.a),
            "b_smem": self._operand(b_shape, chosen.b),
            "out_smem": plgpu.SMEM((2, ROWS, self.width), jnp.dtype(chosen.accumulator)),
            "acc": plgpu.TMEM(
                (ROWS, slots * self.tile_n),
                jnp.dtype(chosen.accumulator),
                packed=False,
                collective=self.pair,
            ),
            "full": plgpu.Barrier(num_arrivals=4 if chosen.block else 2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_barriers=self.stages, orders_tensor_core=True),
            "summed": plgpu.Barrier(num_barriers=slots, orders_tensor_core=True),
            "read": plgpu.ClusterBarrier(
                collective_axes=("pair",), num_barriers=slots, orders_tensor_core=True
            )
            if self.pair
            else plgpu.Barrier(num_barriers=slots, orders_tensor_core=True),
        }
        if chosen.scale is not None:
            dtype, count = jnp.dtype(chosen.scale), self.scales
            sizes = {"a": ROWS, "b": self.tile_n}
            for name, size in sizes.items():
                found[f"{name}_scales"] = plgpu.SMEM(
                    (self.stages, size // ROWS, count, 32, 16), dtype
                )
                layout = plgpu.TMEMLayout.SCALES_LAYOUT
                found[f"{name}_factors"] = plgpu.TMEM((size, 4 * count), dtype, layout=layout)
        return found

    def _operand(self, shape: tuple[int, int], dtype: str) -> Any:
        bits = self.elements.bits
        swizzle = min(128, shape[1] * bits // 8)
        tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
        transforms = (tiling, plgpu.SwizzleTransform(swizzle))
        return plgpu.SMEM((self.stages, *shape), jnp.dtype(dtype), transforms=transforms)


class _Body:
    """The body of a kernel."""

    def __init__(self, chosen: Configuration, steps: int, tiles: int, tiles_n: int):
        self.chosen, self.steps, self.tiles, self.tiles_n = chosen, steps, tiles, tiles_n

    def run(self, *inputs: Any, **refs: Any) -> None:
        *sources, out = inputs

        def produce() -> None:
            def per_warp(warp: Any) -> None:
                pl.when(warp == 0)(lambda: self.fetch(sources, refs))
                leads = jnp.logical_and(warp == 1, lax.axis_index("pair") == 0)
                pl.when(leads)(lambda: self.multiply(refs))

            plgpu.warp_map(per_warp)

        first = lax.axis_index("warpgroup") == 0
        lax.cond(first, produce, lambda: self.write(out, refs))

    def next(self, stage: Any) -> Any:
        """The stage that follows."""
        return lax.select(stage == self.chosen.stages - 1, jnp.int32(0), stage + 1)

    def over_tiles(self, body: Callable[[Any, Any, Any, Any], Any]) -> None:
        """``stage = body(number, row, column, stage)`` for each tile of the block."""
        block, blocks = lax.axis_index("blocks"), lax.axis_size("blocks")

        def one(number: Any, stage: Any) -> Any:
            tile = block + number * blocks
            row, column = lax.div(tile, self.tiles_n), lax.rem(tile, self.tiles_n)
            chosen = self.chosen
            return body(number, row * ROWS * chosen.blocks, column * chosen.tile_n, stage)

        if self.chosen.persistent:
            lax.fori_loop(0, lax.div(self.tiles - 1 - block, blocks) + 1, one, jnp.int32(0))
        else:
            one(jnp.int32(0), jnp.int32(0))

    def fetch(self, sources: Sequence[Any], refs: dict[str, Any]) -> None:
        chosen = self.chosen
        a, b, *scales = sources

        def tile(number: Any, row: Any, column: Any, stage: Any) -> Any:
            def step(index: Any, stage: Any) -> Any:
                count = number * self.steps + index
                full = refs["full"].at[stage]
                wait = refs["empty"].at[stage]
                pl.when(count >= chosen.stages)(lambda: plgpu.barrier_wait(wait))
                along = pl.ds(index * chosen.depth, chosen.depth)
                columns = pl.ds(column, chosen.tile_n)
                b_window = b.at[columns, along] if chosen.b_turned else b.at[along, columns]
                rows = pl.ds(row, ROWS * chosen.blocks)
                for window, name, axis in (
                    (a.at[rows, along], "a_smem", 0),
                    (b_window, "b_smem", 0 if chosen.b_turned else 1),
                ):
                    shared: dict[str, Any] = {}
                    if chosen.pair:
                        shared["collective_axes"] = "pair"
                        shared["leader_tracked"] = plgpu.CopyPartition.PARTITIONED(axis)
                    plgpu.copy_gmem_to_smem(window, refs[name].at[stage], full, **shared)
                places = ((row, ROWS), (column, chosen.tile_n))
                for source, name, (start, size) in zip(scales, "ab", places, strict=False):
                    window = source.at[
                        pl.ds(lax.div(start, ROWS), size // ROWS),
                        pl.ds(index * chosen.scales, chosen.scales),
                    ]
                    plgpu.copy_gmem_to_smem(window, refs[f"{name}_scales"].at[stage], full)
                return self.next(stage)

            return lax.fori_loop(0, self.steps, step, stage)

        self.over_tiles(tile)

    def multiply(self, refs: dict[str, Any]) -> None:
        chosen = self.chosen
        axis = "pair" if chosen.pair else None

        def tile(number: Any, row: Any, column: Any, stage: Any) -> Any:
            slot = lax.rem(number, 2) if chosen.persistent else 0
            pl.when(number >= 2)(lambda: plgpu.barrier_wait(refs["read"].at[slot]))
            acc = refs["acc"].at[:, pl.ds(slot * chosen.tile_n, chosen.tile_n)]

            def step(index: Any, stage: Any) -> Any:
                plgpu.barrier_wait(refs["full"].at[stage])
                b = refs["b_smem"].at[stage]
                factors: dict[str, Any] = {}
                for name in "ab" if chosen.elements.block else "":
                    target = factors[f"{name}_scale"] = refs[f"{name}_factors"]
                    plgpu.async_copy_scales_to_tmem(refs[f"{name}_scales"].at[stage], target)
                plgpu.tcgen05_mma(
                    acc,
                    refs["a_smem"].at[stage],
                    plgpu.transpose_ref(b, (1, 0)) if chosen.b_turned else b,
                    refs["empty"].at[stage],
                    accumulate=index > 0,
                    collective_axis=axis,
                    **factors,
                )
                return self.next(stage)

            stage = lax.fori_loop(0, self.steps, step, stage)
            plgpu.tcgen05_commit_arrive(refs["summed"].at[slot], collective_axis=axis)
            return stage

        self.over_tiles(tile)

    def write(self, out: Any, refs: dict[str, Any]) -> None:
        chosen = self.chosen
        own = lax.axis_index("pair") * ROWS
        parts = chosen.tile_n // chosen.width

        def tile(number: Any, row: Any, column: Any, _: Any) -> Any:
            slot = lax.rem(number, 2) if chosen.persistent else 0
            plgpu.barrier_wait(refs["summed"].at[slot])
            for part in range(parts):
                staging = refs["out_smem"].at[part % 2]
                start = slot * chosen.tile_n + part * chosen.width
                sums = plgpu.async_load_tmem(refs["acc"].at[:, pl.ds(start, chosen.width)])
                if part == parts - 1:
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(refs["read"].at[slot])
                # The buffer was last read two copies ago, or by the last copy of the tile before.
                plgpu.wait_smem_to_gmem(1 - parts % 2, wait_read_only=True)
                staging[...] = sums
                plgpu.commit_smem()
                columns = pl.ds(column + part * chosen.width, chosen.width)
                plgpu.copy_smem_to_gmem(staging, out.at[pl.ds(row + own, ROWS), columns])
            return 0

        self.over_tiles(tile)
        plgpu.wait_smem_to_gmem(0)


def generate(seed: int, count: int) -> list[Configuration]:
    """Different configurations that are possible, each kind of elements as often as the others."""
    chooser = random.Random(seed)
    found: dict[Configuration, None] = {}
    while len(found) < count:
        one = Configuration(
            ELEMENTS[len(found) % len(ELEMENTS)],
            tile_n=chooser.choice((32, 64, 96, 128, 192, 256)),
            step=chooser.choice((128, 256)),
            stages=chooser.randint(2, 7),
            pair=chooser.random() < 0.5,
            b_turned=chooser.random() < 0.7,
            persistent=chooser.random() < 0.6,
            width=chooser.choice((16, 32, 64, 96, 128)),
            warpgroup=chooser.random() < 0.5,
        )
        if one.is_possible():
            found[one] = None
    return list(found)


def code_of(chosen: Configuration, target: str) -> Code:
    """The machine code of a configuration, for large matrices."""
    n = chosen.tile_n * 32
    sizes = (4096, n, chosen.depth * 64)
    made = pallasite.compile(chosen.kernel(*sizes), *chosen.shapes(*sizes), target=target)
    return read_code(made.ptx, str(chosen))


def per_instruction(code: Code) -> float:
    """Machine instructions for each product and each copy to tensor memory, in their loop."""
    return code.loop / (code.products + code.tensor_copies)


def complaints(code: Code) -> list[str]:
    """What is wrong with machine code."""
    found = []
    if code.spills or code.local:
        found.append(f"{code.spills} bytes of spills, {code.local} accesses to local memory")
    if (each := per_instruction(code)) > MOST_INSTRUCTIONS:
        found.append(f"{each:.2f} instructions for each of the tensor core's")
    if code.guarded:
        found.append(f"lanes decide on {code.guarded} instructions")
    return found


HEADS = (
    *("configuration", "per product", "per tensor core's", "registers", "instructions"),
    *("by branches", ""),
)


def main(argv: Sequence[str]) -> int:
    """Checks configurations and prints a table; returns 1 if anything is wrong with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=33)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="sm_100a")
    wanted = parser.parse_args(argv)
    lines = []
    wrong = 0
    ratios = []
    for chosen in generate(wanted.seed, wanted.count):
        code = code_of(chosen, wanted.target)
        problems = complaints(code)
        wrong += bool(problems)
        ratios.append(code.ratio)
        kind = chosen.elements
        name = f"{kind.a} {kind.b} {kind.accumulator} {kind.scale or ''} {kind.block or ''}"
        options = {key: value for key, value in vars(chosen).items() if key != "elements"}
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        row = [f"{code.ratio:.2f}", f"{per_instruction(code):.2f}"]
        row += map(str, (code.registers, code.instructions, code.branched))
        lines.append((f"{name.strip()}: {shown}", *row, "; ".join(problems)))
    harness.print_table(HEADS, lines)
    print(
        f"{wrong} of {len(lines)} are not as wanted; per product {np.mean(ratios):.2f} on average"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
