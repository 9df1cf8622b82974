"""JAX's own kernels for narrow weights, groups of rows and decoding, as contenders.

Each takes the module that it is from as an argument, since the same source may have been compiled
by others. Searches go in steps, as in ``upstream``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import contest
import jax
import jax.numpy as jnp

import upstream

PACKAGE = "jax.experimental.pallas.ops.gpu"


def load(name: str) -> Any:
    """A module of JAX's kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(f"{PACKAGE}.{name}")


# Mixed-precision GEMM ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MixedBlocks:
    """A configuration of the product with narrow weights.

    Attributes:
      tile_m, tile_n, tile_k: of one warpgroup; the weights are the first operand.
      shared: the dimension that the two warpgroups share, ``"M"`` or ``"N"``.
      minor, width: the order of the tiles.
      steps: in flight.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    shared: str
    minor: str = "M"
    width: int = 8
    steps: int = 4

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether the tiles divide the product."""
        rows = self.tile_m * (1 + (self.shared == "M"))
        columns = self.tile_n * (1 + (self.shared == "N"))
        return m % rows == n % columns == k % self.tile_k == 0


def mixed(blocks: MixedBlocks, module: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of weights (M, K) with activations (K, N), in the dtype of the latter."""
    dimension = module.MatmulDimension
    config = module.TuningConfig(
        tile_m=blocks.tile_m,
        tile_n=blocks.tile_n,
        tile_k=blocks.tile_k,
        max_concurrent_steps=blocks.steps,
        epi_tile_m=64,
        epi_tile_n=64,
        grid_minor_dim=dimension[blocks.minor],
        grid_tile_width=blocks.width,
        wg_dimension=dimension[blocks.shared],
        cluster_dimension=None,
    )
    return lambda w, a: module.mixed_matmul_kernel(w, a, out_dtype=a.dtype, config=config)


def mixed_candidate(blocks: MixedBlocks, module: Any, label: str = "") -> contest.Candidate:
    """The kernel for activations (m, k) and weights (n, k).

    It multiplies the weights by the activations, which are transposed beforehand; the result is
    transposed for the check only.
    """
    return contest.Candidate(
        label or f"{upstream.label(blocks)}, transposed beforehand",
        jax.jit(mixed(blocks, module)),
        lambda a, w: (w, a.T),
        lambda result: result.T,
    )


def mixed_candidates(m: int, n: int, k: int, search: str) -> contest.Candidates:
    """The kernel, tuned for m rows of activations and n x k weights."""
    module = load("hopper_mixed_type_matmul_mgpu")
    deep = 128 if m <= upstream.SKINNY else 64
    tiles = (64, 128, 256) if search == "full" else (64, 128)
    first = [
        MixedBlocks(tile_m, tile_n, deep, shared)
        for tile_m, tile_n, shared in itertools.product(tiles, (128, 64), "MN")
    ]
    first = [one for one in first if one.fits(n, m, k)]
    if search == "one":
        first = first[:1]

    def depths(best: MixedBlocks) -> list[MixedBlocks]:
        replace = dataclasses.replace
        return [replace(best, tile_k=64), replace(best, tile_k=128), replace(best, steps=6)]

    def orders(best: MixedBlocks) -> list[MixedBlocks]:
        choices = itertools.product("MN", (16, 8, 4) if search == "full" else (16, 4))
        return [dataclasses.replace(best, minor=minor, width=width) for minor, width in choices]

    refine = {"one": [], "quick": [depths], "full": [depths, orders]}[search]
    if m > upstream.SKINNY and search == "quick":
        refine = [depths, orders]
    return upstream.climb(lambda blocks: mixed_candidate(blocks, module), first, *refine)


# Groups of rows -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GroupBlocks:
    """A configuration of the products of groups; the names are those of the kernels' arguments."""

    block_m: int
    block_n: int
    block_k: int = 64
    max_concurrent_steps: int = 4
    grid_block_n: int = 8

    def fits(self, columns: int) -> bool:
        """Whether bands of tiles divide the columns of the result."""
        return columns % (self.block_n * self.grid_block_n) == 0


def ragged(blocks: GroupBlocks, module: Any, transpose_b: bool = False) -> Callable[..., Any]:
    """The product of groups of rows with a matrix each."""
    options = dataclasses.asdict(blocks)

    def product(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return module.ragged_dot(a, b, group_sizes=sizes, transpose_rhs=transpose_b, **options)

    return product


def transposed_ragged(blocks: GroupBlocks, module: Any) -> Callable[..., Any]:
    """For each group of rows, the product of the transpose of one matrix with another."""
    options = dataclasses.asdict(blocks)

    def product(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return module.transposed_ragged_dot(a, b, group_sizes=sizes, **options)

    return product


def ragged_candidates(columns: int, search: str) -> contest.Candidates:
    """The kernel for groups of rows, tuned."""
    module = load("ragged_dot_mgpu")
    tiles = [(128, 128), (64, 128), (128, 64), (192, 128), (64, 256)]
    if search == "full":
        tiles = list(itertools.product((128, 64, 192), (128, 64, 192, 256)))
    return _group_candidates(
        lambda blocks: ragged(blocks, module), tiles, ((2, 5, 6), (1, 2, 4, 16)), columns, search
    )


def transposed_ragged_candidates(columns: int, search: str) -> contest.Candidates:
    """The kernel for products of groups with the rows contracted, tuned."""
    module = load("transposed_ragged_dot_mgpu")
    tiles = [(128, 128), (64, 128), (128, 64)]
    return _group_candidates(
        lambda blocks: transposed_ragged(blocks, module),
        tiles,
        ((2, 5, 6), (1, 2, 4, 16)),
        columns,
        search,
    )


def _group_candidates(
    function: Callable[[GroupBlocks], Callable[..., Any]],
    tiles: list[tuple[int, int]],
    choices: tuple[tuple[int, ...], tuple[int, ...]],
    columns: int,
    search: str,
) -> contest.Candidates:
    """Tiles first, then steps in flight and bands; the first of everything if ``"one"``."""
    narrow = next((w for w in (8, 4, 2) if columns % (tiles[0][1] * w) == 0), 1)
    first = [GroupBlocks(*tile, grid_block_n=narrow) for tile in tiles]
    first = [one for one in first if one.fits(columns)]
    steps, bands = choices if search == "full" else (choices[0][:2], choices[1][1::2])

    def depths(best: GroupBlocks) -> list[GroupBlocks]:
        deep = [dataclasses.replace(best, max_concurrent_steps=count) for count in steps]
        return [*deep, dataclasses.replace(best, block_k=128, max_concurrent_steps=2)]

    def orders(best: GroupBlocks) -> list[GroupBlocks]:
        found = [dataclasses.replace(best, grid_block_n=width) for width in bands]
        return [one for one in found if one.fits(columns)]

    def make(blocks: GroupBlocks) -> contest.Candidate:
        return contest.Candidate(upstream.label(blocks), jax.jit(function(blocks)))

    if search == "one":
        return upstream.climb(make, first[:1])
    return upstream.climb(make, first, depths, orders)


# Decoding -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """A configuration of the kernels for decoding.

    Attributes:
      rows: of the cache in one step.
      splits: parts of a sequence that are worked on side by side.
      warps: of a block.
      paged: whether pages are read, or a cache whose rows were gathered beforehand.
    """

    rows: int
    splits: int
    warps: int
    paged: bool


class DecodeProblem(Protocol):
    """What is computed.

    Attributes:
      heads: of the queries.
      context: rows of a sequence at most.
      page_size: rows of a page.
      full: whether all sequences are that long, so that no lengths need to be given.
    """

    heads: int
    context: int
    page_size: int
    full: bool

    def gather(self, k_pages: Any, v_pages: Any, pages: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values, (batch, kv_heads, context, head_dim)."""


def decode_candidates(problem: DecodeProblem, search: str) -> contest.Candidates:
    """The kernels by way of Triton, tuned: the one for pages and the one for a plain cache."""

    def fits(blocks: DecodeBlocks) -> bool:
        divides = problem.context % (blocks.splits * blocks.rows) == 0
        return divides and blocks.rows >= problem.page_size

    def others(best: DecodeBlocks) -> list[DecodeBlocks]:
        found = [dataclasses.replace(best, warps=warps) for warps in (2, 8)]
        found += [dataclasses.replace(best, splits=splits) for splits in (1, 2, 8, 32)]
        return list(filter(fits, found))

    choices = itertools.product((True, False), (128, 64), (16, 4))
    first = [DecodeBlocks(rows, splits, 4, paged) for paged, rows, splits in choices]
    first = list(filter(fits, first))
    make = functools.partial(decode_candidate, problem)
    if search == "one":
        return upstream.climb(make, first[:1])
    return upstream.climb(make, first, *([others] * (2 if search == "full" else 1)))


def decode_candidate(problem: DecodeProblem, blocks: DecodeBlocks) -> contest.Candidate:
    """A kernel for decoding with a configuration."""
    return (_paged if blocks.paged else _plain)(blocks, problem)


def paged(page_size: int, blocks: DecodeBlocks) -> Callable[..., jax.Array]:
    """The kernel for pages; it does not scale the scores."""
    return functools.partial(
        load("paged_attention").paged_attention,
        pages_per_compute_block=blocks.rows // page_size,
        k_splits=blocks.splits,
        num_warps=blocks.warps,
    )


def _paged(blocks: DecodeBlocks, problem: DecodeProblem) -> contest.Candidate:
    attend = paged(problem.page_size, blocks)

    def call(q: Any, k_pages: Any, v_pages: Any, lengths: Any, pages: Any) -> Any:
        return attend(q, k_pages, v_pages, pages, None if problem.full else lengths)

    def prepare(q: Any, *rest: Any) -> tuple[Any, ...]:
        return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype), *rest

    return contest.Candidate(f"{upstream.label(blocks)}, scaled beforehand", jax.jit(call), prepare)


def _plain(blocks: DecodeBlocks, problem: DecodeProblem) -> contest.Candidate:
    attend = functools.partial(
        load("decode_attention").mqa,
        block_k=blocks.rows,
        k_splits=blocks.splits,
        num_warps=blocks.warps,
    )

    def call(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return attend(q, k, v, kv_seq_len=None if problem.full else lengths)

    def prepare(q: Any, k_pages: Any, v_pages: Any, lengths: Any, pages: Any) -> tuple[Any, ...]:
        # A head of the cache counts as a sequence, which the kernel takes as it lies in memory.
        batch, heads, head_dim = q.shape
        kv_heads = k_pages.shape[0]
        cache = problem.gather(k_pages, v_pages, pages)
        k, v = (x.reshape(batch * kv_heads, -1, head_dim) for x in cache)
        queries = q.reshape(batch * kv_heads, heads // kv_heads, head_dim)
        return queries, k, v, jnp.repeat(lengths, kv_heads)

    def output(result: Any) -> Any:
        return result.reshape(-1, problem.heads, result.shape[-1])

    return contest.Candidate(
        f"{upstream.label(blocks)}, gathered beforehand", jax.jit(call), prepare, output
    )
