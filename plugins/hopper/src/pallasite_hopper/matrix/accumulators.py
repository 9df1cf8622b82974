"""Accumulators: matrices in registers that wgmma accumulates into asynchronously.

In a kernel's program an accumulator is a reference, so that wgmma looks like other asynchronous
operations. It has no address: before lowering, the reference is replaced by its value, which loops
and branches then carry in registers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace, checks

if TYPE_CHECKING:
    from pallasite.plugin.layouts import RegisterLayout
    from pallasite.plugin.lowering import EstimatorContext, Resources, RuleContext

ROWS = 64
"""Of one instruction; accumulators have a multiple of them."""

COLUMNS = 8
"""Accumulators have a multiple of this many columns."""

DTYPES = ("float32", "float16", "int32")
"""What the tensor cores accumulate in."""


def _check(shape: Any, dtype: Any) -> tuple[tuple[int, int], np.dtype[Any]]:
    sizes = checks.positive_integers(shape, "shape")
    expected = f"(rows, columns) with rows a multiple of {ROWS}, columns a multiple of {COLUMNS}"
    if len(sizes) != 2 or sizes[0] % ROWS or sizes[1] % COLUMNS:
        raise checks.value_error(
            "an accumulator cannot have this shape", got=sizes, expected=expected
        )
    dtype = np.dtype(dtype)
    if dtype.name not in DTYPES:
        raise checks.value_error(
            "products are not accumulated in this dtype",
            got=dtype,
            expected=", ".join(DTYPES[:-1]) + f" or {DTYPES[-1]}",
            hint="convert the result: acc[...].astype(dtype)",
        )
    return (sizes[0], sizes[1]), dtype


class Accumulators(MemorySpace):
    """Registers of one thread that hold an accumulator: a value that has no address."""

    name = "ACCUMULATORS"
    is_value = True
    per_block = False
    reuses_memory = False

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """None: registers are not counted."""
        del variable, axes
        return ctx.nothing()

    def enter_scope(
        self, ctx: RuleContext, aval: Any, axes: tuple[Any, ...], initial: Any = None
    ) -> Any:
        """The value at the beginning of a scope: zeros, or an array's contents."""
        from pallasite_hopper.matrix.values import enter

        if axes:
            raise InvalidValueError(
                "an accumulator is shared by the threads of a block",
                got=f"collective_axes={axes}",
                expected="no collective_axes: every thread has its own registers",
                hint="allocate accumulators in a pl.run_scoped of their own",
            )
        return enter(ctx, aval.inner_aval, initial)

    def leave_scope(self, ctx: RuleContext, aval: Any, value: Any, initial: Any) -> Any:
        """The contents, once all wgmma have completed.

        As an array, unless the scope began with an accumulator of a scope further out.
        """
        from pallasite_hopper.matrix.values import leave

        del aval
        return leave(ctx, value, initial)

    def scope_layout(self, aval: Any) -> RegisterLayout:
        """The register layout of arrays that a scope of state begins and ends with."""
        from pallasite_hopper.matrix.fragments import result_layout

        return result_layout(tuple(aval.shape))

    def value_layout(self, aval: Any) -> RegisterLayout:
        """The register layout of the value within its scope."""
        from pallasite_hopper.matrix.fragments import accumulator_layout

        return accumulator_layout(tuple(aval.shape), np.dtype(aval.dtype))


ACCUMULATORS = Accumulators()


@dataclasses.dataclass(frozen=True)
class WGMMAAccumulatorRef:
    """Describes an accumulator in registers, for ``pl.run_scoped`` and ``scratch_types=``.

    Attributes:
      shape: (rows, columns): rows a multiple of 64, columns a multiple of 8.
      dtype: float32 (MMAs of any float dtype), float16 (of float16 and 8-bit floats) or int32
        (of 8-bit integers).

    The reference starts at zero. ``acc[...]`` waits for all wgmma and reads it, ``acc[...] = x``
    replaces it; ``acc.at[:, 0:64]`` is a part of it for :func:`wgmma`.

    Raises:
      InvalidValueError: for another shape or dtype.
    """

    shape: tuple[int, int]
    dtype: Any = jnp.float32
    _init: Any = _jax.uninitialized

    def __post_init__(self) -> None:
        shape, dtype = _check(self.shape, self.dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype)

    @staticmethod
    def init(array: Any) -> WGMMAAccumulatorRef:
        """An accumulator that starts as ``array``, an argument of ``pl.run_state``."""
        return WGMMAAccumulatorRef(array.shape, array.dtype, _init=array)

    def get_array_aval(self) -> Any:
        """The array type of the contents."""
        return _jax.ShapedArray(self.shape, self.dtype)

    def get_ref_aval(self) -> Any:
        """The type of the reference that the body gets."""
        if self._init is not _jax.uninitialized:
            raise checks.value_error(
                "an accumulator with initial contents is allocated as a scratch",
                expected="pl.run_state(body)(plgpu.ACC.init(array))",
                hint="or allocate it without contents and write them: acc[...] = array",
            )
        return AbstractAccumulatorRef(self.get_array_aval(), ACCUMULATORS)


def _initial(ref: WGMMAAccumulatorRef) -> tuple[Any, Any]:
    return AbstractAccumulatorRef(ref.get_array_aval(), ACCUMULATORS), ref._init


_jax.ref_type_aval_mappings[WGMMAAccumulatorRef] = _initial


class AbstractAccumulatorRef(_jax.AbstractRef):  # type: ignore[misc]
    """Type of a reference to an accumulator."""

    def __repr__(self) -> str:
        return f"Accumulator{{{self.inner_aval.str_short()}}}"

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> Any:
        """An accumulator with another array type."""
        ref = super().update(inner_aval, memory_space, kind)
        return type(self)(ref.inner_aval, ref.memory_space)

    def _getitem(self, tracer: Any, idx: Any) -> Any:
        from pallasite_hopper.matrix.products import wgmma_accumulator_load

        array = wgmma_accumulator_load(tracer)
        return array if is_whole(idx, tracer.shape) else array[idx]

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        from pallasite_hopper.matrix.products import part_is_written, wgmma_accumulator_store

        if not is_whole(idx, tracer.shape):
            raise part_is_written(f"index {idx}")
        wgmma_accumulator_store(tracer, value)


def is_whole(index: Any, shape: tuple[int, ...]) -> bool:
    """Whether an index selects everything."""
    entries = index if isinstance(index, tuple) else (index,)
    if len(entries) == 1 and entries[0] is Ellipsis:
        return True
    entries = tuple(entry for entry in entries if entry is not Ellipsis)
    if len(entries) > len(shape):
        return False
    for entry, size in zip(entries, shape, strict=False):
        if isinstance(entry, _jax.Slice):
            if (entry.start, entry.size, entry.stride) != (0, size, 1):
                return False
        elif not isinstance(entry, slice) or entry.indices(size) != (0, size, 1):
            return False
    return True
