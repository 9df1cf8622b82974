"""Steps of random kernels with tensor memory: what each does in a kernel, and to NumPy's arrays."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

LARGEST = 4
"""Of the absolute values that are stored."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Matrices in tensor memory; ``union`` names those that share columns."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packed: bool
    union: str = ""

    @property
    def packing(self) -> int:
        return 32 // (8 * self.dtype.itemsize) if self.packed else 1

    @property
    def columns(self) -> int:
        *batch, rows, columns = self.shape
        each = columns // 2 if rows == 64 else rows // 128 * columns
        return -(-math.prod(batch) * each // self.packing // 4) * 4

    def description(self, pair: bool) -> Any:
        return plgpu.TMEM(self.shape, self.dtype, packed=self.packed, collective=pair or None)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What a program lacks: the step's number, and which of its waits."""

    step: int
    wait: str


@dataclasses.dataclass(frozen=True)
class View:
    """Rows and columns of one matrix, or, with no ``batch``, of all matrices of a buffer.

    Attributes:
      rows, columns: the first, and how many.
      computed: whether starts are known only to the kernel.
      step: how many columns are added for each iteration of a loop.
    """

    buffer: Buffer
    batch: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]
    computed: bool = False
    step: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._rest, self.rows[1], self.columns[1])

    @property
    def _rest(self) -> tuple[int, ...]:
        return () if self.batch else self.buffer.shape[:-2]

    def slices(self, iteration: int) -> tuple[Any, ...]:
        start = self.columns[0] + iteration * self.step
        rows = slice(self.rows[0], sum(self.rows))
        before = self.batch or (Ellipsis,)
        return (*before, rows, slice(start, start + self.columns[1]))

    def of(self, kernel: Kernel) -> Any:
        ref = kernel.refs[self.buffer.name]
        if self.batch:
            ref = ref.at[tuple(kernel.number(i, self.computed) for i in self.batch)]
        rows, columns = self.buffer.shape[-2:]
        every = (slice(None),) * len(self._rest)
        if self.rows != (0, rows):
            start = kernel.number(self.rows[0], self.computed, 128)
            ref = ref.at[(*every, pl.ds(start, self.rows[1]))]
        if self.columns == (0, columns):
            return ref
        start = kernel.number(self.columns[0], self.computed, math.gcd(self.columns[0], 64) or 64)
        if self.step:
            divisor = math.gcd(self.columns[0], self.step)
            start = pl.multiple_of(start + kernel.iteration * self.step, divisor)
        return ref.at[(*every, slice(None), pl.ds(start, self.columns[1]))]

    def overlaps(self, other: View) -> bool:
        """Whether both certainly have an element in common."""

        def common(one: tuple[int, int], two: tuple[int, int]) -> bool:
            return one[0] < sum(two) and two[0] < sum(one)

        if self.buffer.name != other.buffer.name or (
            self.batch and other.batch and self.batch != other.batch
        ):
            return False
        return common(self.rows, other.rows) and common(self.columns, other.columns)


class Model:
    """What a kernel should do: NumPy arrays for each block."""

    def __init__(self, program: Program):
        self.inputs = program.inputs
        self.blocks = program.blocks
        self.memory: dict[str, list[np.ndarray[Any, Any]]] = {}
        self.outputs = [np.zeros(one.shape, one.dtype) for one in program.outputs]
        self.pool: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.iteration = 0

    def write(self, view: View, block: int, value: Any) -> None:
        name = view.buffer.name
        if name not in self.memory:
            self.memory[name] = [np.zeros(view.buffer.shape) for _ in range(self.blocks)]
        self.memory[name][block][view.slices(self.iteration)] = value

    def read(self, view: View, block: int) -> np.ndarray[Any, Any]:
        return self.memory[view.buffer.name][block][view.slices(self.iteration)].copy()


