"""Copy, RMSNorm and softmax against XLA's fusions and the same kernels under Mosaic GPU.

Every row is timed in one run on one GPU; the bandwidth counts each array once, read or written. The
kernels are written once: ``gpu`` is ``pallasite.gpu`` or JAX's Mosaic GPU module.

    python benchmarks/memory_bound.py --json memory_bound.json
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallasite import gpu as pallasite


def options(gpu: Any, min_blocks: int = 1) -> dict[str, Any]:
    """Keyword arguments of ``kernel`` for lane semantics; only Pallasite knows ``min_blocks``."""
    semantics = gpu.LoweringSemantics.Lane
    own = dict(min_blocks=min_blocks) if gpu is pallasite else {}
    return dict(compiler_params=gpu.CompilerParams(lowering_semantics=semantics, **own))


def copy_kernel(gpu: Any, size: int, dtype: Any) -> Callable[..., Any]:
    """Copies a vector; each lane of a warpgroup one vector of 16 bytes."""
    block = 128 * 16 // jnp.dtype(dtype).itemsize

    @gpu.kernel(
        out_type=jax.ShapeDtypeStruct((size,), dtype),
        grid=(size // block,),
        grid_names=("block",),
        **options(gpu),
    )
    def copy(x_ref, o_ref):
        part = pl.ds(lax.axis_index("block") * block, block)
        o_ref[part] = x_ref[part]

    return copy


def row_kernel(
    gpu: Any,
    rows: int,
    columns: int,
    dtype: Any,
    name: str,
    compute: Callable[..., Any],
    threads: int = 1,
    min_blocks: int = 1,
) -> Callable[..., Any]:
    """A kernel that works on one row per block, distributed over a number of warpgroups.

    ``compute(x, combine, *vectors)`` gets the thread's part of the row, and a function for each
    further input that loads the thread's part of it in f32; ``combine(reduce, value, slot)``
    reduces a scalar over the threads of the block.
    """
    part_size = columns // threads
    several: dict[str, Any] = {}
    if threads > 1:
        several = dict(
            num_threads=threads,
            thread_name="thread",
            scratch_types=[
                gpu.SMEM((2, threads), jnp.float32),
                gpu.Barrier(num_arrivals=threads),
            ],
        )

    def body(x_ref, *refs):
        *vector_refs, o_ref = refs if threads == 1 else refs[:-2]
        row = lax.axis_index("row")
        thread = lax.axis_index("thread") if threads > 1 else 0
        part = pl.ds(thread * part_size, part_size)

        def combine(reduce, value, slot):
            if threads == 1:
                return value
            partial, written = refs[-2:]
            partial[slot, thread] = value
            gpu.barrier_arrive(written)
            gpu.barrier_wait(written)
            total = partial[slot, 0]
            for other in range(1, threads):
                total = reduce(total, partial[slot, other])
            return total

        vectors = [lambda ref=ref: ref[part].astype(jnp.float32) for ref in vector_refs]
        result = compute(x_ref[row, part], combine, *vectors)
        o_ref[row, part] = result.astype(dtype)

    body.__name__ = name
    return gpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(rows,),
        grid_names=("row",),
        **several,
        **options(gpu, min_blocks),
    )


def streamed_row_kernel(
    gpu: Any,
    rows: int,
    columns: int,
    dtype: Any,
    name: str,
    compute: Callable[..., Any],
    threads: int = 4,
    stages: int = 2,
    blocks: int = 132,
) -> Callable[..., Any]:
    """A kernel for rows of which a multiprocessor holds few: it loads the next ones in advance.

    One block per multiprocessor takes every ``blocks``-th row. TMA copies the rows into ``stages``
    buffers; a buffer is filled again as soon as all warpgroups have their part of it in registers.
    ``compute`` is that of ``row_kernel``.
    """
    part_size = columns // threads

    def body(x_ref, *refs):
        *vector_refs, o_ref, buffers, partial, loaded, written = refs
        block, thread = lax.axis_index("block"), lax.axis_index("thread")
        part = pl.ds(thread * part_size, part_size)
        vectors = [lambda ref=ref: ref[part].astype(jnp.float32) for ref in vector_refs]

        def fetch(step):
            row = block + step * blocks

            @pl.when((thread == 0) & (row < rows))
            def _():
                slot = lax.rem(step, stages)
                gpu.copy_gmem_to_smem(x_ref.at[row], buffers.at[slot], loaded.at[slot])

        for step in range(stages):
            fetch(jnp.int32(step))

        @pl.loop(0, (rows - block + blocks - 1) // blocks)
        def _(step):
            slot = lax.rem(step, stages)

            def combine(reduce, value, which):
                partial[which, thread] = value
                gpu.barrier_arrive(written)
                gpu.barrier_wait(written)
                if which == 0:
                    fetch(step + stages)
                total = partial[which, 0]
                for other in range(1, threads):
                    total = reduce(total, partial[which, other])
                return total

            gpu.barrier_wait(loaded.at[slot])
            result = compute(buffers[slot, part], combine, *vectors)
            o_ref[block + step * blocks, part] = result.astype(dtype)

    body.__name__ = name
    return gpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="thread",
        scratch_types=[
            gpu.SMEM((stages, columns), dtype),
            gpu.SMEM((2, threads), jnp.float32),
            gpu.Barrier(num_barriers=stages),
            gpu.Barrier(num_arrivals=threads),
        ],
        **options(gpu),
    )


def is_streamed(columns: int, dtype: Any) -> bool:
    """Whether a row needs so many registers that too few rows would be in flight otherwise."""
    return columns > 16384 and jnp.dtype(dtype).itemsize == 2


def rms_norm(gpu: Any, rows: int, columns: int, dtype: Any) -> Callable[..., Any]:
    """x / sqrt(mean(x^2) + eps) * w for every row."""

    def compute(x, combine, w):
        x = x.astype(jnp.float32)
        total = combine(jnp.add, jnp.sum(x * x), 0)
        return x * lax.rsqrt(total / columns + 1e-6) * w()

    if is_streamed(columns, dtype):
        return streamed_row_kernel(gpu, rows, columns, dtype, "rms_norm", compute)
    threads = 1 if columns <= 8192 else columns // 4096
    return row_kernel(gpu, rows, columns, dtype, "rms_norm", compute, threads)


def softmax(gpu: Any, rows: int, columns: int, dtype: Any) -> Callable[..., Any]:
    """Softmax of every row."""

    def compute(x, combine):
        largest = combine(jnp.maximum, jnp.max(x).astype(jnp.float32), 0)
        e = jnp.exp(x.astype(jnp.float32) - largest)
        return e * (1.0 / combine(jnp.add, jnp.sum(e), 1))

    if is_streamed(columns, dtype):
        return streamed_row_kernel(gpu, rows, columns, dtype, "softmax", compute)
    threads, min_blocks = 1 if columns <= 16384 else columns // 8192, 1
    if jnp.dtype(dtype).itemsize == 2 and columns <= 16384:
        threads, min_blocks = (1, 4) if columns <= 8192 else (2, 3)
    return row_kernel(gpu, rows, columns, dtype, "softmax", compute, threads, min_blocks)


def xla_rms_norm(x, w):
    """The reference that XLA fuses."""
    y = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale * w.astype(jnp.float32)).astype(x.dtype)


def xla_softmax(x):
    """The reference that XLA fuses."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds, bandwidths in bytes per second."""

    kernel: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pallasite_ms: float
    xla_ms: float | None
    mosaic_ms: float | None
    bandwidth: float
    share_of_copy: float
    relative_error: float
    mosaic_note: str = ""


