"""Register arrays: how an array of the kernel lives in the registers of a warpgroup's lanes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.errors import InternalError, InvalidTypeError, InvalidValueError
from pallasite.ir import ops, types
from pallasite.layouts.description import describe
from pallasite.layouts.registers import Layout, Rearrangement, RegisterLayout, SplatLayout
from pallasite.layouts.transforms import broadcast_in_dim, broadcast_with_target


@dataclasses.dataclass(frozen=True, eq=False)
class RegisterArray:
    """An array in registers, as one thread of the warpgroup sees it.

    Attributes:
      registers: MLIR values, one per register number of the layout; scalars where the layout's
        vector length is 1, else vectors of that length. A splat has a single scalar.
      layout: where each element lies; its shape is the array's shape.
      dtype: a NumPy or ml_dtypes dtype; it carries the sign of integers.
    """

    registers: tuple[ir.Value, ...]
    layout: Layout
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "registers", tuple(self.registers))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        expected = 1 if isinstance(self.layout, SplatLayout) else self.layout.registers
        if len(self.registers) != expected:
            raise InternalError(
                f"a register array of layout {describe(self.layout)} needs {expected} registers,"
                f" not {len(self.registers)}"
            )
        if not all(isinstance(one, ir.Value) for one in self.registers[:1]):
            raise TypeError(f"a register is no MLIR value: {self.registers[0]!r}")

    @staticmethod
    def splat(value: ir.Value, dtype: Any, shape: Sequence[int] = ()) -> RegisterArray:
        """An array whose elements all equal ``value``."""
        return RegisterArray((value,), SplatLayout(tuple(shape)), np.dtype(dtype))

    @staticmethod
    def constant(value: Any, dtype: Any, shape: Sequence[int] = ()) -> RegisterArray:
        """An array whose elements all equal the number ``value``."""
        dtype = np.dtype(dtype)
        if types.is_float(dtype) and types.bit_width(dtype) <= 8:
            value = int(np.asarray(value, dtype).view(np.uint8))
        return RegisterArray.splat(ops.constant(value, types.element_type(dtype)), dtype, shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.layout.shape

    @property
    def size(self) -> int:
        """The number of elements of the whole array."""
        return math.prod(self.shape)

    @property
    def is_splat(self) -> bool:
        """Whether all elements are known to be equal."""
        return isinstance(self.layout, SplatLayout)

    @property
    def vector_length(self) -> int:
        """Elements per register; 1 for a splat."""
        return 1 if isinstance(self.layout, SplatLayout) else self.layout.vector_length

    @property
    def scalar(self) -> ir.Value:
        """The one value of a splat or of a single-element array."""
        if self.is_splat:
            return self.registers[0]
        if self.size == 1:
            return ops.extract(self.registers[0], 0)
        raise InvalidTypeError(
            "an array is used where a scalar is needed",
            got=f"{self.dtype}{list(self.shape)} with layout {describe(self.layout)}",
            expected="a scalar",
        )

    def materialize(self, layout: RegisterLayout) -> RegisterArray:
        """A splat materialized in ``layout``; other arrays must have that layout already."""
        if not self.is_splat:
            if self.layout != layout:
                raise InternalError(f"cannot materialize {describe(self.layout)}")
            return self
        register = ops.broadcast(self.registers[0], layout.vector_length)
        return RegisterArray((register,) * layout.registers, layout, self.dtype)

    def map(self, function: Callable[[ir.Value], ir.Value], dtype: Any = None) -> RegisterArray:
        """Applies ``function`` to every register; the result may have another dtype.

        Registers that are one and the same value are computed once.
        """
        results: dict[int, ir.Value] = {}
        registers = []
        for register in self.registers:
            key = hash(register)
            if key not in results:
                results[key] = function(register)
            registers.append(results[key])
        return RegisterArray(tuple(registers), self.layout, dtype or self.dtype)

    def with_layout(self, layout: Layout) -> RegisterArray:
        """The same registers under another layout with as many registers."""
        return RegisterArray(self.registers, layout, self.dtype)


def elementwise(
    function: Callable[..., ir.Value],
    arrays: Sequence[RegisterArray],
    dtype: Any,
    shape: Sequence[int] | None = None,
) -> RegisterArray:
    """Applies ``function`` to corresponding registers of several arrays.

    Splats and scalars adapt to the others; all other arrays must share one layout.

    Args:
      function: gets one register of each array, all scalars or all vectors of one length.
      arrays: the operands; their shapes equal ``shape`` or are ``()``.
      dtype: dtype of the result.
      shape: shape of the result; by default that of the operand of highest rank.

    Raises:
      InvalidValueError: two operands have different layouts.
    """
    if shape is None:
        shape = max((array.shape for array in arrays), key=len)
    shape = tuple(shape)
    distributed = [array for array in arrays if not array.is_splat and array.shape == shape]
    if not distributed:
        partial = [array for array in arrays if not array.is_splat and array.size > 1]
        if not partial:
            value = function(*[array.scalar for array in arrays])
            return RegisterArray.splat(value, dtype, shape)
        rank = len(shape)
        dims = tuple(range(rank - len(partial[0].shape), rank))
        distributed = [rearrange(partial[0], broadcast_in_dim(partial[0].layout, shape, dims))]
    layout = distributed[0].layout
    assert isinstance(layout, RegisterLayout)
    for other in distributed[1:]:
        if other.layout != layout:
            raise InvalidValueError(
                "the operands are distributed over the lanes in different ways",
                got=f"{describe(layout)} and {describe(other.layout)} for shape {list(shape)}",
                expected="one layout for all operands",
                hint="cast one of them first: plgpu.layout_cast(x, layout)",
            )
    materialized = []
    for array in arrays:
        if array.shape != shape:
            array = _stretch(array, layout)
        materialized.append(array.materialize(layout).registers)
    registers = [function(*values) for values in zip(*materialized, strict=True)]
    return RegisterArray(tuple(registers), layout, dtype)


def _stretch(array: RegisterArray, layout: RegisterLayout) -> RegisterArray:
    """A scalar, or an array of the same rank with extents of 1, repeated to fill ``layout``."""
    if array.size == 1 or array.is_splat:
        return RegisterArray.splat(array.scalar, array.dtype, layout.shape)
    rank = len(layout.shape)
    dims = tuple(range(rank - len(array.shape), rank))
    return rearrange(array, broadcast_with_target(array.layout, layout, dims))


def rearrange(array: RegisterArray, rearrangement: Rearrangement) -> RegisterArray:
    """The array under a new layout of elements that every thread already holds."""
    whole = rearrangement.registers
    if whole is not None and rearrangement.layout.vector_length == array.vector_length:
        registers = tuple(array.registers[source] for source in whole)
        return RegisterArray(registers, rearrangement.layout, array.dtype)
    return RegisterArray(
        gather(array.registers, rearrangement.sources), rearrangement.layout, array.dtype
    )


def gather(
    registers: Sequence[ir.Value], sources: Sequence[Sequence[tuple[int, int]]]
) -> tuple[ir.Value, ...]:
    """New registers, each made of the (old register, element) pairs given for it."""
    results = []
    for elements in sources:
        first, start = elements[0]
        length = ops.vector_length(registers[first])
        run = [(first, start + i) for i in range(len(elements))]
        if list(elements) == run:
            if length == len(elements):
                results.append(registers[first])
            else:
                results.append(ops.slice_vector(registers[first], start, len(elements)))
            continue
        values = [ops.extract(registers[register], element) for register, element in elements]
        if len(set(elements)) == 1:
            results.append(ops.broadcast(values[0], len(values)))
        else:
            results.append(ops.from_elements(values))
    return tuple(results)
