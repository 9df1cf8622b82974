"""Random kernels that use tensor memory, on the simulator and its sanitizer, against NumPy.

A kernel has matrices in tensor memory (of all dtypes and sizes, batches, members of unions, of
inner scopes), and is a sequence of stores, loads, copies and products on slices of them, with
starts that are known or computed, in loops, by warps, by single blocks and pairs. Values are small
integers, of which all results are exact. With ``--mistakes``, waits are left out one by one, each
of which must be found.

    python -m tests.fuzz tensor_memory --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from tests.fuzz._tensor_memory_steps import (
    LARGEST,
    Buffer,
    Copy,
    Load,
    Loop,
    Mistake,
    Model,
    Product,
    Program,
    Scope,
    Store,
    View,
)

import pallasite
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

F32, F16, I32, U32 = (np.dtype(name) for name in ("float32", "float16", "int32", "uint32"))
I8, U8 = np.dtype(np.int8), np.dtype(np.uint8)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)

OPERANDS = {
    F32: ((F16,), (BF16,), (F32,), (E4M3, E5M2)),
    F16: ((F16,), (E4M3, E5M2)),
    I32: ((I8, U8),),
}
"""Dtypes of operands, by that of the accumulator: those of a group in any mixture."""

COLUMNS = 512
SHARED = 200 * 1024


class Generator:
    """Makes programs up."""

    def __init__(self, choose: random.Random, largest: int):
        self.choose = choose
        self.largest = largest
        semantics = plgpu.LoweringSemantics
        self.program = Program(
            choose.choice(("sm_100a", "sm_103a", "sm_110a")),
            choose.choice((semantics.Lane, semantics.Warpgroup)),
            choose.random() < 0.25,
            choose.choice((1, 1, 1, 2, 3)),
            [],
        )
        self.free = COLUMNS
        self.live: dict[str, Buffer] = {}
        self.names = 0
        self.loaded: dict[int, tuple[int, ...]] = {}
        self.trips = 1

    # Matrices -------------------------------------------------------------------------------------

    def buffer(self, union: str = "", *, accumulates: bool = False) -> Buffer | None:
        """A random matrix, if there is room for it."""
        choose = self.choose
        dtypes = (F32, F32, F16, F16, BF16, I32, U32, I8, U8, E4M3, E5M2)
        dtype = choose.choice((F32, F32, F16, I32) if accumulates else dtypes)
        narrow = dtype.itemsize < 4
        # A cell has one element of 8 bits in no layout that is loaded.
        packed = narrow and (dtype.itemsize == 1 or choose.random() < 0.7) and not accumulates
        rows = choose.choice((64, 128, 128, 128, 128, 256, 384))
        unit = 16 if rows == 64 else 32 // dtype.itemsize if packed else choose.choice((8, 16, 16))
        if packed and rows == 64:
            unit = 32
        columns = unit * choose.randint(1, max(1, self.largest // unit))
        batch = choose.choice(((), (), (), (2,), (2, 3)))
        found = Buffer(f"t{self.names}", (*batch, rows, columns), dtype, packed, union)
        if found.columns > self.free:
            return None
        self.names += 1
        return found

    def view(self, buffer: Buffer, unit: int = 1, *, rows: int = 0, whole: bool = False) -> View:
        """A random part of a matrix, of multiples of a number of columns; or, if that may be, of
        all matrices of a batch."""
        choose = self.choose
        *batch, height, width = buffer.shape
        index = tuple(choose.randrange(extent) for extent in batch)
        if whole and math.prod(buffer.shape) <= 128 * 64 and choose.random() < 0.3:
            index = ()
        computed = choose.random() < 0.3
        extent = (0, height)
        if height > 128 and choose.random() < 0.6:
            first = choose.randrange(height // 128)
            extent = (128 * first, 128 * choose.randint(1, height // 128 - first))
        if rows and extent[1] != rows:
            extent = (0, rows)
        unit = math.lcm(unit, buffer.packing)
        columns = (0, width)
        if extent[1] == 128 and width > unit and choose.random() < 0.6:
            start = unit * choose.randrange(width // unit)
            columns = (start, unit * choose.randint(1, (width - start) // unit))
        return View(buffer, index, extent, columns, computed)

    def layout(self, shape: tuple[int, ...], dtype: np.dtype[Any], rows: int) -> Any:
        """A layout that is asked for, or none."""
        options: list[Any] = [None] * 4
        if len(shape) > 2:
            return None
        if rows == 128 and dtype.itemsize == 4 and shape[1] % 8 == 0:
            options += [plgpu.Layout.TCGEN05, plgpu.Layout.TCGEN05_TMEM_NATIVE]
        if math.prod(shape) % 128 == 0 and dtype.itemsize == 4 and math.prod(shape) <= 1 << 13:
            options.append(plgpu.Layout.WG_STRIDED(shape, vec_size=1))
        return self.choose.choice(options)

    def input(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """One more input; returns its number."""
        made = np.random.default_rng(self.choose.getrandbits(32))
        low = 0 if dtype.kind == "u" else -LARGEST
        values = made.integers(low, LARGEST, (self.program.blocks, *shape), endpoint=True)
        self.program.inputs.append(values.astype(np.float32).astype(dtype))
        return len(self.program.inputs) - 1

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        full = (self.program.blocks, self.trips, *shape)
        self.program.outputs.append(jax.ShapeDtypeStruct(full, dtype))
        return len(self.program.outputs) - 1

    # Steps ----------------------------------------------------------------------------------------

    def fill(self, buffer: Buffer) -> list[Any]:
        """Stores to all of a buffer."""
        steps = []
        rows, columns = buffer.shape[-2:]
        every = list(np.ndindex(*buffer.shape[:-2]))
        together = math.prod(buffer.shape) <= 128 * 64 and self.choose.random() < 0.7
        for index in [()] if together else every:
            whole = View(buffer, tuple(index), (0, rows), (0, columns))
            steps.append(self.store_to(whole))
        if buffer.union:
            for one in [name for name, b in self.live.items() if b.union == buffer.union]:
                del self.live[one]
        self.live[buffer.name] = buffer
        return steps

    def store_to(self, view: View) -> Any:
        dtype, shape = view.buffer.dtype, view.shape
        kinds = ["input", "input", "splat"]
        same = [number for number, known in self.loaded.items() if known == shape]
        kinds += ["pool", "pool"] * bool(same and self.program.threads == 1)
        kind = self.choose.choice(kinds)
        if kind == "pool":
            number = self.choose.choice(same)
        elif kind == "input":
            number = self.input(shape, dtype)
        else:
            number = self.choose.randint(0, LARGEST)
        layout = self.layout(shape, dtype, view.buffer.shape[-2]) if kind != "splat" else None
        return Store(view, (kind, number), layout)

    def store(self) -> list[Any]:
        buffer = self.choose.choice(list(self.live.values()))
        return [self.store_to(self.view(buffer, whole=True))]

    def load(self) -> list[Any]:
        buffer = self.choose.choice(list(self.live.values()))
        view = self.view(buffer, whole=True)
        reduce = None
        able = len(view.shape) == 2 and view.shape[0] == 128 and view.shape[1] % 2 == 0
        if self.program.target != "sm_100a" and buffer.dtype in (F32, I32, U32) and able:
            reduce = self.choose.choice((None, "max", "min", "absmax"))
            if reduce == "absmax" and buffer.dtype == I32:
                reduce = "max"
        layout = self.layout(view.shape, buffer.dtype, buffer.shape[-2])
        step = Load(view, len(self.loaded), self.output(view.shape, buffer.dtype), layout, reduce)
        if reduce is not None:
            self.output(view.shape[:1], buffer.dtype)
        self.loaded[step.number] = view.shape
        return [step]

    def copy(self) -> list[Any]:
        found = [
            one
            for one in self.live.values()
            if one.shape[-2] != 64 and one.packing * one.dtype.itemsize == 4
        ]
        if not found:
            return []
        buffer = self.choose.choice(found)
        view = self.view(buffer, 32 // buffer.dtype.itemsize)
        swizzle = self.swizzle(view.shape[1], buffer.dtype, (16, 32, 64, 128))
        if swizzle is None or math.prod(view.shape) * buffer.dtype.itemsize > SHARED:
            return []
        return [Copy(view, self.input(view.shape, buffer.dtype), swizzle, self.warp())]

    def swizzle(self, extent: int, dtype: np.dtype[Any], widths: Sequence[int]) -> int | None:
        """A swizzle that divides the contiguous extent; 0 leaves it to be inferred."""
        fitting = [one for one in widths if extent * dtype.itemsize % one == 0]
        if not fitting:
            return None
        inferred = self.program.semantics is plgpu.LoweringSemantics.Warpgroup
        if inferred and self.choose.random() < 0.5:
            return 0
        return self.choose.choice(fitting)

    def warp(self) -> int | None:
        return self.choose.choice((None, None, 0, 1, 3))

    def product(self) -> list[Any]:
        """A product into some matrix that can be an accumulator."""
        choose, pair = self.choose, self.program.pair
        blocks = self.program.blocks
        integers = self.program.target != "sm_103a"
        found = [
            one
            for one in self.live.values()
            if one.dtype in OPERANDS
            and one.packing == 1
            and (one.dtype != I32 or integers)
            and not (pair and one.shape[-2] not in (64, 128))
        ]
        if not found:
            return []
        buffer = choose.choice(found)
        group = choose.choice(OPERANDS[buffer.dtype])
        a, b = choose.choice(group), choose.choice(group)
        packed = [one for one in self.live.values() if one.packed and one.shape[-2] == 128]
        if packed and choose.random() < 0.6:
            a = choose.choice(packed).dtype
            fitting = [one for one in OPERANDS[buffer.dtype] if a in one]
            if not fitting:
                return []
            b = choose.choice(fitting[0])
        rows = buffer.shape[-2]
        unit = (16 if a.kind in "iu" else 8) * (2 if pair or rows == 64 else 1)
        view = self.view(buffer, unit)
        m, n = view.shape
        if n % unit or n > 256 * (1 if pair else 2):
            return []
        bits = 8 * a.itemsize
        instruction = 256 // bits
        turned_a, turned_b = choose.random() < 0.3, choose.random() < 0.5
        if a == F32:
            turned_a, turned_b = False, True
        source: int | View | None = None
        lefts = [
            one
            for one in self.live.values()
            if one.dtype == a and one.packing * a.itemsize == 4 and one.shape[-2] == m != 64
            and not (buffer.union and one.union == buffer.union) and one is not buffer
        ]  # fmt: skip
        depth = instruction * choose.randint(1, max(1, self.largest // instruction))
        if lefts and choose.random() < 0.7:
            source = self.view(choose.choice(lefts), instruction, rows=m)
            depth = source.shape[1]
            if depth % instruction:
                return []
        columns = n // blocks
        # With 64 rows, the instructions make one half of the columns each.
        part = columns // 2 if rows == 64 and not pair else columns
        part = math.gcd(part, 256 // blocks)
        b_extent = depth if turned_b else part
        widths = [w for w in (32, 64, 128) if w * 8 // bits <= max(b_extent, 1)]
        b_swizzle = self.swizzle(b_extent, b, widths)
        a_extent = m if turned_a else depth
        a_swizzle = self.swizzle(
            math.gcd(a_extent, 128 if turned_a else a_extent), a, (32, 64, 128)
        )
        if b_swizzle is None or (source is None and a_swizzle is None):
            return []
        if (m + columns) * depth * a.itemsize > SHARED:
            return []
        if source is None:
            source = self.input((depth, m) if turned_a else (m, depth), a)
        shape = (columns, depth) if turned_b else (depth, columns)
        return [
            Product(
                view,
                source,
                self.input(shape, b),
                (a, b),
                depth,
                (turned_a, turned_b),
                (a_swizzle or 0, b_swizzle),
                choose.choice((False, True, "computed")),
                choose.choice((1, 1, 2)),
                choose.random() < 0.3,
                self.warp(),
            )
        ]

    def loop(self) -> list[Any]:
        """A few steps, three times; one loads columns that move."""
        if self.trips > 1:
            return []
        self.trips = 3
        before = dict(self.loaded)
        steps = [one for _ in range(self.choose.randint(1, 2)) for one in self.step(loops=False)]
        wide = [
            one
            for one in self.live.values()
            if one.shape[-2] == 128 and one.shape[-1] // 3 // one.packing
        ]
        if wide:
            buffer = self.choose.choice(wide)
            size = buffer.packing * (buffer.shape[-1] // 3 // buffer.packing)
            index = tuple(self.choose.randrange(extent) for extent in buffer.shape[:-2])
            view = View(buffer, index, (0, 128), (0, size), False, size)
            if self.choose.random() < 0.5:
                steps.append(self.store_to(view))
            steps.append(Load(view, -1, self.output(view.shape, buffer.dtype), None))
        self.trips = 1
        self.loaded = before
        return [Loop(3, tuple(steps))] if steps else []

    def scope(self) -> list[Any]:
        """A few steps with a matrix of their own."""
        buffer = self.buffer()
        if buffer is None:
            return []
        self.free -= buffer.columns
        steps = self.fill(buffer)
        for _ in range(self.choose.randint(1, 3)):
            steps += self.step()
        del self.live[buffer.name]
        self.free += buffer.columns
        return [Scope(buffer, tuple(steps))]

    def step(self, *, loops: bool = True) -> list[Any]:
        makers = [self.store, self.load, self.load, self.copy, self.scope, *[self.product] * 6]
        unions = {one.name: one for one in self.program.buffers if one.union}
        dead = [one for name, one in unions.items() if name not in self.live]
        if loops:
            makers.append(self.loop)
            if dead:
                makers.append(lambda: self.fill(self.choose.choice(dead)))
        return self.choose.choice(makers)()

    def make(self, length: int) -> Program:
        choose, program = self.choose, self.program
        for number in range(choose.randint(1, 4)):
            found = self.buffer(accumulates=not number)
            while found is None and not number:
                found = self.buffer(accumulates=True)
            if found is not None:
                program.buffers.append(found)
                self.free -= found.columns
                program.steps += self.fill(found)
        if choose.random() < 0.4:
            members = [self.buffer("union"), self.buffer("union")]
            kept = [one for one in members if one is not None]
            if len(kept) == 2:
                program.buffers += kept
                self.free -= max(one.columns for one in kept)
                program.steps += self.fill(kept[0])
        for _ in range(choose.randint(2, length)):
            if self.live:
                program.steps += self.step()
        if not program.outputs:
            program.steps += self.load()
        return program


def make_program(seed: int, *, length: int = 6, largest: int = 64) -> Program:
    """The program of a seed."""
    return Generator(random.Random(seed), largest).make(length)


def check(program: Program) -> None:
    """Runs a program on the simulator, and compares its results with NumPy's.

    Raises:
      AssertionError: they differ, or the sanitizer finds something.
      PallasiteError: the kernel does not compile.
    """
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs]
    made = pallasite.compile(program.kernel(), *types, target=program.target)
    simulation = simulate(made, *program.inputs, sanitize=("on", "fences"))
    assert not simulation.findings, str(simulation.findings[0])
    model = Model(program)
    for step in program.steps:
        step.model(model)
    for number, (got, want) in enumerate(zip(simulation.outputs, model.outputs, strict=True)):
        wide = [np.asarray(x).astype(np.float64) for x in (got, want)]
        np.testing.assert_array_equal(*wide, err_msg=f"output {number}")


def check_mistake(program: Program, mistake: Mistake) -> None:
    """Checks that a mistake is found, when the kernel is compiled or run.

    Raises:
      AssertionError: it is not.
    """
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs]
    try:
        kernel = program.kernel(mistake)
        made = pallasite.compile(kernel, *types, target=program.target)
        found = simulate(made, *program.inputs, sanitize=True).findings
    except pallasite.PallasiteError:
        return
    assert found, f"nothing found: {mistake}"


def main(arguments: Sequence[str]) -> int:
    """Checks random kernels; prints those that fail, and how many."""
    parser = argparse.ArgumentParser(prog="tests.fuzz tensor_memory", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first kernel")
    parser.add_argument("--count", type=int, default=50, help="how many kernels")
    parser.add_argument("--length", type=int, default=6, help="steps of a kernel, at most")
    parser.add_argument("--largest", type=int, default=64, help="columns of a matrix, at most")
    parser.add_argument("--mistakes", action="store_true", help="leave waits out, too")
    given = parser.parse_args(arguments)
    failures = 0
    for seed in range(given.seed, given.seed + given.count):
        program = make_program(seed, length=given.length, largest=given.largest)
        try:
            check(program)
            if given.mistakes:
                for mistake in program.mistakes():
                    check_mistake(program, mistake)
        except Exception as error:
            failures += 1
            print(f"seed {seed}: {program}", file=sys.stderr)
            text = "".join(traceback.format_exception_only(error))
            print("\n".join(text.splitlines()[:12]), file=sys.stderr, flush=True)
    print(f"{given.count} kernels, {failures} failures")
    return min(failures, 1)
