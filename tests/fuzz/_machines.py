"""What differs between a random kernel and its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from tests.fuzz._memory_steps import Updates, pipelined

from pallasite import gpu as plgpu


class Machine:
    """What differs between the kernel and the reference; this is the reference."""

    def through_shared(self, x: Any, part: tuple[slice, ...] | None) -> Any:
        """An array that is stored to shared memory; what a part of that memory holds."""
        return x if part is None else x[part]

    def kept(self, x: Any) -> Any:
        """The array. XLA merges slices at computed places of one another, and then takes other
        elements where the inner one is moved to fit (jaxlib 0.11.2, on the CPU)."""
        return lax.optimization_barrier(x)

    def factor(self, x: Any) -> Any:
        """A factor of a product, of few bits. XLA lacks some products of narrow floats with a wide
        result on the CPU."""
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def copied_input(self, x: Any, number: int, part: tuple[slice, ...]) -> Any:
        """A part of an input, which is copied to shared memory asynchronously."""
        return x[part]

    def through_global(self, x: Any, part: tuple[slice, ...]) -> Any:
        """An array that is copied to global memory, and a part of it back, asynchronously."""
        return x[part]

    def updated(self, x: Any, updates: Updates, is_global: bool) -> Any:
        """An array after changes of the memory where it is stored."""
        return updates.of_array(x)

    def pipelined_input(self, x: Any, number: int, rows: int, steps: int) -> Any:
        """An input that a pipeline copies, with its columns reversed."""
        return jnp.flip(x, -1)


@dataclasses.dataclass
class KernelMachine(Machine):
    """The kernel.

    Attributes:
      inputs: references to them.
      room: references to global memory for values that pass through it, in order.
    """

    inputs: Sequence[Any]
    room: Iterator[Any]

    def factor(self, x: Any) -> Any:
        return x

    def through_shared(self, x: Any, part: tuple[slice, ...] | None) -> Any:
        def body(ref: Any) -> Any:
            ref[...] = x
            return ref[...] if part is None else ref[part]

        return pl.run_scoped(body, plgpu.SMEM(x.shape, x.dtype))

    def kept(self, x: Any) -> Any:
        return x

    def copied_input(self, x: Any, number: int, part: tuple[slice, ...]) -> Any:
        return self._copied(self.inputs[number], part)

    def through_global(self, x: Any, part: tuple[slice, ...]) -> Any:
        place = next(self.room)

        def body(ref: Any) -> None:
            ref[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ref, place)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(body, plgpu.SMEM(x.shape, x.dtype))
        return self._copied(place, part)

    def updated(self, x: Any, updates: Updates, is_global: bool) -> Any:
        def body(ref: Any) -> Any:
            updates.of_reference(ref, x)
            return ref[...]

        return (
            body(next(self.room))
            if is_global
            else pl.run_scoped(body, plgpu.SMEM(x.shape, x.dtype))
        )

    def pipelined_input(self, x: Any, number: int, rows: int, steps: int) -> Any:
        place = next(self.room)
        pipelined(self.inputs[number], place, rows, steps)
        return place[...]

    def _copied(self, source: Any, part: tuple[slice, ...]) -> Any:
        shape = tuple(one.stop - one.start for one in part)

        def body(ref: Any, barrier: Any) -> Any:
            plgpu.copy_gmem_to_smem(source.at[part], ref, barrier)
            plgpu.barrier_wait(barrier)
            return ref[...]

        return pl.run_scoped(body, plgpu.SMEM(shape, source.dtype), plgpu.Barrier())