class Kernel:
    """A kernel while it is traced."""

    def __init__(
        self, program: Program, inputs: Sequence[Any], outputs: Sequence[Any], **refs: Any
    ):
        self.program = program
        self.inputs, self.outputs, self.refs = inputs, outputs, dict(refs)
        self.block = lax.axis_index("pair") if program.pair else 0
        self.pool: dict[int, Any] = {}
        self.iteration: Any = 0
        self.loaded = False
        self.left_out = ""
        self.turns = self.owner = 0

    def barrier(self, name: str) -> Any:
        """A barrier: warpgroups have their own, as each counts its phases."""
        return self.refs[name].at[self.owner]

    def turn(self, body: Any) -> None:
        """What one of the warpgroups does, while the others wait."""
        threads = self.program.threads
        if threads == 1:
            body()
            return
        self.owner, self.turns = self.turns * 3 // 2 % threads, self.turns + 1

        @pl.when(lax.axis_index("thread") == self.owner)
        def _() -> None:
            body()
            self.before_writing()

        plgpu.barrier_arrive(self.refs["turn"])
        plgpu.barrier_wait(self.refs["turn"])

    def scoped(self, body: Any, *allocations: Any) -> None:
        """``pl.run_scoped`` for all warpgroups."""
        axes = ("thread",) if self.program.threads > 1 else ()
        pl.run_scoped(body, *allocations, collective_axes=axes)

    def wait(self, what: str, body: Any) -> None:
        """Waits, unless that is the mistake."""
        if what != self.left_out:
            body()

    def number(self, value: int, computed: bool, multiple: int = 1) -> Any:
        """A number that the compiler knows, or only its divisor."""
        if not computed:
            return value
        found = pl.program_id(0) * multiple + value
        return pl.multiple_of(found, multiple) if multiple > 1 else found

    def before_writing(self) -> None:
        if self.loaded:
            self.wait("loads", plgpu.wait_load_tmem)
            self.loaded = False

    def input(self, number: int) -> Any:
        return self.inputs[number].at[self.block]


@dataclasses.dataclass(frozen=True)
class Store:
    """An array is stored: an input, what was loaded before, or one number."""

    view: View
    source: tuple[str, int]
    layout: Any

    def emit(self, kernel: Kernel) -> None:
        kernel.turn(lambda: self._store(kernel))

    def _store(self, kernel: Kernel) -> None:
        kind, number = self.source
        dtype = self.view.buffer.dtype
        if kind == "input":
            value = plgpu.load(kernel.input(number), optimized=False)
        elif kind == "pool":
            value = _narrowed(kernel.pool[number], dtype)
        else:
            value = jnp.full(self.view.shape, number, dtype)
        kernel.before_writing()
        if self.layout is not None:
            value = plgpu.layout_cast(value, self.layout)
        plgpu.async_store_tmem(self.view.of(kernel), value)
        kernel.wait("stores", plgpu.commit_tmem)

    def model(self, model: Model) -> None:
        kind, number = self.source
        for block in range(model.blocks):
            if kind == "input":
                value = model.inputs[number][block].astype(np.float64)
            elif kind == "pool":
                limit = 0 if self.view.buffer.dtype.kind == "u" else -LARGEST
                value = model.pool[number][block].clip(limit, LARGEST)
            else:
                value = np.full(self.view.shape, number)
            model.write(self.view, block, value)


