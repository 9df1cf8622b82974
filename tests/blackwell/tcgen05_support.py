"""Products of the tensor core to test: operands in every place and form, inputs, references."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import pallasite
from pallasite import _jax
from pallasite import gpu as plgpu
from pallasite_simulator import simulate

_jax.hide_frames_of(__file__)

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
F4 = np.dtype(ml_dtypes.float4_e2m1fn)
I8 = np.dtype(np.int8)
U8 = np.dtype(np.uint8)
I32 = np.dtype(np.int32)
U2 = np.dtype(ml_dtypes.uint2)

LANE, WARPGROUP = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup


def bits(dtype: Any) -> int:
    """Of an element."""
    return {F4: 4, U2: 2}.get(np.dtype(dtype), 8 * np.dtype(dtype).itemsize)


def transforms(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows as wide as the swizzle (16 is none)."""
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits(dtype)))
    return (tiling,) if swizzle == 16 else (tiling, plgpu.SwizzleTransform(swizzle))


def smem(shape: Sequence[int], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory with a swizzle."""
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms(swizzle, dtype))


def values(name: str, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """A random matrix of small numbers, whose products are exact."""
    dtype = np.dtype(dtype)
    generator = np.random.default_rng(zlib.crc32(f"{name}{tuple(shape)}{dtype}".encode()))
    if dtype in (I8, U8):
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    return generator.integers(-3, 3, shape, endpoint=True).astype(np.float32).astype(dtype)


def wide(array: Any) -> np.ndarray:
    """In a type in which products are exact."""
    array = np.asarray(array)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product ``acc (m, n) = a (m, k) @ b (k, n)``, for pairs of blocks with 2m rows.

    Attributes:
      a_turned, b_turned: the transpose is what is in memory.
      a_in_tmem: a is stored to tensor memory first.
      pair: two blocks make it together; each has m rows and n / 2 columns of b.
      warp: one warp starts it.
    """

    m: int = 128
    n: int = 64
    k: int = 64
    a: Any = F16
    b: Any = None
    acc: Any = F32
    a_swizzle: int = 128
    b_swizzle: int = 128
    a_turned: bool = False
    b_turned: bool = False
    a_in_tmem: bool = False
    pair: bool = False
    warp: bool = False
    cluster: tuple[int, ...] = (2,)
    semantics: Any = LANE
    target: str = "sm_100a"

    @property
    def b_dtype(self) -> Any:
        return self.a if self.b is None else self.b

    def kernel(self) -> Any:
        """The kernel, of a and b as they lie in memory."""
        blocks = 2 if self.pair else 1
        rows, columns = self.m, self.n // blocks
        a_shape = (self.k, rows) if self.a_turned else (rows, self.k)
        b_shape = (columns, self.k) if self.b_turned else (self.k, columns)
        names = tuple(f"c{i}" for i in range(len(self.cluster)))
        axis = names[-1] if self.pair else None

        def body(a, b, o, a_smem, b_smem, acc, filled, done, both=None, a_tmem=None):
            index = lax.rem(lax.axis_index(axis), 2) if self.pair else 0
            a_part = jnp.int32(index) * rows
            b_part = jnp.int32(index) * columns
            a_at = (slice(None), pl_ds(a_part, rows)) if self.a_turned else pl_ds(a_part, rows)
            b_at = pl_ds(b_part, columns)
            b_at = b_at if self.b_turned else (slice(None), b_at)
            plgpu.copy_gmem_to_smem(a.at[a_at], a_smem, filled)
            plgpu.copy_gmem_to_smem(b.at[b_at], b_smem, filled)
            plgpu.barrier_wait(filled)
            left = plgpu.transpose_ref(a_smem, (1, 0)) if self.a_turned else a_smem
            right = plgpu.transpose_ref(b_smem, (1, 0)) if self.b_turned else b_smem
            if self.a_in_tmem:
                layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(32 // bits(self.a))
                plgpu.async_store_tmem(a_tmem, plgpu.load(a_smem, layout=layout, optimized=False))
                plgpu.commit_tmem()
                left = a_tmem
            if both is not None:
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)

            def multiply():
                plgpu.tcgen05_mma(acc, left, right, done, accumulate=False, collective_axis=axis)

            if self.warp:
                from jax.experimental import pallas as pl

                @plgpu.warp_map
                def _(warp):
                    pl.when(warp == 1)(multiply)

            else:
                multiply()
            plgpu.barrier_wait(done)
            o[pl_ds(a_part, rows)] = plgpu.async_load_tmem(acc)

        scratch = dict(
            a_smem=smem(a_shape, self.a, self.a_swizzle),
            b_smem=smem(b_shape, self.b_dtype, self.b_swizzle),
            acc=plgpu.TMEM((rows, self.n), self.acc, packed=False, collective=self.pair),
            filled=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        )
        if self.pair:
            scratch["both"] = plgpu.ClusterBarrier(
                collective_axes=(axis,), orders_tensor_core=self.a_in_tmem
            )
        if self.a_in_tmem:
            scratch["a_tmem"] = plgpu.TMEM(
                (rows, self.k), self.a, packed=True, collective=self.pair
            )
        options = dict(cluster=self.cluster, cluster_names=names) if self.pair else {}
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((rows * blocks, self.n), self.acc),
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
            **options,
        )

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """a and b."""
        blocks = 2 if self.pair else 1
        return (
            values("a", (self.m * blocks, self.k), self.a),
            values("b", (self.k, self.n), self.b_dtype),
        )

    def compiled(self) -> Any:
        """The kernel, compiled."""
        a, b = self.inputs()
        a = a.T if self.a_turned else a
        b = b.T if self.b_turned else b
        return pallasite.compile(
            self.kernel(),
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(b.shape, b.dtype),
            target=self.target,
        )

    def check(self) -> Any:
        """Runs it, and compares with the product in higher precision."""
        a, b = self.inputs()
        made = self.compiled()
        stored = [
            np.ascontiguousarray(x.T if turned else x)
            for x, turned in ((a, self.a_turned), (b, self.b_turned))
        ]
        (out,) = simulate(made, *stored).outputs
        np.testing.assert_array_equal(wide(out), wide(a) @ wide(b))
        return made


def pl_ds(start: Any, size: int) -> Any:
    """``pl.ds``."""
    from jax.experimental import pallas as pl

    return pl.ds(start, size)
