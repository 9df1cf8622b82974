"""Warp-level MMA on arrays in registers.

Bound arguments: ``mma`` (acc, a, b).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, in_warp_region

mma_p = _jax.Primitive("mma")

#: dtype of the operands -> dtype of the accumulator.
MMA_ACCUMULATORS = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float8_e4m3fn": "float32",
    "float8_e5m2": "float32",
    "int8": "int32",
    "uint8": "int32",
}

MMA_FAMILIES = (("float8_e4m3fn", "float8_e5m2"), ("int8", "uint8"))
"""dtypes of operands that may be multiplied."""


def mma(acc: Any, a: Any, b: Any, /) -> Any:
    """Computes ``acc + a @ b`` with warp-level MMA, on arrays in registers.

    The four warps of a warpgroup share the product as ``m_warps`` along the rows and
    ``4 // m_warps`` along the columns; m is a multiple of ``16 * m_warps``, n of
    ``8 * (4 // m_warps)``, and k of 32 bytes. ``m_warps`` is that of the layouts of the operands,
    or else the largest that fits. Unlike ``wgmma`` it is done when it returns.

    Args:
      acc: (m, n), float32 for floating-point operands, int32 for integers, in the layout
        ``Layout.MMA_ACC(dtype, m_warps=...)`` where dtype is that of the operands.
      a: (m, k), in the layout ``Layout.MMA_LHS(dtype, m_warps=...)``.
      b: (k, n), of the dtype of ``a`` (or the other kind of 8-bit float, or of 8-bit integer), in
        the layout ``Layout.MMA_RHS(dtype, m_warps=...)``.

    Dtypes of a and b: bfloat16, float16, float32 (multiplied as tf32), float8_e4m3fn, float8_e5m2,
    int8, uint8.

    Returns:
      An array like ``acc``.

    Raises:
      InvalidTypeError: an operand is not an array, or has another dtype.
      InvalidValueError: shapes or layouts that do not fit together.
      UnsupportedError: in code that runs per warp.

    PTX ISA: ``mma.sync``. Float8 needs compute capability 8.9.
    """
    if in_warp_region():
        raise checks.unsupported(
            "mma in code that runs per warp",
            expected="the four warps of a warpgroup together",
            hint="call it outside of plgpu.warp_map",
        )
    operands = (("acc", acc), ("a", a), ("b", b))
    avals = [_matrix(value, what) for what, value in operands]
    (m, n), (rows, depth), (depth_of_b, columns) = (aval.shape for aval in avals)
    if (m, n, depth) != (rows, columns, depth_of_b):
        raise checks.value_error(
            "the shapes do not fit together as acc (m, n) + a (m, k) @ b (k, n)",
            got=f"acc {(m, n)}, a {(rows, depth)}, b {(depth_of_b, columns)}",
            expected=f"a ({m}, k) and b (k, {n})",
        )
    dtypes = [np.dtype(aval.dtype).name for aval in avals]
    if not can_multiply(dtypes[1], dtypes[2]):
        raise checks.type_error(
            "a and b have different dtypes",
            got=f"{dtypes[1]} and {dtypes[2]}",
            expected="one (or two kinds of 8-bit float, or int8 and uint8)",
        )
    wanted = MMA_ACCUMULATORS.get(dtypes[1])
    if wanted is None:
        raise checks.type_error(
            "there is no mma for these operands",
            got=dtypes[1],
            expected=", ".join(MMA_ACCUMULATORS),
        )
    if dtypes[0] != wanted:
        raise checks.type_error(
            f"the accumulator of products of {dtypes[1]} has the wrong dtype",
            got=dtypes[0],
            expected=wanted,
        )
    step = 32 // np.dtype(avals[1].dtype).itemsize
    if depth % step:
        raise checks.value_error(
            f"the depth of products of {dtypes[1]} is no multiple of 32 bytes",
            got=f"k={depth}",
            expected=f"k a multiple of {step}",
        )
    if not depth or warps_along_rows((m, n)) is None:
        raise checks.value_error(
            "four warps cannot share a product of this shape",
            got=f"m={m}, n={n}, k={depth}",
            expected="m and n multiples of 64 and 8, 32 and 16, or 16 and 32",
        )
    return mma_p.bind(*(value for _, value in operands))


def can_multiply(a: str, b: str) -> bool:
    """Whether operands of these dtypes may be multiplied, as far as they are multiplied."""
    return a == b or any(a in family and b in family for family in MMA_FAMILIES)


def warps_along_rows(shape: tuple[int, ...]) -> int | None:
    """The largest ``m_warps`` for an accumulator of this shape; None if there is none."""
    m, n = shape
    for warps in (4, 2, 1):
        if m and n and m % (16 * warps) == 0 and n % (8 * (4 // warps)) == 0:
            return warps
    return None


def _matrix(value: Any, what: str) -> Any:
    aval = None
    if not isinstance(value, _jax.TransformedRef):
        try:
            aval = _jax.typeof(value)
        except TypeError:
            aval = None
    if not isinstance(aval, _jax.ShapedArray):
        raise checks.type_error(
            f"{what} is not an array",
            got=aval if aval is not None else type(value).__name__,
            expected="an array in registers",
            hint="read the reference first: plgpu.load(ref, layout=...)",
        )
    if len(aval.shape) != 2:
        raise checks.value_error(
            f"{what} is not a matrix", got=f"shape {tuple(aval.shape)}", expected="rank 2"
        )
    return aval


@_jax.abstract_eval(mma_p)
def _mma_abstract_eval(acc: Any, a: Any, b: Any) -> Any:
    del a, b
    return _jax.ShapedArray(acc.shape, acc.dtype), set()
