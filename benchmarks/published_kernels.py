"""Kernels that JAX publishes for Hopper, compiled by Pallasite and by JAX's own compiler.

The source is the same: it is read from the installed JAX, and for Pallasite only the import of the
GPU module is replaced, and the semantics that it asks for with ``--semantics lane``. Configurations
are the same, too; docs/benchmarks.md says how the two are compared. Needs absl-py.

    python benchmarks/published_kernels.py --semantics warpgroup --json published_kernels.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attention
import contest_tables
import harness
import matmul
import program
import timing
import upstream_library
from contest import Candidate, Candidates, Contender, Row, RowResult, describe
from library_products import Mixed, Ragged

import upstream

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import jax
import jax.numpy as jnp
import published

JAX = "upstream"
"""The name of JAX's compiler among the contenders."""

NOT_EQUAL = "not equal"
"""Among the errors: elements in which a result differs from that of JAX's compiler."""

MATMUL, MIXED, ATTENTION, RAGGED, TRANSPOSED = (
    "hopper_matmul_mgpu",
    "hopper_mixed_type_matmul_mgpu",
    "attention_mgpu",
    "ragged_dot_mgpu",
    "transposed_ragged_dot_mgpu",
)

PRODUCTS = (  # tile_m, tile_n, tile_k, wg_dimension, grid_minor_dim, cluster_dimension
    (128, 128, 64, "M", "M", None),
    (64, 256, 64, "M", "M", None),
    (128, 128, 64, "N", "M", None),
    (128, 128, 64, "N", "N", None),
    (128, 128, 64, "N", "M", "M"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel with one configuration and one shape.

    Attributes:
      module: of JAX, which has the kernel.
      row: what it computes.
      candidate: makes the call of the kernel, given a module.
    """

    module: str
    row: Row
    candidate: Callable[[Any], Candidate]

    @functools.cached_property
    def theirs(self) -> Candidate:
        """The call by JAX's compiler."""
        return self.candidate(upstream_library.load(self.module))


def product(shape: tuple[int, int, int], config: tuple[Any, ...]) -> Case:
    """A matrix product."""
    tile_m, tile_n, tile_k, shared, minor, cluster = config

    def candidate(module: Any) -> Candidate:
        dimension = module.MatmulDimension
        tuning = module.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            max_concurrent_steps=4,
            epi_tile_m=64,
            epi_tile_n=64,
            grid_minor_dim=dimension[minor],
            grid_tile_width=8,
            wg_dimension=dimension[shared],
            cluster_dimension=None if cluster is None else dimension[cluster],
        )
        return Candidate(upstream.label(tuning), jax.jit(upstream.matmul(tuning, module)))

    row = matmul.make_row(matmul.SQUARE, shape)
    beside = "" if cluster is None else f"_cluster{cluster}"
    name = f"matmul_{'x'.join(map(str, shape))}_{tile_m}x{tile_n}_wg{shared}_minor{minor}{beside}"
    return Case(MATMUL, dataclasses.replace(row, name=name, group="matmul"), candidate)


def mixed(problem: Mixed, blocks: upstream_library.MixedBlocks) -> Case:
    """A product of weights of 8 bits with activations."""
    name = f"mixed_{problem.n}x{problem.m}x{problem.k}_{blocks.tile_m}x{blocks.tile_n}"
    row = dataclasses.replace(problem.row(), name=f"{name}_wg{blocks.shared}", group="mixed")
    return Case(MIXED, row, functools.partial(upstream_library.mixed_candidate, blocks))


def attend(problem: attention.Problem, config: dict[str, Any], pipelined: bool = False) -> Case:
    """Attention, or its gradient; ``pipelined`` is the kernel that uses the pipeline emitter."""
    row = attention.make_row(problem)
    group = f"attention {row.group}" + (" pipelined" if pipelined else "")

    def candidate(module: Any) -> Candidate:
        tuning = module.TuningConfig(**config, causal=problem.causal)
        if problem.backward:
            return upstream.attention_gradient_candidate(tuning, problem.head_dim, module)
        return upstream.attention_candidate(tuning, problem.head_dim, pipelined, module)

    name = f"attention_{row.name}" + ("_pipelined" if pipelined else "")
    return Case(ATTENTION, dataclasses.replace(row, name=name, group=group), candidate)


def ragged(problem: Ragged, blocks: upstream_library.GroupBlocks) -> Case:
    """Products of groups of rows."""
    row = problem.row()
    name = f"{row.name}_{blocks.block_m}x{blocks.block_n}"

    def candidate(module: Any) -> Candidate:
        if problem.transposed:
            function = upstream_library.transposed_ragged(blocks, module)
        else:
            function = upstream_library.ragged(blocks, module, problem.transpose_b)
        return Candidate(upstream.label(blocks), jax.jit(function))

    module = TRANSPOSED if problem.transposed else RAGGED
    return Case(module, dataclasses.replace(row, name=name), candidate)


def backward_blocks(*sizes: int, warpgroups: int = 2) -> dict[str, int]:
    """The part of a configuration of attention that is for the gradient."""
    names = ("block_q_dq", "block_kv_dq", "block_q_dkv", "block_kv_dkv")
    return dict(zip(names, sizes, strict=True)) | {"compute_wgs_bwd": warpgroups}


FORWARD = {
    64: {"block_q": 64, "block_kv": 256, "max_concurrent_steps": 2},
    128: {"block_q": 64, "block_kv": 128, "max_concurrent_steps": 2},
}
BACKWARD = {
    64: FORWARD[64] | backward_blocks(64, 128, 128, 64),
    128: FORWARD[128] | backward_blocks(64, 64, 64, 64),
}
"""Configurations of attention for each head dimension."""


def cases() -> list[Case]:
    """All rows: shapes of JAX's own benchmarks of these kernels, or alike."""
    heads = functools.partial(attention.Problem, 1, 4096, 16)
    blocks = upstream_library.GroupBlocks
    groups = functools.partial(Ragged, 16384, 2048, dtype=jnp.float16)
    weights = Mixed("int8", 8192, 4096, 4096)
    return [
        *(product((4096, 4096, 4096), config) for config in PRODUCTS),
        product((4096, 8192, 4096), PRODUCTS[2]),
        product((8192, 8192, 8192), PRODUCTS[2]),
        mixed(weights, upstream_library.MixedBlocks(64, 128, 64, "M")),
        mixed(weights, upstream_library.MixedBlocks(128, 64, 64, "N")),
        *(attend(heads(d, False, False), FORWARD[d]) for d in (64, 128)),
        *(attend(heads(d, True, False), FORWARD[d]) for d in (64, 128)),
        *(attend(heads(d, False, False), FORWARD[d], pipelined=True) for d in (64, 128)),
        *(attend(heads(d, False, True), BACKWARD[d]) for d in (64, 128)),
        ragged(groups(8192, 16), blocks(128, 128)),
        ragged(groups(8192, 16, transpose_b=True), blocks(128, 128)),
        ragged(groups(2048, 16, transposed=True), blocks(128, 128)),
    ]  # fmt: skip


def compiled_cases(step: int) -> list[Case]:
    """One case of each kernel, whose compilation is timed; each ``step`` has other shapes."""
    heads = functools.partial(attention.Problem, 1, 4096 - 512 * (step % 7), 2, 128)
    k = 4096 + 64 * step
    mixed_blocks = upstream_library.MixedBlocks(64, 128, 64, "M")
    blocks = upstream_library.GroupBlocks(128, 128)
    return [
        product((4096, 4096, k), PRODUCTS[2]),
        mixed(Mixed("int8", 4096, 4096, k), mixed_blocks),
        attend(heads(False, False), FORWARD[128]),
        attend(heads(True, False), FORWARD[128]),
        attend(heads(False, False), FORWARD[128], pipelined=True),
        attend(heads(False, True), BACKWARD[128]),
        ragged(Ragged(4096, k, 1024, 16, dtype=jnp.float16), blocks),
        ragged(Ragged(k, 1024, 1024, 16, transposed=True, dtype=jnp.float16), blocks),
    ]


SMALL = (64, 64, 64, "M", "M", None)


def tiny_cases(step: int = 0) -> list[Case]:
    """One case of each kernel, so small that the simulator takes little time.

    Each ``step`` has other shapes.
    """
    heads = functools.partial(attention.Problem, 1, 128 * (step + 1), 2, 64)
    config = {"block_q": 64, "block_kv": 64, "max_concurrent_steps": 2}
    gradient = config | backward_blocks(64, 64, 64, 64, warpgroups=1)
    k = 128 + 64 * step
    blocks = upstream_library.GroupBlocks(64, 64, 64, 2, 1)
    return [
        product((128, 128, k), SMALL),
        mixed(Mixed("int8", 128, 128, k), upstream_library.MixedBlocks(64, 64, 64, "M", steps=2)),
        attend(heads(False, False), config),
        attend(heads(True, False), config),
        attend(heads(False, False), config, pipelined=True),
        attend(heads(False, True), gradient),
        ragged(Ragged(128, k, 128, 2, dtype=jnp.float16), blocks),
        ragged(Ragged(128, 128, k, 2, transposed=True, dtype=jnp.float16), blocks),
    ]


def loaded(module: str, semantics: str) -> Any:
    """A module of JAX with ``pallasite.gpu``; without a GPU it finds one of few multiprocessors."""
    harness.use_checkout()
    found = published.load(module, lane_semantics=semantics == "lane")
    if jax.default_backend() != "gpu":
        found.__dict__.update(published.with_multiprocessors(found, 4))
    return found


def contenders(case: Case, semantics: str) -> list[Contender]:
    """Both compilers."""

    def ours() -> Candidates:
        yield case.candidate(loaded(case.module, semantics))

    def theirs() -> Candidates:
        yield case.theirs

    return [Contender("ours", "jax", ours), Contender(JAX, "jax", theirs)]


def compared(case: Case) -> Row:
    """The row, whose errors have :data:`NOT_EQUAL` as well, if JAX's compiler has a result."""
    row = case.row

    def reference(*inputs: Any) -> tuple[Any, Any]:
        try:
            theirs = case.theirs.output(case.theirs.call(*case.theirs.prepare(*inputs)))
            timing.FRAMEWORKS["jax"].wait(theirs)
        except Exception as failure:
            print(f"{row.name}: nothing to compare with: {describe(failure)}", file=sys.stderr)
            theirs = None
        return row.reference(*inputs), theirs

    def errors(result: Any, references: tuple[Any, Any]) -> dict[str, Any]:
        reference, theirs = references
        found = dict(row.errors(result, reference))
        if theirs is not None:
            pairs = zip(jax.tree.leaves(result), jax.tree.leaves(theirs), strict=True)
            found[NOT_EQUAL] = sum(jnp.sum(one != other) for one, other in pairs)
        return found

    return dataclasses.replace(row, reference=reference, errors=errors)


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """All kernels, whose compilation is timed; the shapes are others each time."""
    make_cases = tiny_cases if arguments.rehearse else compiled_cases

    def kernel(place: int, group: str) -> Any:
        def call(repetition: int, candidate: Callable[[Case], Candidate]) -> Any:
            case = make_cases(repetition)[place]
            made = candidate(case)
            return made.call, made.prepare(*case.row.inputs(repetition))

        def ours(case: Case) -> Candidate:
            return case.candidate(loaded(case.module, arguments.semantics))

        return program.compilers(
            group,
            arguments,
            ours=lambda repetition: call(repetition, ours),
            upstream=lambda repetition: call(repetition, lambda case: case.theirs),
        )

    groups = [case.row.group for case in make_cases(0)]
    return {group: kernel(place, group) for place, group in enumerate(groups)}


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns how many elements differ, and geometric means."""
    lines, differing = [], {}
    for row in rows:
        ours = next((r for r in row.results if r.contender == "ours"), None)
        count = None if ours is None else ours.errors.get(NOT_EQUAL)
        differing[row.name] = count
        equal = "-" if count is None else f"{count:.0f} differ" if count else "yes"
        cells = contest_tables.rates(row, ("ours", JAX))
        lines.append((row.name, *cells, contest_tables.ratio_text(row.ratio()), equal))
    print("TFLOP/s; one source, compiled by Pallasite and by JAX's compiler")
    harness.print_table(("row", "ours", JAX, f"ours / {JAX}", "equal"), lines)
    means = contest_tables.group_means(rows)
    print(f"\nours / {JAX}, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    return {"not_equal": differing, "geometric_means": means}


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    listed = tiny_cases() if arguments.rehearse else cases()
    by_name = {case.row.name: case for case in listed}
    first = {case.row.group: case.row.name for case in reversed(listed)}
    return program.Benchmark(
        name="published_kernels",
        script=__file__,
        rows={name: compared(case) for name, case in by_name.items()},
        quick=list(by_name) if arguments.rehearse else list(first.values()),
        contenders=lambda row: contenders(by_name[row.name], arguments.semantics),
        kernels=kernels(arguments),
        facts=lambda timer: {"semantics": arguments.semantics},
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    parser = program.parser(__doc__.splitlines()[0])
    parser.set_defaults(code_time=1, rounds=5, seconds=120.0)
    parser.add_argument(
        "--semantics",
        choices=["warpgroup", "lane"],
        default="warpgroup",
        help="warpgroup, which the source asks for, or lane instead",
    )
    return program.main(benchmark, parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