def error(result: Any, expected: Any) -> float:
    """Relative error in the Euclidean norm of the last rows, in double precision."""
    a = np.asarray(result, np.float64)
    b = np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(
    name: str, make: Any, reference: Any, args: tuple[Any, ...], peak: float, repeats: int
) -> Row:
    """Times one kernel under both compilers, and XLA's version."""
    x = args[0]
    ours = jax.jit(make(pallasite))
    tail = slice(-64, None) if x.ndim > 1 else slice(-(1 << 16), None)
    got = ours(*args)[tail]
    wanted = reference(x[tail], *args[1:])
    relative = error(got, wanted)
    limit = 1e-6 if x.dtype == jnp.float32 else 8e-3
    if not relative < limit:
        raise SystemExit(f"{name} {x.shape}: wrong result, relative error {relative}")
    del got
    time = harness.kernel_milliseconds(ours, *args, repeats=repeats)
    xla = None
    if name != "copy":
        xla = harness.kernel_milliseconds(jax.jit(reference), *args, repeats=repeats)
    else:
        plus_one = jax.jit(lambda x: x + 1)
        xla = harness.kernel_milliseconds(plus_one, *args, repeats=repeats)
    mosaic_time, note = None, ""
    try:
        theirs = jax.jit(make(mosaic))
        rival = error(theirs(*args)[tail], wanted)
        mosaic_time = harness.kernel_milliseconds(theirs, *args, repeats=repeats)
        if not rival < limit:
            note = f"relative error {rival:.1e}"
    except Exception as failure:
        note = f"{type(failure).__name__}: {str(failure).splitlines()[0][:80]}"
    moved = 2 * x.size * x.dtype.itemsize
    bandwidth = moved / (time * 1e-3)
    return Row(
        name, x.shape, x.dtype.name, moved, time, xla, mosaic_time, bandwidth, bandwidth / peak,
        relative, note,
    )  # fmt: skip


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--gibibytes", type=float, default=1.0, help="size of each array")
    parser.add_argument("--columns", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"it needs a GPU, and JAX is on {jax.default_backend()!r}")
    size = int(arguments.gibibytes * 2**30)
    peak, how = harness.copy_bandwidth(size)
    print(f"{harness.machine()}\ncopy bandwidth {peak / 1e12:.3f} TB/s ({how})")
    rows = []
    for dtype in (jnp.bfloat16, jnp.float32):
        elements = size // jnp.dtype(dtype).itemsize
        x = jax.random.normal(jax.random.key(0), (elements,), dtype)
        rows.append(
            measure(
                "copy",
                lambda gpu, n=elements, d=dtype: copy_kernel(gpu, n, d),
                lambda x: x,
                (x,),
                peak,
                arguments.repeats,
            )
        )
        for columns in arguments.columns:
            matrix = x.reshape(-1, columns)
            w = jax.random.normal(jax.random.key(1), (columns,), dtype)
            for name, make, reference, extra in (
                ("rms_norm", rms_norm, xla_rms_norm, (w,)),
                ("softmax", softmax, xla_softmax, ()),
            ):
                rows.append(
                    measure(
                        name,
                        lambda gpu, m=make, r=matrix.shape[0], c=columns, d=dtype: m(gpu, r, c, d),
                        reference,
                        (matrix, *extra),
                        peak,
                        arguments.repeats,
                    )
                )
        del x, matrix
    header = (
        "kernel", "shape", "dtype", "ms", "TB/s", "of copy", "XLA ms", "vs XLA", "Mosaic ms",
        "vs Mosaic", "note",
    )  # fmt: skip
    harness.print_table(
        header,
        [
            (
                row.kernel,
                "x".join(map(str, row.shape)),
                row.dtype,
                row.pallasite_ms,
                row.bandwidth / 1e12,
                row.share_of_copy,
                row.xla_ms,
                None if row.xla_ms is None else row.xla_ms / row.pallasite_ms,
                row.mosaic_ms,
                None if row.mosaic_ms is None else row.mosaic_ms / row.pallasite_ms,
                row.mosaic_note,
            )  # fmt: skip
            for row in rows
        ],
    )
    harness.write_json(arguments.json, "memory_bound", rows)


if __name__ == "__main__":
    main()
