"""Random programs with control flow: what they are made of, and how they are run.

A program is a tree of blocks. Its statements call functions of :mod:`jax.lax` on values that were
computed before, and load and store references; the same statements make the body of a kernel and,
with references of JAX (:func:`jax.new_ref`) on the CPU, the function it is compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tests.fuzz import _executors
from tests.fuzz._executors import Executor

import pallasite
from pallasite import gpu as plgpu

type Run = Callable[["Machine", list[Any]], Sequence[Any]]
"""Takes the values so far, and returns further ones."""


@dataclasses.dataclass(frozen=True)
class Type:
    """What is known of a value while a program is made up.

    Attributes:
      shape, dtype: of the array or scalar.
      bounds: the least and the greatest value of a scalar, if the program says so.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bounds: tuple[int, int] | None = None

    @property
    def is_scalar(self) -> bool:
        return self.shape == ()

    @property
    def is_integer(self) -> bool:
        return self.dtype.kind in "iu"

    def like(self, other: Type) -> bool:
        """Whether a loop can carry one in place of the other."""
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """Memory of a program.

    Attributes:
      kind: "input", "shared" or "global".
      shape, dtype: of it.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a program runs on.

    Attributes:
      refs: its memory.
      index: of the block of the grid.
      is_kernel: whether this is the kernel.
    """

    refs: Sequence[Any]
    index: Any
    is_kernel: bool = False

    def kept(self, x: Any) -> Any:
        """The array. XLA merges slices at computed places of one another, and then takes other
        elements where the inner one is moved to fit (jaxlib 0.11.2, on the CPU)."""
        return x if self.is_kernel else lax.optimization_barrier(x)


@dataclasses.dataclass
class Block:
    """Statements, and the numbers of the values that they hand out.

    Attributes:
      statements: in order.
      results: numbers of values, from those that the block was given on.
    """

    statements: list[Statement] = dataclasses.field(default_factory=list)
    results: tuple[int, ...] = ()

    def run(self, machine: Machine, values: Sequence[Any]) -> tuple[Any, ...]:
        """The results."""
        known = list(values)
        for statement in self.statements:
            known += statement.run(machine, known)
        return tuple(known[number] for number in self.results)

    def change(self, machine: Machine, values: Sequence[Any]) -> None:
        """As :meth:`run`, for what it changes."""
        self.run(machine, values)

    def lines(self, first: int) -> list[str]:
        """The program as text, if ``first`` values are known before."""
        lines = []
        for statement in self.statements:
            names = [str(first + i) for i in range(statement.count)]
            lines.append(f"{', '.join(names)} = {statement.text}" if names else statement.text)
            for arguments, block in statement.blocks:
                names = [str(first + i) for i in range(arguments)]
                lines.append(f"  with {', '.join(names) or 'nothing'}:")
                lines += [f"    {line}" for line in block.lines(first + arguments)]
            first += statement.count
        return [*lines, f"return {', '.join(map(str, self.results))}"]


@dataclasses.dataclass(frozen=True)
class Statement:
    """What computes values or changes memory.

    Attributes:
      text: that describes it.
      run: does it.
      count: how many values it computes.
      blocks: that are in it, with the number of values that each is given.
    """

    text: str
    run: Run
    count: int
    blocks: tuple[tuple[int, Block], ...] = ()


