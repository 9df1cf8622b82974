"""Stores to all devices at once, and loads that reduce what all have.

Bound arguments: ``multimem_store`` (value, reference); ``multimem_load_reduce`` (reference).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, checks, memory_effect
from pallasite_multigpu.language.references import MulticastRef, PeerMemRef, axis_tuple
from pallasite_std.api import arguments

multimem_store_p = _jax.Primitive("multimem_store")
multimem_store_p.multiple_results = True

multimem_load_reduce_p = _jax.Primitive("multimem_load_reduce")

_FLOATS = tuple(np.dtype(one) for one in (np.float32, np.float16, ml_dtypes.bfloat16))
_SMALL_FLOATS = tuple(np.dtype(one) for one in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn))
_INTEGERS = tuple(np.dtype(one) for one in (np.int32, np.uint32, np.int64, np.uint64))

OPERATIONS = {
    "add": (*_FLOATS, np.dtype(np.float64), *_SMALL_FLOATS, *_INTEGERS),
    "min": (*_FLOATS[1:], *_SMALL_FLOATS, *_INTEGERS),
    "max": (*_FLOATS[1:], *_SMALL_FLOATS, *_INTEGERS),
    "and": _INTEGERS,
    "or": _INTEGERS,
    "xor": _INTEGERS,
}
"""Which elements each operation takes: PTX ISA, ``multimem.ld_reduce``."""


@_jax.abstract_eval(multimem_store_p)
def _store_abstract_eval(*avals: Any, args_tree: Any, collective_axes: tuple[Hashable, ...]) -> Any:
    del collective_axes
    effects = arguments.reference_effects(args_tree, len(avals), written=(1,))
    return (), effects | {memory_effect, _jax.comms_effect}


@_jax.abstract_eval(multimem_load_reduce_p)
def _load_abstract_eval(
    *avals: Any, args_tree: Any, collective_axes: tuple[Hashable, ...], reduction_op: str
) -> Any:
    del collective_axes, reduction_op
    (reference,) = args_tree.unflatten(avals)
    effects = arguments.reference_effects(args_tree, len(avals), read=(0,))
    result = _jax.ShapedArray(tuple(reference.shape), reference.dtype)
    return result, effects | {memory_effect, _jax.comms_effect}


for _primitive in (multimem_store_p, multimem_load_reduce_p):
    arguments.no_discharge(_primitive)


def multimem_store(
    source: jax.Array, ref: Any, collective_axes: Hashable | tuple[Hashable, ...]
) -> None:
    """Stores a value to the arrays of all devices, over the switch once.

    Args:
      source: an array or scalar in registers.
      ref: a reference of its shape and dtype in global memory.
      collective_axes: all axes of the device mesh.

    Raises:
      InvalidTypeError: ``ref`` is no reference, or of another dtype.
      InvalidValueError: ``ref`` has another shape, or is a view of another device's array.

    PTX ISA: ``multimem.st.relaxed.sys.global``.
    """
    base = _own(ref, "multimem_store")
    value = jnp.asarray(source)
    if value.dtype != base.dtype:
        raise checks.type_error(
            "multimem_store of another dtype than its reference",
            got=value.dtype,
            expected=str(base.dtype),
        )
    if value.shape != tuple(base.shape):
        raise checks.value_error(
            "multimem_store of another shape than its reference",
            got=list(value.shape),
            expected=str(list(base.shape)),
        )
    arguments.bind(multimem_store_p, value, base, collective_axes=axis_tuple(collective_axes))


def multimem_load_reduce(
    ref: Any, *, collective_axes: Hashable | tuple[Hashable, ...], reduction_op: str
) -> jax.Array:
    """Loads the same elements from all devices, reduced on their way through the switch.

    Sums of float16 and bfloat16 are accumulated in float32, those of 8-bit floats in float16.

    Args:
      ref: a reference in global memory.
      collective_axes: all axes of the device mesh.
      reduction_op: ``"add"``; ``"min"`` or ``"max"`` (not of float32); ``"and"``, ``"or"`` or
        ``"xor"`` of integers. Elements are int32, int64 (unsigned too), float32, float64 (``"add"``
        only), float16, bfloat16; float8_e5m2 and float8_e4m3fn since Blackwell.

    Returns:
      An array of the reference's shape and dtype.

    Raises:
      InvalidTypeError: ``ref`` is no reference, or of a dtype that the operation does not take.
      InvalidValueError: an unknown operation, or a view of another device's array.

    PTX ISA: ``multimem.ld_reduce.relaxed.sys.global``.
    """
    base = _own(ref, "multimem_load_reduce")
    if reduction_op not in OPERATIONS:
        raise checks.value_error(
            "reduction_op is unknown",
            got=repr(reduction_op),
            expected="one of " + ", ".join(map(repr, OPERATIONS)),
        )
    dtype = np.dtype(base.dtype)
    if dtype not in OPERATIONS[reduction_op]:
        taking = ", ".join(str(one) for one in OPERATIONS[reduction_op])
        raise checks.type_error(
            f"multimem_load_reduce cannot compute {reduction_op!r} of {dtype}",
            got=dtype,
            expected=f"one of {taking}",
        )
    found: jax.Array = arguments.bind(
        multimem_load_reduce_p,
        base,
        collective_axes=axis_tuple(collective_axes),
        reduction_op=reduction_op,
    )
    return found


def _own(ref: Any, what: str) -> Any:
    base = arguments.reference(ref, "ref", GMEM)
    for one in base.transforms:
        if isinstance(one, PeerMemRef | MulticastRef):
            raise checks.value_error(
                f"{what} of a view of other devices' arrays",
                got=base,
                expected="the reference to this device's array: all devices are meant anyway",
            )
    return base
