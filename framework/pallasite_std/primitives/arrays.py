"""Loads, iota, atomics and the printing of layouts.

Bound arguments:
  ``load``: (ref,); parameter ``optimized``.
  ``atomic``: (ref, value); parameter ``operation`` (add, and, or, xor, max or min).
  ``print_layout``: (x,), where x is an array or a reference; parameter ``fmt``.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, SMEM, checks
from pallasite_std.primitives import arguments
from pallasite_std.primitives.layouts import SomeLayout, layout_cast

load_p = _jax.Primitive("load")


@_jax.abstract_eval(load_p)
def _load_abstract_eval(*avals: Any, args_tree: Any, optimized: bool) -> Any:
    del optimized
    (ref,) = args_tree.unflatten(avals)
    result = _jax.transform_type(ref.transforms, ref.ref)
    return result.inner_aval, arguments.reference_effects(args_tree, len(avals), read=(0,))


arguments.no_discharge(load_p)
arguments.pretty(
    load_p, lambda args, params: [args[0], *([] if params["optimized"] else ["optimized=False"])]
)


def load(
    src: Any,
    idx: Any = None,
    *,
    layout: SomeLayout | None = None,
    optimized: bool = True,
) -> Any:
    """Reads a reference into registers.

    Args:
      src: a reference in SMEM or GMEM, or a view of one.
      idx: an index into it; the same as ``src.at[idx]``. None means everything.
      layout: the register layout of the result.
      optimized: an error if the read would be slow (bank conflicts, no vectors); False permits it.

    Returns:
      An array with the shape and dtype of the view.

    Raises:
      InvalidTypeError: not a reference to data.
      InvalidValueError: another memory space.
    """
    ref = arguments.reference(src, "src", SMEM, GMEM)
    if idx is not None:
        ref = ref.at[idx]
    result = arguments.bind(load_p, ref, optimized=bool(optimized))
    return result if layout is None else layout_cast(result, layout)


def broadcasted_iota(
    dtype: Any, shape: Sequence[int], dimension: int, *, layout: SomeLayout | None = None
) -> Any:
    """An array that counts 0, 1, 2, ... along one dimension.

    Args:
      dtype: an integer or floating-point dtype.
      shape: the array's shape.
      dimension: along which dimension it counts; negative numbers count from the last.
      layout: the register layout; by default the compiler chooses.

    Raises:
      InvalidValueError: ``shape`` has no such dimension.
      InvalidTypeError: ``layout`` is not a layout.
    """
    shape = tuple(shape)
    if not -len(shape) <= dimension < len(shape):
        raise checks.value_error(
            f"shape {shape} has no dimension {dimension}",
            expected=f"an integer below {len(shape)}",
        )
    result = lax.broadcasted_iota(dtype, shape, dimension % len(shape))
    return result if layout is None else layout_cast(result, layout)


print_layout_p = _jax.Primitive("print_layout")
print_layout_p.multiple_results = True


@_jax.abstract_eval(print_layout_p)
def _print_layout_abstract_eval(*avals: Any, args_tree: Any, fmt: str) -> Any:
    del avals, args_tree, fmt
    return (), {_jax.debug_effect}


arguments.no_discharge(print_layout_p)


def print_layout(fmt: str, x: Any) -> None:
    """Prints, while the kernel is compiled, the layout of an array or reference.

    Args:
      fmt: a format string with one placeholder, such as ``"accumulator: {}"``.
      x: an array, or a reference, which may be a view.

    Raises:
      InvalidTypeError: ``fmt`` is not a string.
      InvalidValueError: it has not exactly one placeholder.
    """
    if not isinstance(fmt, str):
        raise checks.type_error("fmt is not a string", got=fmt, expected='such as "x: {}"')
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(fmt) if field is not None]
    except ValueError:
        fields = []
    if len(fields) != 1 or fields[0] not in ("", "0"):
        raise checks.value_error(
            "fmt does not have exactly one placeholder", got=repr(fmt), expected='such as "x: {}"'
        )
    is_view = isinstance(x, _jax.TransformedRef)
    if is_view or isinstance(_jax.typeof(x), _jax.AbstractRef):
        x = arguments.reference(x, "x")
    arguments.bind(print_layout_p, x, fmt=fmt)


atomic_p = _jax.Primitive("atomic")
atomic_p.multiple_results = True


@_jax.abstract_eval(atomic_p)
def _atomic_abstract_eval(*avals: Any, args_tree: Any, operation: str) -> Any:
    del operation
    return (), arguments.reference_effects(args_tree, len(avals), read=(0,), written=(0,))


arguments.no_discharge(atomic_p)
arguments.pretty(atomic_p, lambda args, params: [params["operation"], args[0], args[1]])


def _atomic(ref: Any, val: Any, operation: str) -> None:
    target = arguments.reference(ref, "ref", SMEM, GMEM)
    value = arguments.array(val, "val")
    if not hasattr(value, "dtype"):
        value = jnp.asarray(value, target.dtype)
    if operation in ("and", "or", "xor") and jnp.issubdtype(target.dtype, jnp.floating):
        raise checks.value_error(
            f"atomic_{operation} works on bits", got=target.dtype, expected="an integer dtype"
        )
    aval = _jax.typeof(value)
    arguments.same_dtype(aval, "val", target, "ref")
    arguments.same_shape(aval, "val", target, "ref")
    arguments.bind(atomic_p, target, value, operation=operation)


def atomic_add(ref: Any, val: Any) -> None:
    """Adds ``val`` to memory, atomically for each element.

    ``ref`` is a reference in GMEM or SMEM, ``val`` an array of its dtype and shape. Indices may be
    arrays, as in ``atomic_add(counts.at[bins], ones)``; equal ones count as often. Sums of floats
    depend on the order in which threads come. Raises InvalidTypeError or InvalidValueError for
    anything else.

    PTX ISA: ``red``.
    """
    _atomic(ref, val, "add")


def atomic_max(ref: Any, val: Any) -> None:
    """Replaces memory by its maximum with ``val``; otherwise as :func:`atomic_add`."""
    _atomic(ref, val, "max")


def atomic_min(ref: Any, val: Any) -> None:
    """Replaces memory by its minimum with ``val``; otherwise as :func:`atomic_add`."""
    _atomic(ref, val, "min")


def atomic_and(ref: Any, val: Any) -> None:
    """Replaces memory by its bitwise and with ``val``; otherwise as :func:`atomic_add`."""
    _atomic(ref, val, "and")


def atomic_or(ref: Any, val: Any) -> None:
    """Replaces memory by its bitwise or with ``val``; otherwise as :func:`atomic_add`."""
    _atomic(ref, val, "or")


def atomic_xor(ref: Any, val: Any) -> None:
    """Replaces memory by its bitwise exclusive or with ``val``; otherwise as :func:`atomic_add`."""
    _atomic(ref, val, "xor")
