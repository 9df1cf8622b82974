"""Register arrays as ``FragmentedArray`` and back: the same registers under other numbers.

Both sides say which lane holds which element in which register. Where they agree, as they do for
layouts that are given by the same tiling, an array of one kind is one of the other kind without any
data movement; only registers of one element are vectors on the one side and scalars on the other.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallasite.plugin import InternalError, InvalidTypeError, InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import (
    THREADS,
    Layout,
    RegisterLayout,
    SplatLayout,
    named,
    strided,
    unravel,
)
from pallasite.plugin.lowering import RegisterArray


def is_fragmented(value: Any) -> bool:
    """Whether a value is a ``FragmentedArray``."""
    module = _jax.imported_mosaic_gpu()
    return module is not None and isinstance(value, module.FragmentedArray)


def mosaic_type(dtype: Any) -> ir.Type:
    """The MLIR type of an element in a ``FragmentedArray`` or a memref."""
    found: ir.Type = _jax.mosaic_gpu().utils.dtype_to_ir_type(np.dtype(dtype))
    return found


def register_layout(layout: Any, shape: tuple[int, ...]) -> Layout:
    """Our layout for the layout of a ``FragmentedArray`` and the array's shape.

    Raises:
      InvalidValueError: the shape does not fit, or a kind of layout that is not known here.
    """
    mosaic = _jax.mosaic_gpu()
    if isinstance(layout, mosaic.WGSplatFragLayout):
        return SplatLayout(shape)
    if isinstance(layout, mosaic.WGStridedFragLayout):
        return strided(shape, layout.vec_size)
    if isinstance(layout, mosaic.TiledLayout):
        args = (layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
        return named.specification("TILED", args, {}, 0).layout(shape)
    raise InvalidValueError(
        "a FragmentedArray of an unknown kind of layout",
        got=str(layout),
        expected="WGSplatFragLayout, WGStridedFragLayout or TiledLayout",
    )


@functools.lru_cache(maxsize=1024)
def register_numbers(layout: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each register of a ``FragmentedArray``, row-major, our number of it.

    Args:
      layout: ``WGStridedFragLayout`` or ``TiledLayout``.
      shape: of the array.
    """
    own = register_layout(layout, shape)
    assert isinstance(own, RegisterLayout)
    # Both sides agree on lanes and positions in vectors, so one thread and position tells all.
    numbers = {own.element_at(0, 0, register): register for register in range(own.registers)}
    if isinstance(layout, _jax.mosaic_gpu().TiledLayout):
        places = np.ndindex(layout.registers_shape(shape))
        elements = [layout.tiling.untile_indices(place) for place in places]
    else:
        step = THREADS * layout.vec_size
        elements = [unravel(first, shape) for first in range(0, math.prod(shape), step)]
    found = tuple(numbers.get(tuple(element), -1) for element in elements)
    if sorted(found) != list(range(own.registers)):
        raise InternalError(f"the registers of {layout} are not those of {own}")
    return found


def fragmented_layout(declared: Any, layout: Layout) -> Any:
    """The layout of the ``FragmentedArray`` for an array of ours.

    Args:
      declared: the layout by name.
      layout: what it is for the array's shape.
    """
    if isinstance(layout, SplatLayout):
        return _jax.mosaic_gpu().WGSplatFragLayout(layout.shape)
    return declared.to_mgpu()


def fragmented(array: RegisterArray, layout: Any) -> Any:
    """An array of ours as a ``FragmentedArray``.

    Args:
      array: the array; its layout is ``layout``.
      layout: from :func:`fragmented_layout`.
    """
    element = mosaic_type(array.dtype)
    own = array.layout
    length = own.vector_length

    def convert(register: ir.Value) -> ir.Value:
        if isinstance(own, RegisterLayout) and length == 1:
            register = vector.broadcast(ir.VectorType.get((1,), register.type), register)
        return _with_element(register, element)

    registers = array.map(convert, array.dtype).registers
    result = np.empty(layout.registers_shape(array.shape), dtype=object)
    if isinstance(own, SplatLayout):
        result[()] = registers[0]
    else:
        numbers = register_numbers(layout, array.shape)
        for place, number in zip(np.ndindex(result.shape), numbers, strict=True):
            result[place] = registers[number]
    signed = types.is_signed(array.dtype) if isinstance(element, ir.IntegerType) else None
    return _jax.fragmented_array(result, layout, signed)


def register_array(value: Any, dtype: Any, what: str) -> RegisterArray:
    """A ``FragmentedArray`` as an array of ours.

    Args:
      value: the array. The sign of integers is not compared: that of ``dtype`` counts.
      dtype: of the elements.
      what: is converted, for messages.

    Raises:
      InvalidTypeError: elements of another type.
    """
    dtype = np.dtype(dtype)
    element = mosaic_type(dtype)
    shape = tuple(value.shape)
    if value.mlir_dtype != element:
        raise InvalidTypeError(
            f"{what} has another dtype than return_type says",
            got=f"a FragmentedArray of {value.mlir_dtype}, shape {list(shape)}",
            expected=f"{dtype}, which is {element}",
        )
    layout = register_layout(value.layout, shape)
    flat = list(value.registers.flat)
    if isinstance(layout, RegisterLayout):
        numbers = register_numbers(value.layout, shape)
        flat = [register for _, register in sorted(zip(numbers, flat, strict=True), key=_number)]
    held = types.element_type(dtype)

    def convert(register: ir.Value) -> ir.Value:
        register = _with_element(register, held)
        return ops.extract(register, 0) if layout.vector_length == 1 else register

    return RegisterArray(tuple(flat), layout, dtype).map(convert)


def _number(pair: tuple[int, Any]) -> int:
    return pair[0]


def _with_element(value: ir.Value, element: ir.Type) -> ir.Value:
    """The same bits as elements of another type of the same width."""
    if not isinstance(value.type, ir.VectorType):
        return value if value.type == element else arith.bitcast(element, value)
    if value.type.element_type == element:
        return value
    return arith.bitcast(ir.VectorType.get(value.type.shape, element), value)
