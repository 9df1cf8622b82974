"""Matrix products to test: operands in every place and form, inputs, and references."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tests.accepted_ptx import AcceptedPtx

import pallasite
from pallasite import _jax
from pallasite import gpu as plgpu

_jax.hide_frames_of(__file__)

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
I8 = np.dtype(np.int8)
U8 = np.dtype(np.uint8)
I32 = np.dtype(np.int32)

LEFT_LAYOUTS = {1: "WGMMA_8BIT", 2: "WGMMA", 4: "WGMMA_TF32"}
"""Register layouts of a left operand by the bytes of an element."""


def transforms(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows as wide as the swizzle (16 is none)."""
    tiling = plgpu.TilingTransform((8, swizzle // np.dtype(dtype).itemsize))
    return (tiling,) if swizzle == 16 else (tiling, plgpu.SwizzleTransform(swizzle))


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix in shared memory.

    Attributes:
      rows, columns: of the matrix as it is multiplied.
      dtype: of its elements.
      swizzle: in bytes; 16 is none.
      transposed: its transpose is what is in global and shared memory.
    """

    rows: int
    columns: int
    dtype: Any = BF16
    swizzle: int = 128
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, int]:
        """In memory."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def scratch(self) -> Any:
        """The shared memory."""
        return plgpu.SMEM(
            self.stored_shape, self.dtype, transforms=transforms(self.swizzle, self.dtype)
        )

    def view(self, ref: Any) -> Any:
        """The matrix in the shared memory."""
        return plgpu.transpose_ref(ref, (1, 0)) if self.transposed else ref

    def stored(self, matrix: np.ndarray) -> jax.Array:
        """What the kernel is called with."""
        return jnp.asarray(matrix.T if self.transposed else matrix)


def values(name: str, shape: Sequence[int], dtype: Any, *, whole: bool = True) -> np.ndarray:
    """A random matrix: small whole numbers (whose products are exact), or normal ones."""
    dtype = np.dtype(dtype)
    generator = np.random.default_rng(zlib.crc32(f"{name}{tuple(shape)}{dtype}".encode()))
    if dtype in (I8, U8):
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    if whole:
        return generator.integers(-3, 3, shape, endpoint=True).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def wide(matrix: Any) -> np.ndarray:
    """What the tensor cores see of a matrix, in double precision.

    The lower 13 bits of float32 are ignored (PTX ISA, "Alternate Floating-Point Data Formats").
    """
    matrix = np.asarray(matrix)
    if matrix.dtype == F32:
        matrix = (matrix.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)
    return matrix.astype(np.float64)


def load(copies: Sequence[tuple[Any, Any]], barrier: Any) -> None:
    """Copies global into shared memory, all on one barrier, and waits."""
    for source, destination in copies:
        plgpu.copy_gmem_to_smem(source, destination, barrier)
    plgpu.barrier_wait(barrier)


def multiply(
    left: Operand | None,
    right: Operand,
    accumulator: Any = F32,
    *,
    shape: tuple[int, int] | None = None,
    left_dtype: Any = None,
) -> Any:
    """A kernel of one product; without ``left``, a is an array in registers.

    The left operand is then given by ``shape`` and ``left_dtype``.
    """
    m, k = (left.rows, left.columns) if left is not None else shape or (64, right.rows)
    n = right.columns
    scratch = [right.scratch, plgpu.Barrier(num_arrivals=1 if left is None else 2)]
    if left is not None:
        scratch.insert(0, left.scratch)

    def body(a_ref, b_ref, out_ref, *refs):
        *operands, barrier = refs
        load(list(zip([a_ref, b_ref][-len(operands) :], operands, strict=True)), barrier)
        if left is None:
            name = LEFT_LAYOUTS[np.dtype(left_dtype).itemsize]
            a = plgpu.load(a_ref, (), layout=getattr(plgpu.Layout, name))
        else:
            a = left.view(operands[0])
        b = right.view(operands[-1])

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        out_ref[...] = _scoped(scope, (m, n), accumulator)

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((m, n), accumulator), scratch_types=scratch
    )


def _scoped(scope: Callable[..., Any], shape: tuple[int, int], dtype: Any) -> Any:
    from jax.experimental import pallas as pl

    return pl.run_scoped(scope, plgpu.ACC(shape, dtype))


def compiled(function: Any, *args: Any, spills: bool = False) -> str:
    """The PTX of a kernel; ptxas accepts it without a warning, in this test or a later one.

    With ``spills``, the kernel has more accumulators than there are registers.
    """
    ptx = pallasite.compile(function, *args, target="sm_90a").ptx
    accepted = AcceptedPtx.of_session
    if accepted is not None and not spills:
        accepted.check_later(ptx, "sm_90a", os.environ["PYTEST_CURRENT_TEST"], strict=True)
    return ptx


def run(function: Any, *args: Any, spills: bool = False) -> np.ndarray:
    """Compiles a kernel, runs it, and returns its result in double precision."""
    arrays = [jnp.asarray(one) for one in args]
    compiled(function, *arrays, spills=spills)
    return np.asarray(jax.jit(function)(*arrays)).astype(np.float64)


def check(result: Any, expected: np.ndarray, tolerance: float = 0.0) -> None:
    """Asserts that a result is near, or by default equal to, a matrix."""
    result = np.asarray(result).astype(np.float64)
    assert result.shape == expected.shape
    if tolerance:
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * scale)
    else:
        np.testing.assert_array_equal(result, expected)
