"""What a pipeline walks over: a grid of steps, and the blocks of each operand that they use."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, SMEM, as_transformed, checks
from pallasite_std.pipelines.block_spec import BlockSpec


@dataclasses.dataclass(frozen=True)
class Block:
    """One operand of a pipeline: its block specification, made explicit.

    Attributes:
      dims: for each dimension of the array (kind, size): "block", "element" or "squeezed".
      index_map: the block indices of a step.
      in_smem: whether the body gets it in shared memory.
      varies: whether the block index depends on the step at all.
      always_changes: whether it is known to differ between any two consecutive steps.
    """

    what: str
    spec: BlockSpec
    dims: tuple[tuple[str, int], ...]
    index_map: Callable[..., tuple[Any, ...]]
    in_smem: bool
    varies: bool
    always_changes: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the block, without squeezed dimensions."""
        return tuple(size for kind, size in self.dims if kind != "squeezed")

    def window(self, gmem_ref: Any, indices: Sequence[Any]) -> Any:
        """The view of the array that is this step's block. It may leave the array."""
        parts: list[Any] = []
        for (kind, size), index in zip(self.dims, self.index_map(*indices), strict=True):
            if kind == "squeezed":
                parts.append(jnp.asarray(index, jnp.int32))
            elif kind == "element":
                parts.append(_jax.Slice(index, size))
            elif checks.is_integer(index):
                parts.append(_jax.Slice(int(index) * size, size))
            else:
                parts.append(_jax.Slice(lax.mul(int32(index), np.int32(size)), size))
        base = as_transformed(gmem_ref, self.what)
        indexer = _jax.NDIndexer(tuple(parts), tuple(base.shape), ())
        return _jax.TransformedRef(base.ref, (*base.transforms, indexer))


def int32(value: Any) -> Any:
    """``value`` as an int32 scalar."""
    if checks.is_integer(value):
        return np.int32(value)
    aval = value.aval if isinstance(value, _jax.Tracer) else None
    if aval is not None and aval.dtype == np.int32 and not aval.weak_type:
        return value
    return jnp.asarray(value, jnp.int32)


def _dimension(dim: Any, what: str) -> tuple[str, int]:
    match dim:
        case None | pl.Squeezed():
            return "squeezed", 1
        case int():
            return "block", dim
        case pl.Blocked():
            return "block", dim.block_size
        case pl.Element():
            if tuple(dim.padding) != (0, 0):
                raise checks.unsupported(
                    f"{what} has a padded dimension", got=dim, expected="pl.Element without padding"
                )
            return "element", dim.block_size
        case _:
            raise checks.unsupported(
                f"{what} has a block dimension that a pipeline cannot copy",
                got=repr(dim),
                expected="an integer, None, pl.Squeezed, pl.Blocked or pl.Element",
            )


def _own_spec(spec: Any, what: str) -> BlockSpec:
    if not isinstance(spec, pl.BlockSpec):
        raise checks.type_error(f"{what} has no block spec", got=spec, expected="a BlockSpec")
    if spec.pipeline_mode is not None:
        raise checks.unsupported(
            f"pipeline_mode= is not supported, which the block spec of {what} has",
            got=spec.pipeline_mode,
            hint="use max_concurrent_steps= for all operands together",
        )
    if isinstance(spec, BlockSpec):
        return spec
    return BlockSpec(spec.block_shape, spec.index_map, memory_space=spec.memory_space)


def _in_smem(space: Any, what: str) -> bool:
    if space in (None, SMEM, _jax.PallasMemorySpace.DEFAULT):
        return True
    if space in (GMEM, _jax.PallasMemorySpace.ANY):
        return False
    raise checks.value_error(
        f"a pipeline cannot put {what} into {space}",
        expected="memory_space SMEM (the default) or GMEM",
    )


def make_block(spec: Any, array_shape: tuple[int, ...], grid: Grid, what: str) -> Block:
    """The block specification of one operand, checked and made explicit."""
    spec = _own_spec(spec, what)
    in_smem = _in_smem(spec.memory_space, what)
    if spec.block_shape is None:
        dims: tuple[tuple[str, int], ...] = tuple(("block", size) for size in array_shape)
    else:
        dims = tuple(_dimension(dim, what) for dim in spec.block_shape)
    if len(dims) != len(array_shape):
        raise checks.value_error(
            f"the block shape of {what} does not have the rank of the array",
            got=f"block shape {tuple(spec.block_shape)}, array shape {array_shape}",
        )
    rank = len(dims)
    given = spec.index_map if spec.block_shape is not None else None

    def index_map(*indices: Any) -> tuple[Any, ...]:
        if given is None:
            return (0,) * rank
        result = given(*indices)
        result = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(result) != rank:
            raise checks.value_error(
                f"the index map of {what} returns {len(result)} indices",
                expected=f"{rank}, one for each dimension of the array",
            )
        return result

    varies, always_changes = grid.analyse(index_map) if in_smem else (False, False)
    return Block(what, spec, dims, index_map, in_smem, varies, always_changes)


