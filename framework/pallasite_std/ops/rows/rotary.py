"""``rotary_embedding``: the function that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import InvalidTypeError
from pallasite_std.ops.arguments import (
    as_array,
    flag,
    in_32_bits,
    matched,
    positive,
    without_derivatives,
    zeros,
)
from pallasite_std.ops.rows.arguments import float_array, integer, machine
from pallasite_std.ops.rows.batching import over_leading_axes
from pallasite_std.ops.rows.elementwise import ELEMENTS
from pallasite_std.ops.rows.tiling import LANES


@in_32_bits
def rotary_embedding(
    x: jax.Array,
    positions: jax.Array,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> jax.Array:
    """Rotates pairs of elements of each head by angles that grow with the position.

    Pair i of a head is multiplied, as a complex number, by
    ``exp(1j * position * base**(-2 * i / rotary_dim))``.

    Args:
      x: (..., tokens, heads, head_dim), bfloat16, float16 or float32; it is computed in float32.
      positions: (tokens,), or (..., tokens) as the leading axes of x: numbers.
      base: of the angles.
      rotary_dim: how many elements of each head are rotated, an even number; the rest is copied.
        By default all.
      interleaved: whether a pair is of neighbours (2i, 2i + 1), instead of halves
        (i, i + rotary_dim / 2).

    Returns:
      An array like x, which has gradients by it, of any order.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: J. Su et al., "RoFormer", arXiv 2104.09864.
    """
    x, positions = float_array(x, "x", rank=3), as_array(positions, "positions")
    *lead, tokens, heads, head_dim = x.shape
    rotated = head_dim if rotary_dim is None else integer(rotary_dim, "rotary_dim")
    if not 0 < rotated <= head_dim or rotated % 2:
        raise InvalidTypeError(
            "so many elements of a head cannot be rotated",
            got=f"rotary_dim {rotated}, heads of {head_dim}",
            expected="a positive even number, at most that of a head",
        )
    if positions.shape not in ((tokens,), (*lead, tokens)):
        raise InvalidTypeError(
            "positions do not fit the tokens",
            got=f"{positions.dtype}{list(positions.shape)}",
            expected=f"shape {(tokens,)}" + (f" or {(*lead, tokens)}" if lead else ""),
        )
    frequencies = positive(base, "base") ** (-np.arange(0, rotated, 2) / rotated)
    if jnp.issubdtype(positions.dtype, jnp.floating):
        positions = without_derivatives(
            "rotary_embedding by positions",
            "use jax.numpy, or jax.lax.stop_gradient of the positions",
            lambda given: given.astype(jnp.float32),
        )(positions)
    elif positions.dtype != jnp.int32:
        positions = positions.astype(jnp.float32)
    x, positions = matched(x, positions)
    if x.size == 0:
        return zeros(x.shape, np.dtype(x.dtype), x)
    # Leading axes that have the same positions are one, others are more tokens.
    sequences = x.reshape(-1, positions.size, heads, head_dim)
    rotation = _Rotation(tuple(map(float, frequencies)), flag(interleaved, "interleaved"))
    result: jax.Array = _rotate(rotation, sequences, positions.reshape(-1))
    return result.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """By which angles pairs are turned.

    Attributes:
      frequencies: of the pairs.
      interleaved: whether pairs are of neighbours.
      back: whether they are turned by the opposite angles.
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    back: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(rotation: _Rotation, x: Any, positions: Any) -> Any:
    return over_leading_axes(functools.partial(_run, rotation), 1)(x, positions)


def _run(rotation: _Rotation, x: jax.Array, positions: jax.Array) -> jax.Array:
    frequencies = np.asarray(rotation.frequencies, np.float32)
    sequences = x.reshape(-1, *x.shape[-3:])
    kernel = _kernel(rotation, *sequences.shape, np.dtype(x.dtype), machine()[0])
    return jnp.reshape(kernel(sequences, positions, jnp.asarray(frequencies)), x.shape)


def _forward(rotation: _Rotation, x: Any, positions: Any) -> tuple[Any, Any]:
    return _rotate(rotation, x, positions), positions


def _backward(rotation: _Rotation, positions: Any, d_out: Any) -> tuple[Any, Any]:
    # The transpose of a rotation is the one back; nobody asks for gradients by positions.
    d_x = _rotate(dataclasses.replace(rotation, back=not rotation.back), d_out, positions)
    if jnp.issubdtype(positions.dtype, jnp.floating):
        return d_x, jnp.zeros_like(positions)
    return d_x, np.zeros(positions.shape, jax.dtypes.float0)


_rotate.defvjp(in_32_bits(_forward), in_32_bits(_backward))