def _narrowed(value: Any, dtype: np.dtype[Any]) -> Any:
    """Small enough to be exact in a dtype."""
    wide = value.astype(jnp.float32)
    low = 0.0 if dtype.kind == "u" else -float(LARGEST)
    return jnp.clip(wide, low, float(LARGEST)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Load:
    """A matrix is loaded, to be stored again and written to an output."""

    view: View
    number: int
    output: int
    layout: Any
    reduce: str | None = None

    def emit(self, kernel: Kernel) -> None:
        kernel.turn(lambda: self._load(kernel))

    def _load(self, kernel: Kernel) -> None:
        out = kernel.outputs[self.output].at[kernel.block, kernel.iteration]
        if self.reduce is not None:
            value, reduced = plgpu.async_load_tmem(self.view.of(kernel), reduce=self.reduce)
            kernel.outputs[self.output + 1].at[kernel.block, kernel.iteration][...] = reduced
        else:
            value = plgpu.async_load_tmem(self.view.of(kernel), layout=self.layout)
        kernel.loaded = True
        out[...] = value
        kernel.pool[self.number] = value

    def model(self, model: Model) -> None:
        found = [model.read(self.view, block) for block in range(model.blocks)]
        model.pool[self.number] = found
        for block, value in enumerate(found):
            model.outputs[self.output][block, model.iteration] = value
            if self.reduce is not None:
                given = np.abs(value) if "abs" in self.reduce else value
                reduced = given.max(axis=1) if "max" in self.reduce else given.min(axis=1)
                model.outputs[self.output + 1][block, model.iteration] = reduced


@dataclasses.dataclass(frozen=True)
class Copy:
    """An input is copied from shared memory."""

    view: View
    input: int
    swizzle: int
    warp: int | None

    def emit(self, kernel: Kernel) -> None:
        kernel.before_writing()

        def body(ref: Any) -> None:
            kernel.turn(lambda: self._copy(kernel, ref))

        kernel.scoped(body, _shared(kernel, self.view.shape, self.view.buffer.dtype, self.swizzle))

    def _copy(self, kernel: Kernel, ref: Any) -> None:
        plgpu.copy_gmem_to_smem(kernel.input(self.input), ref, kernel.barrier("copied"))
        plgpu.barrier_wait(kernel.barrier("copied"))
        axis = "pair" if kernel.program.pair else None
        _meet(kernel)

        def copy() -> None:
            plgpu.async_copy_smem_to_tmem(ref, self.view.of(kernel), axis)
            plgpu.tcgen05_commit_arrive(kernel.barrier("done"), collective_axis=axis)

        _by_warp(self.warp, copy)
        kernel.wait("done", lambda: plgpu.barrier_wait(kernel.barrier("done")))

    def model(self, model: Model) -> None:
        for block in range(model.blocks):
            model.write(self.view, block, model.inputs[self.input][block].astype(np.float64))


@dataclasses.dataclass(frozen=True)
class Product:
    """``acc (+)= a @ b``: a is an input or in tensor memory.

    Attributes:
      turned: whether the transposes of a and b are what lies in memory.
      accumulate: a constant, or "computed".
      times: how often it is added, before anybody waits.
      committed: whether the arrival is asked for apart from the product.
    """

    acc: View
    a: int | View
    b: int
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]
    depth: int
    turned: tuple[bool, bool]
    swizzles: tuple[int, int]
    accumulate: Any
    times: int
    committed: bool
    warp: int | None

    def emit(self, kernel: Kernel) -> None:
        blocks = kernel.program.blocks
        m, n = self.acc.shape
        n //= blocks
        shapes = [(m, self.depth), (self.depth, n)]
        inputs: list[int] = [self.b] if isinstance(self.a, View) else [self.a, self.b]
        first = 2 - len(inputs)
        allocations = [
            _shared(
                kernel,
                shapes[i][::-1] if self.turned[i] else shapes[i],
                self.dtypes[i],
                self.swizzles[i],
            )
            for i in range(first, 2)
        ]
        kernel.before_writing()

        def body(*refs: Any) -> None:
            kernel.turn(lambda: self._multiply(kernel, inputs, refs))

        kernel.scoped(body, *allocations)

    def _multiply(self, kernel: Kernel, inputs: Sequence[int], refs: Sequence[Any]) -> None:
        first = 2 - len(inputs)
        filled = kernel.barrier("filled" if len(inputs) == 2 else "copied")
        for number, ref in zip(inputs, refs, strict=True):
            plgpu.copy_gmem_to_smem(kernel.input(number), ref, filled)
        kernel.wait("filled", lambda: plgpu.barrier_wait(filled))
        _meet(kernel)
        views = [
            plgpu.transpose_ref(ref, (1, 0)) if self.turned[i] else ref
            for i, ref in zip(range(first, 2), refs, strict=True)
        ]
        a = self.a.of(kernel) if isinstance(self.a, View) else views[0]
        axis = "pair" if kernel.program.pair else None
        done = kernel.barrier("done")
        accumulate = self.accumulate
        if accumulate == "computed":
            accumulate = pl.program_id(0) == 0

        def multiply() -> None:
            for time in range(self.times):
                last = time == self.times - 1 and not self.committed
                plgpu.tcgen05_mma(
                    self.acc.of(kernel),
                    a,
                    views[-1],
                    done if last else None,
                    accumulate=accumulate if time == 0 else True,
                    collective_axis=axis,
                )
            if self.committed:
                plgpu.tcgen05_commit_arrive(done, collective_axis=axis)

        _by_warp(self.warp, multiply)
        kernel.wait("done", lambda: plgpu.barrier_wait(done))

    def model(self, model: Model) -> None:
        def matrix(number: int, block: int, turned: bool) -> np.ndarray[Any, Any]:
            found = model.inputs[number][block].astype(np.float64)
            return found.T if turned else found

        b = [matrix(self.b, block, self.turned[1]) for block in range(model.blocks)]
        sums = []
        for block in range(model.blocks):
            if isinstance(self.a, View):
                a = model.read(self.a, block)
            else:
                a = matrix(self.a, block, self.turned[0])
            before = model.read(self.acc, block) if self.accumulate else 0
            sums.append(before + self.times * (a @ np.concatenate(b, axis=1)))
        for block, value in enumerate(sums):
            model.write(self.acc, block, value)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that are repeated."""

    trips: int
    steps: tuple[Any, ...]

    def emit(self, kernel: Kernel) -> None:
        kernel.before_writing()

        def body(i: Any, carry: None) -> None:
            kernel.iteration = i
            for step in self.steps:
                step.emit(kernel)
            kernel.before_writing()
            return carry

        lax.fori_loop(0, self.trips, body, None)
        kernel.iteration = 0

    def model(self, model: Model) -> None:
        for i in range(self.trips):
            model.iteration = i
            for step in self.steps:
                step.model(model)
        model.iteration = 0


@dataclasses.dataclass(frozen=True)
class Scope:
    """Steps with one more matrix."""

    buffer: Buffer
    steps: tuple[Any, ...]

    def emit(self, kernel: Kernel) -> None:
        def body(ref: Any) -> None:
            kernel.refs[self.buffer.name] = ref
            for step in self.steps:
                step.emit(kernel)

        kernel.scoped(body, self.buffer.description(kernel.program.pair))

    def model(self, model: Model) -> None:
        for step in self.steps:
            step.model(model)


def _written(step: Any) -> View | None:
    """What a step writes of tensor memory."""
    if isinstance(step, Store | Copy):
        return step.view
    return step.acc if isinstance(step, Product) else None


def _read(step: Any) -> list[View]:
    """What a step certainly reads of tensor memory."""
    if isinstance(step, Load):
        return [step.view]
    if isinstance(step, Product):
        left = [step.a] if isinstance(step.a, View) else []
        return left + [step.acc] * (step.accumulate is not False)
    return []


def _shared(kernel: Kernel, shape: Sequence[int], dtype: np.dtype[Any], swizzle: int) -> Any:
    if not swizzle:  # To be inferred.
        return plgpu.SMEM(tuple(shape), dtype)
    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, swizzle // dtype.itemsize)),)
    if swizzle > 16:
        transforms += (plgpu.SwizzleTransform(swizzle),)
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def _meet(kernel: Kernel) -> None:
    """The blocks of a pair are both ready."""
    if kernel.program.pair and kernel.left_out != "both":
        plgpu.barrier_arrive(kernel.barrier("both"))
        plgpu.barrier_wait(kernel.barrier("both"))


def _by_warp(warp: int | None, body: Any) -> None:
    if warp is None:
        body()
        return

    @plgpu.warp_map
    def _(number: Any) -> None:
        pl.when(number == warp)(body)


@dataclasses.dataclass
class Program:
    """A kernel that was made up."""

    target: str
    semantics: Any
    pair: bool
    threads: int
    buffers: list[Buffer]
    steps: list[Any] = dataclasses.field(default_factory=list)
    inputs: list[np.ndarray[Any, Any]] = dataclasses.field(default_factory=list)
    outputs: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)

    @property
    def blocks(self) -> int:
        return 2 if self.pair else 1

    def __str__(self) -> str:
        lines = [f"{self.target}, {self.semantics}, {self.pair=}, {self.threads=}"]
        return "\n  ".join(lines + list(map(str, self.buffers)) + list(map(str, self.steps)))

    def mistakes(self) -> list[Mistake]:
        """What could be left out, each of which makes the program wrong."""
        found: list[Mistake] = []
        if self.threads > 1:
            return found
        for number, (step, after) in enumerate(itertools.pairwise(self.steps)):
            if isinstance(step, Product):
                found.append(Mistake(number, "filled"))
                if self.pair:
                    found.append(Mistake(number, "both"))
            written, loaded = _written(step), step.view if isinstance(step, Load) else None
            if written is not None and any(written.overlaps(one) for one in _read(after)):
                wait = "stores" if isinstance(step, Store) else "done"
                found.append(Mistake(number, wait))
            target = _written(after)
            if loaded is not None and target is not None and loaded.overlaps(target):
                found.append(Mistake(number + 1, "loads"))
        return found

    def kernel(self, mistake: Mistake | None = None) -> Any:
        def body(*refs: Any, **scratch: Any) -> None:
            unions = {one: scratch.pop(one) for one in {b.union for b in self.buffers} if one}
            for name, union in unions.items():
                members = [one for one in self.buffers if one.union == name]
                scratch |= {one.name: ref for one, ref in zip(members, union, strict=True)}
            count = len(self.inputs)
            kernel = Kernel(self, refs[:count], refs[count:], **scratch)
            for number, step in enumerate(self.steps):
                wrong = mistake is not None and mistake.step == number
                kernel.left_out = mistake.wait if mistake is not None and wrong else ""
                step.emit(kernel)

        scratch: dict[str, Any] = dict(
            filled=plgpu.Barrier(num_arrivals=2, num_barriers=self.threads),
            copied=plgpu.Barrier(num_barriers=self.threads),
            done=plgpu.Barrier(num_barriers=self.threads, orders_tensor_core=True),
        )
        options: dict[str, Any] = {}
        if self.threads > 1:
            options = dict(num_threads=self.threads, thread_name="thread")
            scratch["turn"] = plgpu.Barrier(num_arrivals=self.threads, orders_tensor_core=True)
        for one in self.buffers:
            if not one.union:
                scratch[one.name] = one.description(self.pair)
        for name in sorted({one.union for one in self.buffers} - {""}):
            members = [one for one in self.buffers if one.union == name]
            scratch[name] = plgpu.RefUnion(*(one.description(self.pair) for one in members))
        if self.pair:
            scratch["both"] = plgpu.ClusterBarrier(
                collective_axes=("pair",), num_barriers=self.threads, orders_tensor_core=True
            )
        return plgpu.kernel(
            body,
            out_type=self.outputs,
            scratch_types=scratch,
            grid=(1,),
            grid_names=("grid",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
            **(dict(cluster=(2,), cluster_names=("pair",)) if self.pair else {}),
            **options,
        )