# --- Walking through the grid ---
class Grid:
    """The steps of a pipeline: positions in a grid, in row-major order."""

    def __init__(self, sizes: Sequence[Any]):
        self.static = all(checks.is_integer(size) for size in sizes)
        for position, size in enumerate(sizes):
            if checks.is_integer(size) and size < 1:
                raise checks.value_error(
                    f"grid[{position}] of a pipeline is not positive",
                    got=tuple(sizes),
                    expected="at least one step along each dimension",
                )
        self.sizes = tuple(int(s) if checks.is_integer(s) else int32(s) for s in sizes)
        self.num_steps: Any = math.prod(self.sizes) if self.static else _product(self.sizes)
        # Dimensions along which steps move.
        self.moving = [i for i, size in enumerate(self.sizes) if not _is_one(size)]

    def analyse(self, index_map: Callable[..., tuple[Any, ...]]) -> tuple[bool, bool]:
        """Whether block indices depend on the step, and whether every step changes them."""
        scalar = _jax.ShapedArray((), jnp.int32)
        jaxpr, _ = _jax.trace_to_jaxpr(
            index_map, [scalar] * len(self.sizes), traced_for="index map"
        )
        for var in jaxpr.outvars:
            aval = var.aval
            if aval.shape != () or aval.dtype.kind not in "iu":
                raise checks.type_error(
                    "an index map returns something that is not an integer scalar", got=aval
                )
        _, used = _jax.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        used = used[len(used) - len(self.sizes) :] if self.sizes else []
        varies = any(used[i] for i in self.moving)
        # The innermost dimension moves at every step; if its size is unknown it may be 1, and then
        # the next one does.
        always = False
        for dim in reversed(self.moving):
            if not any(jaxpr.invars[dim] is var for var in jaxpr.outvars):
                break
            if isinstance(self.sizes[dim], int):
                always = True
                break
        return varies, always

    def start(self, ahead: int) -> tuple[Any, ...]:
        """What to carry along to know the position ``ahead`` steps ahead; begins at step 0."""
        if len(self.moving) <= 1:
            return ()
        position: tuple[Any, ...] = tuple(jnp.int32(0) for _ in self.sizes)
        if self.static:
            digits = []
            for size in reversed(self.sizes):
                digits.append(jnp.int32(ahead % size))
                ahead //= size
            return tuple(digits[::-1])
        for _ in range(ahead):
            position = self.advance(position)
        return position

    def advance(self, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        """What to carry along after one more step."""
        if not carried:
            return ()
        result = list(carried)
        carry: Any = True
        for dim in reversed(self.moving):
            index = carried[dim]
            moved = lax.add(index, np.int32(1))
            if carry is not True:
                moved = lax.select(carry, moved, index)
            wraps = lax.eq(moved, int32(self.sizes[dim]))
            result[dim] = lax.select(wraps, np.int32(0), moved)
            carry = wraps
        return tuple(result)

    def position(self, step: Any, ahead: int, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        """The position ``ahead`` steps after ``step``; int32 scalars."""
        if carried:
            return carried
        here = lax.add(int32(step), np.int32(ahead)) if ahead else int32(step)
        return tuple(here if i in self.moving else jnp.int32(0) for i in range(len(self.sizes)))


def _is_one(size: Any) -> bool:
    return checks.is_integer(size) and size == 1


def _product(sizes: Sequence[Any]) -> Any:
    return functools.reduce(lambda a, b: a * b, (int32(size) for size in sizes))


def differ(block: Block, position: Sequence[Any], other: Sequence[Any]) -> Any:
    """Whether two steps have different blocks of an operand."""
    pairs = zip(block.index_map(*position), block.index_map(*other), strict=True)
    differences = [
        lax.ne(int32(a), int32(b))
        for a, b in pairs
        if not (checks.is_integer(a) and checks.is_integer(b) and a == b)
    ]
    if not differences:
        return jnp.bool_(False)
    return functools.reduce(lax.bitwise_or, differences)
