"""Matrix products against XLA, JAX's own kernel for Hopper, and PyTorch (cuBLAS, cuBLASLt).

All contenders of a row are checked, tuned and timed in the same run; docs/benchmarks.md says how.

    python benchmarks/matmul.py --json matmul.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import contest_tables
import harness
import jax
import jax.numpy as jnp
import operands
import program
import rates
import timing
from contest import Candidate, Candidates, Contender, Row, RowResult
from jax import lax

import upstream

RIVALS = ("xla", "upstream", "torch")
SQUARE, SKINNY, FP8, PEAK = "bf16 square", "skinny", "fp8", "peak"
DTYPES = {SQUARE: jnp.bfloat16, SKINNY: jnp.bfloat16, PEAK: jnp.bfloat16, FP8: jnp.float8_e4m3fn}
SHAPES = {  # M, N, K
    PEAK: [(8192, 8192, 16384)],
    SQUARE: [(2048, 2048, 2048), (4096, 4096, 4096), (4096, 8192, 4096), (8192, 8192, 8192)],
    SKINNY: [(16, 8192, 8192), (64, 8192, 8192), (128, 8192, 8192)],
    FP8: [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384)],
}
TINY_SHAPES = {
    PEAK: [(128, 128, 64)],
    SQUARE: [(128, 256, 128)],
    SKINNY: [(16, 256, 128)],
    FP8: [(128, 256, 128)],
}
LARGE = "8192x8192x8192"
"""Whose best rate counts as a peak, beside that of the rows of the group ``peak``."""

QUICK = ("peak_8192x8192x16384", "bf16_4096x4096x4096", "skinny_64x8192x8192", "fp8_4096x4096x4096")

LIMITS = {
    jnp.bfloat16: operands.PRODUCT_LIMITS,
    jnp.float8_e4m3fn: {"norm": 2e-2, "largest": 0.3},
}
"""Largest errors that are right; sums of products of float8 lose bits in the tensor cores."""


def make_row(group: str, shape: tuple[int, int, int]) -> Row:
    """A product of an M x K and a K x N matrix; the latter is given as N x K in float8."""
    (m, n, k), dtype = shape, DTYPES[group]
    size = jnp.dtype(dtype).itemsize
    by_rows = dtype == jnp.float8_e4m3fn

    def inputs(seed: int) -> tuple[jax.Array, jax.Array]:
        a, b = jax.random.split(jax.random.key(seed))
        shape_b = (n, k) if by_rows else (k, n)
        return operands.normal(a, (m, k), dtype), operands.normal(b, shape_b, dtype)

    kind = {SQUARE: "bf16", SKINNY: "skinny", FP8: "fp8", PEAK: "peak"}[group]
    return Row(
        name=f"{kind}_{m}x{n}x{k}",
        group=group,
        flops=2 * m * n * k,
        bytes=(m + n) * k * size + m * n * 2,
        input_bytes=(m + n) * k * size,
        inputs=inputs,
        reference=_reference(by_rows),
        errors=operands.product_errors(jnp.bfloat16),
        limits=LIMITS[dtype],
    )


def _dot(a: jax.Array, b: jax.Array, by_rows: bool, **options: Any) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1 if by_rows else 0,)), ((), ())), **options)


def _reference(by_rows: bool) -> Any:
    def product(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return _dot(a, b, by_rows, precision=lax.Precision.HIGHEST)

    return lambda a, b: jax.jit(product, **timing.reference_options())(a, b)


def contenders(row: Row, arguments: argparse.Namespace) -> list[Contender]:
    """All contenders of a row."""
    m, n, k = map(int, row.name.partition("_")[2].split("x"))
    search = arguments.upstream_configs
    by_torch = scaled_torch_candidates if row.group == FP8 else torch_candidates
    everyone = [
        Contender("ours", "jax", lambda: ours(row.group, (m, n, k), arguments)),
        Contender("xla", "jax", xla_fp8_candidates if row.group == FP8 else xla_candidates),
        Contender(
            "upstream", "jax", lambda: upstream_candidates(row.group == FP8, (m, n, k), search)
        ),
        Contender("torch", "torch", by_torch),
    ]
    if row.group == PEAK:
        everyone = [one for one in everyone if one.name in ("xla", "torch")]
    return operands.able(everyone)


def our_product(group: str, config: Any) -> Any:
    """The function that computes a row."""
    options: dict[str, Any] = {} if config is None else {"config": config}
    if group == FP8:
        options |= {"out_dtype": jnp.bfloat16, "transpose_b": True}
    return functools.partial(program.our_operation("matmul"), **options)


def ours(group: str, shape: tuple[int, int, int], arguments: argparse.Namespace) -> Candidates:
    """Our kernel."""
    list_configs = program.our_operation("matmul_configs")
    listed = list_configs(*shape, DTYPES[group], jnp.bfloat16) if list_configs else []

    def order(config: Any) -> tuple[Any, ...]:
        return config.group, config.grid_minor

    def reordered(best: Any) -> list[Any]:
        ordered = {
            dataclasses.replace(best, group=group, grid_minor=minor)
            for group, minor in map(order, listed)
        }
        return [one for one in listed if one in ordered]

    return program.our_candidates(
        lambda label, config: Candidate(label, jax.jit(our_product(group, config))),
        [one for one in listed if order(one) == order(listed[0])],
        arguments,
        reordered,
    )


def xla_candidates() -> Candidates:
    """XLA's product, which searches among its algorithms when it compiles."""
    product = functools.partial(_dot, by_rows=False, preferred_element_type=jnp.bfloat16)
    yield Candidate("dot", jax.jit(product))


