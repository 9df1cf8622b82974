"""Programs for JAX's GPU backend on Blackwell, to be compiled by JAX's own compiler.

    python tests/upstream/jax_programs.py [NAME ...]

compiles and runs them all, and keeps what the compiler wrote in ``recorded``, so that the simulator
is tested with it where the compiler is not installed.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

RECORDED = pathlib.Path(__file__).with_name("recorded")


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
      target: what it is compiled for.
      build: makes the function for JAX.
      inputs: makes its arguments, as NumPy arrays of plain types, and what it must return.
      tolerance: relative, of norms; 0 for equality.
      result: type of what it returns.
    """

    target: str
    build: Callable[[], Any]
    inputs: Callable[[], tuple[list[np.ndarray], np.ndarray]]
    tolerance: float = 1e-5
    result: Any = np.float32


def generator(seed: int) -> np.random.Generator:
    """Random numbers."""
    return np.random.default_rng(seed)


def floats(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Normally distributed elements."""
    return generator(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def wide(values: np.ndarray) -> np.ndarray:
    """In double precision."""
    return values.astype(np.float64)


# Products -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """A product ``a @ b.T`` of one block or of a pair; ``m`` and ``n`` are of both together."""

    m: int
    n: int
    k: int
    dtype: Any
    pair: bool = False
    scale: Any = None
    sparse: bool = False
    through: str = ""
    result: Any = np.float32

    @property
    def block(self) -> int:
        """Elements that share a scale factor."""
        return (16 if self.scale is ml_dtypes.float8_e4m3fn else 32) * (1 + self.sparse)

    def build(self) -> Any:
        """The function for JAX."""
        import jax
        import jax.numpy as jnp
        from jax import lax
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        dtype, parts = jnp.dtype(self.dtype), 1 + self.pair
        m, n, k = self.m // parts, self.n // parts, self.k
        stored = k // 2 if self.sparse else k
        bits = 4 if dtype == jnp.dtype(ml_dtypes.float4_e2m1fn) else 8 * dtype.itemsize
        row = 128 * 8 // bits
        tiles = (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(128))
        axis = {"collective_axis": "x"} if self.pair else {}
        scaled = self.scale is not None
        scratch = {
            "a_s": plgpu.SMEM((m, stored), dtype, transforms=tiles),
            "b_s": plgpu.SMEM((n, k), dtype, transforms=tiles),
            "loaded": plgpu.Barrier(num_arrivals=2 + 2 * scaled + self.sparse),
            "done": plgpu.Barrier(orders_tensor_core=True),
            "sums": plgpu.TMEM(
                (m, self.n),
                self.result,
                packed=False if np.dtype(self.result).itemsize < 4 else None,
                collective=self.pair,
            ),
        }
        if self.through:
            scratch["a_t"] = plgpu.TMEM((m, k), dtype, packed=True, collective=self.pair)
        if scaled:
            columns = k // self.block
            layout = plgpu.TMEMLayout.SCALES_LAYOUT
            scratch |= {
                "a_f": plgpu.SMEM((m // 128, columns // 4, 32, 16), self.scale),
                "b_f": plgpu.SMEM((self.n // 128, columns // 4, 32, 16), self.scale),
                "a_u": plgpu.TMEM((m, columns), self.scale, layout=layout, collective=self.pair),
                "b_u": plgpu.TMEM(
                    (self.n, columns), self.scale, layout=layout, collective=self.pair
                ),
            }
        if self.sparse:
            layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
            scratch |= {
                "which_s": plgpu.SMEM((m // 128, k // 128, 128, 64), jnp.uint2),
                "which_t": plgpu.TMEM((m, k // 2), jnp.uint2, layout=layout, collective=self.pair),
            }

        def body(*references: Any) -> None:
            given = list(references[: 2 + 2 * scaled + self.sparse])
            out, held = references[len(given)], references[len(given) + 1]
            rank = lax.axis_index("x") if self.pair else 0

            def load(source: Any, target: Any, divided: bool = True) -> None:
                options = {}
                if self.pair:
                    options["collective_axes"] = "x"
                    if divided:
                        options["leader_tracked"] = plgpu.CopyPartition.PARTITIONED(0)
                plgpu.copy_gmem_to_smem(source, target, held["loaded"], **options)

            load(given.pop(0), held["a_s"])
            load(given.pop(0), held["b_s"])
            if scaled:
                load(given.pop(0), held["a_f"])
                load(given.pop(0), held["b_f"], divided=False)
            if self.sparse:
                load(given.pop(0), held["which_s"])

            def multiply() -> None:
                plgpu.barrier_wait(held["loaded"])
                options = dict(axis)
                if scaled:
                    plgpu.async_copy_scales_to_tmem(held["a_f"], held["a_u"], **axis)
                    plgpu.async_copy_scales_to_tmem(held["b_f"], held["b_u"], **axis)
                    options |= {"a_scale": held["a_u"], "b_scale": held["b_u"]}
                if self.sparse:
                    plgpu.async_copy_sparse_metadata_to_tmem(
                        held["which_s"], held["which_t"], **axis
                    )
                    options["a_sparse_metadata"] = held["which_t"]
                left = held["a_s"]
                if self.through == "registers":
                    layout = plgpu.Layout.TCGEN05
                    plgpu.async_store_tmem(held["a_t"], plgpu.load(held["a_s"], layout=layout))
                    plgpu.commit_tmem()
                    left = held["a_t"]
                plgpu.tcgen05_mma(
                    held["sums"],
                    left,
                    plgpu.transpose_ref(held["b_s"], (1, 0)),
                    held["done"],
                    accumulate=False,
                    **options,
                )

            if self.pair:
                pl.when(rank == 0)(multiply)
            else:
                multiply()
            plgpu.barrier_wait(held["done"])
            rows = pl.ds(rank * m, m)
            out[rows, :] = plgpu.async_load_tmem(held["sums"])

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((self.m, self.n), self.result),
            scratch_types=[scratch],
            **({"cluster": (2,), "cluster_names": ("x",)} if self.pair else {}),
        )

    def inputs(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Arguments, and the product."""
        if np.dtype(self.dtype) == np.int8:
            draw = functools.partial(generator(1).integers, -128, 128, dtype=np.int8)
            a, b = draw((self.m, self.k // (1 + self.sparse))), draw((self.n, self.k))
        else:
            a = floats((self.m, self.k // (1 + self.sparse)), self.dtype, 1)
            b = floats((self.n, self.k), self.dtype, 2)
        arguments, left, right = [a, b], wide(a), wide(b)
        pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.uint8)
        chosen = pairs[generator(5).integers(0, 6, (self.m, self.k // 4))]
        if self.sparse:
            full = np.zeros((self.m, self.k // 4, 4))
            np.put_along_axis(full, chosen.astype(np.int64), left.reshape(*chosen.shape), axis=2)
            left = full.reshape(self.m, self.k)
        if self.scale is not None:
            for number, rows in enumerate((self.m, self.n)):
                factors = self._factors(rows, 3 + number)
                arguments.append(_tiled(factors))
                spread = np.repeat(wide(factors), self.block, axis=1)
                left, right = (left * spread, right) if number == 0 else (left, right * spread)
        if self.sparse:
            arguments.append(_formatted(chosen.reshape(self.m, -1), np.dtype(self.dtype).itemsize))
        return arguments, left @ right.T

    def _factors(self, rows: int, seed: int) -> np.ndarray:
        shape = (rows, self.k // self.block)
        if self.scale is ml_dtypes.float8_e8m0fnu:
            return generator(seed).integers(122, 132, shape, np.uint8).view(self.scale)
        return np.abs(floats(shape, np.float32, seed)).astype(self.scale)


def _tiled(factors: np.ndarray) -> np.ndarray:
    """Scale factors of rows in the order in which copies to tensor memory want them."""
    rows, columns = factors.shape
    parts = factors.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(parts).reshape(rows // 128, columns // 4, 32, 16)


def _formatted(which: np.ndarray, size: int) -> np.ndarray:
    """Metadata of a sparse matrix (rows, entries) in the order in which the hardware wants them."""
    rows, entries = which.shape
    if size == 1:
        parts = which.reshape(rows // 128, 128, entries // 64, 64).transpose(0, 2, 1, 3)
    else:
        parts = which.reshape(rows // 128, 8, 2, 8, entries // 64, 4, 2, 8)
        parts = parts.transpose(0, 4, 1, 6, 3, 5, 2, 7)
    shape = (rows // 128, entries // 64, 128, 64)
    return np.ascontiguousarray(parts).reshape(shape).astype(ml_dtypes.uint2)


def product(target: str = "sm_100a", tolerance: float = 1e-5, **options: Any) -> Program:
    """A product as a program."""
    one = Product(**options)
    return Program(target, one.build, one.inputs, tolerance, one.result)


# Other programs -----------------------------------------------------------------------------------


def _cancelling() -> Any:
    """Each cluster takes over the work of others that have not begun, until there are none."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out: Any, answer: Any, ready: Any, room: Any) -> None:
        del room

        def work(carry: Any) -> Any:
            place, _, step = carry
            out[place] = place * place
            # Threads may still read the answer before.
            own = answer.at[step % 2]
            plgpu.try_cluster_cancel(own, ready)
            plgpu.barrier_wait(ready)
            (following,), taken = plgpu.query_cluster_cancel(own, grid_names=("x",))
            return jnp.where(taken, following, -1), taken, step + 1

        first = (lax.axis_index("x"), jnp.bool_(True), jnp.int32(0))
        lax.while_loop(lambda carry: carry[1], work, first)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((170,), jnp.int32),
        grid=(170,),
        grid_names=("x",),
        scratch_types=[
            plgpu.TryClusterCancelResult(2),
            plgpu.Barrier(),
            plgpu.SMEM((220 * 1024,), jnp.int8),
        ],
    )


def _squares() -> tuple[list[np.ndarray], np.ndarray]:
    return [], np.arange(170) ** 2


def _reducing() -> Any:
    """Loads from tensor memory that also give the largest of each row."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x: Any, out: Any, inside: Any) -> None:
        value = plgpu.load(x, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE, optimized=False)
        plgpu.async_store_tmem(inside, value)
        plgpu.commit_tmem()
        loaded, largest = plgpu.async_load_tmem(
            inside, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE, reduce="max"
        )
        del loaded
        out[...] = largest

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.TMEM((128, 64), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _largest() -> tuple[list[np.ndarray], np.ndarray]:
    x = floats((128, 64), np.float32, 1)
    return [x], x.max(axis=1)


PROGRAMS: dict[str, Program] = {
    "f16": product(m=128, n=128, k=128, dtype=np.float16),
    "f16 of 64 rows": product(m=64, n=128, k=64, dtype=np.float16),
    "f16 in f16": product(tolerance=2e-3, m=128, n=64, k=64, dtype=np.float16, result=np.float16),
    "a pair, 256 rows": product(m=256, n=256, k=64, dtype=ml_dtypes.bfloat16, pair=True),
    "a pair, 128 rows": product(m=128, n=128, k=64, dtype=np.float16, pair=True),
    "e4m3": product(m=128, n=64, k=128, dtype=ml_dtypes.float8_e4m3fn),
    "i8": product(tolerance=0, m=128, n=64, k=128, dtype=np.int8, result=np.int32),
    "a from registers": product(m=128, n=64, k=64, dtype=np.float16, through="registers"),
    "sparse f16": product(m=128, n=128, k=128, dtype=np.float16, sparse=True),
    "sparse e5m2": product(m=128, n=128, k=256, dtype=ml_dtypes.float8_e5m2, sparse=True),
    "sparse pair": product(m=256, n=128, k=128, dtype=ml_dtypes.bfloat16, sparse=True, pair=True),
    "mxf8": product(
        m=128, n=128, k=256, dtype=ml_dtypes.float8_e4m3fn, scale=ml_dtypes.float8_e8m0fnu
    ),
    "mxf4": product(
        m=128, n=128, k=256, dtype=ml_dtypes.float4_e2m1fn, scale=ml_dtypes.float8_e8m0fnu
    ),
    "nvf4": product(
        m=128, n=256, k=256, dtype=ml_dtypes.float4_e2m1fn, scale=ml_dtypes.float8_e4m3fn
    ),
    "nvf4 pair": product(
        m=256, n=256, k=256, dtype=ml_dtypes.float4_e2m1fn, scale=ml_dtypes.float8_e4m3fn, pair=True
    ),
    "sparse mxf8": product(
        m=128,
        n=128,
        k=256,
        dtype=ml_dtypes.float8_e5m2,
        scale=ml_dtypes.float8_e8m0fnu,
        sparse=True,
    ),
    "reducing": Program("sm_103a", _reducing, _largest, 0),
    "cancelling": Program("sm_100a", _cancelling, _squares, 0, np.int32),
}
"""By name."""


# Recording ----------------------------------------------------------------------------------------


def path_of(name: str) -> pathlib.Path:
    """Where a program is kept."""
    return RECORDED / (re.sub(r"\W+", "_", name) + ".json.gz")


def without_locations(ptx: str) -> str:
    """The code, without what says where it comes from."""
    code = ptx.split("\t.section")[0]
    lines = [one for one in code.splitlines() if not re.match(r"\s*\.(loc|file)\b", one)]
    return "\n".join(lines) + "\n"


def record(name: str, kernel: Any, buffers: list[int]) -> None:
    """Keeps what the compiler made of a program, and how the host launches it."""
    sizes = [variable.bytes for variable, _ in kernel._program.parameters]
    launch = kernel._compiled.record(len(buffers), sizes)
    kept = {
        "ptx": without_locations(kernel._compiled.ptx),
        "buffers": buffers,
        "grid": launch.grid,
        "cluster": launch.cluster,
        "block": launch.block,
        "shared": launch.shared,
        "parameters": [base64.b64encode(one).decode() for one in launch.parameters],
        "maps": {number: dataclasses.astuple(one) for number, one in launch.maps.items()},
    }
    RECORDED.mkdir(exist_ok=True)
    path_of(name).write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def assert_right(program: Program, found: np.ndarray, expected: np.ndarray) -> None:
    """Raises AssertionError unless the result is right."""
    if not program.tolerance:
        np.testing.assert_array_equal(found, expected)
        return
    error = np.linalg.norm(wide(found) - expected) / np.linalg.norm(expected)
    assert error < program.tolerance and math.isfinite(error), error


def main() -> None:
    """Runs and records all programs; only runs those that are named."""
    import jax_on_simulator

    named = sys.argv[1:]
    for name, program in PROGRAMS.items():
        if named and name not in named:
            continue
        jax_on_simulator.install(program.target)
        arguments, expected = program.inputs()
        found = np.asarray(program.build()(*arguments))
        assert_right(program, found, expected)
        if named:
            print(name, "is right")
            continue
        kernel, numbers = jax_on_simulator.last
        record(name, kernel, numbers)
        print(name, path_of(name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
