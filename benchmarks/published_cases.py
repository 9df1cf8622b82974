"""The kernels that JAX publishes for Hopper: configurations, shapes, and how each is called."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import attention
import harness
import matmul
import upstream_library
from contest import Candidate, Row
from library_mixed import Mixed
from library_ragged import Ragged

import upstream

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import jax
import jax.numpy as jnp
import published

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