def xla_fp8_candidates() -> Candidates:
    """Ways to write a product of float8 of which XLA may make one call of cuBLASLt."""

    def direct(a, b):
        return _dot(a, b, True, preferred_element_type=jnp.bfloat16)

    def converted(a, b):
        return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), True)

    def scaled(a, b, scale_a, scale_b):
        return converted(a.astype(jnp.bfloat16) * scale_a, b.astype(jnp.bfloat16) * scale_b)

    def with_scales(a, b):
        return a, b, jnp.ones((), jnp.bfloat16), jnp.ones((), jnp.bfloat16)

    yield Candidate("dot of float8", jax.jit(direct))
    yield Candidate("dot of scaled conversions", jax.jit(scaled), with_scales)
    yield Candidate("dot of conversions", jax.jit(converted))


def upstream_candidates(fp8: bool, shape: tuple[int, int, int], search: str) -> Candidates:
    """JAX's kernel, tuned. It takes its second operand as K x N only, also in float8."""
    if not fp8:
        yield from upstream.matmul_candidates(shape[0], search)
        return
    first, _ = upstream.matmul_configs(max(shape[0], 128), "one")

    def transposed(a, b):
        return a, b.T

    yield Candidate(upstream.label(first[0]), jax.jit(upstream.matmul(first[0])), transposed)


def torch_candidates() -> Candidates:
    """PyTorch's product: cuBLAS or cuBLASLt by their heuristics."""
    import torch

    yield Candidate("matmul", torch.matmul, operands.to_torch, jnp.from_dlpack)


def scaled_torch_candidates() -> Candidates:
    """cuBLASLt through PyTorch."""
    import torch

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    def prepare(*arrays: jax.Array) -> tuple[Any, ...]:
        tensors = operands.to_torch(*arrays)
        return *tensors, *(torch.ones((), device=tensors[0].device) for _ in range(2))

    yield Candidate("_scaled_mm", product, prepare, jnp.from_dlpack)


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """The kernels whose compilation is timed; every repetition has another K."""
    size, step = (256, 64) if arguments.rehearse else (4096, 128)

    def kernel(name: str, group: str, rows: int) -> Any:
        def ours(repetition: int) -> Any:
            return our_product(group, None), args(repetition)

        def theirs(repetition: int) -> Any:
            first, _ = upstream.matmul_configs(rows, "one")
            return upstream.matmul(first[0]), args(repetition)

        def args(repetition: int) -> Any:
            k = size + step * (repetition + 1)
            return make_row(group, (rows, size, k)).inputs(repetition)

        rival = {} if group == FP8 else {"upstream": theirs}
        return program.compilers(name, arguments, ours=ours, **rival)

    return {
        name: kernel(name, group, rows)
        for name, group, rows in (
            (f"bf16 {size}x{size}xK", SQUARE, size),
            (f"bf16 128x{size}xK", SKINNY, 128),
            (f"fp8 {size}x{size}xK", FP8, size),
        )
    }


def peaks(rows: Sequence[RowResult]) -> dict[str, float]:
    """The best rate that anyone reached on the large products of each type."""
    found: dict[str, float] = {}
    for row in rows:
        kind = "fp8" if row.group == FP8 else "bf16"
        rates = [row.rate(result.contender) for result in row.results]
        if row.group == PEAK or row.name.endswith(LARGE):
            found[kind] = max([found.get(kind, 0.0), *(rate for rate in rates if rate is not None)])
    return {kind: rate for kind, rate in found.items() if rate > 0}


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns peaks, shares and geometric means."""
    best, names = peaks(rows), ("ours", *RIVALS)
    lines, shares = [], {}
    for row in rows:
        kind = "fp8" if row.group == FP8 else "bf16"
        taken, rate = row.milliseconds("ours"), row.rate("ours")
        if row.group == SKINNY:
            limit, reached = facts.get("bandwidth"), taken and row.bytes / (taken * 1e-3)
        else:
            limit, reached = best.get(kind), rate
        shares[row.name] = reached / limit if reached and limit else None
        microseconds = "-" if taken is None else f"{taken * 1e3:.1f}"
        cells = [microseconds, *contest_tables.rates(row, names)]
        share = contest_tables.percent(shares[row.name])
        lines.append((row.name, *cells, share, contest_tables.ratio_text(row.ratio())))
    print("TFLOP/s; ours as a share of the peak, of the bandwidth of a copy if skinny")
    harness.print_table(
        ("row (M x N x K)", "ours us", *names, "ours of peak", "ours / best rival"), lines
    )
    means = contest_tables.group_means([row for row in rows if row.group != PEAK])
    texts = (f"{kind} {rate / 1e12:.1f} TFLOP/s" for kind, rate in best.items())
    print("\npeak: " + ", ".join(texts))
    if "bandwidth" in facts:
        print(f"copy: {facts['bandwidth'] / 1e12:.3f} TB/s ({facts['bandwidth_by']})")
    print("ours / best rival, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    return {"peaks": best, "ours_of_peak": shares, "geometric_means": means}


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    shapes = TINY_SHAPES if arguments.rehearse else SHAPES
    rows = [make_row(group, shape) for group, listed in shapes.items() for shape in listed]
    return program.Benchmark(
        name="matmul",
        script=__file__,
        rows={row.name: row for row in rows},
        quick=[row.name for row in rows] if arguments.rehearse else QUICK,
        contenders=lambda row: contenders(row, arguments),
        kernels=kernels(arguments),
        facts=lambda timer: rates.copy(timer, arguments.rehearse),
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    return program.main(benchmark, program.parser(__doc__.splitlines()[0]), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
