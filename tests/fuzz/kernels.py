"""Random kernels, against JAX on the CPU.

A kernel is a sequence of random steps on a pool of arrays: element-wise functions, reductions,
changes of shape and place, loops, branches, shared memory, asynchronous copies. The same steps
make the body of the kernel and, evaluated by JAX one by one, the reference.

    python -m tests.fuzz kernels --seed 0 --count 100
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from tests.fuzz import _executors
from tests.fuzz._array_steps import ArraySteps
from tests.fuzz._executors import Executor
from tests.fuzz._machines import KernelMachine, Machine
from tests.fuzz._memory_steps import Updates, make_updates
from tests.fuzz._seeds import add_options, check_seeds
from tests.fuzz._transformed_functions import SUMS, gradient, looped_rows

import pallasite
from pallasite import gpu as plgpu

type Step = Callable[[Machine, list[Any]], Any]
"""Takes the pool of values, and returns one more."""

FLOATS = ("float32", "float32", "float16", "bfloat16")
INTEGERS = ("int32", "uint32", "int8", "uint8", "int16", "uint16", "bool")
WIDE = ("int64", "uint64", "float64", "float64")
TOLERANCES = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-9}
SIDES = (1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 24, 31, 32, 33, 48, 61, 64)


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value of the pool while a kernel is made up.

    Attributes:
      shape, dtype: of the array.
      exact: whether its elements are those of the reference, bit by bit.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    exact: bool

    @property
    def is_float(self) -> bool:
        return np.dtype(self.dtype).kind not in "iub"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_copied(value: Value) -> bool:
    """Whether an asynchronous copy moves all of an array."""
    if value.shape == () or value.dtype == np.bool_:
        return False
    return len(value.shape) > 1 or value.shape[-1] * value.dtype.itemsize % 16 == 0


@dataclasses.dataclass
class Program:
    """A random kernel.

    Attributes:
      inputs: arrays.
      steps: what makes further values of the pool, with a description of each.
      semantics: of the kernel.
      room: shapes and dtypes of what passes through global memory, in order.
      copies_result: whether the result is copied to the output, not stored.
      changes: of the stored result, in the output, which is not read otherwise; or None.
      blocks: with ``pl.pallas_call``, for each input and for the result, whether it is a block in
        shared memory; None with ``plgpu.kernel``.
      wide: whether there may be numbers of 64 bits.
      mapped: whether the kernel runs under ``jax.vmap``, on the inputs and on their reverse.
    """

    inputs: list[np.ndarray]
    steps: list[tuple[str, Step]]
    semantics: Any
    room: list[Any]
    copies_result: bool
    changes: Updates | None
    blocks: list[bool] | None
    wide: bool
    mapped: bool

    def reference(self, inputs: Sequence[Any]) -> Any:
        """The result."""
        result = self.run(Machine(), inputs)
        return result if self.changes is None else self.changes.of_array(result)

    def run(self, machine: Machine, inputs: Sequence[Any]) -> Any:
        """The last value."""
        pool = list(inputs)
        for _, step in self.steps:
            pool.append(step(machine, pool))
        return pool[-1]

    def __str__(self) -> str:
        lines = [f"{i}: {x.dtype}{list(x.shape)}" for i, x in enumerate(self.inputs)]
        start = len(lines)
        lines += [f"{start + i}: {text}" for i, (text, _) in enumerate(self.steps)]
        end = ", the result is copied" if self.copies_result else ""
        end += "" if self.changes is None else f", the result is changed: {self.changes}"
        end += "" if self.blocks is None else f", pallas_call with blocks {self.blocks}"
        end += ", 64 bits" * self.wide + ", under vmap" * self.mapped
        return f"{self.semantics.name} semantics{end}\n" + "\n".join(lines)


class Generator(ArraySteps):
    """Makes a program from a random state.

    Args:
      choose: the random state.
      largest: elements of an array, at most.
    """

    def __init__(self, choose: random.Random, largest: int):
        self.choose = choose
        self.largest = largest
        self.values: list[Value] = []
        self.steps: list[tuple[str, Step]] = []
        self.room: list[Any] = []
        self.inputs = 0
        self.copied: set[int] = set()

    def program(self, length: int) -> Program:
        """A program of so many steps."""
        choose = self.choose
        self.wide = choose.random() < 0.15
        with jax.enable_x64(self.wide):
            return self._program(length)

    def _program(self, length: int) -> Program:
        choose = self.choose
        inputs = [self.input() for _ in range(choose.randint(1, 3))]
        self.values = [Value(x.shape, x.dtype, True) for x in inputs]
        self.inputs = len(inputs)
        makers = [
            *[self.unary] * 3,
            *[self.binary] * 4,
            *[self.reduction] * 2,
            *[self.slice] * 2,
            *(self.reshape, self.transpose, self.concatenate, self.pad, self.reverse, self.cast),
            *(self.cumulative, self.order, self.gather, self.dynamic_slice, self.select),
            *[self.scatter] * 2,
            *(self.loop, self.branch, self.shared, self.shared, self.index_of_extreme, self.tile),
            *(self.copied_input, self.through_global, self.updated, self.updated),
            *(self.pipelined_input, self.looped_rows, self.gradient),
            *self.array_steps,
        ]
        while len(self.steps) < length:
            choose.choice(makers)()
        semantics = choose.choice(list(plgpu.LoweringSemantics))
        last = self.values[-1]
        copies = is_copied(last) and choose.random() < 0.3
        changes = None
        if not copies and last.shape != () and last.dtype != np.bool_ and choose.random() < 0.3:
            changes = make_updates(choose, last.shape, last.dtype, branches=last.exact, reads=False)
        blocks = None
        if choose.random() < 0.4:
            blocks = [i not in self.copied and choose.random() < 0.7 for i in range(self.inputs)]
            blocks.append(not (copies or changes) and choose.random() < 0.7)
        mapped = choose.random() < 0.15
        return Program(
            inputs, self.steps, semantics, self.room, copies, changes, blocks, self.wide, mapped
        )

    def input(self) -> np.ndarray:
        choose = self.choose
        rank = choose.choice([1, 2, 2, 2, 3])
        while True:
            shape = tuple(choose.choice(SIDES) for _ in range(rank))
            if math.prod(shape) <= self.largest:
                break
        values = np.random.default_rng(choose.getrandbits(32))
        name = choose.choice([*FLOATS, *INTEGERS, *(WIDE if self.wide else ())])
        if name == "bool":
            return values.random(shape) < 0.5
        if name in INTEGERS or name in WIDE[:2]:
            info = np.iinfo(name)
            return values.integers(max(info.min, -100), 100, shape).astype(name)
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
        return values.normal(size=shape).astype(dtype)

    def pick(self, suits: Callable[[Value], bool] = lambda value: True) -> int | None:
        """The number of a value, the last ones more likely."""
        numbers = [i for i, value in enumerate(self.values) if suits(value)]
        return self.choose.choice([*numbers, *numbers[-2:]]) if numbers else None

    def add(self, text: str, step: Step, *sources: int, exact: bool) -> None:
        """Adds a step, unless its result is unsuitable."""

        def function(*values: Any) -> Any:
            pool = [jnp.zeros((), jnp.float32)] * len(self.values)
            for number, value in zip(sources, values, strict=True):
                pool[number] = value
            return step(Machine(), pool)

        given = [jax.ShapeDtypeStruct(self.values[i].shape, self.values[i].dtype) for i in sources]
        result = jax.eval_shape(function, *given)
        if 0 in result.shape or result.size > self.largest:
            return
        exact = exact and all(self.values[i].exact for i in sources)
        shown = f"{text} -> {result.dtype}{list(result.shape)}"
        self.values.append(Value(tuple(result.shape), np.dtype(result.dtype), exact))
        self.steps.append((shown, step))

    # Steps ------------------------------------------------------------------------------------

    def unary(self) -> None:
        """An element-wise function."""
        i = self.pick()
        assert i is not None
        if self.values[i].is_float:
            name, function, exact = self.choose.choice(
                [
                    ("tanh", jnp.tanh, False),
                    ("exp(-abs)", lambda x: jnp.exp(-jnp.abs(x)), False),
                    ("sqrt(abs)", lambda x: jnp.sqrt(jnp.abs(x)), False),
                    ("sin", jnp.sin, False),
                    ("logistic", jax.nn.sigmoid, False),
                    ("neg", jnp.negative, True),
                    ("abs", jnp.abs, True),
                    ("clip", lambda x: jnp.clip(x, -1, 1), True),
                ]
            )
        elif self.values[i].dtype == np.bool_:
            name, function, exact = "not", jnp.logical_not, True
        else:
            name, function, exact = self.choose.choice(
                [
                    ("neg", jnp.negative, True),
                    ("not", jnp.bitwise_not, True),
                    ("halve", lambda x: x >> 1, True),
                    ("count bits", lax.population_count, True),
                    ("min(x, 9)", lambda x: jnp.minimum(x, 9), True),
                ]
            )
        self.add(f"{name} {i}", lambda m, pool: function(pool[i]), i, exact=exact)

    def binary(self) -> None:
        """A function of two arrays of one dtype that broadcast against each other."""
        i = self.pick()
        assert i is not None
        own = self.values[i]

        def suits(other: Value) -> bool:
            if other.dtype != own.dtype or len(other.shape) != len(own.shape):
                return False
            return all(a in (1, b) or b == 1 for a, b in zip(other.shape, own.shape, strict=True))

        j = self.pick(suits)
        assert j is not None
        if own.dtype == np.bool_:
            table = [("and", jnp.logical_and, True), ("xor", jnp.logical_xor, True)]
        else:
            table = [
                ("add", jnp.add, not own.is_float),
                ("sub", jnp.subtract, not own.is_float),
                ("mul", jnp.multiply, not own.is_float),
                ("max", jnp.maximum, True),
                ("min", jnp.minimum, True),
            ]
            if own.exact and self.values[j].exact:
                table.append(("less", jnp.less, True))
        name, function, exact = self.choose.choice(table)
        self.add(f"{name} {i} {j}", lambda m, pool: function(pool[i], pool[j]), i, j, exact=exact)

    def select(self) -> None:
        """A choice between two arrays by a third."""
        i = self.pick(lambda value: value.exact and value.dtype != np.bool_)
        if i is None:
            return
        j = self.pick(lambda value: value.shape == self.values[i].shape)
        assert j is not None

        def step(m: Machine, pool: list[Any]) -> Any:
            return jnp.where(pool[i] > 0, pool[j], jnp.zeros_like(pool[j]))

        self.add(f"where {i} > 0: {j}", step, i, j, exact=True)

    def reduction(self) -> None:
        """A reduction over some axes."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        own = self.values[i]
        axes = tuple(d for d in range(len(own.shape)) if self.choose.random() < 0.5)
        axes = axes or (self.choose.randrange(len(own.shape)),)
        keep = self.choose.random() < 0.7 or len(axes) == len(own.shape)
        table = [("max", jnp.max, True), ("min", jnp.min, True)]
        if own.dtype == np.bool_:
            table = [("any", jnp.any, True), ("all", jnp.all, True)]
        elif own.is_float:
            table.append(("mean", jnp.mean, False))
        else:
            table.append(("sum", lambda x, **rest: jnp.sum(x, dtype=x.dtype, **rest), True))
        name, function, exact = self.choose.choice(table)
        self.add(
            f"{name} {i} over {axes}, keepdims={keep}",
            lambda m, pool: function(pool[i], axis=axes, keepdims=keep),
            i,
            exact=exact,
        )

    def index_of_extreme(self) -> None:
        """The place of the largest or smallest element."""
        i = self.pick(lambda value: value.exact and value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        name, function = self.choose.choice([("argmax", jnp.argmax), ("argmin", jnp.argmin)])
        step: Step = lambda m, pool: function(pool[i], axis=axis, keepdims=True)  # noqa: E731
        self.add(f"{name} {i} over {axis}", step, i, exact=True)

    def slice(self) -> None:
        """A part with steps."""
        i = self.pick(lambda value: value.size > 1)
        if i is None:
            return
        part = self.part(self.values[i].shape)
        self.add(f"slice {i} {part}", lambda m, pool: pool[i][part], i, exact=True)

    def part(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Random slices of a shape."""
        slices = []
        for extent in shape:
            start = self.choose.randrange(extent) if self.choose.random() < 0.5 else 0
            stop = self.choose.randint(start + 1, extent) if self.choose.random() < 0.5 else extent
            slices.append(slice(start, stop, self.choose.choice([1, 1, 1, 2, 3])))
        return tuple(slices)

    def reshape(self) -> None:
        """Another shape of as many elements."""
        i = self.pick(lambda value: value.size > 1)
        if i is None:
            return
        size = self.values[i].size
        factors = [n for n in range(1, size + 1) if size % n == 0]
        first = self.choose.choice(factors)
        shape = self.choose.choice([(size,), (first, size // first), (first, 1, size // first)])
        order = self.choose.choice("CCF")
        self.add(
            f"reshape {i} {shape} {order}",
            lambda m, pool: pool[i].reshape(shape, order=order),
            i,
            exact=True,
        )

    def transpose(self) -> None:
        """Another order of the dimensions."""
        i = self.pick(lambda value: len(value.shape) > 1)
        if i is None:
            return
        order = list(range(len(self.values[i].shape)))
        self.choose.shuffle(order)
        step: Step = lambda m, pool: jnp.transpose(pool[i], order)  # noqa: E731
        self.add(f"transpose {i} {order}", step, i, exact=True)

    def concatenate(self) -> None:
        """Two arrays one behind the other."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        own = self.values[i]
        axis = self.choose.randrange(len(own.shape))

        def suits(other: Value) -> bool:
            shapes = [[n for d, n in enumerate(v.shape) if d != axis] for v in (own, other)]
            same = len(other.shape) == len(own.shape) and shapes[0] == shapes[1]
            return same and other.dtype == own.dtype

        j = self.pick(suits)
        assert j is not None
        step: Step = lambda m, pool: jnp.concatenate([pool[i], pool[j]], axis)  # noqa: E731
        self.add(f"concatenate {i} {j} along {axis}", step, i, j, exact=True)

    def pad(self) -> None:
        """Zeros around an array."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        config = [
            (self.choose.randint(0, 3), self.choose.randint(0, 3), self.choose.choice([0, 0, 1]))
            for _ in self.values[i].shape
        ]
        step: Step = lambda m, pool: lax.pad(pool[i], pool[i].dtype.type(0), config)  # noqa: E731
        self.add(f"pad {i} {config}", step, i, exact=True)

    def reverse(self) -> None:
        """The other way round."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        if self.choose.random() < 0.5:
            self.add(f"flip {i} {axis}", lambda m, pool: jnp.flip(pool[i], axis), i, exact=True)
        else:
            step: Step = lambda m, pool: jnp.roll(pool[i], 2, axis)  # noqa: E731
            self.add(f"roll {i} {axis}", step, i, exact=True)

    def tile(self) -> None:
        """Repetitions."""
        i = self.pick(lambda value: value.shape != ())
        if i is None:
            return
        times = tuple(self.choose.choice([1, 2, 3]) for _ in self.values[i].shape)
        self.add(f"tile {i} {times}", lambda m, pool: jnp.tile(pool[i], times), i, exact=True)

    def cast(self) -> None:
        """Another dtype."""
        i = self.pick(lambda value: value.exact or value.is_float)
        assert i is not None
        own = self.values[i]
        names = ["float32", "float16", "bfloat16"]
        if not own.is_float:
            names += ["int32", "int8", "uint32"]
        name = self.choose.choice(names)
        # Only small numbers have the same nearest float in all dtypes.
        exact = not own.is_float and name.startswith(("int", "uint"))
        step: Step = lambda m, pool: pool[i].astype(name)  # noqa: E731
        self.add(f"cast {i} to {name}", step, i, exact=exact)

    def cumulative(self) -> None:
        """Sums or maxima of all elements before each."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        own = self.values[i]
        axis = self.choose.randrange(len(own.shape))
        reverse = self.choose.random() < 0.5
        table = [("cummax", lax.cummax, True)]
        if not own.is_float or own.dtype in (np.float32, np.float64):
            table.append(("cumsum", lax.cumsum, not own.is_float))
        name, function, exact = self.choose.choice(table)
        self.add(
            f"{name} {i} along {axis}, reverse={reverse}",
            lambda m, pool: function(pool[i], axis, reverse),
            i,
            exact=exact,
        )

    def order(self) -> None:
        """Sorted along an axis."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        self.add(f"sort {i} {axis}", lambda m, pool: jnp.sort(pool[i], axis), i, exact=True)

    def gather(self) -> None:
        """Elements at indices that the kernel computes."""
        i = self.pick(lambda value: value.shape != ())
        j = self.pick(lambda value: value.exact and len(value.shape) == 1 and not value.is_float)
        if i is None or j is None or self.values[j].dtype == np.bool_:
            return
        axis = self.choose.randrange(len(self.values[i].shape))
        extent = self.values[i].shape[axis]

        def step(m: Machine, pool: list[Any]) -> Any:
            places = jnp.abs(pool[j].astype(jnp.int32)) % extent
            return jnp.take(pool[i], places, axis, mode="clip")

        self.add(f"take {i} at {j} along {axis}", step, i, j, exact=True)

    def scatter(self) -> None:
        """Rows at indices that the kernel computes are changed; some indices are beyond the end."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        j = self.pick(lambda value: value.exact and value.dtype != np.bool_)
        if i is None or j is None:
            return
        own = self.values[i]
        names = ["set", "max", "min", "apply"]
        if not own.is_float:
            names += ["add", "multiply"]
        elif own.dtype == np.float32:
            names += ["add"]  # Narrower sums depend on what is rounded.
        name = self.choose.choice(names)
        changed = jnp.negative if own.is_float else lambda x: (x >> 1) + 3

        def step(m: Machine, pool: list[Any]) -> Any:
            numbers = jnp.clip(pool[j], -99, 99).astype(jnp.int32).ravel()[:32]
            places = jnp.abs(numbers) % (own.shape[0] + 2)
            update = getattr(pool[i].at[places], name)
            return update(changed if name == "apply" else np.asarray(3, own.dtype), mode="drop")

        exact = name != "add" or not own.is_float
        self.add(f"{name} {i} at {j}", step, i, j, exact=exact)

    def dynamic_slice(self) -> None:
        """A part that begins where the kernel says."""
        i = self.pick(lambda value: value.shape != () and value.exact and value.dtype != np.bool_)
        if i is None:
            return
        shape = self.values[i].shape
        sizes = [self.choose.randint(1, n) for n in shape]

        def step(m: Machine, pool: list[Any]) -> Any:
            place = jnp.argmax(pool[i]).astype(jnp.int32)
            starts = [place // math.prod(shape[d + 1 :]) % n for d, n in enumerate(shape)]
            return m.kept(lax.dynamic_slice(pool[i], starts, sizes))

        self.add(f"dynamic slice {i} of {sizes}", step, i, exact=True)

    def loop(self) -> None:
        """A loop that carries an array."""
        i = self.pick(lambda value: value.is_float or value.dtype != np.bool_)
        if i is None:
            return
        trips = self.choose.randint(1, 5)

        def body(n: Any, carry: Any) -> Any:
            if self_is_float:
                return carry * jnp.asarray(0.5, carry.dtype) + jnp.asarray(0.25, carry.dtype)
            return carry + n.astype(carry.dtype)

        self_is_float = self.values[i].is_float
        step: Step = lambda m, pool: lax.fori_loop(0, trips, body, pool[i])  # noqa: E731
        self.add(f"loop {i}, {trips} times", step, i, exact=not self_is_float)

    def looped_rows(self) -> None:
        """Loops that ``jax.vmap`` makes one of, though each runs as often as it likes."""
        i = self.pick(lambda value: len(value.shape) > 1 and value.dtype != np.bool_)
        if i is None:
            return
        most, is_float = self.choose.randint(0, 4), self.values[i].is_float
        step: Step = lambda m, pool: looped_rows(pool[i], most, is_float)  # noqa: E731
        self.add(f"rows of {i} in loops of {most} steps", step, i, exact=not is_float)

    def gradient(self) -> None:
        """The gradient of a function of an array."""
        i = self.pick(lambda value: value.is_float and value.exact and value.shape != ())
        if i is None:
            return
        name = self.choose.choice(sorted(SUMS))
        step: Step = lambda m, pool: gradient(m.kept(pool[i]), name)  # noqa: E731
        self.add(f"gradient of {name} at {i}", step, i, exact=False)

    def branch(self) -> None:
        """One of two functions, by what the kernel computes."""
        i = self.pick(lambda value: value.dtype != np.bool_)
        j = self.pick(lambda value: value.exact and value.dtype != np.bool_)
        if i is None or j is None:
            return

        def step(m: Machine, pool: list[Any]) -> Any:
            x = pool[i]
            return lax.cond(jnp.max(pool[j]) > 1, lambda: x + x, lambda: jnp.flip(-x))

        self.add(f"branch on {j}: {i}", step, i, j, exact=True)

    def shared(self) -> None:
        """Through shared memory."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        part = None if self.choose.random() < 0.5 else self.part(self.values[i].shape)
        step: Step = lambda m, pool: m.through_shared(pool[i], part)  # noqa: E731
        self.add(f"shared {i} {part}", step, i, exact=True)

    def copied_input(self) -> None:
        """A part of an input, through shared memory by an asynchronous copy."""
        i = self.choose.randrange(self.inputs)
        own = self.values[i]
        part = self.window(own)
        if part is None:
            return
        self.copied.add(i)
        step: Step = lambda m, pool: m.copied_input(pool[i], i, part)  # noqa: E731
        self.add(f"copy of input {i} {part}", step, i, exact=True)

    def through_global(self) -> None:
        """Through global memory by asynchronous copies, a part of it back."""
        i = self.pick(is_copied)
        part = None if i is None else self.window(self.values[i])
        if i is None or part is None:
            return
        own, before = self.values[i], len(self.steps)
        step: Step = lambda m, pool: m.through_global(pool[i], part)  # noqa: E731
        self.add(f"global {i} {part}", step, i, exact=True)
        if len(self.steps) > before:
            self.room.append(jax.ShapeDtypeStruct(own.shape, own.dtype))

    def updated(self) -> None:
        """Changes of parts of shared or global memory."""
        i = self.pick(lambda value: value.shape != () and value.dtype != np.bool_)
        if i is None:
            return
        own, is_global = self.values[i], self.choose.random() < 0.5
        updates = make_updates(self.choose, own.shape, own.dtype, branches=own.exact)
        step: Step = lambda m, pool: m.updated(pool[i], updates, is_global)  # noqa: E731
        where = "global" if is_global else "shared"
        self.add(f"{where} {i}: {updates}", step, i, exact=not own.is_float)
        if is_global:
            self.room.append(jax.ShapeDtypeStruct(own.shape, own.dtype))

    def pipelined_input(self) -> None:
        """An input by way of a pipeline."""
        i = self.choose.randrange(self.inputs)
        own = self.values[i]
        if len(own.shape) < 2:
            return
        rows, steps = self.choose.randint(1, own.shape[0]), self.choose.randint(1, 3)
        self.copied.add(i)
        step: Step = lambda m, pool: m.pipelined_input(pool[i], i, rows, steps)  # noqa: E731
        self.add(f"pipeline of input {i}, {rows} rows, {steps} stages", step, i, exact=True)
        self.room.append(jax.ShapeDtypeStruct(own.shape, own.dtype))

    def window(self, value: Value) -> tuple[slice, ...] | None:
        """Random slices that an asynchronous copy may have.

        Where the array's rows are multiples of 16 bytes, so are the window's, and their starts.
        """
        parts = zip(self.part(value.shape), value.shape, strict=True)
        part = [slice(s.start, min(s.stop, n)) for s, n in parts]
        unit = 16 // value.dtype.itemsize
        if len(value.shape) == 1 or value.shape[-1] % unit == 0:
            start, extent = part[-1].start // unit * unit, value.shape[-1]
            stop = start + (part[-1].stop - start + unit - 1) // unit * unit
            part[-1] = slice(start, min(stop, extent // unit * unit))
        return tuple(part) if part[-1].start < part[-1].stop else None


def make_program(seed: int, *, length: int = 6, largest: int = 2048) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    return Generator(choose, largest).program(choose.randint(2, length))


def make_kernel(program: Program) -> Callable[..., Any]:
    """A function of the program's inputs, which runs it as a kernel."""
    want = jax.eval_shape(lambda *given: program.reference(given), *program.inputs)
    out = jax.ShapeDtypeStruct(want.shape, want.dtype)

    def kernel(*refs: Any) -> None:
        count = len(program.inputs)
        sources, out, room = refs[:count], refs[count], refs[count + 1 :]
        machine = KernelMachine(sources, iter(room))
        result = program.run(machine, [ref[...] for ref in sources])
        if program.changes is not None:
            program.changes.of_reference(out, result)
            return
        if not program.copies_result:
            out[...] = result
            return

        def body(ref: Any) -> None:
            ref[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ref, out)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(body, plgpu.SMEM(want.shape, want.dtype))

    params = plgpu.CompilerParams(lowering_semantics=program.semantics)
    if program.blocks is None:
        return plgpu.kernel(kernel, out_type=[out, *program.room], compiler_params=params)
    specs = [
        pl.BlockSpec(memory_space=plgpu.SMEM if block else plgpu.GMEM)
        for block in (*program.blocks, *(False for _ in program.room))
    ]
    count = len(program.inputs)
    return pl.pallas_call(
        kernel,
        out_shape=[out, *program.room],
        in_specs=specs[:count],
        out_specs=specs[count:],
        compiler_params=params,
    )


def check(program: Program, executors: Sequence[Executor] | None = None) -> str | None:
    """Runs a program as a kernel, and compares the result with the reference.

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
    with jax.enable_x64(program.wide):
        return _check(program, executors)


def _check(program: Program, executors: Sequence[Executor]) -> str | None:
    def reference(*given: Any) -> Any:
        return program.reference(given)

    def kernel(*given: Any) -> Any:
        return make_kernel(program)(*given)[0]

    both, inputs = (reference, kernel), program.inputs
    if program.mapped:
        both, inputs = tuple(map(jax.vmap, both)), [np.stack([x, x[::-1]]) for x in inputs]
    with _executors.on_cpu():
        # As one function: compiled one by one, the steps would take longer than the kernel.
        want = np.asarray(jax.jit(both[0])(*map(jnp.asarray, inputs)))
    found = []
    sanitized = pallasite.config.scoped(sanitize=True)  # On the simulator.
    with pallasite.target("sm_90a"), sanitized, _executors.recorded() as ptx:
        for executor in executors:
            with jax.default_device(executor.device):
                found.append(np.asarray(both[1](*map(jnp.asarray, inputs))))
            try:
                _compare(program, found[-1], want)
            except AssertionError as error:
                raise AssertionError(f"on the {executor.name}: {error}") from None
    if len(found) == 1:
        return None
    return _executors.compared([found[0]], [found[1]], lambda: _executors.inexact(ptx))


def _compare(program: Program, got: np.ndarray, want: np.ndarray) -> None:
    names = [np.dtype(x.dtype).name for x in (*program.inputs, want)]
    names += [word for text, _ in program.steps for word in TOLERANCES if f"to {word}" in text]
    tolerance = max([TOLERANCES.get(name, 0.0) for name in names])
    if np.dtype(want.dtype).kind in "iub":
        np.testing.assert_array_equal(got, want)
    else:
        wide = [np.asarray(x).astype(np.float64) for x in (got, want)]
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


def main(arguments: Sequence[str]) -> int:
    """Checks random kernels; prints those that fail, and how many."""
    parser = argparse.ArgumentParser(prog="tests.fuzz kernels", description=__doc__)
    add_options(parser, "kernels")
    parser.add_argument("--length", type=int, default=8, help="steps of a kernel, at most")
    parser.add_argument("--largest", type=int, default=2048, help="elements of an array, at most")
    given = parser.parse_args(arguments)
    executors = _executors.executors(given.executor)
    return check_seeds(
        given,
        "kernels",
        lambda seed: make_program(seed, length=given.length, largest=given.largest),
        lambda program: check(program, executors),
    )
