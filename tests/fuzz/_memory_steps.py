"""What random kernels do to memory: updates of parts, under masks, in loops and branches."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallasite import gpu as plgpu

ATOMIC = tuple(map(np.dtype, ("int32", "uint32", "float32")))

type Part = tuple[slice, ...]


class Array:
    """Memory as an array, for references.

    Parts are changed by selection: what XLA compiles for the CPU updates slices in place, also
    where it reads them later (``x.at[4:8].set(x[2:6])`` under ``jax.jit``, with other steps).
    """

    def __init__(self, value: Any):
        self.value = value

    def load(self, part: Part) -> Any:
        return self.value[part]

    def store(self, part: Part, x: Any) -> None:
        inside = self._placed(part, jnp.ones(x.shape, np.bool_))
        self.value = jnp.where(inside, self._placed(part, x), self.value)

    def _placed(self, part: Part, x: Any) -> Any:
        """An array of the whole shape with ``x`` at its place, zeros elsewhere."""
        sizes = zip(part, self.value.shape, strict=True)
        return lax.pad(x, np.zeros((), x.dtype), [(p.start, n - p.stop, 0) for p, n in sizes])

    def swap(self, part: Part, x: Any) -> Any:
        old = self.value[part]
        self.store(part, x)
        return old

    def add(self, part: Part, x: Any) -> None:
        self.store(part, self.value[part] + x)

    def atomic(self, part: Part, x: Any) -> None:
        self.add(part, x)

    def store_some(self, part: Part, x: Any, mask: Any) -> None:
        self.store(part, jnp.where(mask, x, self.value[part]))

    def load_some(self, part: Part, mask: Any) -> Any:
        return jnp.where(mask, self.value[part], jnp.asarray(3, self.value.dtype))


class Memory(Array):
    """Memory of a kernel."""

    def load(self, part: Part) -> Any:
        return self.value[part]

    def store(self, part: Part, x: Any) -> None:
        self.value[part] = x

    def swap(self, part: Part, x: Any) -> Any:
        return jax.ref.swap(self.value, part, x)

    def add(self, part: Part, x: Any) -> None:
        jax.ref.addupdate(self.value, part, x)

    def atomic(self, part: Part, x: Any) -> None:
        plgpu.atomic_add(self.value.at[part], x)

    def store_some(self, part: Part, x: Any, mask: Any) -> None:
        triton.store(self.value.at[part], x, mask=mask)

    def load_some(self, part: Part, mask: Any) -> Any:
        return triton.load(self.value.at[part], mask=mask, other=3)


@dataclasses.dataclass(frozen=True)
class Update:
    """A change of a part of memory by another part of it.

    Attributes:
      kind: see :meth:`apply`.
      place: what is changed.
      other: a part of the same shape.
      reads: whether that is loaded, instead of being what it was at first.
      step: every so many elements are left out by masks.
    """

    kind: str
    place: Part
    other: Part
    reads: bool
    step: int

    def apply(self, memory: Array, first: Any) -> None:
        """Makes the change; ``first`` is what memory held at first."""
        sizes = [one.stop - one.start for one in self.place]
        numbers = lax.broadcasted_iota(jnp.int32, sizes, len(sizes) - 1)
        if len(sizes) > 1:
            numbers += lax.broadcasted_iota(jnp.int32, sizes, 0)
        mask = numbers % self.step != 0
        if self.kind == "masked load":
            memory.store(self.place, memory.load_some(self.other, mask))
            return
        x = memory.load(self.other) if self.reads else first[self.other]
        if self.kind == "store":
            memory.store(self.place, x)
        elif self.kind == "swap":
            memory.store(self.other, memory.swap(self.place, x))
        elif self.kind == "add":
            memory.add(self.place, x)
        elif self.kind == "atomic add":
            memory.atomic(self.place, x)
        else:
            memory.store_some(self.place, x, mask)


@dataclasses.dataclass(frozen=True)
class Updates:
    """Changes of memory, one after the other.

    Attributes:
      each: the changes.
      times: how often all of them are made: in a loop, unless it is 1.
      if_positive: whether this depends on the largest element of the first array.
    """

    each: tuple[Update, ...]
    times: int
    if_positive: bool

    def of_array(self, x: Any) -> Any:
        """The array after the changes."""

        def once(n: Any, value: Any) -> Any:
            memory = Array(value)
            for one in self.each:
                one.apply(memory, x)
            return (
                jnp.where(jnp.max(x) > 0, memory.value, value)
                if self.if_positive
                else (memory.value)
            )

        return lax.fori_loop(0, self.times, once, x)

    def of_reference(self, ref: Any, x: Any) -> None:
        """Stores an array where a reference of a kernel refers to, and changes it there."""

        def every() -> None:
            for one in self.each:
                one.apply(Memory(ref), x)

        def once() -> None:
            if self.if_positive:
                pl.when(jnp.max(x) > 0)(every)
            else:
                every()

        ref[...] = x
        if self.times == 1:
            once()
        else:
            pl.loop(0, self.times)(lambda n: once())

    def __str__(self) -> str:
        def text(part: Part) -> str:
            return ", ".join(f"{one.start}:{one.stop}" for one in part)

        changes = [
            f"{one.kind} {text(one.place)} by {'' if one.reads else 'old '}{text(one.other)}"
            for one in self.each
        ]
        condition = " if positive" if self.if_positive else ""
        return f"{'; '.join(changes)}, {self.times} times{condition}"


def make_updates(
    choose: random.Random,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    *,
    branches: bool,
    reads: bool = True,
) -> Updates:
    """Random changes of an array of a shape; with branches and loads of it or not."""
    kinds = ["store", "swap", "add", "masked store"]
    if reads:
        kinds.append("masked load")
    if np.dtype(dtype) in ATOMIC:
        kinds.append("atomic add")
    each = []
    for _ in range(choose.randint(1, 2)):
        sizes = [choose.randint(1, n) if choose.random() < 0.7 else n for n in shape]
        starts = [
            [choose.randint(0, n - size) for n, size in zip(shape, sizes, strict=True)]
            for _ in range(2)
        ]
        place, other = (
            tuple(slice(a, a + size) for a, size in zip(one, sizes, strict=True)) for one in starts
        )
        loads = reads and choose.random() < 0.7
        each.append(Update(choose.choice(kinds), place, other, loads, choose.randint(1, 4)))
    times = choose.choice([1, 1, 2, 3])
    return Updates(tuple(each), times, branches and choose.random() < 0.3)


def pipelined(source: Any, target: Any, rows: int, steps: int) -> None:
    """Copies an array in a pipeline of blocks of so many rows, each with its columns reversed."""
    shape = source.shape
    zeros = (0,) * (len(shape) - 1)
    spec = plgpu.BlockSpec((rows, *shape[1:]), lambda i: (i, *zeros))

    def body(position: Any, x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.flip(x_ref[...], -1)

    plgpu.emit_pipeline(
        body,
        grid=(math.ceil(shape[0] / rows),),
        in_specs=[spec],
        out_specs=[spec],
        max_concurrent_steps=steps,
    )(source, target)
