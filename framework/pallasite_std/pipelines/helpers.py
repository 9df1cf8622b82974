"""Loops and index arithmetic that kernels have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import WarpMesh, checks


@dataclasses.dataclass(frozen=True, eq=False)
class NDLoopInfo:
    """Where a loop is.

    Attributes:
      index: indices into the grid of the loop.
      local_index: how many steps this program did before.
      num_local_steps: how many it does in total; None where that is not known beforehand.
    """

    index: tuple[Any, ...]
    local_index: Any
    num_local_steps: Any


def _collective_size(collective_axes: Any) -> int:
    names = collective_axes if isinstance(collective_axes, tuple | list) else (collective_axes,)
    for name in names:
        if not _jax.axis_exists(name):
            raise checks.value_error(
                f"there is no axis named {name!r}",
                expected="an axis of the kernel's grid, cluster or threads",
            )
    return math.prod(_jax.axis_size(name) for name in names)


def _unravel(step: Any, sizes: Sequence[Any]) -> list[Any]:
    """Row-major indices of a linear index."""
    index = []
    for size in reversed(sizes):
        size = lax.convert_element_type(size, step.dtype)
        index.append(lax.rem(step, size))
        step = lax.div(step, size)
    return index[::-1]


def nd_loop(
    grid: Sequence[Any],
    *,
    collective_axes: Sequence[Hashable] | Hashable,
    tiling: Sequence[int] | None = None,
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that runs a function for this program's share of a grid.

    The steps of the grid, in row-major order, are distributed over the programs along
    ``collective_axes`` one at a time: with n programs, program i does steps i, i + n, i + 2n, ...

    Args:
      grid: sizes; integers or integer scalars.
      collective_axes: the axis, or axes, of the kernel that share the grid.
      tiling: visit the grid tile by tile; one size per dimension, which must divide it.
      init_carry: a value to carry from step to step. The function then takes ``carry=`` and returns
        the next one, and the decorator's result is the last.

    Returns:
      A decorator for ``function(loop_info)``, with :class:`NDLoopInfo`; it runs the loop at once.

    Raises:
      InvalidValueError: an unknown axis, or a tiling that does not fit the grid.
    """
    grid = tuple(grid)
    num_programs = _collective_size(collective_axes)
    axes = tuple(collective_axes) if isinstance(collective_axes, list) else collective_axes
    program = lax.axis_index(axes)
    sizes = grid
    if tiling:
        tiling = checks.positive_integers(tiling, "tiling")
        if len(grid) != len(tiling):
            raise checks.value_error(
                f"the grid has {len(grid)} dimensions but the tiling has {len(tiling)}",
                got=f"grid={grid}, tiling={tiling}",
            )
        for size, tile in zip(grid, tiling, strict=True):
            if checks.is_integer(size) and size % tile:
                raise checks.value_error(
                    f"a tile of {tile} does not divide {size}",
                    got=f"grid={grid}, tiling={tiling}",
                )
        sizes = (*(size // tile for size, tile in zip(grid, tiling, strict=True)), *tiling)
    total: Any = 1
    for size in grid:
        total = total * size
    total = jnp.asarray(total, dtype=program.dtype)
    one_each = lax.div(total, jnp.asarray(num_programs, program.dtype))
    rest = lax.rem(total, jnp.asarray(num_programs, program.dtype))
    num_steps = one_each + lax.convert_element_type(program < rest, program.dtype)

    def decorator(function: Callable[..., Any]) -> Any:
        def step(local_index: Any, carry: Any) -> Any:
            index = _unravel(local_index * num_programs + program, sizes)
            if tiling:
                outer, inner = index[: len(tiling)], index[len(tiling) :]
                index = [o * t + i for o, t, i in zip(outer, tiling, inner, strict=True)]
            info = NDLoopInfo(tuple(index), local_index, num_steps)
            if init_carry is None:
                function(info)
                return None
            return function(info, carry=carry)

        return lax.fori_loop(0, num_steps, step, init_carry)

    return decorator


def planar_snake(
    lin_idx: Any, shape: tuple[Any, Any], minor_dim: int, tile_width: int
) -> tuple[Any, Any]:
    """Maps a linear index to a position in a plane so that neighbours share operands in the cache.

    The plane is cut into strips of ``tile_width`` along ``minor_dim``. A strip is walked along the
    other dimension, ``tile_width`` positions at a time, and every other strip backwards, so that
    the way from one strip to the next is short. The last strip may be narrower.

    Args:
      lin_idx: an int32 scalar below ``shape[0] * shape[1]``.
      shape: sizes of the plane.
      minor_dim: 0 or 1.
      tile_width: width of a strip.

    Returns:
      The two int32 coordinates, in the order of ``shape``.
    """
    if minor_dim not in (0, 1):
        raise checks.value_error("minor_dim is not a dimension", got=minor_dim, expected="0 or 1")
    tile_width = checks.count(tile_width, "tile_width", minimum=1)
    width = jnp.int32(tile_width)
    major_size, minor_size = jnp.int32(shape[1 - minor_dim]), jnp.int32(shape[minor_dim])
    strip_size = width * major_size
    full_strips, last_width = lax.div(minor_size, width), lax.rem(minor_size, width)
    strip = lax.div(lin_idx, strip_size)
    within = lin_idx - strip * strip_size
    if _is_multiple(shape[minor_dim], tile_width):
        major, minor = lax.div(within, width), lax.rem(within, width)
    else:
        # In the last, narrower strip the same index means another position. A cond keeps the
        # division by a constant, which is cheap, in the common case.
        major, minor = lax.cond(
            strip < full_strips,
            lambda: (lax.div(within, width), lax.rem(within, width)),
            lambda: (lax.div(within, last_width), lax.rem(within, last_width)),
        )
    backwards = lax.rem(strip, jnp.int32(2)) != 0
    major = lax.select(backwards, major_size - 1 - major, major)
    minor = strip * width + minor
    return (minor, major) if minor_dim == 0 else (major, minor)


def _is_multiple(size: Any, of: int) -> bool:
    return checks.is_integer(size) and size % of == 0


def warp_map(f: Callable[[jax.Array], None], /) -> None:
    """Runs ``f(warp)`` once in each of the four warps of this warpgroup, with its number 0..3.

    Inside, one warp is the thread: only scalars and references can be used. All warps wait for each
    other before and after. ``f`` captures the references that it needs and returns nothing.
    """
    mesh = WarpMesh(axis_name=_WarpAxis())

    def body() -> None:
        f(lax.axis_index(mesh.axis_name))

    _jax.mpmd_map([(mesh, body)], name=getattr(f, "__name__", "warp_map"))()


class _WarpAxis:
    """The name of the axis of warps in one :func:`warp_map`."""

    def __repr__(self) -> str:
        return "warp"