@dataclasses.dataclass
class Program:
    """A random kernel.

    Attributes:
      references: its memory, inputs first.
      inputs: arrays.
      blocks: of the grid.
      block: what each of them does.
      results: types of what that returns.
      semantics: of the kernel.
      wide: whether 64-bit types are enabled.
    """

    references: list[Reference]
    inputs: list[np.ndarray]
    blocks: int
    block: Block
    results: list[Type]
    semantics: Any
    wide: bool

    def __str__(self) -> str:
        lines = [f"ref{i}: {one}" for i, one in enumerate(self.references)]
        wide = ", 64-bit types" if self.wide else ""
        head = f"{self.semantics.name} semantics, {self.blocks} blocks (0 is the index){wide}"
        return "\n".join([head, *lines, *self.block.lines(1)])

    def types(self) -> contextlib.AbstractContextManager[Any]:
        """Within it the program is traced."""
        return jax.enable_x64(self.wide)

    def of_kind(self, kind: str) -> list[int]:
        return [i for i, one in enumerate(self.references) if one.kind == kind]

    def reference(self, index: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What one block returns, by JAX."""
        rest = self.references[len(inputs) :]
        arrays = [*inputs, *(jnp.zeros(one.shape, one.dtype) for one in rest)]
        machine = Machine([jax.new_ref(jnp.array(one)) for one in arrays], index)
        return self.block.run(machine, [index])

    def expected(self, eager: bool) -> list[np.ndarray]:
        """The results of all blocks, by JAX as one program, or one primitive after the other."""
        inputs = [jnp.asarray(x) for x in self.inputs]
        call = self.reference if eager else jax.jit(self.reference)
        with jax.disable_jit(eager):
            rows = [call(jnp.int32(index), inputs) for index in range(self.blocks)]
        return [np.stack([np.asarray(one) for one in column]) for column in zip(*rows, strict=True)]

    def kernel(self) -> Callable[..., Any]:
        """A function of the inputs that returns the results, then what is in global memory."""
        inputs, shared, rooms = map(self.of_kind, ("input", "shared", "global"))

        def body(*refs: Any) -> None:
            index = lax.axis_index("block") if self.blocks > 1 else jnp.int32(0)
            own = list(refs)
            place = {number: own.pop(0) for number in inputs}
            outs = [own.pop(0).at[index] for _ in self.results]
            place |= {number: own.pop(0).at[index] for number in rooms}
            place |= {number: own.pop(0) for number in shared}
            machine = Machine([place[i] for i in range(len(place))], index, is_kernel=True)
            for ref, value in zip(outs, self.block.run(machine, [index]), strict=True):
                value = jnp.where(value, 1, 0).astype(ref.dtype) if _is_bool(value) else value
                ref[... if value.shape else 0] = value

        out_type = [
            jax.ShapeDtypeStruct((self.blocks, *(one.shape or (1,))), _stored(one.dtype))
            for one in self.results
        ]
        out_type += [
            jax.ShapeDtypeStruct((self.blocks, *self.references[i].shape), self.references[i].dtype)
            for i in rooms
        ]
        grid = {"grid": (self.blocks,), "grid_names": ("block",)} if self.blocks > 1 else {}
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=[
                plgpu.SMEM(self.references[i].shape, self.references[i].dtype) for i in shared
            ],
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
            **grid,
        )

    def found(self, device: Any) -> list[np.ndarray]:
        """The results of all blocks, by the kernel on a device."""
        with jax.default_device(device):
            results = self.kernel()(*map(jnp.asarray, self.inputs))
        pairs = zip(results, self.results, strict=False)
        return [np.asarray(x).reshape(self.blocks, *one.shape) for x, one in pairs]


def _is_bool(value: Any) -> bool:
    return value.dtype == np.bool_


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Of the array that receives values of a type."""
    return np.dtype(np.int32) if dtype == np.bool_ else dtype


def check(program: Program, executors: Sequence[Executor] | None = None) -> str | None:
    """Runs a program as a kernel, and compares the results with those of JAX.

    Args:
      program: the program.
      executors: what runs it; by default what serves JAX's first device.

    Returns:
      Whether the bits of two executors are equal, or why they need not be.

    Raises:
      AssertionError: results differ.
      PallasiteError: the kernel does not compile.
    """
    executors = _executors.executors() if executors is None else executors
    sanitized = pallasite.config.scoped(sanitize=True)  # On the simulator.
    with program.types(), _executors.on_cpu():
        expected = program.expected(eager=False)
    found = []
    with pallasite.target("sm_90a"), sanitized, _executors.recorded() as ptx, program.types():
        for executor in executors:
            found.append(program.found(executor.device))
            wrong = _wrong(program, found[-1], expected)
            if wrong is not None:
                # XLA may be wrong about a whole program, but not about one primitive.
                with _executors.on_cpu():
                    wrong = _wrong(program, found[-1], program.expected(eager=True))
            assert wrong is None, f"on the {executor.name}: {wrong}"
    if len(found) == 1:
        return None
    return _executors.compared(found[0], found[1], lambda: _executors.inexact(ptx))


def _wrong(
    program: Program, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> str | None:
    """What differs, or None."""
    for number, got, want in zip(program.block.results, found, expected, strict=True):
        try:
            np.testing.assert_array_equal(got, want)
        except AssertionError as error:
            return f"value {number}: {error}"
    return None