def _together(heads: int, head_dim: int, most: int) -> int:
    """Heads of a block, about ``most``; the last one of a token may have fewer.

    A power of two that divides them, if blocks then have few tokens, whose angles they compute;
    else all of them, or parts that registers hold.
    """
    together = 1
    while heads % (2 * together) == 0 and 2 * together <= most:
        together *= 2
    if together == heads or together * FEWEST_PARTS >= most:
        return together
    groups = -(-heads * head_dim // (_MOST_ELEMENTS * LANES))
    return heads if groups == 1 else min(heads, -(-heads // (8 * groups)) * 8)


def _sharing(sequences: int, together: int) -> int:
    """Sequences of a block, which computes the angles of its tokens once for all of them."""
    most = max(1, SHARING // together)
    return next(n for n in range(min(most, sequences), 0, -1) if sequences % n == 0)


FEWEST_PARTS = 4
"""Tokens of a block, at most, if a power of two is to divide the heads that it has of each."""

SHARING = 8
"""Heads for which a block uses angles, about, if there are sequences enough: to compute a cosine
and a sine takes as long as to move several pairs. Of 26214 x 40 x 64 in bfloat16 with heads first,
that took 0.54 of the time on an H200."""

_MOST_ELEMENTS = 48
"""Those of a lane, of any number of heads."""


_LEAST_ELEMENTS = 4
"""Those of a lane, of few heads."""


def _rows_of_block(size: int, head_dim: int, multiprocessors: int) -> int:
    """Heads of a block, of arrays of so many elements: fewer if blocks are too."""
    area = 2 * LANES * ELEMENTS
    while size < area * multiprocessors and area > _LEAST_ELEMENTS * LANES:
        area //= 2
    return max(1, area // head_dim)


@functools.lru_cache(maxsize=512)
def _kernel(
    rotation: _Rotation,
    sequences: int,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
) -> Callable[..., Any]:
    """A kernel of which each block rotates some heads of some tokens, of one or more sequences.

    It is a function of (sequences, tokens, heads, head_dim), positions of the tokens, and
    frequencies. A block computes each cosine and sine once.
    """
    pairs, interleaved = len(rotation.frequencies), rotation.interleaved
    most = _rows_of_block(sequences * tokens * heads * head_dim, head_dim, multiprocessors)
    together, height = _together(heads, head_dim, most), 1
    sharing = _sharing(sequences, together)
    if heads % together == 0:
        while 2 * height * together * sharing <= most and 2 * height <= tokens:
            height *= 2
    full, left, groups = tokens // height, tokens % height, -(-heads // together)
    tiles = -(-tokens // height)

    def place_of_block() -> tuple[Any, Any, Any]:
        """The sequences, the tile of tokens, and the group of heads: those of a token follow one
        another."""
        number, group, sequence = lax.axis_index("tile"), 0, 0
        if groups > 1:
            number, group = lax.div(number, groups), lax.rem(number, groups)
        if sequences > sharing:
            sequence, number = lax.div(number, tiles), lax.rem(number, tiles)
        return sequence, number, group

    def body(*refs: Any, table: Any) -> None:
        _, tile, group = place_of_block()
        rotated = functools.partial(rotate, table, *refs)
        last = heads - (groups - 1) * together
        if left:
            pl.when(tile < full)(lambda: rotated(count=height, of_token=together))
            pl.when(tile == full)(lambda: rotated(count=left, of_token=together))
        elif last < together:
            pl.when(group < groups - 1)(lambda: rotated(count=height, of_token=together))
            pl.when(group == groups - 1)(lambda: rotated(count=height, of_token=last))
        else:
            rotated(count=height, of_token=together)

    def rotate(
        table: Any, x: Any, of_tokens: Any, frequencies: Any, out: Any, *, count: int, of_token: int
    ) -> None:
        sequence, tile, group = place_of_block()
        first = tile * height
        some = pl.ds(group * together, of_token)
        place: tuple[Any, ...] = (sequence, pl.ds(first, count), some)
        shape: tuple[int, ...] = (count, of_token, pairs)
        if sharing > 1:
            place = (pl.ds(sequence * sharing, sharing), *place[1:])
            shape = (sharing, *shape)
        halves = pl.ds(0, pairs), pl.ds(pairs, pairs)

        # What is turned is on its way while the angles are computed.
        taken = [pl.ds(0, 2 * pairs)] if interleaved else halves
        parts = [x[*place, one] for one in taken]
        given = of_tokens[pl.ds(first, count)].astype(jnp.float32)
        angles = lax.broadcast_in_dim(given, (count, pairs), (0,)) * lax.broadcast_in_dim(
            frequencies[...], (count, pairs), (1,)
        )
        table[0, :count] = jnp.cos(angles)
        table[1, :count] = -jnp.sin(angles) if rotation.back else jnp.sin(angles)
        axes = len(shape) - 3, len(shape) - 1
        cosine, sine = (lax.broadcast_in_dim(table[n, :count], shape, axes) for n in (0, 1))

        def turn(first: Any, second: Any) -> tuple[Any, Any]:
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            return first * cosine - second * sine, second * cosine + first * sine

        if interleaved:
            # Sums leave neighbours where they are, slices would move them.
            both = parts[0].reshape(*shape, 2).astype(jnp.float32)
            is_first = lax.broadcasted_iota(jnp.int32, both.shape, len(shape)) == 0
            alone = jnp.where(is_first, both, 0.0), jnp.where(is_first, 0.0, both)
            first_of_pair, second_of_pair = (
                lax.broadcast_in_dim(one, both.shape, range(len(shape)))
                for one in turn(*(jnp.sum(one, axis=len(shape)) for one in alone))
            )
            pairs_turned = jnp.where(is_first, first_of_pair, second_of_pair)
            turned = pairs_turned.reshape(*shape[:-1], 2 * pairs)
            out[*place, pl.ds(0, 2 * pairs)] = turned.astype(dtype)
        else:
            for half, value in zip(halves, turn(*parts), strict=True):
                out[*place, half] = value.astype(dtype)
        if 2 * pairs < head_dim:
            rest = pl.ds(2 * pairs, head_dim - 2 * pairs)
            out[*place, rest] = x[*place, rest]

    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((sequences, tokens, heads, head_dim), dtype),
        grid=(sequences // sharing * tiles * groups,),
        grid_names=("tile",),
        scratch_types={"table": plgpu.SMEM((2, height, pairs), jnp.float32)},
        kernel_name="rotary_embedding",
    )
    return kernel
