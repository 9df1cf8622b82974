"""What NumPy does for each primitive of JAX: see ``numpy_programs``.

Arithmetic of 16-bit floats is that of float32, rounded after each operation, and sums of them are
rounded once, so that results are no less accurate than those of XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax._src import ad_util, core, lax
from jax._src.lax import slicing, special
from jax._src.lax.control_flow import loops

Function = Callable[..., Any]
Rule = Callable[[dict[str, Any], list[Any], list[Any]], Function]
"""What evaluates an equation, made of its parameters and of the types of operands and results."""

RULES: dict[core.Primitive, Rule] = {}

ROUNDED = {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)}
"""Floats whose results are rounded from float32."""

_MOST_PRODUCTS = 1 << 26


class Unsupported(Exception):
    """XLA has to compile the program."""


# Elementwise operations


def _wide(value: Any) -> Any:
    return value.astype(np.float32) if value.dtype in ROUNDED else value


def _elementwise(function: Function) -> Rule:
    """Of the type that it gets, or float32, whose results are rounded."""

    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        dtype = results[0].dtype
        if any(one.dtype in ROUNDED for one in operands):
            return lambda *values: function(*map(_wide, values)).astype(dtype)
        return lambda *values: function(*values).astype(dtype, copy=False)

    return rule


def _floats(function: Function) -> Rule:
    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        if operands[0].dtype not in ROUNDED and operands[0].dtype.kind != "f":
            raise Unsupported
        return _elementwise(function)(params, operands, results)

    return rule


def _divide(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if operands[0].dtype.kind not in "iu":
        return _elementwise(np.divide)(params, operands, results)

    def divide(x: Any, y: Any) -> Any:
        divisor = np.where(y == 0, 1, y).astype(x.dtype)
        quotient = (x - np.fmod(x, divisor)) // divisor
        return np.where(y == 0, np.array(-1).astype(x.dtype), quotient)

    return divide


def _remainder(x: Any, y: Any) -> Any:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype)))


def _shift_right(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    kind, dtype = np.dtype(f"u{operands[0].dtype.itemsize}"), operands[0].dtype
    return lambda x, y: (x.view(kind) >> y.view(kind)).view(dtype)


def _shift_right_signed(
    params: dict[str, Any], operands: list[Any], results: list[Any]
) -> Function:
    kind, dtype = np.dtype(f"i{operands[0].dtype.itemsize}"), operands[0].dtype
    return lambda x, y: (x.view(kind) >> y.view(kind)).view(dtype)


def _integer_power(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    exponent, dtype = params["y"], operands[0].dtype
    if exponent < 0 and dtype.kind in "iu":
        raise Unsupported

    def power(x: Any) -> Any:
        result, factor, left = np.ones((), np.asarray(x).dtype), x, abs(exponent)
        while left:
            result = result * factor if left & 1 else result
            factor, left = factor * factor, left >> 1
        return 1 / result if exponent < 0 else result

    return _elementwise(power)(params, operands, results)


def _round(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    def away_from_zero(x: Any) -> Any:
        whole = np.trunc(x)
        return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0).astype(x.dtype)

    to_even = params["rounding_method"] == lax.lax.RoundingMethod.TO_NEAREST_EVEN
    return _elementwise(np.rint if to_even else away_from_zero)(params, operands, results)


def _convert(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    source, target = operands[0].dtype, results[0].dtype
    if target.kind == "b":
        return lambda x: x != np.zeros((), source)
    if target.kind in "iu" and source.kind not in "biu":
        if target.itemsize == 8:
            raise Unsupported
        limits = np.iinfo(target)

        def saturate(x: Any) -> Any:
            wide = np.nan_to_num(x.astype(np.float64), nan=0.0)
            return np.clip(wide, limits.min, limits.max).astype(target)

        return saturate
    if source.kind == "b" and target in ROUNDED:
        return lambda x: x.astype(np.float32).astype(target)
    return lambda x: x.astype(target)


def _select(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if operands[0].dtype.kind != "b":
        raise Unsupported
    return lambda which, no, yes=None: no if yes is None else np.where(which, yes, no)


def _scipy(name: str) -> Function:
    def function(x: Any) -> Any:
        import scipy.special

        return getattr(scipy.special, name)(x)

    return function


_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _erf_inv(x: Any) -> Any:
    """By polynomials in float32 as XLA does, so that random numbers are the same but for rounding
    (Giles, Approximating the erfinv function, 2010)."""
    if x.dtype == np.float64:
        return _scipy("erfinv")(x)
    w = -np.log1p(-x * x)
    central = w < 5
    w = np.where(central, w - np.float32(2.5), np.sqrt(w) - np.float32(3))
    result = np.zeros_like(w)
    for near, far in zip(_CENTRAL, _TAIL, strict=True):
        result = result * w + np.where(central, np.float32(near), np.float32(far))
    return np.where(np.abs(x) == 1, x * np.float32(np.inf), result * x)


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# Shapes


def _reshape(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if len(operands) != 1:
        raise Unsupported
    shape, order = results[0].shape, params["dimensions"]
    return lambda x: np.reshape(x if order is None else np.transpose(x, order), shape)


def _broadcast(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if len(operands) != 1:
        raise Unsupported
    shape, places = results[0].shape, params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for place, size in zip(places, operands[0].shape, strict=True):
        inner[place] = size
    return lambda x: np.broadcast_to(np.reshape(x, inner), shape)


def _slice(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or [1] * len(starts)
    parts = tuple(map(slice, starts, limits, strides))
    return lambda x: x[parts]


def _at(sizes: Sequence[int], shape: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    """The part of an array at a place, moved so that it is inside."""
    firsts = [min(max(int(one), 0), n - m) for one, n, m in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    sizes, shape = results[0].shape, operands[0].shape
    return lambda x, *starts: x[_at(sizes, shape, starts)]


def _dynamic_update(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    shape, sizes = operands[0].shape, operands[1].shape

    def update(x: Any, values: Any, *starts: Any) -> Any:
        result = np.array(x)
        result[_at(sizes, shape, starts)] = values
        return result

    return update


def _pad(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    shape, inside, kept = [], [], []
    for extent, (low, high, gap) in zip(operands[0].shape, params["padding_config"], strict=True):
        spread, first, last = (
            (extent - 1) * (gap + 1) + 1 if extent else 0,
            max(low, 0),
            max(high, 0),
        )
        shape.append(first + spread + last)
        inside.append(slice(first, first + spread, gap + 1))
        kept.append(slice(max(-low, 0), shape[-1] - max(-high, 0)))

    def pad(x: Any, value: Any) -> Any:
        result = np.full(shape, value, x.dtype)
        result[tuple(inside)] = x
        return result[tuple(kept)]

    return pad


def _iota(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if operands:
        raise Unsupported
    shape, dimension = results[0].shape, params["dimension"]
    numbers = np.arange(shape[dimension]).astype(results[0].dtype)
    inner = [shape[dimension] if one == dimension else 1 for one in range(len(shape))]
    return lambda: np.broadcast_to(numbers.reshape(inner), shape)


def _bitcast(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    dtype = results[0].dtype
    if dtype.itemsize != operands[0].dtype.itemsize:
        raise Unsupported
    return lambda x: np.ascontiguousarray(x).reshape(x.shape).view(dtype)


def _sort(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    if params["num_keys"] != 1:
        raise Unsupported

    def sort(*values: Any) -> list[Any]:
        order = np.argsort(_wide(values[0]), params["dimension"], stable=True)
        return [np.take_along_axis(one, order, params["dimension"]) for one in values]

    return sort


def _split(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    ends = np.cumsum(params["sizes"])[:-1]
    return lambda x: np.split(x, ends, params["axis"])


# Sums and products


def _reduce(function: Any) -> Rule:
    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        axes, dtype = tuple(params["axes"]), results[0].dtype
        empty = math.prod(operands[0].shape) == 0 and results[0].size
        if empty and function in (np.maximum, np.minimum):
            raise Unsupported
        wide = np.dtype(np.float32) if dtype in ROUNDED else dtype
        return lambda x: function.reduce(_wide(x), axis=axes, dtype=wide).astype(dtype, copy=False)

    return rule


def _arg(function: Function) -> Rule:
    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        (axis,), dtype = params["axes"], results[0].dtype
        return lambda x: function(_wide(x), axis=axis).astype(dtype)

    return rule


def _accumulate(function: Any) -> Rule:
    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        axis, dtype = params["axis"], results[0].dtype

        def accumulate(x: Any) -> Any:
            x = np.flip(_wide(x), axis) if params["reverse"] else _wide(x)
            done = function.accumulate(x, axis=axis, dtype=x.dtype).astype(dtype, copy=False)
            return np.flip(done, axis) if params["reverse"] else done

        return accumulate

    return rule


def _dot(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    """A batch of products of matrices; those of 8-bit and 16-bit integers are exact in float64."""
    ((inner_x, inner_y), (batch_x, batch_y)), (x, y) = params["dimension_numbers"], operands
    dtype, shape = results[0].dtype, results[0].shape
    rows = [n for n in range(x.ndim) if n not in (*inner_x, *batch_x)]
    columns = [n for n in range(y.ndim) if n not in (*inner_y, *batch_y)]
    batch, depth = [x.shape[n] for n in batch_x], math.prod(x.shape[n] for n in inner_x)
    heights, widths = [x.shape[n] for n in rows], [y.shape[n] for n in columns]
    if math.prod(shape) * depth > _MOST_PRODUCTS:
        raise Unsupported
    if dtype.kind in "iu":
        kind = np.dtype(np.float64 if max(x.dtype.itemsize, y.dtype.itemsize) <= 2 else dtype)
        if kind == dtype and math.prod(shape) * depth > 1 << 20:
            raise Unsupported
    elif dtype.kind == "b":
        raise Unsupported
    else:
        kind = np.dtype(np.float32) if dtype in ROUNDED else dtype
    integers = dtype.kind in "iu" and kind != dtype

    def dot(x: Any, y: Any) -> Any:
        left = np.transpose(x, (*batch_x, *rows, *inner_x)).astype(kind)
        right = np.transpose(y, (*batch_y, *inner_y, *columns)).astype(kind)
        left = left.reshape(*batch, math.prod(heights), depth)
        right = right.reshape(*batch, depth, math.prod(widths))
        product = np.matmul(left, right).reshape(shape)
        return product.astype(np.int64).astype(dtype) if integers else product.astype(dtype)

    return dot


# Gathers and scatters


def _indices(
    starts: Any, sizes: Sequence[int], shape: Sequence[int], numbers: Any, clip: bool
) -> tuple[list[Any], Any]:
    """For each dimension the indices of elements, and which of them are inside.

    Dimensions of what is returned: those of ``starts`` but its last, then those of windows.
    """
    around, windows = starts.shape[:-1], len(sizes)
    inside = np.ones((*around, *[1] * windows), bool)
    result = []
    for axis, (size, extent) in enumerate(zip(sizes, shape, strict=True)):
        first = np.zeros(around, np.int64)
        if axis in numbers.start:
            first = starts[..., numbers.start.index(axis)]
            if first.dtype == np.uint64:
                first = np.minimum(first, np.uint64(np.iinfo(np.int64).max))
            first = first.astype(np.int64)
        elif axis in numbers.batch:
            along = numbers.batch_of_starts[numbers.batch.index(axis)]
            first = np.broadcast_to(
                np.arange(extent).reshape([-1 if n == along else 1 for n in range(len(around))]),
                around,
            )
        if clip:
            first = np.clip(first, 0, extent - size)
        else:
            ok = (first >= 0) & (first <= extent - size)
            inside = inside & ok.reshape(*around, *[1] * windows)
            first = np.where(ok, first, 0)
        window = np.arange(size).reshape([-1 if n == axis else 1 for n in range(windows)])
        result.append(first.reshape(*around, *[1] * windows) + window)
    return result, inside


class _Numbers:
    """Which dimensions of the operand indices and windows belong to."""

    def __init__(self, start: Any, batch: Any, batch_of_starts: Any):
        self.start, self.batch = tuple(start), tuple(batch)
        self.batch_of_starts = tuple(batch_of_starts)


def _mode(mode: Any) -> bool:
    """Whether indices are clipped; else what is outside is filled or dropped."""
    modes = slicing.GatherScatterMode
    if mode in (modes.CLIP, modes.PROMISE_IN_BOUNDS):
        return True
    if mode != modes.FILL_OR_DROP:
        raise Unsupported
    return False


def _order(offsets: Sequence[int], around: int, windows: int) -> list[int]:
    """Where each dimension of a result comes from, those of indices first, then of windows."""
    order = list[int]()
    indices, within = iter(range(around)), iter(range(around, around + windows))
    for one in range(around + windows):
        order.append(next(within) if one in offsets else next(indices))
    return order


def _gather(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    numbers, sizes, clip = params["dimension_numbers"], params["slice_sizes"], _mode(params["mode"])
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    which = _Numbers(
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    shape, dtype, fill = operands[0].shape, results[0].dtype, params["fill_value"]
    if math.prod(shape) == 0:
        raise Unsupported
    if fill is None and not clip:
        fill = np.nan
        if dtype.kind in "iu":
            fill = np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
        elif dtype.kind == "b":
            fill = True
    around = operands[1].ndim - 1
    order = _order(numbers.offset_dims, around, len(sizes) - len(dropped))

    def gather(x: Any, starts: Any) -> Any:
        indices, inside = _indices(starts, sizes, shape, which, clip)
        values = x[tuple(indices)]
        if not clip:
            values = np.where(inside, values, np.asarray(fill).astype(dtype))
        values = np.squeeze(values, tuple(around + one for one in dropped))
        return np.transpose(values, order)

    return gather


def _scatter(ufunc: Any) -> Rule:
    def rule(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
        numbers, clip = params["dimension_numbers"], _mode(params["mode"])
        dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        which = _Numbers(
            numbers.scatter_dims_to_operand_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
        )
        shape, dtype = operands[0].shape, results[0].dtype
        around, windows = operands[1].ndim - 1, len(shape) - len(dropped)
        order = _order(numbers.update_window_dims, around, windows)
        sizes, within = [1] * len(shape), iter(numbers.update_window_dims)
        for axis in range(len(shape)):
            if axis not in dropped:
                sizes[axis] = operands[2].shape[next(within)]
        if dtype in ROUNDED and ufunc is not None:
            raise Unsupported
        if ufunc is None and params["update_jaxpr"] is not None:  # A function of the old elements.
            raise Unsupported

        def scatter(x: Any, starts: Any, updates: Any) -> Any:
            indices, inside = _indices(starts, sizes, shape, which, clip)
            whole = np.broadcast_shapes(inside.shape, *(one.shape for one in indices))
            values = np.transpose(updates, np.argsort(order)).reshape(whole)
            inside = np.broadcast_to(inside, whole)
            places = tuple(np.broadcast_to(one, whole)[inside] for one in indices)
            result = np.array(x)
            if ufunc is None:
                result[places] = values[inside]
            else:
                ufunc.at(result, places, values[inside])
            return result

        return scatter

    return rule


def _same(params: dict[str, Any], operands: list[Any], results: list[Any]) -> Function:
    return lambda x: x


def _register() -> None:
    every, moves = lax.lax, slicing
    reductions = {
        "reduce_sum": np.add, "reduce_prod": np.multiply, "reduce_max": np.maximum,
        "reduce_min": np.minimum, "reduce_and": np.logical_and, "reduce_or": np.logical_or,
    }  # fmt: skip
    exact: dict[str, Function] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
        "max": np.maximum, "min": np.minimum, "sign": np.sign, "square": np.square,
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor, "not": np.invert, "floor": np.floor, "ceil": np.ceil,
        "is_finite": np.isfinite, "clamp": lambda low, x, high: np.clip(x, low, high),
        "shift_left": np.left_shift,
    }  # fmt: skip
    functions: dict[str, Function] = {
        "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log1p": np.log1p,
        "expm1": np.expm1, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
        "cos": np.cos, "logistic": _logistic, "tanh": np.tanh,
        "pow": np.power, "one_minus_square": lambda x: (1 - x) * (1 + x), "cbrt": np.cbrt,
        "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "atan2": np.arctan2, "atan": np.arctan,
    }  # fmt: skip
    rules: dict[str, Rule] = {
        **{name: _elementwise(function) for name, function in exact.items()},
        **{name: _floats(function) for name, function in functions.items()},
        **{name: _reduce(function) for name, function in reductions.items()},
        "argmax": _arg(np.argmax),
        "argmin": _arg(np.argmin),
        "bitcast_convert_type": _bitcast,
        "broadcast_in_dim": _broadcast,
        "concatenate": lambda params, *_: lambda *parts: np.concatenate(parts, params["dimension"]),
        "convert_element_type": _convert,
        "copy": _same,
        "div": _divide,
        "dot_general": _dot,
        "integer_pow": _integer_power,
        "iota": _iota,
        "pad": _pad,
        "reshape": _reshape,
        "rev": lambda params, *_: lambda x: np.flip(x, params["dimensions"]),
        "rem": lambda params, operands, results: _elementwise(
            np.fmod if operands[0].dtype.kind not in "iu" else _remainder
        )(params, operands, results),
        "round": _round,
        "shift_right_arithmetic": _shift_right_signed,
        "shift_right_logical": _shift_right,
        "select_n": _select,
        "sort": _sort,
        "split": _split,
        "squeeze": lambda params, _, out: lambda x: np.reshape(x, out[0].shape),
        "stack": lambda params, *_: lambda *parts: np.stack(parts, params["axis"]),
        "tile": lambda params, *_: lambda x: np.tile(x, params["reps"]),
        "transpose": lambda params, *_: lambda x: np.transpose(x, params["permutation"]),
    }
    RULES.update({getattr(every, f"{name}_p"): rule for name, rule in rules.items()})
    RULES.update(
        {
            moves.slice_p: _slice,
            moves.dynamic_slice_p: _dynamic_slice,
            moves.dynamic_update_slice_p: _dynamic_update,
            moves.gather_p: _gather,
            moves.scatter_p: _scatter(None),
            moves.scatter_add_p: _scatter(np.add),
            moves.scatter_mul_p: _scatter(np.multiply),
            moves.scatter_max_p: _scatter(np.maximum),
            moves.scatter_min_p: _scatter(np.minimum),
            loops.cumsum_p: _accumulate(np.add),
            special.erf_p: _floats(_scipy("erf")),
            special.erf_inv_p: _floats(_erf_inv),
            special.erfc_p: _floats(_scipy("erfc")),
            ad_util.add_jaxvals_p: _elementwise(np.add),
            ad_util.stop_gradient_p: _same,
        }
    )


_register()
